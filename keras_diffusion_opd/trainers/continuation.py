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
from keras_diffusion_opd.provenance.differences import differences


@dataclasses.dataclass(frozen=True)
class Continuation:
    """Where the next `fit` begins.

    Args:
        epoch: int >= 0, the `initial_epoch` that `fit` has to be given.
        batch: int >= 0, batches of that epoch that are done; whole windows.
        metric_sums: values of the metrics' variables after those batches.
        dataset: `PreparedDataset.settings()` of the earlier run; empty if it read something else.
    """

    epoch: int
    batch: int
    metric_sums: Sequence[np.ndarray]
    dataset: Mapping[str, Any]

    def check(self, dataset: PreparedDataset | None, arguments: Mapping[str, Any]) -> None:
        """ValueError unless `fit` with these arguments goes on where the earlier run stopped."""
        given = arguments.get("initial_epoch", 0)
        if given != self.epoch:
            raise ValueError(
                f"`initial_epoch` must be {self.epoch}, where the resumed run stopped. Received {given}. Pass "
                "initial_epoch=state.epoch with the state that resume() gave."
            )
        if arguments.get("steps_per_epoch") is not None:
            raise ValueError(
                f"`steps_per_epoch` must be None in a run that is resumed. Received {arguments['steps_per_epoch']}: "
                "the epochs are not whole passes then, and where the next one begins is not known."
            )
        if dataset is None:
            if self.dataset or self.batch:
                raise ValueError(
                    f"`x` must be the PreparedDataset of the run that is resumed: {self.batch} batches of epoch "
                    f"{self.epoch} are done, and nothing else can begin there. Received something else."
                )
            return
        different = differences(self.dataset, dataset.settings(), "dataset", leave_out=("replacements",))
        if different:
            raise ValueError("`x` must be the dataset of the run that is resumed. " + " ".join(different))
        if self.batch and self.dataset.get("replacements"):
            raise ValueError(
                f"Epoch {self.epoch} was on batches that a callback had put in place of the dataset's own, and the "
                "checkpoint does not hold them. Resume from a checkpoint of an epoch's end: every=None."
            )


class ContinuedCallbacks(keras.callbacks.CallbackList):
    """The callbacks of a `fit` that continues."""

    def __init__(self, continuation: Continuation, trainer: Any, dataset: Any, arguments: dict[str, Any]) -> None:
        verbose = arguments.get("verbose", "auto")
        self._continuation, self._dataset, self._present = continuation, dataset, -1
        super().__init__(
            arguments.get("callbacks"),
            add_history=True,
            add_progbar=verbose != 0,
            model=trainer,
            verbose=verbose,
            epochs=arguments.get("epochs", 1),
            steps=dataset.num_batches,
        )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin the first epoch in its middle."""
        self._present = epoch
        first = epoch == self._continuation.epoch
        if first:
            self._dataset.start_at(self._continuation.batch)
        super().on_epoch_begin(epoch, logs)
        if not first:
            return
        if self._continuation.dataset.get("replacements") and not self._dataset.replacements:
            raise ValueError(
                f"Epoch {epoch} was to go on with batches that a callback had put in place of the dataset's own, and "
                "the checkpoint does not hold them. Resume where new ones are rolled out: every=1."
            )
        if self._continuation.batch:
            sums = self._continuation.metric_sums
            for variable, value in zip(self.model.metrics_variables, sums, strict=True):
                variable.assign(value)

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
        self._dataset.start_at(0)
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins at its beginning."""
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

    def __call__(self, *state_and_data: Any) -> Any:
        """One window: state and data as the backend's train function takes them."""
        if self.left:
            self.left -= 1
            return self.trainer.pass_over(*state_and_data)
        self.trainer.continued()
        return self.trains(*state_and_data)
