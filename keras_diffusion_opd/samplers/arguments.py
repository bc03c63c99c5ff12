"""Checks of what samplers are called with."""

from typing import Any

import numpy as np

from keras_diffusion_opd.validation import finite_real, positive_int


def not_negative(name: str, value: Any) -> Any:
    """`value`, a float or a float array, finite and >= 0; else ValueError."""
    if np.ndim(value) == 0:
        value = finite_real(name, value)
    if not np.all(np.isfinite(value)) or np.any(np.asarray(value) < 0):
        raise ValueError(f"`{name}` must be finite and at least 0. Received {value!r}.")
    return value


def canvas_shape(shape: Any) -> tuple[int, int]:
    """`(rows, length)` as ints; else ValueError."""
    if len(shape) != 2:
        raise ValueError(f"`shape` must be (rows, length). Received {shape!r}.")
    return positive_int("shape[0]", shape[0]), positive_int("shape[1]", shape[1])


def canvas(tokens: Any, rows: int, length: int, mask_id: int) -> np.ndarray:
    """The first tokens, int32 (rows, length): `tokens`, or all masked where None."""
    if tokens is None:
        return np.full((rows, length), mask_id, "int32")
    tokens = np.asarray(tokens)
    if tokens.shape != (rows, length) or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"`tokens` must be integers of shape {(rows, length)}. Received {tokens.dtype}, shape {tokens.shape}."
        )
    return tokens.astype("int32")


def batch_conditions(conditions: dict[str, Any] | None, rows: int) -> dict[str, np.ndarray]:
    """The conditions as arrays of `rows` rows; else ValueError."""
    arrays = {name: np.asarray(value) for name, value in (conditions or {}).items()}
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[0] != rows:
            raise ValueError(f"`conditions[{name!r}]` must have {rows} rows. Received shape {array.shape}.")
    return arrays
