"""Replacement of tokens by uniform ones."""

from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.data.token_corruption import TokenCorruption, uniform_tokens
from keras_diffusion_opd.validation import positive_int

_WEIGHTS = ("denoising", "replaced")


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class UniformCorruption(TokenCorruption):
    """Replaces tokens by tokens drawn uniformly from the vocabulary: the forward process of uniform diffusion.

    A row draws a time t; with probability `1 - alpha(t)` a token gives way to one drawn from all V, itself
    included. The model is not told which: a token that was replaced looks like any other. Randomness as in
    `MaskedCorruption`: a function of (seed, step, sample id).

    Args:
        vocabulary_size: int V >= 2: tokens are 0 to V - 1.
        schedule: a `MaskSchedule` or its name, see `MaskedCorruption`; its masking rate is the rate of
            replacement.
        weights: which positions count, and for how much.
            "denoising": all that are not frozen, 1 each. The cross-entropy is then the mean over t of
                `-log p(x_0 | x_t)`, the auxiliary loss of D3PM without its variational term; the best model
                gives the posterior of every token, which is what a uniform sampler needs. Not a bound on the
                likelihood.
            "replaced": those that were replaced, `-alpha'(t) / (1 - alpha(t))` each. The best model then
                answers "what was here, if this was replaced". The expected sum is an upper bound on the
                negative log-likelihood of the masked model that fills its masks with uniform tokens before
                it asks this one.
        times: see `MaskedCorruption`.

    Raises:
        ValueError: an argument is out of its range.

    Source: Austin et al., "Structured Denoising Diffusion Models in Discrete State-Spaces", 2021,
    arXiv:2107.03006.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import UniformCorruption

    tokens = np.arange(8, dtype="int32").reshape(2, 4)
    out = UniformCorruption(vocabulary_size=10)(0, 17, np.array([30, 31]), tokens)
    assert out.token_ids.max() < 10
    assert np.array_equal(out.token_ids[~out.mask], tokens[~out.mask])
    assert out.weights.tolist() == [[1.0] * 4] * 2
    ```
    """

    def __init__(
        self,
        vocabulary_size: int,
        schedule: Any = "linear",
        *,
        weights: str = "denoising",
        times: str = "low_discrepancy",
    ) -> None:
        self.vocabulary_size = positive_int("vocabulary_size", vocabulary_size)
        if self.vocabulary_size < 2:
            raise ValueError(f"`vocabulary_size` must be at least 2. Received {vocabulary_size!r}.")
        if weights not in _WEIGHTS:
            raise ValueError(f"`weights` must be one of {list(_WEIGHTS)}. Received {weights!r}.")
        self.weights = weights
        super().__init__(schedule, times)

    def _replacement(self, tokens: np.ndarray, keys: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return uniform_tokens(keys, tokens.shape[1], self.vocabulary_size)

    def _weights(self, mask: np.ndarray, t: np.ndarray, block: np.ndarray, frozen: np.ndarray) -> np.ndarray:
        if self.weights == "denoising":
            return np.where(frozen, 0.0, 1.0)
        return super()._weights(mask, t, block, frozen)

    def _check_tokens(self, tokens: np.ndarray, frozen: np.ndarray) -> None:
        if self.vocabulary_size - 1 > np.iinfo(tokens.dtype).max:
            raise ValueError(
                f"`tokens` must have a dtype that holds the ids up to {self.vocabulary_size - 1}. Received "
                f"{tokens.dtype}, which ends at {np.iinfo(tokens.dtype).max}. Cast them: tokens.astype('int32')."
            )
        wrong = ((tokens < 0) | (tokens >= self.vocabulary_size)) & ~frozen
        if np.any(wrong):
            raise ValueError(
                f"`tokens` must lie in [0, {self.vocabulary_size}) where not frozen. Received {tokens[wrong][0]}. Mark "
                "prompt and padding in `frozen`, or give the true `vocabulary_size`."
            )

    @property
    def gives_bound(self) -> bool:
        """True for weights "replaced"."""
        return self.weights == "replaced"

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {"vocabulary_size": self.vocabulary_size, "weights": self.weights}
        return {**own, **super().get_config()}
