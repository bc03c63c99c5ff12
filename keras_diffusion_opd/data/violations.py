"""Value checks that also hold inside a compiled step, where nothing can raise."""

from collections.abc import Callable, Mapping
from typing import Any

from keras import ops

from keras_diffusion_opd.data.prepared_batch import LARGEST_WEIGHT, PreparedBatch
from keras_diffusion_opd.data.targets import DenseTargets, fault_message, fault_messages, no_distribution

# What each check of weights, ids, student and loss means, in the words of the error that the trainer raises at the
# end of the window. Those of a teacher are in the `FAULTS` of its kind.
MESSAGES: dict[str, str] = {
    "weights_finite": (
        f"`loss_weights` must contain only finite values, at most {LARGEST_WEIGHT:g}. An inactive position has weight 0"
    ),
    "weights_nonnegative": "`loss_weights` must be nonnegative",
    "targets_nonnegative": "active target_ids must be nonnegative. A position not to be learned has weight 0",
    "targets_in_vocabulary": "active target_ids must be smaller than the vocabulary size of the student's logits",
    "student_finite": (
        "active student logits must be finite (-inf may exclude single ids). Training has diverged or half "
        "precision overflowed: lower the learning rate, clip gradients, or use mixed_bfloat16"
    ),
    "loss_finite": (
        "the loss must be finite. The student gives probability 0 (logit -inf) to an id that the target or the "
        "teacher needs: exclude the same ids in both models, or use divergence='jsd'"
    ),
}


def messages() -> dict[str, str]:
    """What every check means, by name: `MESSAGES`, and the faults of every kind of teacher."""
    teachers = {name: f"active {fault_message(name)}" for name in fault_messages()}
    return {**MESSAGES, **teachers}


def violations(batch: PreparedBatch, logits: Any, loss_total: Any) -> dict[str, Any]:
    """Where a batch breaks the contract, computed on the device; usable under `jit`.

    Args:
        batch: `PreparedBatch` of B rows and L positions.
        logits: float (B, L, V), the student's.
        loss_total: float scalar, the loss's unreduced sum.

    Returns:
        For every name in `violations.MESSAGES`, and for every fault that the batch's kind of teacher can have, a
            bool (B, L): True where it does not hold.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import PreparedBatch, violations

    batch = PreparedBatch({"x": np.ones((1, 2))}, np.array([[0, 7]]), np.ones((1, 2), "float32"))
    found = violations(batch, np.zeros((1, 2, 5), "float32"), 0.0)
    assert np.asarray(found["targets_in_vocabulary"]).tolist() == [[False, True]]
    ```
    """
    logits = ops.convert_to_tensor(logits)
    return violations_from(
        batch,
        logits.shape[-1],
        student=no_distribution(logits),
        teacher={} if batch.teacher is None else batch.teacher.faults(logits.shape[-1]),
        suspects=lambda: _suspects(batch, logits),
        loss_total=loss_total,
    )


def violations_from(
    batch: PreparedBatch,
    vocabulary: int,
    *,
    student: Any,
    teacher: Mapping[str, Any],
    suspects: Callable[[], Any],
    loss_total: Any,
) -> dict[str, Any]:
    """`violations`, by one who has looked at student and teacher already.

    Args:
        batch: `PreparedBatch` of B rows and L positions.
        vocabulary: V, the number of ids that the student scores.
        student: bool (B, L), where the student holds no distribution; anything where inactive.
        teacher: for every fault of the teacher, by name, a bool (B, L) that says where it is.
        suspects: function that gives a bool (B, L), where an infinite loss can come from.
        loss_total: float scalar, the loss's unreduced sum.
    """
    weights = ops.cast(batch.loss_weights, "float32")
    ids = ops.convert_to_tensor(batch.target_ids)
    finite = ops.logical_and(ops.isfinite(weights), weights <= LARGEST_WEIGHT)
    active = ops.not_equal(weights, 0)
    found = {
        "weights_finite": ops.logical_not(finite),
        "weights_nonnegative": ops.logical_and(finite, weights < 0),
        "targets_nonnegative": ops.logical_and(active, ids < 0),
        "targets_in_vocabulary": ops.logical_and(active, ids >= vocabulary),
        "student_finite": ops.logical_and(active, student),
    }
    known_names = fault_messages()
    for name, where in teacher.items():
        # A kind that declares no `FAULTS` of its own shares the general one.
        name = name if name in known_names else "teacher_finite"
        where = ops.logical_and(active, ops.convert_to_tensor(where))
        found[name] = ops.logical_or(found[name], where) if name in found else where
    known = ops.any(ops.stack([ops.any(x) for x in found.values()]))
    unexplained = ops.logical_and(ops.logical_not(ops.isfinite(loss_total)), ops.logical_not(known))
    found["loss_finite"] = ops.logical_and(unexplained, _some(suspects(), active))
    return found


def _some(suspects: Any, active: Any) -> Any:
    """bool (B, L): the active suspects; all active positions if there is none."""
    suspects = ops.logical_and(active, suspects)
    return ops.logical_or(suspects, ops.logical_and(active, ops.logical_not(ops.any(suspects))))


def _suspects(batch: PreparedBatch, logits: Any) -> Any:
    """bool (B, L): positions where an infinite loss can come from."""
    excluded = ops.equal(logits, -float("inf"))
    suspects = ops.any(excluded, axis=-1)
    if isinstance(batch.teacher, DenseTargets):
        differs = ops.not_equal(excluded, ops.equal(ops.convert_to_tensor(batch.teacher.logits), -float("inf")))
        suspects = ops.logical_or(ops.any(differs, axis=-1), _target_excluded(batch, excluded))
    return suspects


def _target_excluded(batch: PreparedBatch, excluded: Any) -> Any:
    ids = ops.clip(ops.cast(batch.target_ids, "int32"), 0, excluded.shape[-1] - 1)
    return ops.squeeze(ops.take_along_axis(excluded, ops.expand_dims(ids, -1), axis=-1), -1)
