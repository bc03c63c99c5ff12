"""`TeacherStore`: what a teacher said of a corpus, on disk."""

import bisect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.row_source import RowSource
from keras_diffusion_opd.data.store.fingerprints import checked_fingerprints, refuse_other_fingerprints
from keras_diffusion_opd.data.store.packing import TargetPacking
from keras_diffusion_opd.data.store.reading import RowReader, row_reader
from keras_diffusion_opd.data.store.writing import StoreWriter
from keras_diffusion_opd.provenance import RESERVED_KEYS, plain_json
from keras_diffusion_opd.provenance.row_manifest import Manifest
from keras_diffusion_opd.provenance.row_merge import check_size, merge_rows, open_shard, verify_rows
from keras_diffusion_opd.provenance.row_shard import Column, Shard, StoredRow, StoreError
from keras_diffusion_opd.validation import positive_int


class TeacherStore(RowSource):
    """Prepared rows with a teacher's targets on disk, each readable alone.

    A store is a directory of safetensors shards and a manifest. Rows are written in one pass by `write`, which
    can be killed at any moment and started again: the result is the same to the last byte. Every row is known by
    three digests (of its target ids, of all that was given, of what the teacher said), which are checked whenever
    it is read: a damaged row, or one that does not belong, raises and never becomes a batch.

    A row keeps the length that it had when it was written; rows of different lengths make one batch where `open`
    was told what stands behind the end of a shorter one.

    Use `open`; the constructor is for it alone.

    Args:
        path: the directory.
        manifest: what it holds.
        reader: what turns its rows into batches.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets, PackedTopK, PreparedBatch, PreparedDataset, TeacherStore

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (6, 4)).astype("int32")
    batch = PreparedBatch.create(
        model_inputs={"token_ids": ids}, target_ids=ids, loss_weights=np.ones((6, 4), "float32")
    )
    teacher_weights = [rng.normal(size=(50, 50)).astype("float32")]

    store = TeacherStore.write(
        "store",
        [batch],
        targets=PackedTopK(8, vocabulary_size=50),
        metadata={"corpus": "six rows"},
        teacher=lambda batch: teacher_weights[0][batch.target_ids],
        fingerprints={"teacher": teacher_weights},
        progress=False,
    )
    assert len(store) == 6 and store.verify() == []
    store = TeacherStore.open("store", expect={"teacher": teacher_weights, "vocabulary_size": 50})
    assert store.batch([5, 0]).teacher.ids.shape == (2, 4, 8)
    dataset = PreparedDataset(store, batch_size=4, shuffle=True, seed=1)
    assert len(dataset) == 2
    ```
    """

    def __init__(self, path: str | os.PathLike[str], manifest: Manifest, reader: RowReader) -> None:
        self.path = Path(path)
        self._manifest = manifest
        self._reader = reader
        self._ends = list(itertools.accumulate(entry.rows for entry in manifest.shards))
        self._shards: dict[int, Shard] = {}

    # ---- writing --------------------------------------------------------------------------------------

    @classmethod
    def write(
        cls,
        path: str | os.PathLike[str],
        batches: Any,
        *,
        targets: TargetPacking,
        metadata: Mapping[str, Any] | None = None,
        fingerprints: Mapping[str, Any],
        teacher: Callable[[PreparedBatch], Any] | None = None,
        rows_per_shard: int = 256,
        writer: tuple[int, int] = (0, 1),
        progress: bool = True,
    ) -> "TeacherStore | None":
        """Write a store, or go on with one that a killed process has begun.

        Shards that are there are not written again, and the teacher is not asked for them; that the batches are
        those that they were written from is checked by digests.

        Args:
            path: the directory; made if it is not there.
            batches: what yields `PreparedBatch`, or `(x, y, sample_weight)` of one: a list, a generator, a
                `PreparedDataset`. The same again after a kill.
            targets: how the targets lie on disk: `PackedTopK`, `PackedDense`, `PackedSampled`, `PackedHidden`.
            metadata: None, or a mapping of JSON values, but for reserved names.
            fingerprints: `"teacher"`: a model, arrays, or their digest. And, where there is one, `"tokenizer"`:
                a digest, and `"mask_id"`: an int. Vocabulary size and temperature are those of `targets`.
            teacher: None where the batches have their targets, or a function from a batch to logits (B, L, V) or
                to targets. It should say the same when it is asked again.
            rows_per_shard: rows in one file. A multiple of the batch size asks no batch twice after a kill.
            writer: (index, count) where `count` processes write to one directory, each its own share of the rows.
                `merge` makes the store when all are done.
            progress: whether to show a progress bar.

        Returns:
            The store; None where there are other writers.

        Raises:
            StoreError: the directory holds something else, or a store with other settings or from other batches.
            ValueError, TypeError: an argument out of range, or a batch that cannot be stored. Shards that were
                written before stay.
            OSError: the directory cannot be written.
        """
        if not isinstance(targets, TargetPacking):
            raise TypeError(
                f"`targets` must be a packing such as PackedTopK(64, ...). Received {type(targets).__name__}."
            )
        if teacher is not None and not callable(teacher):
            raise TypeError(f"`teacher` must be None or a function from a batch to logits. Received {teacher!r}.")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise TypeError(f"`metadata` must be None or a mapping. Received {type(metadata).__name__}.")
        number, count = _writer(writer)
        StoreWriter(
            folder=Path(path),
            packing=targets,
            fingerprints=checked_fingerprints(fingerprints, targets),
            metadata=plain_json(metadata or {}, name="metadata", reserved=RESERVED_KEYS),
            teacher=teacher,
            rows_per_shard=positive_int("rows_per_shard", rows_per_shard),
            number=number,
            writers=count,
        ).run(batches, progress)
        return None if count > 1 else cls._merged(path, allow_duplicates=True)

    @classmethod
    def merge(cls, path: str | os.PathLike[str], *, allow_duplicates: bool = False) -> "TeacherStore":
        """Make one store of what several writers wrote. Every row is read and checked.

        Args:
            path: the directory.
            allow_duplicates: whether two writers may have written equal rows. By default that is refused: it is
                what happens when every process is given all batches.

        Returns:
            The store.

        Raises:
            StoreError: a writer is missing or not done, a shard is missing, damaged or too many, settings differ,
                or two writers wrote equal rows.
        """
        return cls._merged(path, allow_duplicates=allow_duplicates)

    @classmethod
    def _merged(cls, path: str | os.PathLike[str], *, allow_duplicates: bool) -> "TeacherStore":
        versions: list[int | None] = []
        tokens: list[int] = []
        readers: list[RowReader] = []

        def visit(settings: Mapping[str, Any], row: StoredRow, name: str) -> None:
            if not readers:
                readers.append(row_reader(Path(path), settings, None, {}))
            reader = readers[0]
            stamp = reader.check(row, name)
            versions.append(None if stamp is None else stamp.policy_version)
            tokens.append(_tokens(reader.columns, row))

        def summary() -> dict[str, Any]:
            stamped = [version for version in versions if version is not None]
            oldest = min(stamped) if len(stamped) == len(versions) else None
            return {"tokens": sum(tokens), "oldest_policy_version": oldest}

        merge_rows(Path(path), allow_duplicates=allow_duplicates, visit=visit, summary=summary)
        return cls._open(Path(path), {}, None, {})

    # ---- reading --------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        expect: Mapping[str, Any] | None = None,
        head: Mapping[str, Any] | None = None,
        padding: Mapping[str, float] | None = None,
    ) -> "TeacherStore":
        """Open a store for reading. The manifest is read, and no shard.

        Args:
            path: the directory.
            expect: None, or fingerprints that the store must have: `"teacher"` and `"tokenizer"` (a model, arrays
                or a digest), `"mask_id"`, `"vocabulary_size"`, `"temperature"`.
            head: for hidden states, what all rows share: `{"head": (D, V)}` and, where there is one, `"bias"`.
            padding: None, or name of an input (its keys joined by `/`) -> the number that stands behind the end
                of a row shorter than others of its batch. Such positions have weight 0 and target id 0.

        Returns:
            The store.

        Raises:
            StoreError: there is no store, it is damaged, or it has other fingerprints or another head.
            ValueError: `expect` or `padding` have unknown names.
        """
        return cls._open(Path(path), expect or {}, head, padding or {})

    @classmethod
    def _open(
        cls, path: Path, expect: Any, head: Mapping[str, Any] | None, padding: Mapping[str, float]
    ) -> "TeacherStore":
        manifest = Manifest.load(path)
        refuse_other_fingerprints(expect, manifest.settings["fingerprints"], str(path))
        if not _is_summary(manifest.summary):
            raise StoreError(f"{path} is damaged: its manifest counts neither tokens nor policy versions.")
        reader = row_reader(path, manifest.settings, None if head is None else dict(head), padding)
        for entry in manifest.shards:
            check_size(path, entry)
        return cls(path, manifest, reader)

    def __len__(self) -> int:
        """Number of rows."""
        return self._ends[-1]

    def batch(self, indices: Sequence[int]) -> PreparedBatch:
        """The rows at `indices` as one batch of NumPy arrays; nothing else of the shards is read.

        Args:
            indices: ints in [0, len), at least one, in any order.

        Returns:
            `PreparedBatch`, with the stamp of the oldest row.

        Raises:
            IndexError: there is no such row.
            StoreError: a row is damaged or does not belong.
            ValueError: rows of different lengths, and no padding for them.
        """
        wanted = [int(index) for index in indices]
        outside = [index for index in wanted if not 0 <= index < len(self)]
        if outside or not wanted:
            raise IndexError(f"`indices` must hold at least one row in [0, {len(self)}). Received {outside or 'none'}.")
        places = [self._place(index) for index in wanted]
        found: dict[tuple[int, int], StoredRow] = {}
        for number in sorted({number for number, _ in places}):
            rows = sorted({row for shard, row in places if shard == number})
            found.update(zip(((number, row) for row in rows), self._shard(number).read(rows), strict=True))
        names = [f"row {row} of {self._shard(number).path}" for number, row in places]
        return self._reader.batch([found[place] for place in places], names)

    def _place(self, index: int) -> tuple[int, int]:
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def _shard(self, number: int) -> Shard:
        if number not in self._shards:
            self._shards[number] = open_shard(self.path, self._manifest.shards[number], self._manifest.columns)
        return self._shards[number]

    def row_digests(self, indices: Sequence[int] | None = None) -> np.ndarray:
        """uint8 (rows, 16): the digests of the target ids, of all rows or of those at `indices`."""
        places = [self._place(int(index)) for index in (range(len(self)) if indices is None else indices)]
        return np.stack([self._shard(number).digests[row, 0] for number, row in places])

    # ---- what it is -----------------------------------------------------------------------------------

    @property
    def metadata(self) -> dict[str, Any]:
        """What was given as metadata when it was written."""
        return dict(self._manifest.settings["metadata"])

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Teacher, tokenizer, mask id, vocabulary size, temperature; None for what was not given."""
        return dict(self._manifest.settings["fingerprints"])

    @property
    def targets(self) -> TargetPacking:
        """How the targets lie on disk."""
        return self._reader.packing

    @property
    def digest(self) -> str:
        """The store's identity, 64 hexadecimal digits: of everything that the manifest says."""
        return self._manifest.digest

    @property
    def bytes_per_token(self) -> float:
        """Bytes of all shards, over the positions of all rows."""
        return sum(entry.bytes for entry in self._manifest.shards) / max(1, self._manifest.summary["tokens"])

    def oldest_policy_version(self) -> int | None:
        """The smallest policy version of any row's stamp; None where a row has no stamp."""
        version = self._manifest.summary["oldest_policy_version"]
        return None if version is None else int(version)

    def verify(self) -> list[str]:
        """Read everything and recompute every digest.

        Returns:
            One sentence for each thing that does not hold; none for a sound store.
        """
        manifest, problems = verify_rows(self.path, self._reader.check)
        if manifest is not None and manifest.digest != self.digest:
            problems.append(f"{self.path} is another store than the one that was opened.")
        return problems

    # ---- grain ----------------------------------------------------------------------------------------

    def grain_source(self) -> Any:
        """The rows as a `grain` RandomAccessDataSource: each a batch of one row.

        Returns:
            An object with `len` and integer indexing that names the store by its digest.
        """
        from keras_diffusion_opd.data.store.grain_reading import RowDataSource

        return RowDataSource(self)

    def grain_loader(
        self,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        num_epochs: int | None = 1,
        shard_options: Any = None,
        drop_remainder: bool = False,
    ) -> Any:
        """Batches through a `grain.DataLoader`: what `fit` takes, with a position that can be kept.

        The order is grain's own, a function of the seed. `iter(loader)` has `get_state()` and `set_state(state)`:
        a new iterator that is given a state goes on with exactly the batches that were to come.

        Args:
            batch_size: rows per batch.
            shuffle: whether every epoch has a new order.
            seed: int, of the order.
            num_epochs: None for no end.
            shard_options: a `grain.ShardOptions`: which share of the rows this process reads.
            drop_remainder: whether a last batch that is short is left out.

        Returns:
            A `grain.DataLoader` of `PreparedBatch`.

        Raises:
            ImportError: grain is not installed.
        """
        from keras_diffusion_opd.data.store.grain_reading import data_loader

        return data_loader(
            self,
            batch_size=positive_int("batch_size", batch_size),
            shuffle=shuffle,
            seed=seed,
            num_epochs=num_epochs,
            shard_options=shard_options,
            drop_remainder=drop_remainder,
        )


def _writer(value: Any) -> tuple[int, int]:
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int for n in value)
    if not pair or not 0 <= value[0] < value[1]:
        raise ValueError(f"`writer` must be (index, count) with 0 <= index < count. Received {value!r}.")
    return value[0], value[1]


def _is_summary(summary: Mapping[str, Any]) -> bool:
    tokens, oldest = summary.get("tokens"), summary.get("oldest_policy_version", -1)
    return type(tokens) is int and tokens > 0 and (oldest is None or (type(oldest) is int and oldest >= 0))


def _tokens(columns: Sequence[Column], row: StoredRow) -> int:
    names = [column.name for column in columns if column.ragged]
    return row.counts[names.index("target_ids")]
