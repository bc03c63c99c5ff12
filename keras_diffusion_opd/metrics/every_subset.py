"""Every way to mask the tokens of a block, with the share of each in the bound."""

import math
from collections.abc import Iterator

import numpy as np

from keras_diffusion_opd.data import MaskedCorruption, TokenCorruption

MOST_TOKENS = 12


def every_subset(
    corruption: TokenCorruption, ids: np.ndarray, frozen: np.ndarray
) -> tuple[Iterator[tuple[np.ndarray, np.ndarray, float]], int]:
    """Corrupted tokens and weights (N, L) of every subset of every block's free tokens, all blocks at once.

    A block of n tokens is bounded by the mean over orders of the sum of `-log p(next | those before)`. A
    subset of k masked tokens is met with probability 1 / C(n, k), and each of its tokens is next in 1 / k of
    the cases: weight 1 / (k C(n, k)) for all of them.

    Returns:
        an iterator of (corrupted, weights, 1.0), and how many it gives.
    """
    if not isinstance(corruption, MaskedCorruption):
        raise ValueError(f"`samples` must be a number for {type(corruption).__name__}: only masks can be enumerated.")
    # 1. The place of each free token among those of its block, and how many there are.
    block = corruption.block_of(ids.shape[1])
    in_block = (block[:, None] == block[None, :]).astype("int64")
    free = ~frozen
    size = free @ in_block
    place = free @ np.triu(in_block, k=1)
    most = int(size.max())
    if most > MOST_TOKENS:
        raise ValueError(
            f"`samples=None` adds up all subsets of a block, for at most {MOST_TOKENS} tokens. Received {most} in one: "
            f"2^{most} - 1 passes. Give a number of `samples`."
        )
    return _subsets(corruption.mask_id, ids, free, size, place, most), 2**most - 1


def _subsets(
    mask_id: int, ids: np.ndarray, free: np.ndarray, size: np.ndarray, place: np.ndarray, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray, float]]:
    for subset in range(1, 2**most):
        # 2. The subset in every block that has so many tokens; a shorter one has met all of its own before.
        masked = free & ((subset >> place) & 1 == 1) & (subset < 2**size)
        k = subset.bit_count()
        share = np.array([1.0 / (k * math.comb(n, k)) if n >= k else 0.0 for n in range(most + 1)])
        yield np.where(masked, mask_id, ids).astype(ids.dtype), np.where(masked, share[size], 0.0), 1.0
