"""`ProvenanceCheckpoint`: checkpoints that say what they are, and from which training continues exactly."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.callbacks.checkpoint_files import (
    foreign_files,
    keep_newest,
    places,
    remove_left_over,
    write_checkpoint,
)
from keras_diffusion_opd.callbacks.training_state import as_array, layout, state_arrays, state_variables
from keras_diffusion_opd.provenance import RESERVED_KEYS, Parent, Recipe, digest, new_directory, plain_json
from keras_diffusion_opd.validation import positive_int


class ProvenanceCheckpoint(keras.callbacks.Callback):
    """Saves the whole state of a run with its recipe: every `every` updates, every epoch, and at the end.

    A checkpoint is a directory such as `step-00000042`: one safetensors file each for the student's weights,
    the optimizer, the random states, the sums of the metrics and other weights, and `checkpoint.json` with
    the position (epoch, batch, updates), the recipe (loss, optimizer, accumulation, dataset, versions,
    metadata) and the digests of student and files. It is complete and on the disk before it has its name.
    `keras_diffusion_opd.callbacks.resume` continues from it. Put this callback last: what a later
    callback changes at the end of an epoch would not be in that epoch's checkpoint.

    An optimizer with EMA overwrites the weights with their average after the last epoch. The checkpoint of the
    last epoch holds them as they were before, and one more those that `fit` leaves behind; where nothing has
    changed since the last epoch, that epoch's checkpoint is the final one.

    Args:
        directory: of the checkpoints; made if it is not there. It must hold nothing else.
        every: None, or a whole number >= 1: updates between two checkpoints within an epoch.
        keep: whole number >= 1, newest checkpoints to keep.
        metadata: None, or what to record in every checkpoint, the final one too: a mapping of JSON values.
        parents: what the student is made from, each a `keras_diffusion_opd.provenance.Parent` with a digest:
            the teacher, the weights the student began with.

    Raises:
        TypeError, ValueError: wrong arguments; metadata that JSON cannot hold, or a reserved key; a directory
            that holds other files, or checkpoints of a run that is further than this one.
        OSError: the directory cannot be written; while training, a checkpoint cannot. What was written before
            is untouched.

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
    )
    trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.TokenCrossEntropyLoss())
    trainer.compile(keras.optimizers.Adam(0.01))
    checkpoint = kdo.callbacks.ProvenanceCheckpoint("checkpoints", every=2, metadata={"corpus": "one row"})
    _ = trainer.fit(kdo.data.PreparedDataset([batch] * 3), callbacks=[checkpoint], verbose=0)
    assert [path.name for path in checkpoint.paths()] == ["step-00000002", "step-00000003"]
    ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int = 3,
        metadata: Mapping[str, Any] | None = None,
        parents: Sequence[Parent] = (),
    ) -> None:
        super().__init__()
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f"`directory` must be a path. Received {directory!r} of type {type(directory).__name__}.")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise TypeError(f"`metadata` must be None or a mapping. Received {type(metadata).__name__}.")
        self.directory = Path(directory)
        self.every = None if every is None else positive_int("every", every)
        self.keep = positive_int("keep", keep)
        self.metadata = plain_json(metadata or {}, name="metadata", reserved=RESERVED_KEYS)
        self.parents = Recipe("check", parents=parents).parents
        self._refuse_foreign()
        self._trainer: Any = None
        self._epoch = self._batch = self._saved_updates = 0
        self._saved: str | None = None
        self._sums: list[np.ndarray] | None = None

    def paths(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        return [place.path for place in places(self.directory)] if self.directory.is_dir() else []

    # ---- when -----------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Check trainer and directory before the first window."""
        trainer = self.model
        if not hasattr(trainer, "policy_version") or not hasattr(trainer, "student"):
            raise TypeError(
                "ProvenanceCheckpoint saves trainers of keras_diffusion_opd. Received a "
                f"{type(trainer).__name__}: wrap the model, as in PreparedTrainer(model, loss)."
            )
        self._refuse_foreign()
        self._open()
        present = places(self.directory)
        if present and present[-1].updates > trainer.policy_version:
            raise ValueError(
                f"`directory` ({self.directory}) holds a checkpoint of {present[-1].updates} updates, and this "
                f"trainer has made {trainer.policy_version}. Call resume(trainer, directory) to continue that run, "
                "or choose another directory."
            )
        self._trainer = trainer  # `self.model` moves the whole state on JAX: only where it is saved
        self._saved_updates = trainer.policy_version
        self._saved = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keep the position."""
        self._epoch, self._batch, self._sums = epoch, 0, None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save after every `every`-th update; the epoch's last window is saved at the epoch's end."""
        self._batch = batch + 1
        updates = self._trainer.policy_version
        if self.every is None or updates == self._saved_updates or updates % self.every or self._epoch_is_done():
            return
        self._save(self._epoch, self._batch)

    def on_test_begin(self, logs: Any = None) -> None:
        """Keep the epoch's sums, which validation is about to reset."""
        if self._trainer is not None and self._sums is None:
            self._sums = [as_array(v) for v in self.model.metrics_variables]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save. An epoch that a callback has cut short is saved where it stopped."""
        if self._epoch_is_done():
            self._epoch, self._batch = epoch + 1, 0
        self._save(self._epoch, self._batch)

    def on_train_end(self, logs: Any = None) -> None:
        """Save the final state, where it is not that of the last checkpoint."""
        self._save(self._epoch, self._batch, unless_saved=True)
        self._trainer = None

    def _epoch_is_done(self) -> bool:
        steps = self.params.get("steps")
        return self._batch > 0 if steps is None else self._batch >= steps

    # ---- what -----------------------------------------------------------------------------------------

    def _save(self, epoch: int, batch: int, *, unless_saved: bool = False) -> None:
        trainer = self.model  # on JAX this brings the variables up to date
        variables = state_variables(trainer)
        state = state_arrays(variables)
        if self._sums is not None:
            state["metrics"] = self._sums
        identity = digest([[epoch, batch], state])
        if unless_saved and identity == self._saved:
            return
        record = {
            "epoch": epoch,
            "batch": batch,
            "student": digest(state["student"]),
            "recipe": self._recipe(trainer).to_json(),
            "layout": layout(variables, state),
        }
        updates = trainer.policy_version
        try:
            write_checkpoint(self.directory, updates, record, state)
            keep_newest(self.directory, self.keep)
        except OSError as error:
            raise OSError(
                error.errno,
                f"The checkpoint of {updates} updates could not be written to {self.directory}: {error}. Those "
                "written before are untouched, and the trainer holds the present state.",
            ) from error
        self._saved, self._saved_updates = identity, updates

    def _recipe(self, trainer: Any) -> Recipe:
        dataset = trainer.dataset
        return Recipe(
            method=type(trainer).__name__,
            parents=self.parents,
            hyperparameters=trainer.training_settings,
            data={} if dataset is None else dataset.settings(),
            seed=None if dataset is None else dataset.seed,
            metadata=self.metadata,
        )

    # ---- where ----------------------------------------------------------------------------------------

    def _refuse_foreign(self) -> None:
        if not self.directory.exists():
            return
        if not self.directory.is_dir():
            raise ValueError(f"`directory` must be a directory. {self.directory} is a file: choose another name.")
        foreign = foreign_files(self.directory)
        if foreign:
            raise ValueError(
                f"`directory` must hold nothing but checkpoints. {self.directory} holds {foreign[:5]}: choose an "
                "empty directory."
            )

    def _open(self) -> None:
        """Make the directory, and find out now rather than hours later whether it can be written."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            remove_left_over(self.directory)
            probe = self.directory / ".step-00000000.probe.tmp"
            with new_directory(probe):
                pass
            probe.rmdir()
        except OSError as error:
            raise OSError(
                error.errno,
                f"`directory` must be a directory that can be written. Received {self.directory}: {error}.",
            ) from error
