"""Value checks of a window: counted on the device, raised on the host before anything has moved."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from keras import ops

# One row per check: how many positions, then micro-batch, row and position of the first; -1 where rows have none.
COLUMNS = 4


def no_violations(names: Iterable[str]) -> Any:
    """int32 (checks, 4) of zeros, a row for every name."""
    return ops.zeros((len(list(names)), COLUMNS), "int32")


def add_violations(names: Iterable[str], table: Any, found: dict[str, Any], micro_batch: Any) -> Any:
    """`table` with the violations of one micro-batch added.

    Args:
        names: of all checks, in the order of the table.
        table: int32 (checks, 4).
        found: for the checks that apply a bool by name, where it does not hold: all (B, L), or all (B,).
        micro_batch: int scalar, its index in the window.
    """
    names = list(names)
    found = {name: found[name] for name in names if name in found}
    shape = ops.shape(next(iter(found.values())))
    length = shape[1] if len(shape) > 1 else 1
    flat = ops.cast(ops.stack([ops.reshape(where, (-1,)) for where in found.values()]), "int32")
    count = ops.sum(flat, axis=1)
    first = ops.cast(ops.argmax(flat, axis=1), "int32")
    micro = ops.zeros_like(count) + ops.cast(micro_batch, "int32")
    position = first % length if len(shape) > 1 else ops.full_like(first, -1)
    where = ops.stack([micro, first // length, position], axis=1)
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


def raise_violations(messages: Mapping[str, str], table: np.ndarray, evaluating: bool = False) -> None:
    """ValueError that names every broken check, in the words of `messages`, and where it broke first."""
    if not table[:, 0].any():
        return
    lines = [
        f"{message}. Received {count} {'row' if position < 0 else 'position'}(s), the first at micro-batch {micro}, "
        f"row {row}{'' if position < 0 else f', position {position}'}."
        for message, (count, micro, row, position) in zip(messages.values(), table.tolist(), strict=True)
        if count
    ]
    if not evaluating:
        lines.append("The update of this window was not applied: weights and optimizer are as before.")
    raise ValueError("\n".join(lines))
