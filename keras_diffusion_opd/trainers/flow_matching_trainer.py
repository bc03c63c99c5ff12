"""`FlowMatchingTrainer`: a denoiser learns the velocity from data to noise."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.flow_batch import FlowBatch
from keras_diffusion_opd.losses.flow_matching import FlowMatchingLoss
from keras_diffusion_opd.losses.sample_rows import column
from keras_diffusion_opd.losses.weighted_sum import WeightedSum
from keras_diffusion_opd.samplers.flow_draws import TIMES, FlowDraws
from keras_diffusion_opd.trainers.weight_average import WeightAverage
from keras_diffusion_opd.trainers.window import WindowTrainer
from keras_diffusion_opd.validation import finite_real, whole_number

_MESSAGES = {
    "weights_sound": "`weights` must be finite and at least 0",
    "samples_finite": "`samples` must be finite where the weight is above 0. Give such a row weight 0",
    "velocity_finite": (
        "the velocity must be finite. Training has diverged or half precision overflowed: lower the learning rate, "
        "clip gradients, or use mixed_bfloat16"
    ),
}


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class FlowMatchingTrainer(WindowTrainer):
    """Trains a denoiser by flow matching: `FlowMatchingTrainer(student).compile(...)`, `.fit(dataset)`.

    A row of data x0 gets noise e and a time s (0 = data, 1 = noise); the student sees
    `{"x": (1 - s) x0 + s e, "time": s, **conditions}` and learns the velocity `e - x0`. Noise and time are a
    function of (seed, update, sample id), so that k micro-batches are one batch, and a resumed run is the run
    itself. In evaluation they are fixed for each row.

    Args:
        student: a built Keras model or layer: `{"x": float (B, ...), "time": float32 (B,), **conditions}` -> velocity
            of the shape of x.
        times: `"logit_normal"` (most times in the middle), or `"uniform"`.
        weighting: how the error of a time counts: see `FlowMatchingLoss`.
        gamma: float > 0, of the weighting.
        class_dropout: float in [0, 1), the part of the rows that lose their conditions in an update, so that guidance
            has an unconditional velocity to set off from.
        null_condition: None, or what stands for "no condition", by name: a number, or an array without the row's axis.
            Needed with `class_dropout`. Conditions that are not named stay.
        seed: int, of noise, times and dropout.
        name, dtype: as for any Keras model.

    Attributes:
        student: the model given, trained in place.
        policy_version: int, number of updates the student has made.

    Raises:
        TypeError: the student is not a Keras layer.
        ValueError: the student is not built; an argument out of range.

    Source: Lipman et al., "Flow Matching for Generative Modeling", 2023, arXiv:2210.02747; Esser et al., "Scaling
    Rectified Flow Transformers for High-Resolution Image Synthesis", 2024, arXiv:2403.03206 (logit-normal times); Ho
    and Salimans, "Classifier-Free Diffusion Guidance", 2022, arXiv:2207.12598 (class dropout).

    Example:

    ```python
    import keras, numpy as np
    import keras_diffusion_opd as kdo

    inputs = {"x": keras.Input((2,)), "time": keras.Input((), dtype="float32")}
    time = keras.layers.Reshape((1,))(inputs["time"])
    hidden = keras.layers.Dense(16, "tanh")(keras.layers.Concatenate()([inputs["x"], time]))
    student = keras.Model(inputs, keras.layers.Dense(2)(hidden))

    rows = np.random.default_rng(0).normal(2.0, 0.5, size=(64, 2)).astype("float32")
    trainer = kdo.trainers.FlowMatchingTrainer(student, seed=1)
    trainer.compile(keras.optimizers.Adam(0.01), ema=0.9)
    history = trainer.fit(kdo.data.FlowBatch.create(rows), batch_size=32, epochs=3, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    with trainer.ema_weights():
        velocity = trainer.student.predict({"x": rows[:4], "time": np.ones(4, "float32")}, verbose=0)
    assert velocity.shape == (4, 2)
    ```
    """

    batch_type = FlowBatch

    def __init__(
        self,
        student: Any,
        *,
        times: str = "logit_normal",
        weighting: str = "none",
        gamma: float = 5.0,
        class_dropout: float = 0.0,
        null_condition: Mapping[str, Any] | None = None,
        seed: int = 0,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(student, keras.layers.Layer):
            raise TypeError(f"`student` must be a Keras model or layer. Received {type(student).__name__}.")
        if not all(layer.built for layer in student._flatten_layers()):
            raise ValueError("`student` must be built. Call it on an input {'x': ..., 'time': ...} first.")
        if times not in TIMES:
            raise ValueError(f"`times` must be one of {TIMES}. Received {times!r}.")
        class_dropout = finite_real("class_dropout", class_dropout)
        if not 0 <= class_dropout < 1:
            raise ValueError(f"`class_dropout` must be at least 0 and below 1. Received {class_dropout}.")
        if class_dropout and not null_condition:
            raise ValueError(
                "`class_dropout` needs `null_condition`, what stands for no condition, by name: "
                "null_condition={'label': num_classes}. Received none."
            )
        loss = FlowMatchingLoss(weighting, gamma)
        seed = whole_number("seed", seed, least=None)
        super().__init__(name=name, dtype=dtype)
        self.student = student
        self.loss = loss
        self.times, self.class_dropout, self.seed = times, class_dropout, seed
        self.null_condition = dict(null_condition or {})
        self.average: WeightAverage | None = None
        self.ema: float | None = None
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The student's velocity for `{"x", "time", **conditions}`."""
        if self.student._call_has_training_arg:
            return self.student(inputs, training=training)
        return self.student(inputs)

    def compile(self, optimizer: Any = "adamw", *, ema: float | None = None, **arguments: Any) -> None:
        """As `PreparedTrainer.compile`, without metrics.

        Args:
            optimizer: a Keras optimizer, its name or config.
            ema: None, or the decay in [0, 1) of a moving average of the trained weights, a step an update. It starts
                from the present weights, and is saved with checkpoints; `ema_weights` lends it to the student.
            **arguments: `accumulation_steps`, `on_empty`, and those of Keras.
        """
        if ema is not None:
            ema = finite_real("ema", ema)
            if not 0 <= ema < 1:
                raise ValueError(f"`ema` must be None, or at least 0 and below 1. Received {ema}.")
        self.average, self.ema = None, ema
        if ema is not None:
            self.average = WeightAverage(self.trainable_variables, ema)
        super().compile(optimizer, **arguments)
        self._own_compile_config["ema"] = ema

    def updated(self) -> None:
        """The average follows."""
        if self.average is not None:
            self.average.advance()

    def ema_weights(self) -> AbstractContextManager[None]:
        """`with trainer.ema_weights(): ...`: the student has the averaged weights within, and its own after, always.

        Raises:
            ValueError: `compile` was not given `ema`.
        """
        if self.average is None:
            raise ValueError("There is no average. Call compile(..., ema=0.999) first.")
        return self.average.lent()

    def own_settings(self) -> dict[str, Any]:
        """What decides on the draws, and the decay of the average."""
        null = {name: ops.convert_to_numpy(value).tolist() for name, value in self.null_condition.items()}
        return {
            "times": self.times,
            "class_dropout": self.class_dropout,
            "null_condition": null,
            "seed": self.seed,
            "ema": self.ema,
        }

    def violation_messages(self) -> Mapping[str, str]:
        """What each check means."""
        return _MESSAGES

    def micro_batch(self, x: Any, y: Any, sample_weight: Any, training: bool) -> tuple[WeightedSum, dict[str, Any]]:
        """The unreduced loss of one micro-batch, and where it breaks the contract."""
        with backend.values_hidden():
            batch = FlowBatch.from_fit(x, y, sample_weight).validate()
        # 1. Rows of weight 0 may hold anything: they become zeros.
        weights = ops.cast(batch.weights, "float32")
        active = ops.not_equal(weights, 0)
        x0 = ops.convert_to_tensor(batch.samples)
        x0 = ops.where(column(active, x0), x0, ops.zeros_like(x0))
        # 2. Draw time and noise for each row, and who loses its conditions.
        draws = FlowDraws(self.seed, self.optimizer.iterations if training else None, batch.sample_ids)
        time, noise = draws.times(self.times), draws.noise(x0)
        conditions = dict(batch.conditions)
        if training and self.class_dropout:
            conditions = self._without(conditions, draws.dropped(self.class_dropout))
        # 3. Corrupt, and ask for the velocity.
        s = ops.cast(column(time, x0), x0.dtype)
        velocity = self({"x": (1.0 - s) * x0 + s * noise, "time": time, **conditions}, training=training)
        # 4. Weight, and leave unreduced.
        with backend.values_hidden():
            output = self.loss(velocity, x0, noise, time, weights)
        primary = self.with_losses(output.primary)
        self.metric_set.add(primary, output.metrics)
        return primary, {
            "weights_sound": ops.logical_not(ops.logical_and(ops.isfinite(weights), weights >= 0)),
            "samples_finite": ops.logical_and(active, _unsound(x0)),
            "velocity_finite": ops.logical_and(active, _unsound(velocity)),
        }

    def _without(self, conditions: dict[str, Any], dropped: Any) -> dict[str, Any]:
        """`conditions`, in the rows of `dropped` (B,) what stands for none."""
        unknown = sorted(set(self.null_condition) - set(conditions))
        if unknown:
            raise ValueError(f"`null_condition` names {unknown}; the batch has the conditions {sorted(conditions)}.")
        for name, null in self.null_condition.items():
            value = ops.convert_to_tensor(conditions[name])
            null = ops.broadcast_to(ops.cast(null, value.dtype), ops.shape(value))
            conditions[name] = ops.where(column(dropped, value), null, value)
        return conditions

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serialised."""
        serialize = keras.saving.serialize_keras_object
        return {
            "student": serialize(self.student),
            "times": self.times,
            "weighting": self.loss.weighting,
            "gamma": self.loss.gamma,
            "class_dropout": self.class_dropout,
            "null_condition": {name: ops.convert_to_numpy(v).tolist() for name, v in self.null_condition.items()},
            "seed": self.seed,
            "name": self.name,
            "dtype": serialize(self.dtype_policy),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "FlowMatchingTrainer":
        """The inverse of `get_config`."""
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("student", "dtype")
        }
        return cls(**{**config, **parts})


def _unsound(values: Any) -> Any:
    """bool (B,): whether a row (B, ...) holds NaN or infinity."""
    return ops.any(ops.logical_not(ops.isfinite(values)), axis=tuple(range(1, len(values.shape))))
