"""Log-probabilities in float32 or better, and what is left of them beside a few chosen ids."""

from typing import Any

import keras
from keras import ops

# Stands for a log-probability of minus infinity: its exponential is exactly 0, and unlike an infinity it can
# be subtracted from itself. Logits at or below it (finfo.min as a mask) count as minus infinity.
EXCLUDED = -1e30


def computation_dtype(*arrays: Any) -> str:
    """`"float64"` where any of the arrays has it, else `"float32"`: never less, whatever the logits are."""
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in arrays}
    return "float64" if "float64" in dtypes else "float32"


def log_probabilities(logits: Any, temperature: float = 1.0, dtype: str | None = None) -> Any:
    """`log softmax(logits / temperature)` over the last axis.

    An id with logit -inf (a mask token that must not be predicted) gets `EXCLUDED` in place of -inf:
    probability exactly 0, gradient exactly 0.

    Args:
        logits: float (..., V), any float dtype, no +inf; NaN stays NaN.
        temperature: > 0.
        dtype: of the result; `computation_dtype(logits)` by default.

    Returns:
        (..., V), float32 or float64, at most 0.
    """
    scaled = ops.cast(logits, dtype or computation_dtype(logits))
    if temperature != 1.0:
        scaled = scaled / temperature
    # Selected, not `maximum`: Keras on torch takes the maximum of two float64 tensors in float32.
    excluded = scaled <= EXCLUDED
    scaled = ops.where(excluded, ops.full_like(scaled, EXCLUDED), scaled)
    shifted = scaled - ops.stop_gradient(ops.max(scaled, axis=-1, keepdims=True))
    log_softmax = shifted - ops.log(ops.sum(ops.exp(shifted), axis=-1, keepdims=True))
    return ops.where(excluded, ops.full_like(scaled, EXCLUDED), log_softmax)


def gather_ids(values: Any, ids: Any) -> Any:
    """`values[..., ids]`: float (..., V) at int (...) gives float (...)."""
    ids = ops.expand_dims(ops.cast(ids, "int32"), -1)
    return ops.squeeze(ops.take_along_axis(values, ids, axis=-1), -1)


def chosen_and_rest(log_q: Any, ids: Any) -> tuple[Any, Any]:
    """The log-probabilities of a few ids, and the log of the mass of all the others.

    The rest is summed itself, not taken as 1 minus the chosen: a mass of 1e-30 has all its digits.

    Args:
        log_q: float (..., V), from `log_probabilities`.
        ids: int (..., K), in [0, V), no id twice in a row.

    Returns:
        (..., K) and (...); `EXCLUDED` where the rest is nothing.
    """
    ids = ops.cast(ids, "int32")
    chosen = ops.take_along_axis(log_q, ids, axis=-1)
    others = ops.where(_marked(log_q, ids), ops.full_like(log_q, EXCLUDED), log_q)
    top = ops.stop_gradient(ops.max(others, axis=-1, keepdims=True))
    return chosen, ops.squeeze(top, -1) + ops.log(ops.sum(ops.exp(others - top), axis=-1))


def _marked(values: Any, ids: Any) -> Any:
    """bool of the shape of `values` (..., V): True at `ids` (..., K)."""
    flat_ids = ops.reshape(ids, (-1, ids.shape[-1]))
    blank = ops.zeros_like(ops.reshape(values, (-1, values.shape[-1])), dtype="bool")
    rows = ops.cumsum(ops.ones_like(flat_ids), axis=0) - 1
    places = ops.reshape(ops.stack([ops.cast(rows, "int32"), flat_ids], axis=-1), (-1, 2))
    marked = ops.scatter_update(blank, places, ops.ones_like(places[:, 0], dtype="bool"))
    return ops.reshape(marked, ops.shape(values))
