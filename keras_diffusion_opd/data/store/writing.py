"""One pass over prepared batches that writes the shards of one writer, and can be killed at any moment."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.data.arrays import is_array
from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.store.packing import TargetPacking, read_array
from keras_diffusion_opd.data.store.rows import columns_of, refuse_other_form, source_arrays, stored_rows
from keras_diffusion_opd.data.store.structure import describe_nest
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets, fault_message
from keras_diffusion_opd.provenance.files import remove_left_over, write_bytes
from keras_diffusion_opd.provenance.row_manifest import MANIFEST, Manifest, shard_name, shard_number, writer_number
from keras_diffusion_opd.provenance.row_merge import Writer, refuse_other_settings
from keras_diffusion_opd.provenance.row_shard import Column, Shard, StoredRow, StoreError, pack_shard


@dataclass
class StoreWriter:
    """The pass of one writer; see `TeacherStore.write` for the arguments."""

    folder: Path
    packing: TargetPacking
    fingerprints: Mapping[str, Any]
    metadata: Mapping[str, Any]
    teacher: Callable[[PreparedBatch], Any] | None
    rows_per_shard: int
    number: int
    writers: int
    _columns: list[Column] = field(default_factory=list)
    _settings: dict[str, Any] = field(default_factory=dict)
    _rows: int = 0
    _complete: int | None = None  # rows of this writer, where it was done before
    _buffer: list[StoredRow] = field(default_factory=list)
    _there: tuple[int, Shard | None] = (-1, None)

    def run(self, batches: Any, progress: bool) -> None:
        """Write every shard that is not there. A shard is there in full or not at all."""
        bar = keras.utils.Progbar(_count(batches), unit_name="batch") if progress else None
        for done, batch in enumerate(prepared_batches(batches)):
            try:
                self._take(batch)
            except StoreError:
                raise
            except (ValueError, TypeError) as error:
                raise type(error)(f"Batch {done}: {error}") from error
            if bar is not None:
                bar.update(done + 1)
        if not self._rows:
            raise ValueError("`batches` is empty: there is nothing to store.")
        self._finish()
        if bar is not None:
            bar.update(done + 1, finalize=True)

    def _take(self, batch: PreparedBatch) -> None:
        # 1. What was given.
        batch.validate()
        source = source_arrays(batch)
        if not self._columns:
            self._begin(batch, source)
        refuse_other_form(self._columns, batch, source, self._settings["inputs"])
        # 2. What the teacher says, unless the shards of all these rows are there.
        count = len(source["target_ids"])
        if self._complete is not None and self._rows + count > self._complete:
            raise StoreError(
                f"{self.folder} is complete with {self._complete} rows, and `batches` has more: these are other "
                "batches than those that the store was begun with. Write to another directory."
            )
        shards = range(self._rows // self.rows_per_shard, (self._rows + count - 1) // self.rows_per_shard + 1)
        needed = any(self._shard(index) is None for index in shards)
        teacher = self._encoded(batch, source) if needed else None
        # 3. Row by row: compare with what is there, or write.
        for row in stored_rows(self._columns, source, teacher, batch.stamp):
            index, place = divmod(self._rows, self.rows_per_shard)
            shard = self._shard(index)
            if shard is not None:
                self._compare(shard, place, row)
            else:
                self._buffer.append(row)
                if place == self.rows_per_shard - 1:
                    self._flush(index)
            self._rows += 1

    def _begin(self, batch: PreparedBatch, source: Mapping[str, np.ndarray]) -> None:
        """Settle the settings, and refuse a directory that holds anything of other settings."""
        self._columns = columns_of(source, self.packing)
        self._settings = {
            "columns": [column.to_json() for column in self._columns],
            "inputs": describe_nest(batch.model_inputs),
            "targets": self.packing.to_json(),
            "fingerprints": self.fingerprints,
            "metadata": self.metadata,
            "rows_per_shard": self.rows_per_shard,
            "writers": self.writers,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        ours = [n for n in names if n == MANIFEST or shard_number(n) is not None or writer_number(n) is not None]
        if ours != names:
            others = [name for name in names if name not in ours]
            raise StoreError(
                f"{self.folder} must hold nothing but a store. It holds {others[:5]}: choose another directory."
            )
        if MANIFEST in names:
            manifest = Manifest.load(self.folder)
            refuse_other_settings(self._settings, manifest.settings, str(self.folder))
            self._complete = manifest.rows_of(self.number)
            return
        known = [number for name in names if (number := writer_number(name)) is not None]
        for number in known:
            there = Writer.load(self.folder, number)
            refuse_other_settings(self._settings, there.settings, str(self.folder))
            if number == self.number:
                self._complete = there.rows
        if self.number not in known:
            if any((shard_number(name) or (-1,))[0] == self.number for name in names):
                raise StoreError(
                    f"{self.folder} holds shards of writer {self.number}, and no record of it. Remove them."
                )
            Writer(self.number, self._settings).save(self.folder)

    def _shard(self, index: int) -> Shard | None:
        """The shard of this writer, if it is there already."""
        if self._there[0] != index:
            path = self.folder / shard_name(self.number, index)
            self._there = (index, Shard(path, self._columns) if path.exists() or path.is_symlink() else None)
        return self._there[1]

    def _compare(self, shard: Shard, place: int, row: StoredRow) -> None:
        if place < shard.rows and shard.digests[place, :2].tobytes() == row.ids + row.source:
            return
        raise StoreError(
            f"row {self._rows} of `batches` is not the one that is stored in {shard.path}: these are other batches "
            "than those that the store was begun with. Give the same batches, or write to another directory."
        )

    def _flush(self, index: int) -> None:
        path = self.folder / shard_name(self.number, index)
        remove_left_over(self.folder, path.name)
        write_bytes(path, pack_shard(self._columns, self._buffer))
        self._buffer = []

    def _finish(self) -> None:
        index, place = divmod(self._rows - 1, self.rows_per_shard)
        if self._buffer:
            self._flush(index)
        self._there = (-1, None)
        last = self._shard(index)
        beyond = self.folder / shard_name(self.number, index + 1)
        if last is None or last.rows != place + 1 or beyond.exists():
            raise StoreError(
                f"`batches` has {self._rows} rows, and {self.folder} holds more: these are other batches than those "
                "that the store was begun with."
            )
        if not (self.folder / MANIFEST).exists():
            Writer(self.number, self._settings, shards=index + 1, rows=self._rows).save(self.folder)

    def _encoded(self, batch: PreparedBatch, source: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The columns of what the teacher says of a batch."""
        targets = self._targets(batch)
        targets.validate(batch.target_ids)
        # In NumPy from here on: nothing is compiled for a check.
        targets = targets.map(lambda x: read_array("teacher", x))
        active = source["loss_weights"].astype("float64") > 0
        for name, where in targets.faults(self.packing.vocabulary_size).items():
            wrong = np.argwhere(np.asarray(where) & active)
            if len(wrong):
                what = fault_message(name, self.packing.vocabulary_size)
                raise ValueError(f"{what} (row {wrong[0][0]}, position {wrong[0][1]}).")
        largest = np.max(source["target_ids"], where=active, initial=0)
        if largest >= self.packing.vocabulary_size:
            raise ValueError(
                f"active target_ids must be smaller than vocabulary size {self.packing.vocabulary_size} of the "
                f"targets. Received {largest}."
            )
        return self.packing.encode(targets, active)

    def _targets(self, batch: PreparedBatch) -> TeacherTargets:
        said = batch.teacher if self.teacher is None else self.teacher(batch)
        if said is None:
            raise ValueError(
                "a batch must have a teacher, or `teacher` must be given: a function from a batch to logits."
            )
        if isinstance(said, DenseTargets) and self.packing.kind != "dense":
            said = said.logits
        if is_array(said):
            return self.packing.from_logits(said)
        if not isinstance(said, TeacherTargets) or said.kind != self.packing.kind:
            raise TypeError(
                f"the teacher must give logits or targets of kind {self.packing.kind!r}. "
                f"Received {type(said).__name__}."
            )
        return said


def prepared_batches(batches: Any) -> Iterator[PreparedBatch]:
    """The batches of a dataset, a batch, or anything that yields batches or what `fit` takes."""
    if isinstance(batches, PreparedBatch):
        batches = [batches]
    if isinstance(batches, PreparedDataset):
        batches = map(batches.batch, range(len(batches)))
    elif isinstance(batches, keras.utils.PyDataset):
        batches = (batches[index] for index in range(_count(batches) or 0))
    if not isinstance(batches, Iterable):
        raise TypeError(f"`batches` must yield PreparedBatch objects. Received {type(batches).__name__}.")
    for index, item in enumerate(batches):
        if isinstance(item, tuple) and len(item) == 3:
            item = PreparedBatch.from_fit(*item)
        if not isinstance(item, PreparedBatch):
            raise TypeError(f"`batches` must yield PreparedBatch objects. Received {type(item).__name__} at {index}.")
        yield item


def _count(batches: Any) -> int | None:
    if isinstance(batches, PreparedBatch):
        return 1
    if isinstance(batches, keras.utils.PyDataset):
        return batches.num_batches
    return len(batches) if hasattr(batches, "__len__") else None
