"""Mask schedules: how likely a token is still there at diffusion time t.

Time runs from 0 (data) to 1 (everything masked). `alpha(t)` is the probability that a token has not been
masked; it falls from about 1 to about 0. The negative evidence lower bound of a masked diffusion model is
the integral over t of `-alpha'(t) / (1 - alpha(t))` times the cross-entropy summed over masked tokens
(Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524).

Every function takes NumPy arrays or Python floats (and answers in float64) or tensors of the backend (and
answers in their dtype, also under `jit`).
"""

import abc
from typing import Any

import numpy as np

from keras_diffusion_opd.schedules.namespace import namespace_of
from keras_diffusion_opd.validation import finite_real


class MaskSchedule(abc.ABC):
    """Base class: a schedule implements `_alpha` and `_derivative` for t in [eps, 1].

    Args:
        eps: float in (0, 1). Times below it count as `eps`: the loss weight grows without bound towards
            t = 0.

    Raises:
        ValueError: `eps` is not in (0, 1).
    """

    def __init__(self, eps: float = 1e-3) -> None:
        self.eps = finite_real("eps", eps)
        if not 0 < self.eps < 1:
            raise ValueError(f"`eps`, the smallest time told from 0, must lie in (0, 1). Received {eps!r}.")

    def alpha(self, t: Any) -> Any:
        """Probability that a token is not masked at time `t`; same shape as `t`, in [0, 1]."""
        xp, t = namespace_of(t)
        return self._alpha(xp, xp.maximum(t, self.eps))

    def alpha_derivative(self, t: Any) -> Any:
        """d alpha / d t at time `t`, at most 0; same shape as `t`."""
        xp, t = namespace_of(t)
        return self._derivative(xp, xp.maximum(t, self.eps))

    def mask_probability(self, t: Any) -> Any:
        """`1 - alpha(t)`; same shape as `t`, in [0, 1]."""
        xp, t = namespace_of(t)
        return self._masked(xp, xp.maximum(t, self.eps))

    def loss_weight(self, t: Any) -> Any:
        """`-alpha'(t) / (1 - alpha(t))`, what a masked token's loss counts; same shape as `t`, at least 0."""
        xp, t = namespace_of(t)
        return self._weight(xp, xp.maximum(t, self.eps))

    def masked_left(self, count: Any, fraction: float) -> Any:
        """How many of `count` tokens a sampler leaves masked after this fraction of its steps.

        Args:
            count: int or int array, number of tokens that were masked at the beginning.
            fraction: float in [0, 1], steps done over steps in all.

        Returns:
            int64 array of the shape of `count`; `count` for 0, and 0 for 1.
        """
        count = np.asarray(count, "int64")
        if fraction <= 0:
            return count
        if fraction >= 1:
            return np.zeros_like(count)
        start, end = self._masked(np, np.float64(1.0)), self._masked(np, np.float64(self.eps))
        share = (self._masked(np, np.maximum(1.0 - fraction, self.eps)) - end) / (start - end)
        # Half up: rint would round half to even, and leave the same count twice in a row.
        return np.clip(np.floor(count * share + 0.5).astype("int64"), 0, count)

    @abc.abstractmethod
    def _alpha(self, xp: Any, t: Any) -> Any:
        """`alpha` of t in [eps, 1], with the functions of `xp`: NumPy or `keras.ops`."""

    @abc.abstractmethod
    def _derivative(self, xp: Any, t: Any) -> Any:
        """d alpha / d t of t in [eps, 1]."""

    def _masked(self, xp: Any, t: Any) -> Any:
        """`1 - alpha`; overridden where the difference would lose digits."""
        return 1.0 - self._alpha(xp, t)

    def _weight(self, xp: Any, t: Any) -> Any:
        return -self._derivative(xp, t) / self._masked(xp, t)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"eps": self.eps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MaskSchedule":
        """The inverse of `get_config`."""
        return cls(**config)
