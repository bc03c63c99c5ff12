"""Value checks of a window: counted on the device, raised on the host before anything has moved."""

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
    length = ops.shape(next(iter(found.values())))[1]
    flat = ops.cast(ops.stack([ops.reshape(where, (-1,)) for where in found.values()]), "int32")
    count = ops.sum(flat, axis=1)
    first = ops.cast(ops.argmax(flat, axis=1), "int32")
    micro = ops.zeros_like(count) + ops.cast(micro_batch, "int32")
    new = ops.stack([count, micro, first // length, first % length], axis=1)
    # Rows of checks that do not apply to this batch are a row of zeros below the others.
    rows = [list(found).index(name) if name in found else len(found) for name in names]
    new = ops.take(ops.concatenate([new, ops.zeros_like(new[:1])], axis=0), rows, axis=0)
    earlier = table[:, :1] > 0
    return ops.concatenate([table[:, :1] + new[:, :1], ops.where(earlier, table[:, 1:], new[:, 1:])], axis=1)


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
