"""A self-test of how teacher and student are put side by side."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.alignment import AlignmentError
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.losses.distillation import (
    active_only,
    prepare,
    refuse_unusable_teacher,
    teacher_divergence,
)
from keras_diffusion_opd.validation import finite_real


@dataclass(frozen=True)
class AlignmentReport:
    """What `alignment_self_test` measured.

    Args:
        largest: the largest divergence at an active position, nats.
        shifted: by shift, the mean divergence had the teacher been moved by so many positions.
        positions: how many active positions there were.

    Example:

    ```python
    from keras_diffusion_opd.losses import AlignmentReport

    assert AlignmentReport(0.0, {-1: 0.7, 1: 0.8}, 12).shifted[1] == 0.8
    ```
    """

    largest: float
    shifted: dict[int, float]
    positions: int


def alignment_self_test(student_logits: Any, batch: PreparedBatch, *, tolerance: float = 1e-4) -> AlignmentReport:
    """Hold a pipeline to 0 where the student is its own teacher, and see that it would notice a shift.

    Prepare a batch as for training, but with the student in the teacher's place: the same code that scores,
    cuts, stores and reads the teacher's targets. The divergence must then be 0 at every active position. Moved by
    one position it must not be: else the logits are alike everywhere, and the test shows nothing.

    Args:
        student_logits: float (B, L, V): what the student gives for the batch's inputs.
        batch: `PreparedBatch` whose teacher is the student. Any kind but `SampledTargets`, which are the teacher
            in expectation only.
        tolerance: > 0, nats: what rounding may leave. Half precision, and stored targets, need more.

    Returns:
        `AlignmentReport`.

    Raises:
        AlignmentError: a position where the divergence is above `tolerance`, with the shift that would mend it
            where one does; or a shift that would go unnoticed.
        TypeError, ValueError: a batch without a teacher or active positions, or without values that can be read.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets, PreparedBatch
    from keras_diffusion_opd.losses import alignment_self_test

    logits = np.random.default_rng(0).normal(size=(2, 6, 5)).astype("float32")
    batch = PreparedBatch.create(
        model_inputs=np.zeros((2, 6), "int32"),
        target_ids=np.zeros((2, 6), "int32"),
        loss_weights=np.ones((2, 6), "float32"),
        teacher=DenseTargets(logits),
    )
    assert alignment_self_test(logits, batch).largest < 1e-6
    ```
    """
    if finite_real("tolerance", tolerance) <= 0:
        raise ValueError(f"`tolerance` must be positive. Received {tolerance}.")
    logits, _, active, _ = prepare(student_logits, batch)
    if batch.teacher is None or batch.teacher.bound == "unbiased":
        raise ValueError(
            "`batch` must have a teacher that is the student itself, of a kind whose divergence from itself is 0. "
            f"Received {'none' if batch.teacher is None else type(batch.teacher).__name__}."
        )
    where = backend.concrete(active)
    if where is None or not where.any():
        raise ValueError("`batch` must have active positions, with values that can be read. Received none.")
    refuse_unusable_teacher(batch.teacher, batch.loss_weights, logits.shape[-1])
    teacher = batch.teacher.map(lambda array: active_only(active, array))
    temperature = float(teacher.settings().get("temperature", 1.0))

    def moved_by(shift: int) -> np.ndarray:
        """float (B, L): the divergence from the teacher's position i + shift, NaN where there is none."""
        moved = teacher.map(lambda array: ops.roll(array, -shift, axis=1))
        values = teacher_divergence(logits, moved, divergence="forward_kl", temperature=temperature, beta=None)
        values = np.asarray(ops.convert_to_numpy(values), "float64") / temperature**2
        return np.where(where & np.roll(_valid(where, shift), -shift, axis=1), values, np.nan)

    at = {shift: moved_by(shift) for shift in (-2, -1, 0, 1, 2)}
    means = {shift: float(np.nanmean(v)) for shift, v in at.items() if np.isfinite(v).any()}
    largest = float(at[0][where].max())
    if not largest <= tolerance:
        _raise_misaligned(at[0], where, tolerance, {s: float(np.nanmax(at[s])) for s in means})
    shifted = {shift: mean for shift, mean in means.items() if abs(shift) == 1}
    blind = [shift for shift, mean in shifted.items() if not mean > 10 * tolerance]
    if blind or not shifted:
        raise AlignmentError(
            "A teacher shifted by one position must be told from one that is not. Received logits that hardly differ "
            f"between neighbouring active positions (mean divergence {shifted}). Use a trained student, and a batch "
            "with several active positions side by side."
        )
    return AlignmentReport(largest, shifted, int(where.sum()))


def _valid(where: np.ndarray, shift: int) -> np.ndarray:
    """bool (B, L): teacher's positions that are active and do not come around the end when moved by `shift`."""
    positions = np.arange(where.shape[1]) - shift
    return where & (positions >= 0) & (positions < where.shape[1])


def _raise_misaligned(values: np.ndarray, where: np.ndarray, tolerance: float, largest: dict[int, float]) -> None:
    wrong = where & ~(values <= tolerance)
    row, position = (int(i) for i in np.argwhere(wrong)[0])
    mends = [shift for shift, value in largest.items() if value <= tolerance]
    reason = (
        f"The teacher's scores are shifted: its position i {mends[0]:+d} matches the student's position i."
        if mends
        else "No shift of up to two positions mends it: compare inputs, rows, masks, vocabulary and dropout."
    )
    raise AlignmentError(
        f"A student that is its own teacher must have divergence 0 at every active position. Received "
        f"{values[row, position]:.3g} at row {row}, position {position}, and "
        f"{int(wrong.sum()) - 1} more above {tolerance}. {reason}"
    )
