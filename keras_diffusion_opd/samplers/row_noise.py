"""Noise that belongs to a row: its seed, the step and the position, and nothing else."""

from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd.counter_random import split_words, splitmix, threefry2x32, uniform32

# The largest float32 below 1: log1p(-u) stays finite.
_BELOW_ONE = np.float32(1 - 2.0**-24)


def row_keys(seed: Any, rows: int, first_row: int = 0) -> np.ndarray:
    """Keys of the rows of a batch, int32 (rows, 2).

    Args:
        seed: int, and row i gets the key of (seed, first_row + i); or int (rows,), a seed of its own for
            every row, which then has the same result in any batch.
        rows: int, number of rows.
        first_row: int, number of the first row where the batch is a part of a larger one.

    Raises:
        TypeError, ValueError: the seeds are not integers or not one per row.
    """
    seeds = np.asarray(seed)
    if seeds.dtype.kind not in "iu" or seeds.shape not in ((), (rows,)):
        raise ValueError(
            f"`seed` must be an integer, or integers of shape ({rows},), one per row. "
            f"Received {seeds.dtype} of shape {seeds.shape}."
        )
    own = seeds.shape != ()
    numbers = np.zeros(rows, "int64") if own else np.arange(first_row, first_row + rows, dtype="int64")
    seeds = seeds.astype("int64") if own else np.full(rows, int(seeds), "int64")
    return np.stack(threefry2x32(np, split_words(seeds), split_words(numbers)), axis=1)


def gumbel(keys: Any, step: Any, length: int, width: int) -> Any:
    """Standard Gumbel noise, float32 (B, length, width).

    The noise is `-log(-log1p(-u))` with u in (0, 1) down to 2^-33, so that large values, which decide who
    wins, are exact and as rare as they should be. In float32 the usual `-log(-log(u))` ends at 16.6 and
    lowers the sampling temperature (Zheng et al., "Masked Diffusion Models are Secretly Time-Agnostic Masked
    Models and Exploit Inaccurate Categorical Sampling", 2024, arXiv:2409.02908).

    Args:
        keys: int32 (B, 2), from `row_keys`.
        step: int32 (B,), the row's own step.
        length: int, positions.
        width: int, numbers per position.
    """
    positions = ops.expand_dims(ops.arange(length, dtype="int32"), 0)
    key = (keys[:, :1], keys[:, 1:])
    start, stride = threefry2x32(ops, key, (positions, ops.expand_dims(step, -1)))
    index = ops.arange(width, dtype="int32")
    uniform = uniform32(ops, splitmix(ops, ops.expand_dims(start, -1), ops.expand_dims(stride, -1), index))
    return -ops.log(-ops.log1p(-ops.minimum(uniform, _BELOW_ONE)))


def normal(xp: Any, keys: Any, step: Any, size: int) -> Any:
    """Standard normal noise, float32 (B, size): the row's own, whatever the batch.

    Box and Muller's pairs from 64 uniform bits each, down to 2^-33: the largest value is 6.8.

    Args:
        xp: `numpy` or `keras.ops`; both give the same bits, and the same noise to float32.
        keys: int32 (B, 2), from `row_keys`.
        step: int32 (B,), the row's own step.
        size: int, numbers per row.
    """
    pairs = xp.expand_dims(xp.arange(-(-size // 2), dtype="int32"), 0)
    first, second = threefry2x32(xp, (keys[:, :1], keys[:, 1:]), (pairs, xp.expand_dims(step, -1)))
    radius = xp.sqrt(-2.0 * xp.log(uniform32(xp, first)))
    angle = np.float32(2 * np.pi) * uniform32(xp, second)
    return xp.concatenate([radius * xp.cos(angle), radius * xp.sin(angle)], axis=1)[:, :size]
