"""The integrands of divergences, in float32 log-space or better."""

from typing import Any

from keras import ops

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
