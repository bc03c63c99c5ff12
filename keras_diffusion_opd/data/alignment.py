"""Whether a teacher scores the positions that it is said to score."""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.validation import positive_int

_FLOOR = -30.0  # of a log-probability: an excluded id must not decide a mean by itself


class AlignmentError(ValueError):
    """A teacher's scores belong to other positions, or other rows, than those they are given for."""


class TargetFit(NamedTuple):
    """How well the teacher predicts the targets some positions away, from `target_fit`.

    Args:
        log_prob: mean log-probability, in nats, of the targets at the teacher's positions `offset` further on.
        gain: mean over the same targets of what that is more than at offset 0.
        error: standard error of the gain.
        positions: how many targets there are.

    Example:

    ```python
    from keras_diffusion_opd.data import TargetFit

    assert TargetFit(log_prob=-1.5, gain=-2.0, error=0.1, positions=60).gain < 0
    ```
    """

    log_prob: float
    gain: float
    error: float
    positions: int


def target_fit(batch: PreparedBatch, *, offsets: int = 2) -> dict[int, TargetFit]:
    """The mean log-probability of a batch's active targets under its teacher, at every offset.

    A teacher that knows something gives the targets the most at offset 0. Where it does so at offset 1, its scores
    at position i + 1 are those of target i: it was shifted by one.

    Args:
        batch: `PreparedBatch` with a teacher, values that can be read, and targets that the teacher should find
            likely: data, or samples of a trained student.
        offsets: at least 1, the largest distance that is looked at.

    Returns:
        `TargetFit` for every offset from `-offsets` to `offsets` that some active target has a usable position at.

    Raises:
        TypeError: no batch, or a kind of targets that does not know single probabilities.
        ValueError: no teacher, or values that cannot be read.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets, PreparedBatch, target_fit

    ids = np.array([[0, 1, 2, 3, 4, 5]])
    batch = PreparedBatch.create(
        model_inputs=ids,
        target_ids=ids,
        loss_weights=np.ones((1, 6), "float32"),
        teacher=DenseTargets(5.0 * np.eye(6, dtype="float32")[np.roll(ids, 1)]),
    )
    fit = target_fit(batch)
    assert max(fit, key=lambda offset: fit[offset].gain) == 1
    ```
    """
    if not isinstance(batch, PreparedBatch):
        raise TypeError(f"`batch` must be a PreparedBatch. Received {type(batch).__name__}.")
    if batch.teacher is None:
        raise ValueError("`batch` must have a teacher. Received none.")
    ids, weights = backend.concrete(batch.target_ids), backend.concrete(batch.loss_weights)
    usable = ops.logical_not(ops.convert_to_tensor(batch.teacher.invalid()))
    valid = backend.concrete(usable)
    if ids is None or weights is None or valid is None:
        raise ValueError("`batch` must have values that can be read. Received tracers, abstract arrays or shards.")
    active = weights != 0
    ids = np.where(active, ids, 0).astype("int32")
    here = _log_probs(batch, ids)
    found = {}
    for offset in range(-positive_int("offsets", offsets), offsets + 1):
        # Target i at the teacher's position i + offset; both it and the teacher's position i have to be usable.
        there = np.roll(_log_probs(batch, np.roll(ids, offset, axis=1)), -offset, axis=1)
        usable_there = active & valid & np.roll(valid, -offset, axis=1) & _inside(ids.shape[1], offset)
        count = int(usable_there.sum())
        if count:
            gains = (there - here)[usable_there]
            error = float(gains.std(ddof=1) / np.sqrt(count)) if count > 1 else float("inf")
            found[offset] = TargetFit(float(there[usable_there].mean()), float(gains.mean()), error, count)
    return found


def check_alignment(batch: PreparedBatch, *, offsets: int = 2, margin: float = 0.5) -> dict[int, TargetFit]:
    """Raise where the teacher predicts a batch's targets much better some positions away.

    Args:
        batch, offsets: see `target_fit`.
        margin: > 0, in nats: how much better on average. It must also be 4 standard errors.

    Returns:
        What `target_fit` found.

    Raises:
        AlignmentError: with the shift, and how to undo it.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets, PreparedBatch, check_alignment

    ids = np.array([[0, 1, 2, 3, 4, 5]])
    batch = PreparedBatch.create(
        model_inputs=ids,
        target_ids=ids,
        loss_weights=np.ones((1, 6), "float32"),
        teacher=DenseTargets(5.0 * np.eye(6, dtype="float32")[ids]),
    )
    assert check_alignment(batch)[0].gain == 0.0
    ```
    """
    found = target_fit(batch, offsets=offsets)
    better = {o: fit for o, fit in found.items() if o and fit.gain > margin and fit.gain > 4.0 * fit.error}
    if better:
        offset = max(better, key=lambda o: better[o].gain)
        fit = better[offset]
        raise AlignmentError(
            f"The teacher must score target i at position i. Received a teacher that gives the targets {fit.gain:.2f} "
            f"nats more at position i {offset:+d} (over {fit.positions} active positions): its scores are shifted by "
            f"{offset}. {_advice(offset)}"
        )
    return found


def _advice(offset: int) -> str:
    if offset == -1:
        return "An autoregressive teacher scores the next token: give it logits[:, :-1] for the targets [:, 1:]."
    return "Compare the spans that teacher and student were given: special tokens, prompts, padding on the left."


def _log_probs(batch: PreparedBatch, ids: np.ndarray) -> np.ndarray:
    """float64 (B, L): of these ids at the teacher's own positions, no less than the floor."""
    assert batch.teacher is not None
    values = ops.convert_to_numpy(ops.cast(batch.teacher.target_log_probs(ids), "float32"))
    return np.maximum(np.nan_to_num(np.asarray(values, "float64"), nan=_FLOOR, neginf=_FLOOR), _FLOOR)


def _inside(length: int, offset: int) -> np.ndarray:
    positions = np.arange(length) + offset
    return (positions >= 0) & (positions < length)
