"""Continuing within an epoch: one `fit` whose first epoch begins where an earlier run stopped.

Keras begins epochs at their first batch. Here the windows that were done before pass without a computation,
the callbacks hear nothing of them, and the epoch's metrics go on from the sums of before.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.data.training_batch import TrainingBatch
from keras_diffusion_opd.trainers.feeding import Feed, IteratorClock


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Where the next `fit` begins.

    Args:
        epoch: int >= 0, the `initial_epoch` that `fit` has to be given.
        batch: int >= 0, batches of that epoch that are done; whole windows.
        metric_sums: values of the metrics' variables after those batches.
        dataset: `PreparedDataset.settings()` of the earlier run; empty if it read something else.
        data_state: what `data_state_of` gave in the earlier run.
        batches: those that the dataset held, where nobody could make them again.
    """

    epoch: int
    batch: int
    metric_sums: Sequence[np.ndarray]
    dataset: Mapping[str, Any]
    data_state: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batches: Sequence[TrainingBatch] = ()

    def check(self, feed: Feed, arguments: Mapping[str, Any]) -> None:
        """ValueError unless `fit` with these arguments goes on where the earlier run stopped."""
        given = arguments.get("initial_epoch", 0)
        if given != self.epoch:
            raise ValueError(
                f"`initial_epoch` must be {self.epoch}, where the resumed run stopped. Received {given}. Pass "
                "initial_epoch=state.epoch with the state that resume() gave."
            )
        steps, before = arguments.get("steps_per_epoch"), self.data_state.get("steps")
        if feed.iterator is not None and self.data_state.get("kind") == "iterator":
            if steps != before:
                raise ValueError(
                    f"`steps_per_epoch` must be {before}, as in the run that is resumed. Received {steps}."
                )
            return
        if steps is not None:
            raise ValueError(
                f"`steps_per_epoch` must be None in a run that is resumed. Received {steps}: the epochs are not whole "
                "passes then, and where the next one begins is not known. An iterator with get_state() and "
                "set_state(), such as grain's, can be resumed."
            )
        if feed.dataset is None:
            if self.dataset or self.batch or self.data_state.get("kind") == "iterator":
                raise ValueError(
                    f"`x` must be the PreparedDataset (or iterator with a state) of the run that is resumed: "
                    f"{self.batch} batches of epoch {self.epoch} are done, and nothing else can begin there. Received "
                    "something else."
                )
            return
        different = feed.dataset.differences(self.dataset)
        if different:
            raise ValueError("`x` must be the dataset of the run that is resumed. " + " ".join(map(str, different)))

    def put_back(self, feed: Feed) -> None:
        """Give dataset or iterator what it held and where it was."""
        if feed.iterator is not None:
            feed.iterator.restore(self.data_state["state"], self.batch)
        elif feed.dataset is not None and self.batches:
            feed.dataset.restore(list(self.batches), self.data_state["replacements"])


def data_state_of(feed: Feed, steps: int | None) -> dict[str, Any]:
    """Where the data of a `fit` are, as JSON values.

    Args:
        feed: what `fit` reads.
        steps: the `steps_per_epoch` that it was given.
    """
    if feed.dataset is not None:
        used, replacements = feed.dataset.used.state(), feed.dataset.replacements
        return {"kind": "dataset", "staleness": used, "replacements": replacements}
    if feed.iterator is not None:
        return {"kind": "iterator", "state": feed.iterator.state(), "steps": steps}
    return {"kind": "other"}


class ContinuedCallbacks(keras.callbacks.CallbackList):
    """The callbacks of a `fit` that continues."""

    def __init__(self, continuation: Continuation, trainer: Any, feed: Feed, arguments: dict[str, Any]) -> None:
        verbose = arguments.get("verbose", "auto")
        self._continuation, self._present, self._trainer = continuation, -1, trainer
        self._dataset, self._iterator = feed.dataset, feed.iterator
        super().__init__(
            arguments.get("callbacks"),
            add_history=True,
            add_progbar=verbose != 0,
            model=trainer,
            verbose=verbose,
            epochs=arguments.get("epochs", 1),
            steps=arguments.get("steps_per_epoch") if feed.dataset is None else feed.dataset.num_batches,
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the first epoch in its middle."""
        self._present = epoch
        first = epoch == self._continuation.epoch
        if first and self._dataset is not None:
            self._dataset.start_at(self._continuation.batch)
        super().on_epoch_begin(epoch, logs)
        if not first:
            return
        if self._dataset is not None:
            self._continue_counts(epoch, self._dataset)
        if self._continuation.batch:
            for callback in self.callbacks:
                if isinstance(callback, IteratorClock):
                    callback.resume_at(self._continuation.batch)
            sums = self._continuation.metric_sums
            for variable, value in zip(self.model.metrics_variables, sums, strict=True):
                variable.assign(value)

    def _continue_counts(self, epoch: int, dataset: PreparedDataset) -> None:
        before = self._continuation.data_state
        if self._continuation.batch and before.get("staleness"):
            dataset.used.restore(before["staleness"])
        if before.get("replacements") and not self._continuation.batches:
            if not dataset.replacements:
                raise ValueError(
                    f"Epoch {epoch} was to go on with batches that a callback puts in place of the dataset's own, and "
                    "none has been put there. Give fit the RolloutRefresh of the earlier run."
                )
            dataset.replacements += before["replacements"]

    def _before(self, batch: int) -> bool:
        return self._present == self._continuation.epoch and batch < self._continuation.batch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Say it, unless the window was done before."""
        if not self._before(batch):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Say it, unless the window was done before."""
        if not self._before(batch):
            super().on_train_batch_end(batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation may read the same dataset, from its beginning."""
        if self._dataset is not None:
            self._dataset.start_at(0)
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins at its beginning."""
        self._trainer.continued()
        if self._dataset is not None:
            self._dataset.start_at(0)
        super().on_epoch_end(epoch, logs)


class PassingOver:
    """A `train_function` that lets the windows that were done before pass, and then trains.

    Args:
        trainer: the trainer, its `train_function` made.
        windows: int >= 0, windows to let pass.
    """

    def __init__(self, trainer: Any, windows: int) -> None:
        self.trainer, self.left, self.trains = trainer, windows, trainer.train_function
        # Keras reads the epoch's metrics off their variables where it is given all their names.
        self._logs = dict.fromkeys(trainer.get_metrics_result(), 0.0)

    def __call__(self, *state_and_data: Any) -> Any:
        """One window: state and data as the backend's train function takes them."""
        if self.left:
            self.left -= 1
            return self.trainer.pass_over(self._logs, *state_and_data)
        self.trainer.continued()
        return self.trains(*state_and_data)
