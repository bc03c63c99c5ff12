"""Log-probabilities in one byte each, with an error in KL that has a bound.

At every position the largest log-probability m is kept in float32. Another one, x, becomes the code
`round(254 sqrt((m - x) / r))`, where r is the distance of the smallest, at most 64: steps are fine near the
largest, where the mass is, and coarse where there is none. Code 255 is probability 0. What lies more than 64 nats
below the largest (a share of 1e-28) is raised to that.

The error of x is at most `r (2 c + 1) / (2 * 254^2)` for code c, and `4 r (m - x) / (12 * 254^2)` in mean square;
KL to second order is half its mean under p, and the mean of m - x is at most log(k): below `1.1e-5 r` nats at
k = 64, 7e-4 at the widest.
"""

import numpy as np

_CODES = 254
_NOTHING = 255
_WIDEST = 64.0


def quantize(log_probs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float (..., K), -inf for probability 0, to codes uint8 (..., K), largest float32 (...), range float32 (...)."""
    values = log_probs.astype("float64")
    largest = values.max(axis=-1).astype("float32")
    nothing = np.isneginf(values)
    below = np.clip(np.where(nothing, 0.0, largest[..., None].astype("float64") - values), 0.0, _WIDEST)
    width = below.max(axis=-1).astype("float32")
    share = below / np.where(width > 0, width, 1.0)[..., None]
    codes = np.minimum(np.rint(_CODES * np.sqrt(share)), _CODES).astype("uint8")
    return np.where(nothing, np.uint8(_NOTHING), codes), largest, width


def dequantize(codes: np.ndarray, largest: np.ndarray, width: np.ndarray) -> np.ndarray:
    """float64 (..., K): the inverse of `quantize`, up to its rounding."""
    below = width[..., None].astype("float64") * (codes.astype("float64") / _CODES) ** 2
    return np.where(codes == _NOTHING, -np.inf, largest[..., None].astype("float64") - below)


def normalized(log_probs: np.ndarray, log_tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both shifted by one number a position, so that their probabilities sum to 1 again after rounding."""
    events = np.concatenate([log_probs, log_tail[..., None]], axis=-1).astype("float64")
    top = events.max(axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        events = events - (top + np.log(np.exp(events - top).sum(axis=-1, keepdims=True)))
    events = np.minimum(events, 0.0)
    return events[..., :-1].astype("float32"), events[..., -1].astype("float32")
