"""`ProvenanceCheckpoint`: checkpoints that say what they are, and from which training continues exactly."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.callbacks.checkpoint_files import ranked
from keras_diffusion_opd.callbacks.checkpoint_writer import CheckpointWriter
from keras_diffusion_opd.callbacks.comparison import origin_differences
from keras_diffusion_opd.callbacks.sharded_state import require_orbax
from keras_diffusion_opd.callbacks.snapshot import Origin, take_snapshot
from keras_diffusion_opd.callbacks.stop_signals import StopSignals
from keras_diffusion_opd.callbacks.training_state import FrozenWeights, as_array
from keras_diffusion_opd.provenance import RESERVED_KEYS, Lineage, Parent, Recipe, plain_json
from keras_diffusion_opd.provenance.checkpoints import places
from keras_diffusion_opd.validation import positive_int

FORMATS = ("safetensors", "orbax")


class ProvenanceCheckpoint(keras.callbacks.Callback):
    """Saves the whole state of a run with its recipe: every `every` updates, every epoch, and at the end.

    A checkpoint is a directory such as `step-00000042`: one safetensors file each for the student's weights,
    the optimizer, the random states, the sums of the metrics, other weights and rolled-out batches, and
    `checkpoint.json` with the position (epoch, batch, updates, data), the recipe (student, loss, optimizer,
    accumulation, dataset, versions, metadata), and the digests of student, files and the checkpoint before. It
    is complete and on the disk before it has its name. `keras_diffusion_opd.callbacks.resume` continues from
    it. Put this callback last: what a later callback changes at the end of an epoch would not be in that
    epoch's checkpoint.

    The state is copied when a window has ended; hashing and writing go on beside the training. What fails
    there is raised at the end of a later window, or of `fit`, which waits for the last checkpoint.

    SIGTERM and Ctrl-C, while training in the main thread: when the window has ended, a checkpoint is written,
    then SystemExit with status 143, or KeyboardInterrupt, leaves `fit`, without validation and the end of the
    epoch, which belong to the resumed run. A second Ctrl-C stops at once. In other threads call `stop()`.

    An optimizer with EMA overwrites the weights with their average after the last epoch. The checkpoint of the
    last epoch holds them as they were before, and one more those that `fit` leaves behind; where nothing has
    changed since the last epoch, that epoch's checkpoint is the final one.

    Args:
        directory: of the checkpoints; made if it is not there. It must hold nothing else.
        every: None, or a whole number >= 1: updates between two checkpoints within an epoch.
        keep: whole number >= 1, newest checkpoints to keep.
        keep_best: whole number >= 0, checkpoints to keep beside them: those of the epochs that were best.
        monitor, mode: by which number of the epochs' logs, and whether "min" or "max" is best.
        metadata: None, or what to record in every checkpoint, the final one too: a mapping of JSON values.
        identity: None, or what a run that continues must share: tokenizer digest, vocabulary size, mask id; a
            mapping of JSON values.
        parents: what the student is made from, each a `keras_diffusion_opd.provenance.Parent` with a digest:
            the teacher, the weights the student began with.
        lineage: None, or the `Lineage` of the weights that the student began with; one of `parents` is its
            last model.
        name: of the student in its lineage.
        trainable_only: whether to store only the student's trainable weights (adapters, say), with the digest of
            the frozen ones, on which alone they can be put back.
        export_keras: whether the checkpoints of epochs hold the student as `student.keras` too.
        format: "safetensors", or "orbax" (JAX, `pip install orbax-checkpoint`): every device's part of the
            state is written by itself, nothing is gathered, and training waits.
        overlap: whether training goes on while a checkpoint is written; it takes the memory of one copy.
        signals: whether to listen to SIGTERM and Ctrl-C.

    Raises:
        TypeError, ValueError: wrong arguments; metadata that JSON cannot hold, or a reserved key; a directory
            that holds other files, or checkpoints of a run that is further than this one; while training, logs
            without the monitor, frozen weights that have changed.
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
        keep_best: int = 0,
        monitor: str = "val_loss",
        mode: str = "min",
        metadata: Mapping[str, Any] | None = None,
        identity: Mapping[str, Any] | None = None,
        parents: Sequence[Parent] = (),
        lineage: Lineage | None = None,
        name: str = "student",
        trainable_only: bool = False,
        export_keras: bool = False,
        format: str = "safetensors",
        overlap: bool = True,
        signals: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(directory, str | os.PathLike):
            raise TypeError(f"`directory` must be a path. Received {directory!r} of type {type(directory).__name__}.")
        for argument, choice, choices in (("mode", mode, ("min", "max")), ("format", format, FORMATS)):
            if choice not in choices:
                raise ValueError(f"`{argument}` must be one of {choices}. Received {choice!r}.")
        if isinstance(keep_best, bool) or not isinstance(keep_best, int) or keep_best < 0:
            raise ValueError(f"`keep_best` must be a whole number >= 0. Received {keep_best!r}.")
        if format == "orbax":
            require_orbax()
        self.every = None if every is None else positive_int("every", every)
        self.keep_best, self.monitor, self.mode = keep_best, monitor, mode
        self.origin = Origin(
            name=name,
            metadata=_mapping("metadata", metadata, RESERVED_KEYS),
            identity=_mapping("identity", identity),
            parents=tuple(Recipe("check", parents=parents).parents),
            lineage=lineage,
            frozen=None,
            allowed=(),
        )
        _check_lineage(self.origin)
        self.trainable_only, self.export_keras = bool(trainable_only), bool(export_keras)
        self.signals = StopSignals() if signals else None
        self._writer = CheckpointWriter(
            Path(directory),
            keep=positive_int("keep", keep),
            keep_best=keep_best,
            mode=mode,
            storage=format,
            overlap=overlap and format == "safetensors",
        )
        self._writer.refuse_foreign()
        self._trainer: Any = None
        self._epoch = self._batch = self._saved_updates = 0
        self._stopping = False
        self._sums: list[np.ndarray] | None = None

    @property
    def directory(self) -> Path:
        """Of the checkpoints."""
        return self._writer.directory

    def paths(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        return [place.path for place in places(self.directory)] if self.directory.is_dir() else []

    def best(self) -> Path | None:
        """The checkpoint of the best epoch of those that are there; None where none was ranked."""
        return next(iter(ranked(self.directory, self.mode)), None) if self.directory.is_dir() else None

    def stop(self) -> None:
        """Save when the present window has ended, and leave `fit` by SystemExit 143: what SIGTERM does."""
        self._stopping = True

    # ---- when -----------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        """Check trainer and directory before the first window."""
        trainer = self.model
        if not hasattr(trainer, "policy_version") or not hasattr(trainer, "student"):
            raise TypeError(
                "ProvenanceCheckpoint saves trainers of keras_diffusion_opd. Received a "
                f"{type(trainer).__name__}: wrap the model, as in PreparedTrainer(model, loss)."
            )
        if self.export_keras and not isinstance(trainer.student, keras.Model):
            raise TypeError(
                f"`export_keras` needs a student that is a keras.Model. Received a {type(trainer.student).__name__}."
            )
        frozen = FrozenWeights(trainer.student) if self.trainable_only else None
        self.origin = _continued(self.origin, trainer.resumed, frozen)
        self._writer.open(trainer.policy_version, trainer.resumed)
        record = None if trainer.resumed is None else trainer.resumed["record"]
        if record is not None and record["updates"] == trainer.policy_version:
            self._epoch, self._batch = record["epoch"], record["batch"]  # `fit` may have nothing left to do
        self._trainer = trainer  # `self.model` moves the whole state on JAX: only where it is saved
        self._saved_updates, self._stopping = trainer.policy_version, False
        trainer.after_fit(self._after_fit)
        if self.signals is not None:
            self.signals.take()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keep the position."""
        self._epoch, self._batch, self._sums = epoch, 0, None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save after every `every`-th update; the epoch's last window is saved at the epoch's end."""
        self._batch = min(batch + 1, self._steps() or batch + 1)  # the last window may be short
        self._writer.poll()
        if self._stop_asked():
            self._save_and_leave()
        updates = self._trainer.policy_version
        if self.every is None or updates == self._saved_updates or updates % self.every or self._may_be_last():
            return
        self._save()

    def on_test_begin(self, logs: Any = None) -> None:
        """Keep the epoch's sums, which validation is about to reset."""
        if self._trainer is not None and self._sums is None:
            self._sums = [as_array(v) for v in self.model.metrics_variables]

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop within validation, if that is asked for: the resumed run begins with validation again."""
        if self._trainer is not None and self._stop_asked():
            self._save_and_leave()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save. An epoch that a callback has cut short is saved where it stopped."""
        if self._epoch_is_done():
            self._epoch, self._batch = epoch + 1, 0
        if self.origin.frozen is not None:
            self._refuse_changed_base(self.origin.frozen)
        self._save(self._monitored(logs or {}), export=self.export_keras)
        if self._stop_asked():
            self._leave()

    def on_train_end(self, logs: Any = None) -> None:
        """Save the final state, where it is not that of the last checkpoint, and wait until all is written."""
        self._save(export=self.export_keras, unless_saved=True)
        self._writer.join()

    def _after_fit(self) -> None:
        """However `fit` has ended: give the signals back, and wait for what is being written."""
        self._trainer = None
        if self.signals is not None:
            self.signals.give_back()
        self._writer.join()

    def _steps(self) -> int | None:
        steps: int | None = self.params.get("steps")
        return steps

    def _epoch_is_done(self) -> bool:
        steps = self._steps()
        return self._batch > 0 if steps is None else self._batch >= steps

    def _may_be_last(self) -> bool:
        """Whether no window may follow in this epoch, so that its end saves. An iterator does not say."""
        if self._steps() is None and self._trainer.data_state()["kind"] == "iterator":
            return False
        return self._epoch_is_done()

    def _stop_asked(self) -> bool:
        return self._stopping or (self.signals is not None and self.signals.received is not None)

    def _save_and_leave(self) -> None:
        self._save()
        self._leave()

    def _leave(self) -> None:
        self._writer.join()
        (self.signals or StopSignals()).leave()

    # ---- what -----------------------------------------------------------------------------------------

    def _save(self, monitor: dict[str, Any] | None = None, *, export: bool = False, unless_saved: bool = False) -> None:
        trainer = self.model  # on JAX this brings the variables up to date
        position = (self._epoch, self._batch)
        snapshot = take_snapshot(trainer, self.origin, position, self._sums, monitor)
        if not unless_saved or not self._writer.has_saved(snapshot):
            self._writer.write(snapshot, trainer, student=trainer.student if export else None)
        self._saved_updates = trainer.policy_version

    def _monitored(self, logs: Mapping[str, Any]) -> dict[str, Any] | None:
        if not self.keep_best:
            return None
        if self.monitor not in logs:
            raise ValueError(
                f"`monitor` must be one of the epoch's logs, {sorted(logs)}. Received {self.monitor!r}."
                + (" Give fit validation_data." if self.monitor.startswith("val_") else "")
            )
        value = float(logs[self.monitor])
        return {"name": self.monitor, "value": value if np.isfinite(value) else None}

    def _refuse_changed_base(self, frozen: FrozenWeights) -> None:
        if FrozenWeights(self.model.student).digest != frozen.digest:
            raise ValueError(
                "`trainable_only` needs frozen weights that stay what they are, and some have changed while training "
                "(statistics of a normalisation, say). Save everything: trainable_only=False."
            )


def _mapping(name: str, value: Any, reserved: Any = ()) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be None or a mapping. Received {type(value).__name__}.")
    plain: dict[str, Any] = plain_json(value or {}, name=name, reserved=reserved)
    return plain


def _check_lineage(origin: Origin) -> None:
    if origin.lineage is None:
        return
    if not isinstance(origin.lineage, Lineage):
        raise TypeError(f"`lineage` must be None or a Lineage. Received {type(origin.lineage).__name__}.")
    origin.lineage.append(origin.name, "0" * 64, Recipe("check", parents=origin.parents))  # raises where none fits


def _continued(origin: Origin, resumed: Any, frozen: FrozenWeights | None) -> Origin:
    """What later checkpoints say, after it was held against the checkpoint that was resumed."""
    if resumed is None:
        return Origin(**{**vars(origin), "frozen": frozen, "allowed": ()})
    record, allowed = resumed["record"], list(resumed["allowed"])
    found = origin_differences(record, origin.parents, origin.identity)
    refused = [str(difference) for difference in found if not difference.within(resumed["allow"])]
    if refused:
        raise ValueError("The run that was resumed is not one of this ProvenanceCheckpoint:\n- " + "\n- ".join(refused))
    known = {(change["name"], str(change["after"])) for change in allowed}
    for difference in found:
        change = difference.to_json()
        if (change["name"], str(change["after"])) not in known:
            allowed.append({**change, "updates": record["updates"]})
    return Origin(**{**vars(origin), "frozen": frozen, "allowed": tuple(allowed)})
