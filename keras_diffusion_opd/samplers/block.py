"""`BlockSampler`: fills canvases block after block, each by masked diffusion."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.data.block_masks import block_causal_mask, block_of
from keras_diffusion_opd.data.corruption import BlockCorruption
from keras_diffusion_opd.samplers.masked import MaskedSampler
from keras_diffusion_opd.schedules import get_mask_schedule
from keras_diffusion_opd.validation import positive_int


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class BlockSampler(MaskedSampler):
    """Samples semi-autoregressively: the first block that is not complete is filled in, then the next.

    Within a block it is `MaskedSampler`: the same orders, schedules, noise and independence of rows. The
    denoiser is called with the tokens (B, L) and the attention mask of
    `keras_diffusion_opd.models.block_causal_mask`: a block sees itself and the blocks before it, which are
    complete by then. That gives the logits that the pass over `[x_t ; x_0]` of training gives. With
    `block_size` the whole length it is `MaskedSampler`, token for token; with 1 it is autoregressive.

    Each row goes on by itself: blocks that a prompt fills are passed over, and what a row does does not
    depend on the prompts of other rows. `steps` are steps of a block; `advance`, `plan` and all other
    arguments are those of `MaskedSampler`.

    Args:
        mask_id: int >= 0. Never drawn, also where the denoiser scores it.
        block_size: int >= 1. The last block is shorter where it does not divide the length.
        schedule, order, order_noise: see `MaskedSampler`; within each block.
        token_key: str, name of the tokens among the denoiser's inputs.
        attention_key: str, name of the attention mask, bool (B, L, L); None leaves it out, for a denoiser
            that knows its blocks itself (and, to be trained and scored, `[x_t ; x_0]` by its length).

    Raises:
        ValueError: an argument is out of its range.

    Source: Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
    Models", 2025, arXiv:2503.09573; Nie et al., "Large Language Diffusion Models", 2025, arXiv:2502.09992
    (blocks with remasking by confidence).

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.models import TransformerDenoiser
    from keras_diffusion_opd.samplers import BlockSampler

    denoiser = TransformerDenoiser(vocabulary_size=5, length=8, width=8, depth=1, heads=2)
    sampler = BlockSampler(denoiser.mask_id, block_size=4)
    prompt = np.full((2, 8), denoiser.mask_id)
    prompt[:, :3] = [1, 2, 3]
    tokens = sampler.sample(denoiser, shape=(2, 8), steps=2, seed=0, tokens=prompt)
    assert tokens[:, :3].tolist() == [[1, 2, 3]] * 2 and tokens.max() < 5
    ```
    """

    def __init__(
        self,
        mask_id: int,
        *,
        block_size: int,
        schedule: Any = "linear",
        order: str = "random",
        order_noise: float = 1.0,
        token_key: str = "token_ids",
        attention_key: str | None = "attention_mask",
    ) -> None:
        super().__init__(mask_id, schedule=schedule, order=order, order_noise=order_noise, token_key=token_key)
        if not isinstance(token_key, str):
            raise ValueError(
                "`token_key` must name the tokens among the denoiser's inputs: scores need clean tokens and a mask "
                f"beside them. Received {token_key!r}."
            )
        self.block_size = positive_int("block_size", block_size)
        self.attention_key = attention_key

    def plan(self, tokens: Any, steps: int, schedule: Any = None) -> np.ndarray:
        """How many tokens each row has left masked after each step, int32 (steps * blocks, B).

        Args:
            tokens: int (B, L), before the first step.
            steps: int >= 1, of a block.
            schedule: None for the sampler's own.
        """
        schedule = self.schedule if schedule is None else get_mask_schedule(schedule)
        masked = np.asarray(tokens) == self.mask_id
        block = block_of(masked.shape[1], self.block_size)
        counts = np.stack([masked[:, block == b].sum(axis=1) for b in range(block[-1] + 1)], axis=1)
        # Each row's blocks that are not complete, in order; complete ones, with nothing to do, at the end.
        order = np.argsort(counts == 0, axis=1, kind="stable")
        counts = np.take_along_axis(counts, order, axis=1)[:, : max(1, int((counts > 0).sum(axis=1).max()))]
        later = counts.sum(axis=1, keepdims=True) - np.cumsum(counts, axis=1)
        left = [schedule.masked_left(counts, (k + 1) / steps) + later for k in range(steps)]
        return np.stack(left, axis=2).transpose(1, 2, 0).reshape(-1, len(masked)).astype("int32")

    def inputs(self, state: dict[str, Any], conditions: dict[str, Any] | None = None) -> Any:
        """What the denoiser is called with at this state."""
        inputs = super().inputs(state, conditions)
        if self.attention_key is not None:
            rows, length = ops.shape(state["tokens"])[0], int(state["tokens"].shape[1])
            mask = ops.convert_to_tensor(block_causal_mask(length, self.block_size))
            inputs[self.attention_key] = ops.broadcast_to(ops.expand_dims(mask, 0), (rows, length, length))
        return inputs

    def open_positions(self, tokens: Any) -> Any:
        """bool (B, L): the masked positions of the first block of each row that has any."""
        masked = super().open_positions(tokens)
        block = ops.convert_to_tensor(block_of(tokens.shape[1], self.block_size))
        none = ops.full_like(ops.cast(masked, "int32"), int(tokens.shape[1]))
        first = ops.min(ops.where(masked, ops.broadcast_to(block, ops.shape(masked)), none), axis=1, keepdims=True)
        return ops.logical_and(masked, ops.equal(block, first))

    def layout(self) -> BlockCorruption:
        """The corruption that a denoiser for this sampler is trained with: it knows the inputs of a state."""
        return BlockCorruption(
            self.mask_id, self.schedule, block_size=self.block_size, attention_key=self.attention_key
        )

    def _reserved_keys(self) -> tuple[str | None, ...]:
        return (self.token_key, self.attention_key)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "block_size": self.block_size, "attention_key": self.attention_key}
