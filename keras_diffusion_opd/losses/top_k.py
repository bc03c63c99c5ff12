"""Divergences from a teacher that is known at k ids of every position."""

from typing import Any

from keras import ops

from keras_diffusion_opd.data.log_space import EXCLUDED, chosen_and_rest, computation_dtype, log_probabilities
from keras_diffusion_opd.data.top_k_targets import TopKTargets
from keras_diffusion_opd.losses.divergences import divergence_of_events, resolve_divergence
from keras_diffusion_opd.validation import positive_temperature


def top_k_divergence(
    student_logits: Any,
    targets: TopKTargets,
    *,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float | None = None,
) -> Any:
    """The divergence of the student from a top-k teacher at every position, times `temperature ** 2`.

    With `tail="bucket"` it is that of the k + 1 events "id 1", ..., "id k", "any other id": at least 0, at most
    the divergence of the whole distributions, and the same where k is the whole vocabulary. The student's mass
    of all other ids is summed itself, never taken as 1 minus the rest. With `tail="renormalize"` both are
    normalised over the k ids, which says nothing of their mass there: forward KL only.

    Where the targets are those of the student itself (`TopKTargets.from_logits(student_logits, k)`) it is 0.

    Args:
        student_logits: float (..., V), any float dtype.
        targets: `TopKTargets`, (..., K), ids in [0, V). No gradient flows into them.
        divergence: a name from `token_divergence`. Reverse KL on the teacher's own likeliest ids sees all that
            the student has elsewhere as one event; to judge it id by id, let the teacher score the student's
            likeliest ids and give those.
        temperature: > 0, that of the targets.
        beta: in (0, 1), see `token_divergence`.

    Returns:
        float32 or float64 (...), at least 0; +inf where that is the true value, or where an id is not in the
        vocabulary.

    Raises:
        TypeError: `targets` are no `TopKTargets`.
        ValueError: unknown divergence; beta out of range; a temperature that is not that of the targets; a
            divergence that renormalised targets cannot give; shapes that do not fit.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import TopKTargets
    from keras_diffusion_opd.losses import top_k_divergence

    targets = TopKTargets.from_logits(np.log([[[0.5, 0.3, 0.1, 0.1]]]).astype("float32"), k=2)
    student = np.log([[[0.6, 0.2, 0.1, 0.1]]]).astype("float32")
    assert abs(float(top_k_divergence(student, targets)[0, 0]) - 0.030479) < 1e-6
    ```
    """
    entry, beta = resolve_divergence(divergence, beta)
    temperature = positive_temperature(temperature)
    if not isinstance(targets, TopKTargets):
        raise TypeError(f"`targets` must be TopKTargets. Received {type(targets).__name__}.")
    if (reason := targets.refusal(divergence, temperature)) is not None:
        raise ValueError(reason)
    student_logits = ops.convert_to_tensor(student_logits)
    ids = ops.cast(ops.convert_to_tensor(targets.ids), "int32")
    if tuple(student_logits.shape[:-1]) != tuple(ids.shape[:-1]):
        raise ValueError(
            "`student_logits` and `targets` must score the same positions. Received logits "
            f"{tuple(student_logits.shape)} and ids {tuple(ids.shape)}."
        )
    vocabulary, k = student_logits.shape[-1], ids.shape[-1]
    if k > vocabulary:
        raise ValueError(f"`targets` hold {k} ids a position, more than the student's vocabulary of {vocabulary}.")
    # Backends disagree on an id outside of the vocabulary (an error, NaN, another id): here it is infinitely wrong.
    known = ops.logical_and(ids >= 0, ids < vocabulary)
    ids = ops.where(known, ids, ops.zeros_like(ids))
    log_p, log_q = _events(student_logits, targets, ids, temperature)
    values = divergence_of_events(ops.stop_gradient(log_p), log_q, entry, beta)
    values = ops.where(ops.all(known, axis=-1), values, ops.full_like(values, float("inf")))
    return values * temperature**2


def _events(student_logits: Any, targets: TopKTargets, ids: Any, temperature: float) -> tuple[Any, Any]:
    """Log-probabilities of teacher and student of the events that both are compared by, (..., K + 1) or (..., K)."""
    log_probs = ops.convert_to_tensor(targets.log_probs)
    dtype = computation_dtype(student_logits, log_probs)
    if targets.tail == "renormalize":
        chosen = ops.take_along_axis(student_logits, ids, axis=-1)
        return log_probabilities(log_probs, 1.0, dtype), log_probabilities(chosen, temperature, dtype)
    log_p = _finite(ops.cast(log_probs, dtype))
    log_q = log_probabilities(student_logits, temperature, dtype)
    if ids.shape[-1] == log_q.shape[-1] and targets.log_tail is None:
        # Nothing is left out: a tail would be what rounding leaves.
        return log_p, ops.take_along_axis(log_q, ids, axis=-1)
    chosen, rest = chosen_and_rest(log_q, ids)
    log_tail = _finite(ops.cast(targets.tail_log_mass(), dtype))
    join = [(log_p, log_tail), (chosen, rest)]
    teacher, student = (ops.concatenate([a, ops.expand_dims(b, -1)], axis=-1) for a, b in join)
    return teacher, student


def _finite(values: Any) -> Any:
    return ops.where(values <= EXCLUDED, ops.full_like(values, EXCLUDED), values)
