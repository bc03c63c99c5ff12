"""When each sample of a step is: diffusion times as a function of (seed, step, sample id)."""

from typing import Any

import numpy as np

from keras_diffusion_opd.counter_random import split_words, threefry2x32, uniform64

TIMES = ("low_discrepancy", "antithetic", "independent")
_TIME_STREAM = 0x40000000
_PLACE_STREAM = 0x20000000


def words(value: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 32 bits of one integer, as int32 arrays of shape (1,)."""
    return split_words(np.array([value], "int64"))


def drawn_step(kind: str, step: int) -> tuple[int, bool]:
    """The step whose numbers are used, and whether they are mirrored (u becomes 1 - u)."""
    return (step - step % 2, step % 2 == 1) if kind == "antithetic" else (step, False)


def mirror(uniform: np.ndarray, mirrored: bool) -> np.ndarray:
    """`uniform`, float64 in [0, 1), or its mirror image in the same range."""
    return (1.0 - 2.0**-53) - uniform if mirrored else uniform


def spread_times(kind: str, seed: int, step: int, ids: np.ndarray, batch_ids: Any, parts: int = 1) -> np.ndarray:
    """Times before the schedule's `eps`, float64 (B, parts) in [0, 1).

    "independent": each for itself. Otherwise one grid of B * parts even steps from a common random offset:
    the parts (blocks) of a sample lie 1 / parts apart in random order, the samples, in random order too,
    1 / (B * parts). Every single time is still uniform. "antithetic" mirrors every odd step.

    Args:
        kind: one of `TIMES`.
        seed: int.
        step: int >= 0.
        ids: int64 (B,).
        batch_ids: None, or int (N,): the ids of the whole step, `ids` among them.
        parts: int >= 1, times per sample.
    """
    step, mirrored = drawn_step(kind, step)
    low, high = words(step)
    key = threefry2x32(np, words(seed), (low, high ^ np.int32(_TIME_STREAM)))
    part = np.arange(parts, dtype="int32")[None]
    low, high = split_words(ids)
    columns = (low[:, None], high[:, None])
    if kind == "independent":
        return uniform64(*threefry2x32(np, (key[0] ^ part, key[1]), columns))
    group = np.unique(ids if batch_ids is None else np.asarray(batch_ids, "int64"))
    place = np.minimum(np.searchsorted(group, ids), len(group) - 1)
    if not np.array_equal(group[place], ids):
        raise ValueError("`batch_ids` must hold every one of `sample_ids`: it names the whole step's batch.")
    # 1. A random order of the ids, so that none is tied to early or late times.
    rank = _places(uniform64(*threefry2x32(np, key, split_words(group))))[place]
    # 2. A random order of the parts of each.
    within = _places(uniform64(*threefry2x32(np, (key[0] ^ part, key[1] ^ np.int32(_PLACE_STREAM)), columns)))
    # 3. Even steps from one offset.
    offset = uniform64(*threefry2x32(np, (key[1], key[0]), words(len(group))))[0]
    return mirror((offset + (rank[:, None] / len(group) + within) / parts) % 1.0, mirrored)


def _places(values: np.ndarray) -> np.ndarray:
    """int64: the rank of each value along the last axis."""
    return np.argsort(np.argsort(values, axis=-1, kind="stable"), axis=-1, kind="stable")
