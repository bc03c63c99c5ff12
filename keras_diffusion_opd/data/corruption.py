"""Masking of tokens: the whole sequence at one time, or every block at its own."""

from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.data.block_masks import block_diffusion_mask, block_of, for_rows
from keras_diffusion_opd.data.token_corruption import TokenCorruption
from keras_diffusion_opd.validation import positive_int, whole_number


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class MaskedCorruption(TokenCorruption):
    """Replaces tokens by the mask id: the forward process of masked diffusion.

    A row draws a time t and every token of it is masked with probability `1 - alpha(t)`. What happens to a
    sample depends on the seed, the step and its id (and, unless times are independent, on which other ids
    belong to the step); never on its place in the batch, on the number of devices or on the backend. It runs
    on the host, in NumPy. The weights, `-alpha'(t) / (1 - alpha(t))` where masked (1 / t for the linear
    schedule), are those of the evidence lower bound.

    Args:
        mask_id: int >= 0, id of the absorbing mask.
        schedule: a `MaskSchedule` or its name: "linear", "log_linear", "cosine", "geometric".
        times: "low_discrepancy" spreads the times of a step evenly over [0, 1]: one common offset, and the
            samples in random order a distance 1 / B apart. Each time is still uniform, and the variance of
            the loss is much smaller. "antithetic" does the same at even steps, and every odd step is the
            mirror image of the step before: times 1 - t, and (linear schedule) masked what was not.
            "independent" draws them independently.

    Raises:
        ValueError: an argument is out of its range.

    Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524;
    the times after Kingma et al., "Variational Diffusion Models", 2021, arXiv:2107.00630.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import MaskedCorruption

    corruption = MaskedCorruption(mask_id=9, schedule="linear")
    tokens = np.arange(8, dtype="int32").reshape(2, 4)
    out = corruption(0, 17, np.array([30, 31]), tokens)         # seed 0, step 17
    again = corruption(0, 17, np.array([31]), tokens[1:], batch_ids=np.array([30, 31]))
    assert np.array_equal(out.token_ids[1], again.token_ids[0])
    assert np.array_equal(out.token_ids == 9, out.mask)
    ```
    """

    def __init__(self, mask_id: int, schedule: Any = "linear", *, times: str = "low_discrepancy") -> None:
        self.mask_id = whole_number("mask_id", mask_id)
        super().__init__(schedule, times)

    def _replacement(self, tokens: np.ndarray, keys: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return np.asarray(self.mask_id, tokens.dtype)

    def _check_tokens(self, tokens: np.ndarray, frozen: np.ndarray) -> None:
        if self.mask_id > np.iinfo(tokens.dtype).max:
            raise ValueError(
                f"`tokens` must have a dtype that holds the mask id {self.mask_id}. Received {tokens.dtype}, which "
                f"ends at {np.iinfo(tokens.dtype).max}. Cast them: tokens.astype('int32')."
            )
        if np.any((tokens == self.mask_id) & ~frozen):
            raise ValueError(
                f"`tokens` must not hold the mask id {self.mask_id} where not frozen: a mask cannot be a target. "
                "Mark prompt and padding in `frozen`."
            )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"mask_id": self.mask_id, **super().get_config()}


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class BlockCorruption(MaskedCorruption):
    """Masks every block of a sequence at a time of its own: the forward process of block diffusion.

    A model is to predict block b from what is left of it and from the clean blocks before it. `prepare`
    lays the noised and the clean sequence side by side, `[x_t ; x_0]`, with the attention mask of
    `keras_diffusion_opd.models.block_diffusion_mask`, so that one pass scores all blocks. With `block_size`
    1 every token is predicted from those before it alone, as in autoregressive training; with the whole
    length this is `MaskedCorruption`, token for token.

    Args:
        mask_id: int >= 0, id of the absorbing mask.
        schedule: a `MaskSchedule` or its name, see `MaskedCorruption`.
        block_size: int >= 1. The last block is shorter where it does not divide the length.
        times: see `MaskedCorruption`. With "low_discrepancy" and "antithetic" the blocks of a row lie
            1 / blocks apart, in random order, and the rows in between: one even grid over all blocks of all
            rows.
        attention_key: str, name of the attention mask among the model's inputs, bool (B, 2L, 2L); None
            leaves it out, for a model that knows its blocks itself.

    Raises:
        ValueError: an argument is out of its range.

    Source: Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
    Models", 2025, arXiv:2503.09573.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import BlockCorruption

    corruption = BlockCorruption(mask_id=9, block_size=2)
    tokens = np.arange(8, dtype="int32").reshape(2, 4)
    assert corruption(0, 0, np.array([30, 31]), tokens).times.shape == (2, 2)    # rows, blocks
    batch = corruption.prepare(0, 0, np.array([30, 31]), tokens)
    assert np.array_equal(batch.model_inputs["token_ids"][:, 4:], tokens)        # x_0 beside x_t
    assert batch.model_inputs["attention_mask"].shape == (2, 8, 8)
    assert batch.target_ids.shape == batch.loss_weights.shape == (2, 4)
    ```
    """

    _times_per_block = True

    def __init__(
        self,
        mask_id: int,
        schedule: Any = "linear",
        *,
        block_size: int,
        times: str = "low_discrepancy",
        attention_key: str | None = "attention_mask",
    ) -> None:
        super().__init__(mask_id, schedule, times=times)
        self.block_size = positive_int("block_size", block_size)
        self.attention_key = attention_key

    def block_of(self, length: int) -> np.ndarray:
        """The block of every position, int32 (length,)."""
        return block_of(length, self.block_size)

    def model_inputs(
        self, corrupted: Any, tokens: Any, *, conditions: dict[str, Any] | None = None, token_key: str = "token_ids"
    ) -> dict[str, Any]:
        """`{token_key: int (B, 2L), attention_key: bool (B, 2L, 2L), **conditions}`; see the base class."""
        both = np.concatenate([np.asarray(corrupted), np.asarray(tokens)], axis=1)
        inputs = super().model_inputs(both, tokens, conditions=conditions, token_key=token_key)
        if self.attention_key is not None:
            mask = block_diffusion_mask(np.shape(tokens)[1], self.block_size)
            inputs[self.attention_key] = for_rows(mask, len(both))
        return inputs

    def input_keys(self, token_key: str) -> tuple[str, ...]:
        """Names of the inputs that `model_inputs` gives beside the conditions."""
        return (token_key,) if self.attention_key is None else (token_key, self.attention_key)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "block_size": self.block_size, "attention_key": self.attention_key}
