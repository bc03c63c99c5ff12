"""`PreparedTrainer`: distillation and fine-tuning on prepared batches."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.violations import messages, violations, violations_from
from keras_diffusion_opd.losses.chunked.distillation import ChunkedDistillationLoss, HiddenScores
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum
from keras_diffusion_opd.models.hidden_route import hidden_route
from keras_diffusion_opd.trainers.settings import config_of
from keras_diffusion_opd.trainers.token_metrics import TokenMetricSet
from keras_diffusion_opd.trainers.window import WindowTrainer


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class PreparedTrainer(WindowTrainer):
    """Trains a student on prepared batches: `PreparedTrainer(student, loss).compile(...)`, `.fit(dataset)`.

    With a `ChunkedDistillationLoss` the trainer takes the student's hidden states and head in place of its logits
    (`models.hidden_route` says of which students): same gradients, checks and loss metrics; metrics that need logits
    are refused. `predict` gives logits as ever.

    Gradients and metrics are exact over micro-batches of any size, length and weight: the window's
    gradient is `sum(gradients of sums) / sum(weights)`, divided once in float32. The student is not
    touched otherwise: its trainable flags, its own compile and its weights' paths stay what they are.

    Args:
        student: a `keras.Model` (or layer) that scores every position: inputs -> float (B, L, V) logits.
        loss: callable `(student_logits, PreparedBatch) -> LossOutput`, such as `DistillationLoss` or
            `TokenCrossEntropyLoss`. One of your own that reports metrics has an attribute
            `metric_names`, a tuple of their names.
        logits_fn: None, or `(student, model_inputs) -> (B, L, V)`: for students whose output is not the
            logits. Register it with `keras.saving.register_keras_serializable` to save the trainer.
        name, dtype: as for any Keras model.

    Attributes:
        student: the model given, trained in place.
        policy_version: int, number of updates the student has made.

    Raises:
        TypeError: the student is not a Keras layer, or loss or logits_fn cannot be called.

    Source: the method is that of weighted prepared distillation; on rollouts of the student it is
    Agarwal et al., "On-Policy Distillation of Language Models", 2023, arXiv:2306.13649.

    Example:

    ```python
    import keras, numpy as np
    import keras_diffusion_opd as kdo

    ids = keras.Input((4,), dtype="int32")
    student = keras.Model(ids, keras.layers.Dense(6)(keras.layers.Embedding(6, 8)(ids)))
    batch = kdo.data.PreparedBatch.create(
        model_inputs=np.array([[1, 5, 5, 2]]),
        target_ids=np.array([[1, 3, 0, 2]]),
        loss_weights=np.array([[0.0, 1.0, 1.0, 0.0]], "float32"),
        teacher=kdo.data.DenseTargets(np.random.default_rng(0).normal(size=(1, 4, 6)).astype("float32")),
    )
    trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.DistillationLoss(temperature=2.0))
    trainer.compile(keras.optimizers.Adam(0.01), accumulation_steps=2)
    history = trainer.fit(kdo.data.PreparedDataset([batch, batch]), epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]
    ```
    """

    batch_type = PreparedBatch
    metric_set: TokenMetricSet

    def __init__(
        self,
        student: Any,
        loss: Any,
        *,
        logits_fn: Callable[[Any, Any], Any] | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(student, keras.layers.Layer):
            raise TypeError(
                f"`student` must be a Keras model or layer. Received {type(student).__name__}. A KerasHub task becomes "
                "one with keras_diffusion_opd.models.token_scorer(task)."
            )
        if not callable(loss) or isinstance(loss, type):
            raise TypeError(
                "`loss` must be a callable (student_logits, batch) -> LossOutput, such as DistillationLoss(). Received "
                f"{loss!r}."
            )
        if isinstance(loss, keras.losses.Loss):
            raise TypeError(
                f"`loss` must take (student_logits, PreparedBatch). Received the Keras loss {type(loss).__name__}, "
                "which takes (y_true, y_pred). Use DistillationLoss() or TokenCrossEntropyLoss()."
            )
        if logits_fn is not None and not callable(logits_fn):
            raise TypeError(
                f"`logits_fn` must be None or a callable (student, model_inputs) -> logits. Received {logits_fn!r}."
            )
        route = None
        if isinstance(loss, ChunkedDistillationLoss):
            if logits_fn is not None:
                raise ValueError(
                    "`logits_fn` makes logits, which a ChunkedDistillationLoss does without. Remove it, and give the "
                    "student the methods hidden_states() and output_head(); or use DistillationLoss."
                )
            route = hidden_route(student)
        super().__init__(name=name, dtype=dtype)
        self.student = student
        self.loss = loss
        self.logits_fn = logits_fn
        self._route = route
        self.built = True

    def call(self, inputs: Any, training: bool | None = None, hidden: bool = False) -> Any:
        """The student's logits, float (B, L, V); with `hidden` its hidden states (B, L, D), for a chunked loss."""
        if hidden and self._route is not None:
            return self._route.hidden(inputs, training)
        if self.logits_fn is not None:
            # The training flag reaches the student through Keras's call context.
            return self.logits_fn(self.student, inputs)
        if self.student._call_has_training_arg:
            return self.student(inputs, training=training)
        return self.student(inputs)

    def compile(self, optimizer: Any = "adamw", **arguments: Any) -> None:
        """As `WindowTrainer.compile`; ValueError for metrics that need logits beside a chunked loss."""
        if self._route is not None and (arguments.get("metrics") or arguments.get("weighted_metrics")):
            raise ValueError(
                "`metrics` look at all logits, which do not exist in a ChunkedDistillationLoss. It reports "
                "distill/soft_loss and distill/hard_loss itself. For other metrics evaluate a part of the data with "
                "PreparedTrainer(student, DistillationLoss(...)), which shares the student."
            )
        super().compile(optimizer, **arguments)

    def make_metrics(self, extra: list[Any]) -> TokenMetricSet:
        """Those of the loss, and metrics of tokens."""
        return TokenMetricSet(tuple(getattr(self.loss, "metric_names", ())), extra)

    def own_settings(self) -> dict[str, Any]:
        """Class and configuration of `logits_fn`."""
        return {"logits_fn": None if self.logits_fn is None else config_of(self.logits_fn)}

    def violation_messages(self) -> Mapping[str, str]:
        """See `keras_diffusion_opd.data.violations`."""
        return messages()

    def micro_batch(self, x: Any, y: Any, sample_weight: Any, training: bool) -> tuple[WeightedSum, dict[str, Any]]:
        """The unreduced loss of one micro-batch, and where it breaks the contract."""
        # 1. Score. The training flag reaches a `logits_fn` through Keras's call context.
        scores = self(x, training=training, hidden=self._route is not None)
        batch = PreparedBatch.from_fit(x, y, sample_weight)
        # 2. Loss, and where it breaks the contract: values are not read here, but on the device.
        with backend.values_hidden():
            batch.validate()
            output, find = self._scored(scores, batch)
        if not isinstance(output, LossOutput):
            raise TypeError(
                f"The loss must return a LossOutput(primary, metrics). Received {type(output).__name__} from "
                f"{self.loss!r}."
            )
        # 3. What layers add, then the metrics.
        primary = self.with_losses(output.primary)
        found = find(primary.total)
        self.metric_set.update(primary, output.metrics, batch, scores)
        return primary, found

    def _scored(self, scores: Any, batch: PreparedBatch) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
        """The loss of a batch, and a function of its sum that says where the batch breaks the contract.

        Args:
            scores: what `call` gave: float (B, L, V), logits; for a chunked loss hidden states.
            batch: with its values hidden.
        """
        if self._route is None:
            batch.validate_logits(scores)
            return self.loss(scores, batch), lambda total: violations(batch, scores, total)
        head = self._route.head()
        examined = self.loss.examine(HiddenScores(scores, head), batch)

        def find(total: Any) -> dict[str, Any]:
            return violations_from(
                batch,
                head.ids,
                student=examined.student_invalid,
                teacher=examined.teacher_faults,
                suspects=lambda: examined.infinite,
                loss_total=total,
            )

        return examined.output, find

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serialised."""
        serialize = keras.saving.serialize_keras_object
        return {
            "student": serialize(self.student),
            "loss": serialize(self.loss),
            "logits_fn": None if self.logits_fn is None else serialize(self.logits_fn),
            "name": self.name,
            "dtype": serialize(self.dtype_policy),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "PreparedTrainer":
        """The inverse of `get_config`."""
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("student", "loss", "logits_fn", "dtype")
            if config.get(name) is not None
        }
        return cls(**parts, name=config.get("name"))
