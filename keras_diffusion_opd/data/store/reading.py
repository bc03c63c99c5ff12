"""Rows of a store become batches."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.row_digests import row_digests
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.store.packing import TargetPacking
from keras_diffusion_opd.data.store.rows import STAMP
from keras_diffusion_opd.data.store.structure import build_nest, leaf_paths
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.provenance.row_shard import Column, StoredRow, StoreError


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
        wrong = [
            c.name for c in self.columns if (c.of_teacher or c.name == "loss_weights") and len(arrays[c.name]) != length
        ]
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
            f"Rows of different lengths {sorted({len(part) for part in parts})} can be one batch only if it is said "
            f"what stands behind the end of a shorter one. Pass padding={{{path!r}: ...}} to TeacherStore.open."
        )


def row_reader(
    path: Path,
    settings: Mapping[str, Any],
    head: dict[str, Any] | None,
    padding: Mapping[str, float],
) -> RowReader:
    """The reader for a store's settings; StoreError where columns, inputs and packing do not belong together."""
    try:
        packing = TargetPacking.from_json(settings["targets"])
        columns = [Column.from_json(column) for column in settings["columns"]]
        inputs = [column.name for column in columns if column.name.startswith("inputs.")]
        order = [f"inputs.{index}" for index in range(len(inputs))]
        given = [column for column in columns if not column.of_teacher and column != STAMP]
        teacher = [Column(f"teacher.{name}", dtype, item, True) for name, (dtype, item) in packing.forms().items()]
        if columns != [*given, STAMP, *teacher] or [c.name for c in given] != [*order, "target_ids", "loss_weights"]:
            raise StoreError("its columns are not those of its inputs and targets.")
        ids, weights = given[-2:]
        if (ids.item, ids.ragged, weights.item, weights.ragged) != ((), True, (), True) or "int" not in ids.dtype:
            raise StoreError("its target ids and weights are no rows of numbers.")
        build_nest(settings["inputs"], inputs)
    except StoreError as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    if head is not None and digest(head) != getattr(packing, "head", None):
        raise StoreError(f"{path} was written with another head than the one given, or with none.")
    return RowReader(columns, settings["inputs"], packing, head, _padding(padding, settings["inputs"]))


def _padding(padding: Mapping[str, float], form: Any) -> Mapping[str, float]:
    unknown = set(padding) - set(leaf_paths(form))
    if unknown:
        raise ValueError(f"`padding` must name inputs, {leaf_paths(form)}. Received {sorted(unknown)}.")
    return dict(padding)
