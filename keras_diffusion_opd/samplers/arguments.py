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


def row_temperatures(temperature: Any, rows: int, *, positive: bool) -> np.ndarray:
    """float32 (rows,); ValueError unless finite, at least 0 (or above, where `positive`) and one for each row."""
    value = np.asarray(not_negative("temperature", temperature))
    if value.shape not in ((), (rows,)):
        raise ValueError(f"`temperature` must be one number, or {rows}, one per row. Received shape {value.shape}.")
    if positive and np.any(value == 0):
        raise ValueError(
            "`temperature` must be above 0 where log-probabilities are wanted: at 0 the best token is certain. "
            f"Received {temperature!r}. Use sample() for the most probable tokens alone."
        )
    return np.broadcast_to(value, (rows,)).astype("float32")


def canvas_shape(shape: Any) -> tuple[int, int]:
    """`(rows, length)` as ints; else ValueError."""
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ValueError(f"`shape` must be (rows, length), two whole numbers. Received {shape!r}.")
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
    if np.any(tokens < 0):
        raise ValueError(
            f"`tokens` must be at least 0. Received {tokens.min()}. What is to be filled in holds the mask id "
            f"{mask_id}."
        )
    if mask_id > np.iinfo(tokens.dtype).max:
        raise ValueError(
            f"`tokens` must have a dtype that holds the mask id {mask_id}. Received {tokens.dtype}, which ends at "
            f"{np.iinfo(tokens.dtype).max}. Cast them: tokens.astype('int32')."
        )
    return tokens.astype("int32")


def step_callback(callback: Any) -> Any:
    """`callback`; TypeError unless it is None or can be called."""
    if callback is not None and not callable(callback):
        raise TypeError(
            f"`callback` must be None or a function (step, steps, tokens). Received {callback!r} of type "
            f"{type(callback).__name__}."
        )
    return callback
