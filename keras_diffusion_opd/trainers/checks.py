"""Value checks of a window: counted on the device, raised on the host before anything has moved."""

import itertools
from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd.data.violations import messages

# One row per check: how many positions, then micro-batch, row and position of the first.
COLUMNS = 4


def no_violations() -> Any:
    """int32 (checks, 4) of zeros."""
    return ops.zeros((len(messages()), COLUMNS), "int32")


def add_violations(table: Any, found: dict[str, Any], micro_batch: Any) -> Any:
    """`table` with the violations of one micro-batch added.

    Args:
        table: int32 (checks, 4).
        found: for the checks that apply a bool (B, L) by name, from `violations`.
        micro_batch: int scalar, its index in the window.
    """
    names = list(messages())
    found = {name: found[name] for name in names if name in found}
    length = ops.shape(next(iter(found.values())))[1]
    flat = ops.cast(ops.stack([ops.reshape(where, (-1,)) for where in found.values()]), "int32")
    count = ops.sum(flat, axis=1)
    first = ops.cast(ops.argmax(flat, axis=1), "int32")
    micro = ops.zeros_like(count) + ops.cast(micro_batch, "int32")
    where = ops.stack([micro, first // length, first % length], axis=1)
    # Row by row of the table, in runs of checks that apply to this batch and of such that do not.
    rows, taken, start = [], 0, 0
    for applies, run in itertools.groupby(names, found.__contains__):
        stop = start + len(list(run))
        old = table[start:stop]
        if applies:
            new = slice(taken, taken + stop - start)
            taken = new.stop
            places = ops.where(old[:, :1] > 0, old[:, 1:], where[new])
            old = ops.concatenate([old[:, :1] + ops.expand_dims(count[new], 1), places], axis=1)
        rows.append(old)
        start = stop
    return ops.concatenate(rows, axis=0)


def sound(table: Any) -> Any:
    """bool scalar: no check has found anything."""
    return ops.equal(ops.sum(table[:, 0]), 0)


def raise_violations(table: np.ndarray, evaluating: bool = False) -> None:
    """ValueError that names every broken check and where it broke first."""
    if not table[:, 0].any():
        return
    lines = [
        f"{message}. Received {count} position(s), the first at micro-batch {micro}, row {row}, position {position}."
        for message, (count, micro, row, position) in zip(messages().values(), table.tolist(), strict=True)
        if count
    ]
    if not evaluating:
        lines.append("The update of this window was not applied: weights and optimizer are as before.")
    raise ValueError("\n".join(lines))
