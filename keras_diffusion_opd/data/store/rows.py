"""Batches become rows of a store."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_diffusion_opd.data.arrays import leaves_with_paths
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.row_digests import row_digests
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.store.packing import TargetPacking, read_array
from keras_diffusion_opd.data.store.structure import describe_nest
from keras_diffusion_opd.provenance import canonical_json
from keras_diffusion_opd.provenance.row_shard import Column, StoredRow, row_content_digests

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


def refuse_other_form(
    columns: Sequence[Column], batch: PreparedBatch, source: Mapping[str, np.ndarray], form: Any
) -> None:
    """ValueError unless a batch has the nest, dtypes and item shapes of the batches before."""
    if describe_nest(batch.model_inputs) != form:
        raise ValueError(
            "`model_inputs` of all batches must be the same nest. Received another than in the first batch."
        )
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
    nothing = {
        column.name: np.empty((len(source["target_ids"]), 0), "uint8") for column in columns if column.of_teacher
    }
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
