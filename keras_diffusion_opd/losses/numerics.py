"""Log-probabilities and the integrands of divergences, in float32 log-space or better."""

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


# Terms r^2/2! - r^3/3! + ... - r^9/9! of exp(-r) - 1 + r, lowest first. Below |r| = 1/4 the first term left
# out is smaller than 1e-10 of the sum; above it the closed form loses at most 2 digits to cancellation.
_TAYLOR = (1 / 2, -1 / 6, 1 / 24, -1 / 120, 1 / 720, -1 / 5040, 1 / 40320, -1 / 362880)
_TAYLOR_RADIUS = 0.25


def excess(log_ratio: Any, a: Any, b: Any) -> Any:
    """`a * log_ratio - a + b` where `b = a * exp(-log_ratio)`: never negative, 0 where `log_ratio` is 0.

    Summed over a distribution it is `KL(a || b)`, since `sum(b) - sum(a)` is 0; unlike `sum(a * log_ratio)`
    no entry is negative, so that nothing cancels: a divergence of 1e-9 has as many digits as one of 1.
    """
    small = ops.abs(log_ratio) < _TAYLOR_RADIUS
    r = ops.where(small, log_ratio, ops.zeros_like(log_ratio))
    series = ops.full_like(r, _TAYLOR[-1])
    for coefficient in reversed(_TAYLOR[:-1]):
        series = series * r + coefficient
    return ops.where(small, a * (r * r * series), a * log_ratio - a + b)


def log_mixture_ratio(difference: Any, weight: float) -> Any:
    """`log(a / m)` where `m = weight * a + (1 - weight) * b` and `difference = log a - log b`.

    Equal to `-log(weight + (1 - weight) * exp(-difference))`, without cancellation for either a small
    `difference` or a `weight` near 0 or 1.
    """
    limit = 20.0
    moderate = difference > -limit
    edge = ops.full_like(difference, -limit)
    inner = ops.where(moderate, difference, edge)
    near = (1.0 - weight) * ops.expm1(-inner)
    if weight < 0.25:
        # 1 + near is close to 0 where a is much larger than b: there its two terms are added as they are.
        small = near < -0.5
        near = ops.log1p(ops.where(small, ops.zeros_like(near), near))
        near = ops.where(small, ops.log(weight + (1.0 - weight) * ops.exp(-inner)), near)
    else:
        near = ops.log1p(near)
    # exp(-difference) would overflow: a / m = exp(difference) / (weight * exp(difference) + 1 - weight).
    low = ops.where(moderate, edge, difference)
    far = low - ops.log(weight * ops.exp(low) + (1.0 - weight))
    return ops.where(moderate, -near, far)
