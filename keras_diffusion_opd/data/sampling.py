"""Drawing ids from logits on the host, as a function of (seed, sample id, position)."""

from typing import Any, NamedTuple

import numpy as np

from keras_diffusion_opd.counter_random import split_words, threefry2x32, uniform64

DRAWS = ("independent", "systematic")
_STREAM = 0x53414D50  # keeps these bits apart from those of the corruption at the same seed
_BYTES_AT_ONCE = 2**21  # what stays in a cache


class Drawn(NamedTuple):
    """Ids and counts (B, L, n), entropy (B, L)."""

    ids: np.ndarray
    counts: np.ndarray
    entropy: np.ndarray


def uniforms(seed: int, sample_ids: np.ndarray, length: int, n: int) -> np.ndarray:
    """float64 (B, length, n) in [0, 1): of every draw at every position of every sample, whatever the batch."""
    low, high = split_words(np.array([seed], "int64"))
    key = threefry2x32(np, (low, high ^ np.int32(_STREAM)), split_words(sample_ids))
    positions = np.arange(length, dtype="int32")[None, :, None]
    draws = np.arange(n, dtype="int32")[None, None]
    return uniform64(*threefry2x32(np, (key[0][:, None, None], key[1][:, None, None]), (positions, draws)))


def draw_ids(
    logits: np.ndarray,
    n: int,
    seed: int,
    sample_ids: np.ndarray,
    temperature: float,
    proposal_temperature: float,
    systematic: bool,
) -> Drawn:
    """See `SampledTargets.from_logits`.

    Args:
        logits: float (B, L, V).
        n: draws at a position.
        seed: of all draws.
        sample_ids: int (B,).
        temperature: of the teacher.
        proposal_temperature: times that of the teacher, of what is drawn from.
        systematic: whether the n draws of a position are evenly spaced.
    """
    rows, length, vocabulary = logits.shape
    if systematic:
        points = (np.arange(n) + uniforms(seed, sample_ids, length, 1)) / n
    else:
        points = uniforms(seed, sample_ids, length, n)
    points = points.reshape(-1, n)
    flat = logits.reshape(-1, vocabulary)
    weighted = proposal_temperature != 1.0
    ids = np.zeros((len(flat), n), "int32")
    counts = np.zeros((len(flat), n), "float32" if weighted else "int32")
    entropy = np.full(len(flat), np.nan, "float32")
    step = max(1, _BYTES_AT_ONCE // (8 * vocabulary))
    for start in range(0, len(flat), step):
        part = slice(start, min(start + step, len(flat)))
        teacher = _distribution(flat[part], temperature)
        proposal = _distribution(flat[part], temperature * proposal_temperature) if weighted else teacher
        entropy[part] = teacher.entropy()
        cumulated = np.cumsum(proposal.unnormalised, axis=-1)
        for row in np.flatnonzero(teacher.sound).tolist():
            found, times = _inverse(cumulated[row], points[start + row])
            ids[start + row, : len(found)] = found
            if weighted:
                times = times / n * np.exp(teacher.log_probs(row, found) - proposal.log_probs(row, found))
            counts[start + row, : len(found)] = times
    shape = (rows, length, n)
    return Drawn(ids.reshape(shape), counts.reshape(shape), entropy.reshape(shape[:2]))


def _inverse(cumulated: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ids in ascending order, and how many of the points in [0, 1) fall on each."""
    # Scaled by the last sum, which rounding leaves beside 1, so that no point falls behind the last id. "right"
    # passes over ids of probability 0.
    drawn = np.searchsorted(cumulated, points * cumulated[-1], side="right")
    last = np.searchsorted(cumulated, cumulated[-1], side="left")
    return np.unique(np.minimum(drawn, last), return_counts=True)


class _Distribution(NamedTuple):
    """float64 softmax of rows (R, V): logits below their largest, exponentials and their sum; which rows are sound."""

    shifted: np.ndarray
    unnormalised: np.ndarray
    total: np.ndarray
    sound: np.ndarray

    def log_probs(self, row: int, ids: np.ndarray) -> Any:
        return self.shifted[row, ids] - np.log(self.total[row])

    def entropy(self) -> np.ndarray:
        """(R,), NaN where there is no distribution."""
        finite = np.where(self.shifted > -np.inf, self.shifted, 0.0)
        mean = np.einsum("rv,rv->r", self.unnormalised, finite) / self.total
        return np.where(self.sound, np.log(self.total) - mean, np.nan)


def _distribution(logits: np.ndarray, temperature: float) -> _Distribution:
    shifted = logits.astype("float64")
    top = shifted.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        shifted -= top
    shifted /= temperature
    unnormalised = np.exp(shifted)
    return _Distribution(shifted, unnormalised, unnormalised.sum(axis=-1), np.isfinite(top[:, 0]))
