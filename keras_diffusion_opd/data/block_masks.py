"""Who sees whom in block diffusion."""

from typing import Any

import numpy as np

from keras_diffusion_opd.validation import positive_int


def block_of(length: int, block_size: int) -> np.ndarray:
    """The block of every position, int32 (length,); the last block is shorter where the size does not divide."""
    return np.arange(positive_int("length", length), dtype="int32") // positive_int("block_size", block_size)


def block_causal_mask(length: int, block_size: int) -> np.ndarray:
    """Attention of one sequence in blocks: a position sees its own block and the blocks before it.

    With `block_size=1` it is the causal mask, with `block_size=length` everything sees everything. This is
    what a block diffusion model is sampled with: what comes before the block is clean by then.

    Args:
        length: int L >= 1.
        block_size: int >= 1.

    Returns:
        bool (L, L): True where the position of the row sees that of the column.

    Raises:
        ValueError: an argument is out of its range.

    Source: Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
    Models", 2025, arXiv:2503.09573.

    Example:

    ```python
    from keras_diffusion_opd.models import block_causal_mask

    assert block_causal_mask(4, 2).astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    ```
    """
    block = block_of(length, block_size)
    return block[:, None] >= block[None, :]


def block_diffusion_mask(length: int, block_size: int) -> np.ndarray:
    """Attention over noised and clean tokens side by side, `[x_t ; x_0]`: every block in one pass.

    Block b of x_t sees itself, in both directions, and the clean blocks before it; block b of x_0 sees the
    clean blocks up to itself. So the logits at x_t are, block by block, what the model says when that block
    alone is noised and all before it is given.

    Args:
        length: int L >= 1, of the sequence: x_t takes the places 0 to L - 1, x_0 those from L to 2L - 1.
        block_size: int >= 1. The last block is shorter where it does not divide `length`.

    Returns:
        bool (2L, 2L): True where the position of the row sees that of the column.

    Raises:
        ValueError: an argument is out of its range.

    Source: Arriola et al., "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language
    Models", 2025, arXiv:2503.09573.

    Example:

    ```python
    from keras_diffusion_opd.models import block_diffusion_mask

    mask = block_diffusion_mask(4, 2)
    assert mask[0].astype(int).tolist() == [1, 1, 0, 0, 0, 0, 0, 0]    # the first noised block: itself
    assert mask[2].astype(int).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]    # the second: itself, and x_0 before it
    ```
    """
    block = block_of(length, block_size)
    own, before = block[:, None] == block[None, :], block[:, None] > block[None, :]
    return np.block([[own, before], [np.zeros_like(own), own | before]])


def for_rows(mask: np.ndarray, rows: int) -> Any:
    """The same mask for every row, bool (rows, ...): a view, which takes no memory."""
    return np.broadcast_to(mask, (rows, *mask.shape))
