"""Batches become rows of a store, and rows become batches."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_diffusion_opd.data.arrays import leaves_with_paths
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.row_digests import row_digests
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.store.packing import TargetPacking, read_array
from keras_diffusion_opd.data.store.structure import build_nest, describe_nest, leaf_paths
from keras_diffusion_opd.provenance import canonical_json
from keras_diffusion_opd.provenance.row_shard import Column, StoredRow, StoreError, row_content_digests

STAMP = Column("stamp", "uint8", (), True)


def source_arrays(batch: PreparedBatch) -> dict[str, np.ndarray]:
    """What a batch was given, by column: (B, ...) each."""
    leaves = [leaf for _, leaf in leaves_with_paths(batch.model_inputs, "model_inputs")]
    named = {f"inputs.{index}": leaf for index, leaf in enumerate(leaves)}
    named |= {"target_ids": batch.target_ids, "loss_weights": batch.loss_weights}
    return {name: read_array(name, leaf) for name, leaf in named.items()}


def columns_of(source: Mapping[str, np.ndarray], packing: TargetPacking) -> list[Column]:
    """The columns of a store, as its first batch shows them."""
    given = [Column(name, x.dtype.name, tuple(x.shape[2:]), x.ndim > 1) for name, x in source.items()]
    teacher = [Column(f"teacher.{name}", dtype, item, True) for name, (dtype, item) in packing.forms().items()]
    return [*given, STAMP, *teacher]


def refuse_other_form(columns: Sequence[Column], batch: PreparedBatch, source: Mapping[str, np.ndarray], form: Any) -> None:
    """ValueError unless a batch has the nest, dtypes and item shapes of the batches before."""
    if describe_nest(batch.model_inputs) != form:
        raise ValueError("`model_inputs` of all batches must be the same nest. Received another than in the first batch.")
    for column in columns:
        array = source.get(column.name)
        if array is None:
            continue
        found = Column(column.name, array.dtype.name, tuple(array.shape[2:]), array.ndim > 1)
        if found != column:
            raise ValueError(
                f"`{column.name}` of all batches must have one dtype and one shape behind rows and positions: "
                f"{column.dtype} {column.item} in the first batch. Received {found.dtype} {found.item}."
            )


def stored_rows(
    columns: Sequence[Column],
    source: Mapping[str, np.ndarray],
    teacher: Mapping[str, np.ndarray] | None,
    stamp: Stamp | None,
) -> list[StoredRow]:
    """The rows of a batch, with their digests. Where the teacher was not asked, nothing stands for what it says."""
    nothing = {column.name: np.empty((len(source["target_ids"]), 0), "uint8") for column in columns if column.of_teacher}
    said = {f"teacher.{name}": array for name, array in (teacher or {}).items()}
    arrays = {**source, **nothing, **said}
    stamped = b"" if stamp is None else canonical_json(stamp.to_json()).encode()
    rows = []
    for index, ids in enumerate(row_digests(source["target_ids"])):
        data, counts = [], []
        for column in columns:
            if column == STAMP:
                data.append(stamped)
                counts.append(len(stamped))
                continue
            row = arrays[column.name][index]
            data.append(row.tobytes())
            if column.ragged:
                counts.append(len(row))
        digests = row_content_digests(columns, data)
        rows.append(StoredRow(ids.tobytes(), *digests, tuple(counts), tuple(data)))
    return rows


@dataclass(frozen=True)
class RowReader:
    """Turns stored rows into batches.

    Args:
        columns: of the store.
        form: the nest of its inputs, from `describe_nest`.
        packing: of its targets.
        shared: arrays that all rows have in common, or None.
        padding: name of an input -> what stands behind the end of a shorter row.
    """

    columns: Sequence[Column]
    form: Any
    packing: TargetPacking
    shared: dict[str, Any] | None
    padding: Mapping[str, float]

    def batch(self, rows: Sequence[StoredRow], names: Sequence[str]) -> PreparedBatch:
        """A batch of stored rows; `names` says in errors where each is from."""
        parts = [self._arrays(row, name) for row, name in zip(rows, names, strict=True)]
        joined = {name: self._joined(name, [part[name] for part in parts]) for name in parts[0]}
        stamps = [self.stamp(row, name) for row, name in zip(rows, names, strict=True)]
        known = [stamp for stamp in stamps if stamp is not None]
        leaves = [joined[column.name] for column in self.columns if column.name.startswith("inputs.")]
        teacher = {name.removeprefix("teacher."): x for name, x in joined.items() if name.startswith("teacher.")}
        return PreparedBatch(
            build_nest(self.form, leaves),
            joined["target_ids"],
            joined["loss_weights"],
            self.packing.decode(teacher, self.shared),
            min(known, key=lambda stamp: stamp.policy_version) if len(known) == len(stamps) else None,
        )

    def _arrays(self, row: StoredRow, name: str) -> dict[str, np.ndarray]:
        counts = iter(row.counts)
        arrays = {}
        for column, data in zip(self.columns, row.data, strict=True):
            shape = (next(counts), *column.item) if column.ragged else column.item
            arrays[column.name] = np.frombuffer(data, np.dtype(column.dtype).newbyteorder("<")).reshape(shape)
        length = len(arrays["target_ids"])
        wrong = [c.name for c in self.columns if (c.of_teacher or c.name == "loss_weights") and len(arrays[c.name]) != length]
        if wrong or not length:
            raise StoreError(f"{name} is damaged: it has {length} target ids, and another number of {wrong}.")
        if row_digests(arrays["target_ids"][None])[0].tobytes() != row.ids:
            raise StoreError(f"{name} does not belong: its target ids are not those that its digest is of.")
        return arrays

    def check(self, row: StoredRow, name: str) -> Stamp | None:
        """StoreError unless a row's ids are those of its digest and its counts agree; its stamp."""
        self._arrays(row, name)
        return self.stamp(row, name)

    def stamp(self, row: StoredRow, name: str) -> Stamp | None:
        """The stamp of a row, or None."""
        data = row.data[self.columns.index(STAMP)]
        try:
            return Stamp.from_json(json.loads(data)) if data else None
        except (ValueError, TypeError, RecursionError) as error:
            raise StoreError(f"{name} is damaged: its stamp does not read as one ({error}).") from None

    def _joined(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        lengths = {len(part) for part in parts if part.ndim}
        if len(lengths) > 1:
            longest = max(lengths)
            value = self._padding_of(name, parts)
            parts = [np.concatenate([x, np.full((longest - len(x), *x.shape[1:]), value, x.dtype)]) for x in parts]
        joined = np.stack(parts)
        return joined.astype(joined.dtype.newbyteorder("="), copy=False)

    def _padding_of(self, name: str, parts: list[np.ndarray]) -> Any:
        if not name.startswith("inputs."):
            return 0  # of weight 0: inactive
        path = leaf_paths(self.form)[int(name.removeprefix("inputs."))]
        if path in self.padding:
            return self.padding[path]
        raise ValueError(
            f"Rows of different lengths {sorted({len(part) for part in parts})} can be one batch only if it is said what "
            f"stands behind the end of a shorter one. Pass padding={{{path!r}: ...}} to TeacherStore.open."
        )
