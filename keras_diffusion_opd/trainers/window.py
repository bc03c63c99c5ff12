"""The algorithm of every trainer: one Keras execution = one accumulation window = one update.

Keras's epoch iterator already walks a dataset in executions of `steps_per_execution` batches, cuts the
last one short, never crosses an epoch and calls the callbacks once for each. Here an execution is a
window: gradients of unreduced sums and the weights that divide them are added up over its micro-batches,
divided once, and applied once. What differs between backends (how to differentiate, compile and draw
batches) is in `_jax.py`, `_tensorflow.py` and `_torch.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.data.training_batch import TrainingBatch
from keras_diffusion_opd.losses.weighted_sum import WeightedSum
from keras_diffusion_opd.trainers.compiling import check_optimizer, optimizer_from, refuse_compile_arguments
from keras_diffusion_opd.trainers.continuation import Continuation, ContinuedCallbacks, PassingOver, data_state_of
from keras_diffusion_opd.trainers.feeding import (
    DatasetClock,
    Feed,
    IteratorClock,
    feed,
    refuse_fit_arguments,
    refuse_second_walk,
    single,
)
from keras_diffusion_opd.trainers.gradient_sums import GradientSums
from keras_diffusion_opd.trainers.metric_set import MetricSet, as_list
from keras_diffusion_opd.trainers.settings import architecture_digest, settings_of
from keras_diffusion_opd.validation import positive_int

if backend.BACKEND == "jax":
    from keras_diffusion_opd.trainers._jax import BackendWindow
elif backend.BACKEND == "tensorflow":
    from keras_diffusion_opd.trainers._tensorflow import BackendWindow  # type: ignore[assignment]
else:
    from keras_diffusion_opd.trainers._torch import BackendWindow  # type: ignore[assignment]

ON_EMPTY = ("skip", "zero_grad")


class WindowTrainer(BackendWindow, GradientSums, keras.Model):
    """A `keras.Model` whose `fit` makes exact accumulation windows. Base of the trainers of this library.

    A subclass sets `student` and `loss`, says what kind of batch it takes, and implements `call`, `micro_batch`
    and `violation_messages`.
    """

    loss: Any
    student: Any
    batch_type: type[TrainingBatch]
    metric_set: Any = None
    resumed: Any = None  # where an earlier run was that this one continues: the record of its checkpoint
    _feed: Feed | None = None  # inside of `fit`
    _steps: int | None = None
    _architecture: str | None = None
    _continuation: Continuation | None = None
    _training = False  # inside of `fit`
    _policy_version = 0

    # ---- compile -----------------------------------------------------------------------------------

    def compile(
        self,
        optimizer: Any = "adamw",
        *,
        accumulation_steps: int = 1,
        on_empty: str = "skip",
        metrics: Any = None,
        weighted_metrics: Any = None,
        **keras_arguments: Any,
    ) -> None:
        """Choose optimizer, window and metrics.

        Args:
            optimizer: a Keras optimizer, its name or config. Its schedule, EMA and weight decay advance once
                per window.
            accumulation_steps: int >= 1, micro-batches per update. k micro-batches give the gradient of one
                batch that holds them all.
            on_empty: what a window whose weights are all 0 does. `"skip"`: nothing at all. `"zero_grad"`: an
                update with gradient 0 (weight decay and moments act, the step counts).
            metrics, weighted_metrics: lists of Keras metrics, names, functions, or token metrics of
                `keras_diffusion_opd.metrics`. All are weighted by the token weights.
            **keras_arguments: `run_eagerly`, `jit_compile`, `auto_scale_loss` as in `keras.Model.compile`.

        Raises:
            ValueError, TypeError: an argument out of range, one that belongs elsewhere (`loss`,
                `steps_per_execution`), or an optimizer that accumulates by itself.
        """
        accumulation_steps = positive_int("accumulation_steps", accumulation_steps)
        if on_empty not in ON_EMPTY:
            raise ValueError(f"`on_empty` must be one of {ON_EMPTY}. Received {on_empty!r}.")
        refuse_compile_arguments(keras_arguments)
        optimizer = optimizer_from(optimizer)
        if getattr(optimizer, "gradient_accumulation_steps", None):
            raise ValueError(
                "The optimizer has gradient_accumulation_steps="
                f"{optimizer.gradient_accumulation_steps}, which averages means of unequal micro-batches. Remove it "
                "and pass accumulation_steps to compile()."
            )
        extra = [*as_list("metrics", metrics), *as_list("weighted_metrics", weighted_metrics)]
        own_metrics = self.make_metrics(extra)
        super().compile(optimizer=optimizer, steps_per_execution=accumulation_steps, **keras_arguments)
        self._loss_tracker = None  # Keras's own "loss" weighs batches by their number of rows
        self.metric_set = own_metrics
        self._policy_version = 0
        self.resumed = self._architecture = self._continuation = None
        self._after_fit: list[Callable[[], None]] = []
        self.on_empty = on_empty
        self.accumulation_steps = accumulation_steps
        # Taken now: a callback may change the learning rate, which then is part of the optimizer's state.
        self._training_settings = settings_of(self)
        self._half_precision = any(layer.compute_dtype == "float16" for layer in self._flatten_layers())
        # Keras decides on loss scaling by the policy of this wrapper; what computes in float16 is inside.
        scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        if self._half_precision and not scaled and keras_arguments.get("auto_scale_loss", True):
            self.optimizer = keras.optimizers.LossScaleOptimizer(self.optimizer)
        self._own_compile_config = {
            "optimizer": optimizer,
            "accumulation_steps": accumulation_steps,
            "on_empty": on_empty,
            "metrics": list(metrics) if metrics is not None else None,
            "weighted_metrics": list(weighted_metrics) if weighted_metrics is not None else None,
            **keras_arguments,
        }

    def get_compile_config(self) -> dict[str, Any]:
        """What `compile` was called with, serialised."""
        if not self.compiled:
            return {}
        return {name: keras.saving.serialize_keras_object(value) for name, value in self._own_compile_config.items()}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compile as before saving, and build the optimizer so that its state can be loaded."""
        self.compile(**{name: keras.saving.deserialize_keras_object(value) for name, value in config.items()})
        if self.built:
            self.optimizer.build(self.trainable_variables)

    @property
    def metrics(self) -> list[Any]:
        """`loss`, what the loss reports, then what was given to `compile`."""
        return [] if self.metric_set is None else self.metric_set.all

    @property
    def trainable_variables(self) -> list[Any]:
        """Those of the student, as it says itself, and of what else there is: an adapted model trains its adapter."""
        found = super().trainable_variables
        student = getattr(self, "student", None)
        if student is None:
            return found
        said = {id(v) for v in student.trainable_variables}
        owned = {id(v) for v in student.variables}
        return [v for v in found if id(v) in said or id(v) not in owned]

    @property
    def non_trainable_variables(self) -> list[Any]:
        """All others."""
        trained = {id(v) for v in self.trainable_variables}
        return [v for v in self.variables if id(v) not in trained]

    @property
    def training_settings(self) -> dict[str, Any]:
        """Student, loss, optimizer and window as they were at `compile`: JSON values, for records and comparisons."""
        if self._architecture is None:
            self._architecture = architecture_digest(self.student)
        return {"architecture": self._architecture, **self._training_settings}

    @property
    def dataset(self) -> PreparedDataset | None:
        """The `PreparedDataset` that `fit` is reading; None outside of `fit`, or when it reads something else."""
        return None if self._feed is None else self._feed.dataset

    def data_state(self) -> dict[str, Any]:
        """Inside of `fit`: where its data are, as JSON values. `continue_from` takes it."""
        return {"kind": "other"} if self._feed is None else data_state_of(self._feed, self._steps)

    def after_fit(self, function: Callable[[], None]) -> None:
        """Have `function` called when the present `fit` ends, in whatever way: callbacks give back what they took."""
        self._after_fit.append(function)

    # ---- fit, evaluate -------------------------------------------------------------------------------

    def fit(self, x: Any = None, y: Any = None, **arguments: Any) -> Any:
        """`keras.Model.fit` on the trainer's batches.

        Args:
            x: a `PreparedDataset`; a batch of the trainer's kind or a list of them; a generator,
                `keras.utils.PyDataset`, grain dataset or loader, or torch DataLoader that yields batches; a
                `tf.data.Dataset` of `batch.as_fit()`; or arrays, with `y` and `sample_weight` as `as_fit()` gives them.
            y: see `x`.
            **arguments: of `keras.Model.fit`. `validation_data` takes whatever `x` takes.

        Returns:
            `keras.callbacks.History`.

        Raises:
            ValueError: data that are not prepared batches; a window that broke the contract (see
                `keras_diffusion_opd.data.violations`), before its update; `steps_per_epoch` that
                `accumulation_steps` does not divide.
        """
        self._check_ready("fit")
        refuse_fit_arguments(x, y, arguments)
        steps = arguments.get("steps_per_epoch")
        if steps is not None and steps % self.accumulation_steps:
            raise ValueError(
                f"`steps_per_epoch` ({steps}) must be a multiple of `accumulation_steps` ({self.accumulation_steps}): "
                "an epoch holds whole windows, and Keras counts micro-batches."
            )
        whole = {"batch_size": arguments.pop("batch_size", None), "shuffle": arguments.get("shuffle", True)}
        self._count_updates()
        if isinstance(x, PreparedDataset):
            x.policy_version = self.policy_version  # before a first batch is looked at
        fed = feed(self.batch_type, x, y, arguments.pop("sample_weight", None), **whole)
        if arguments.get("validation_data") is not None:
            validation = arguments["validation_data"]
            parts = validation if isinstance(validation, tuple) else (validation,)
            rows = arguments.pop("validation_batch_size", None) or whole["batch_size"]
            arguments["validation_data"] = feed(self.batch_type, *parts, batch_size=rows).x
        self._adopt(fed, arguments)
        check_optimizer(self)
        self._continue(fed, arguments)
        refuse_second_walk(x, arguments)
        self._feed, self._steps, self._training = fed, steps, True
        try:
            return super().fit(fed.x, **arguments)
        finally:
            self._feed, self._training = None, False
            if isinstance(self.train_function, PassingOver):
                self.train_function = self.train_function.trains
            if fed.dataset is not None:
                fed.dataset.start_at(0)
            self._call_after_fit()

    def _call_after_fit(self) -> None:
        """Every function, whatever another one raises."""
        if self._after_fit:
            function = self._after_fit.pop()
            try:
                function()
            finally:
                self._call_after_fit()

    def continue_from(self, resumed: Any = None, **continuation: Any) -> None:
        """Have the next `fit` begin there. The variables have been put back already.

        Args:
            resumed: the record of the earlier run, for callbacks.
            **continuation: of `Continuation`.
        """
        self._continuation = Continuation(**continuation)
        self.resumed = resumed
        self._count_updates()

    def continued(self) -> None:
        """The run goes on: the first window that was not done before is about to begin."""
        self._continuation = None

    def _continue(self, fed: Feed, arguments: dict[str, Any]) -> None:
        """Where an earlier run is resumed: check that `fit` goes on with it, and pass over what is done."""
        continuation = self._continuation
        if continuation is None:
            return
        continuation.check(fed, arguments)
        continuation.put_back(fed)
        if fed.dataset is not None or fed.iterator is not None:
            arguments["callbacks"] = ContinuedCallbacks(continuation, self, fed, arguments)
        self.make_train_function()
        self.train_function: Any = PassingOver(self, -(-continuation.batch // self.accumulation_steps))

    def _adopt(self, fed: Feed, arguments: dict[str, Any]) -> None:
        """Give the dataset its clock; datasets that order themselves are not shuffled a second time."""
        if fed.ordered:
            arguments["shuffle"] = False
        callbacks = arguments.get("callbacks") or []
        clocks: list[Any] = [] if fed.dataset is None else [DatasetClock(fed.dataset)]
        clocks += [] if fed.iterator is None else [IteratorClock(fed.iterator)]
        if clocks and not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
            arguments["callbacks"] = [*clocks, *callbacks]

    def evaluate(self, x: Any = None, y: Any = None, **arguments: Any) -> Any:
        """`keras.Model.evaluate`: exact over the whole dataset, without dropout. Takes what `fit` takes."""
        self._check_ready("evaluate")
        if arguments.get("_use_cached_eval_dataset"):
            return super().evaluate(x, y, **arguments)
        if isinstance(x, PreparedDataset):
            x.policy_version = self.policy_version
        fed = feed(
            self.batch_type, x, y, arguments.pop("sample_weight", None), batch_size=arguments.pop("batch_size", None)
        )
        return super().evaluate(fed.x, **arguments)

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **arguments: Any) -> Any:
        """One window of one micro-batch; `x` may be a `PreparedBatch`."""
        self._check_ready("train_on_batch")
        check_optimizer(self)
        self._count_updates()
        return super().train_on_batch(*single(self.batch_type, x, y, sample_weight).as_fit(), **arguments)

    def test_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, **arguments: Any) -> Any:
        """The exact loss and metrics of one batch; `x` may be a `PreparedBatch`."""
        self._check_ready("test_on_batch")
        return super().test_on_batch(*single(self.batch_type, x, y, sample_weight).as_fit(), **arguments)

    @property
    def policy_version(self) -> int:
        """Number of updates that the optimizer has made: what `Stamp.policy_version` refers to."""
        if not self._training:  # while JAX trains, the optimizer's own count is out of reach
            self._count_updates()
        return self._policy_version

    def _count_updates(self) -> None:
        """Read the count off the optimizer, which may have been loaded."""
        if self.compiled and self.optimizer.built:
            self._policy_version = int(keras.ops.convert_to_numpy(self.optimizer.iterations))

    def window_done(self, moved: bool) -> None:
        """A window has ended, with an update if `moved`."""
        self._policy_version += int(moved)

    def _check_ready(self, method: str) -> None:
        if not self.compiled:
            raise ValueError(f"Call `compile(optimizer, ...)` before `{method}()`.")

    # ---- the algorithm, shared by the backends ---------------------------------------------------------

    def micro_batch(self, x: Any, y: Any, sample_weight: Any, training: bool) -> tuple[WeightedSum, dict[str, Any]]:
        """What a trainer is: the unreduced loss of one micro-batch, and where it breaks the contract.

        Called in the compiled step. It calls the models, updates `metric_set`, and may read every variable of
        the trainer, in training those of the optimizer too.

        Args:
            x, y, sample_weight: of one micro-batch, as `batch_type.as_fit` gives them.
            training: False while evaluating: then the same batch always gives the same value.

        Returns:
            The sum that is differentiated, with the weight that divides it at the end of the window
            (`with_losses` adds what layers add), and for every name in `violation_messages` that applies a bool:
            all (B, L), or all (B,). Where one is True the window raises, and makes no update.
        """
        raise NotImplementedError

    def violation_messages(self) -> Mapping[str, str]:
        """What each check means, by the names that `micro_batch` gives: in the words of the error."""
        raise NotImplementedError

    def updated(self) -> None:
        """Called in the compiled step after an update: may assign to variables that are not trained."""

    def make_metrics(self, extra: list[Any]) -> MetricSet:
        """The metrics, given those of `compile`."""
        if extra:
            raise ValueError(
                f"`metrics` must be None for a {type(self).__name__}: it logs what its loss reports. Received {extra}."
            )
        return MetricSet(tuple(getattr(self.loss, "metric_names", ())))

    def own_settings(self) -> dict[str, Any]:
        """JSON values, beside loss, optimizer and window: what else two runs must have in common."""
        return {}

    def with_losses(self, primary: WeightedSum) -> WeightedSum:
        """`primary`, and the losses that layers add (regularisers, `add_loss`), with the micro-batch's weight.

        So k micro-batches equal one batch.
        """
        total, weight = primary
        for loss in self.losses:
            total = total + weight * ops.cast(ops.sum(loss), total.dtype)
        return WeightedSum(total, weight)
