"""A directory of checkpoints that one run writes, each chained to the one before."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_diffusion_opd.callbacks.background import Background
from keras_diffusion_opd.callbacks.checkpoint_files import (
    file_entries,
    foreign_files,
    prune,
    remove_left_over,
    write_checkpoint,
)
from keras_diffusion_opd.callbacks.snapshot import Snapshot
from keras_diffusion_opd.callbacks.training_state import SECTIONS, state_variables
from keras_diffusion_opd.provenance import new_directory
from keras_diffusion_opd.provenance.checkpoints import places, read_checkpoint_record


class CheckpointWriter:
    """Writes snapshots, beside the training where it may, and removes what is not to be kept.

    Args:
        directory: of the checkpoints.
        keep, keep_best, mode: see `ProvenanceCheckpoint`.
        storage: "safetensors" or "orbax".
        overlap: whether to write in a thread.
    """

    def __init__(self, directory: Path, *, keep: int, keep_best: int, mode: str, storage: str, overlap: bool) -> None:
        self.directory, self.storage, self.overlap = directory, storage, overlap
        self._prune = functools.partial(prune, directory, keep, keep_best, mode)
        self._background = Background()
        self._number, self._previous = 0, None
        self._last: dict[str, Any] | None = None

    def refuse_foreign(self) -> None:
        """ValueError where the directory is none, or holds what no checkpoint callback wrote."""
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

    def open(self, updates: int, resumed: dict[str, Any] | None) -> None:
        """Make the directory, and find out now rather than hours later whether it can be written.

        Args:
            updates: of the trainer: no checkpoint may be further.
            resumed: None, or the record that the run continues from.
        """
        self.refuse_foreign()
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
        present = places(self.directory)
        if present and present[-1].updates > updates:
            raise ValueError(
                f"`directory` ({self.directory}) holds a checkpoint of {present[-1].updates} updates, and this "
                f"trainer has made {updates}. Call resume(trainer, directory) to continue that run, "
                "or choose another directory."
            )
        before = read_checkpoint_record(present[-1].path) if present else (resumed or {}).get("record")
        self._number, self._previous = (before["number"], before["digest"]) if before else (0, None)
        self._last = None

    def write(self, snapshot: Snapshot, trainer: Any, *, student: Any = None) -> None:
        """Write a snapshot; with a `student`, also that one as a `.keras` file, for which training waits."""
        more = self._more(snapshot, trainer, student)
        work = functools.partial(self._write, snapshot, more)
        if self.overlap and student is None:
            self._background.submit(work)
        else:
            self.join()
            work()

    def has_saved(self, snapshot: Snapshot) -> bool:
        """Whether the last checkpoint holds just this."""
        self.join()
        last, content = self._last, snapshot.content
        if last is None or any(last[key] != content[key] for key in ("epoch", "batch", "updates")):
            return False
        if self.storage == "orbax":
            return bool(last["student"] == snapshot.digests()["student"])
        return all(last["files"].get(name) == entry for name, entry in file_entries(snapshot.state).items())

    def poll(self) -> None:
        """Raise what has failed beside the training."""
        self._background.poll()

    def join(self) -> None:
        """Wait until everything is written; raise what has failed."""
        self._background.join()

    def _more(self, snapshot: Snapshot, trainer: Any, student: Any) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            if student is not None:
                student.save(folder / "student.keras")
            if self.storage == "orbax":
                from keras_diffusion_opd.callbacks.sharded_state import write_sharded

                variables = state_variables(trainer, trainable_only=snapshot.origin.frozen is not None)
                write_sharded(folder, variables, snapshot.state["metrics"])

        return write

    def _write(self, snapshot: Snapshot, more: Callable[[Path], None]) -> None:
        left = SECTIONS if self.storage == "orbax" else ()
        state = {section: arrays for section, arrays in snapshot.state.items() if section not in left}
        chain = {"number": self._number + 1, "previous": self._previous}
        content = {**chain, **snapshot.content, **snapshot.digests(), "storage": self.storage}
        try:
            record = write_checkpoint(self.directory, content, state, more)
            self._prune()
        except OSError as error:
            raise OSError(
                error.errno,
                f"The checkpoint of {content['updates']} updates could not be written to {self.directory}: {error}. "
                "Those written before are untouched, and the trainer holds the present state.",
            ) from error
        self._number, self._previous, self._last = record["number"], record["digest"], record
