"""Divergences between a teacher's and a student's distribution over the vocabulary, token by token."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_diffusion_opd.data.log_space import EXCLUDED, computation_dtype, log_probabilities
from keras_diffusion_opd.losses.closed_gradients import cross_entropy, forward_kl
from keras_diffusion_opd.losses.numerics import excess, log_mixture_ratio
from keras_diffusion_opd.validation import finite_real, positive_temperature


class _Pair(NamedTuple):
    """Teacher p and student q, their logarithms, each (..., V), and d = log p - log q."""

    p: Any
    q: Any
    log_p: Any
    log_q: Any
    d: Any


def _forward_kl(pair: _Pair, beta: float) -> Any:
    return excess(pair.d, pair.p, pair.q)


def _reverse_kl(pair: _Pair, beta: float) -> Any:
    return excess(-pair.d, pair.q, pair.p)


def _skew(a: Any, b: Any, difference: Any, beta: float) -> Any:
    """KL(a || beta a + (1 - beta) b), entry by entry."""
    return excess(log_mixture_ratio(difference, beta), a, beta * a + (1.0 - beta) * b)


def _skew_forward_kl(pair: _Pair, beta: float) -> Any:
    return _skew(pair.p, pair.q, pair.d, beta)


def _skew_reverse_kl(pair: _Pair, beta: float) -> Any:
    return _skew(pair.q, pair.p, -pair.d, beta)


def _jsd(pair: _Pair, beta: float) -> Any:
    return beta * _skew_forward_kl(pair, beta) + (1.0 - beta) * _skew_reverse_kl(pair, 1.0 - beta)


def _normalized_jsd(pair: _Pair, beta: float) -> Any:
    return _skew_forward_kl(pair, beta) / (1.0 - beta) + _skew_reverse_kl(pair, 1.0 - beta) / beta


def _alpha(pair: _Pair, alpha: float) -> Any:
    # (alpha p + (1 - alpha) q - p^alpha q^(1 - alpha)) / (alpha (1 - alpha)), written from the side whose
    # exponent is larger; that neither overflows nor cancels as alpha goes to 0 or 1.
    if alpha >= 0.5:
        return _alpha_from(pair.p, pair.q, pair.log_p, pair.d, 1.0 - alpha) / alpha
    return _alpha_from(pair.q, pair.p, pair.log_q, -pair.d, alpha) / (1.0 - alpha)


def _alpha_from(a: Any, b: Any, log_a: Any, difference: Any, rest: float) -> Any:
    """`a * (1 - exp(-rest * difference)) / rest - a + b`; the limit `rest = 0` is `excess`."""
    small = ops.abs(difference) < 0.25
    r = ops.where(small, difference, ops.zeros_like(difference))
    # (1 - exp(-rest r)) / rest - 1 + exp(-r), by powers of r; what is left out at 1/4 is below 1e-9 of it.
    series = ops.zeros_like(r)
    for n in range(9, 1, -1):
        series = series * r + (-1.0) ** n / math.factorial(n) * (1.0 - rest ** (n - 1))
    # Far out (a much smaller than b) the exponential would overflow: a exp(-rest d) = a^(1 - rest) b^rest.
    near = -rest * difference < 1.0
    exponent = ops.where(near, -rest * difference, ops.zeros_like(difference))
    geometric = ops.exp(ops.where(near, ops.full_like(log_a, EXCLUDED), log_a - rest * difference))
    gap = ops.where(near, a * (-ops.expm1(exponent) / rest), (a - geometric) / rest)
    return ops.where(small, a * (r * r * series), gap - a + b)


def _total_variation(pair: _Pair, beta: float) -> Any:
    # |p - q| / 2; expm1 keeps the digits where p and q are close.
    near = ops.abs(pair.d) < 1.0
    d = ops.where(near, pair.d, ops.zeros_like(pair.d))
    return 0.5 * ops.abs(ops.where(near, pair.q * ops.expm1(d), pair.p - pair.q))


def _common_pull(q: Any, c: Any) -> Any:
    """0, with gradient `c q` with respect to `log q`.

    What pulls on all log-probabilities of a student alike, `q_j c`, moves nothing, for they sum to one.
    Where the student is almost certain and the divergence is 48, the rest is smaller than one rounding of
    48: to take the common part away first leaves a gradient with all its digits in place of noise.
    """
    return ops.sum(ops.expand_dims(ops.stop_gradient(c), -1) * (q - ops.stop_gradient(q)), axis=-1)


class Divergence(NamedTuple):
    """One entry of the table of divergences: its integrand, its default `beta`, and where it is infinite."""

    integrand: Callable[[_Pair, float], Any]
    default_beta: float | None
    infinite: str | None  # "student": where the student has probability 0 and the teacher not; "teacher": reverse
    pull: Callable[[float], float] | None = None  # see `_common_pull`: c as a multiple of the value


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": Divergence(_forward_kl, None, "student"),
    "reverse_kl": Divergence(_reverse_kl, None, "teacher", lambda _: 1.0),
    "jsd": Divergence(_jsd, 0.5, None),
    "normalized_jsd": Divergence(_normalized_jsd, 0.5, None),
    "skew_forward_kl": Divergence(_skew_forward_kl, 0.1, None),
    "skew_reverse_kl": Divergence(_skew_reverse_kl, 0.1, None),
    "alpha": Divergence(_alpha, 0.5, None, lambda alpha: 1.0 - alpha),
    "total_variation": Divergence(_total_variation, None, None),
}


def resolve_divergence(divergence: str, beta: float | None) -> tuple[Divergence, float]:
    """Look up a divergence by name and settle its `beta`; raises ValueError with what was expected."""
    if divergence not in DIVERGENCES:
        raise ValueError(
            f"`divergence` must be one of {', '.join(map(repr, DIVERGENCES))}. Received {divergence!r}. "
            "Names say the direction: 'forward_kl' is KL(teacher || student)."
        )
    entry = DIVERGENCES[divergence]
    if beta is None:
        beta = entry.default_beta if entry.default_beta is not None else 0.5
    beta = finite_real("beta", beta)
    if not 0.0 < beta < 1.0:
        raise ValueError(
            f"`beta` must lie strictly between 0 and 1. Received {beta} for {divergence!r}. "
            "For the limits name them: 'forward_kl' or 'reverse_kl'."
        )
    return entry, beta


def divergence_of_events(log_p: Any, log_q: Any, entry: Divergence, beta: float) -> Any:
    """A divergence of two distributions over the same events, given by their logarithms, at temperature 1.

    Args:
        log_p: float (..., N), the teacher's, at most 0; `EXCLUDED` for probability 0.
        log_q: float (..., N), the student's.
        entry: from `resolve_divergence`.
        beta: from `resolve_divergence`.

    Returns:
        float (...), at least 0; +inf where that is the true value, with gradient 0.
    """
    pair = _Pair(ops.exp(log_p), ops.exp(log_q), log_p, log_q, log_p - log_q)
    values = ops.sum(entry.integrand(pair, beta), axis=-1)
    if entry.pull is not None:
        values = values - _common_pull(pair.q, entry.pull(beta) * values)
    if entry.infinite is not None:
        holder, other = (pair.p, log_q) if entry.infinite == "student" else (pair.q, log_p)
        lost = ops.any(ops.logical_and(holder > 0, other <= EXCLUDED), axis=-1)
        values = ops.where(lost, ops.full_like(values, float("inf")), values)
    return values


def token_divergence(
    student_logits: Any,
    teacher_logits: Any,
    *,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float | None = None,
) -> Any:
    """The divergence of the student from the teacher at every position, times `temperature ** 2`.

    With teacher p = softmax(teacher_logits / temperature) and student q likewise:

    - `"forward_kl"`: KL(p || q). Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
      arXiv:1503.02531, which also gives the factor temperature ** 2.
    - `"reverse_kl"`: KL(q || p).
    - `"jsd"`: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q. Agarwal et al.,
      "On-Policy Distillation of Language Models", 2023, arXiv:2306.13649. It vanishes as beta goes to 0 or 1.
    - `"normalized_jsd"`: the same over beta (1 - beta): goes to KL(p || q) as beta goes to 0, and to
      KL(q || p) as beta goes to 1.
    - `"skew_forward_kl"`: KL(p || beta p + (1 - beta) q), `"skew_reverse_kl"`: KL(q || beta q + (1 - beta) p).
      Ko et al., "DistiLLM", 2024, arXiv:2402.03898.
    - `"alpha"`: (1 - sum p^beta q^(1 - beta)) / (beta (1 - beta)), Amari's; KL(p || q) as beta goes to 1.
    - `"total_variation"`: sum |p - q| / 2.

    Computed in float32 log-space (float64 where an input has it). Never negative; exactly 0 for equal
    logits. An id with logit -inf in both models adds 0 and has gradient 0. Where the student gives
    probability 0 to an id that the teacher does not (forward KL; reverse KL the other way round) the
    value is +inf, its true value, with gradient 0: never NaN.

    Args:
        student_logits: float (..., V), any float dtype.
        teacher_logits: float (..., V), same shape. No gradient flows into it.
        divergence: a name from the list above.
        temperature: > 0.
        beta: in (0, 1). Default 0.5 for `"jsd"`, `"normalized_jsd"` and `"alpha"`, 0.1 for the skewed KLs.
            The others do not depend on it.

    Returns:
        float32 or float64 (...), at least 0.

    Raises:
        ValueError: unknown divergence; temperature or beta out of range; shapes that differ.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import token_divergence

    teacher = np.log([[0.9, 0.1]]).astype("float32")
    student = np.log([[0.5, 0.5]]).astype("float32")
    assert abs(float(token_divergence(student, teacher)[0]) - 0.368064) < 1e-6
    ```
    """
    entry, beta = resolve_divergence(divergence, beta)
    temperature = positive_temperature(temperature)
    student_logits = ops.convert_to_tensor(student_logits)
    teacher_logits = ops.stop_gradient(ops.convert_to_tensor(teacher_logits))
    if tuple(student_logits.shape) != tuple(teacher_logits.shape):
        raise ValueError(
            "`student_logits` and `teacher_logits` must have identical shapes. Received "
            f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}. Score the same positions "
            "with both models and bring both to one vocabulary size."
        )
    dtype = computation_dtype(student_logits, teacher_logits)
    if divergence == "forward_kl":
        return forward_kl(student_logits, teacher_logits, temperature, dtype)
    log_q = log_probabilities(student_logits, temperature, dtype)
    log_p = log_probabilities(teacher_logits, temperature, dtype)
    return divergence_of_events(log_p, log_q, entry, beta) * temperature**2


def token_cross_entropy(student_logits: Any, target_ids: Any) -> Any:
    """`-log softmax(student_logits)[target_ids]` at every position, in nats.

    Args:
        student_logits: float (..., V), any float dtype.
        target_ids: int (...), in [0, V). Position i of the logits scores target i: nothing is shifted.

    Returns:
        float32 or float64 (...), at least 0; +inf where the target's logit is -inf or the id is not in the
        vocabulary.

    Raises:
        ValueError: the shape of `target_ids` is not that of the logits without the last axis.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import token_cross_entropy

    value = token_cross_entropy(np.zeros((1, 4), "float32"), np.array([2]))
    assert abs(float(value[0]) - np.log(4)) < 1e-6
    ```
    """
    student_logits = ops.convert_to_tensor(student_logits)
    target_ids = ops.convert_to_tensor(target_ids)
    if tuple(student_logits.shape[:-1]) != tuple(target_ids.shape):
        raise ValueError(
            "`target_ids` must have the shape of `student_logits` without its last axis. Received "
            f"{tuple(target_ids.shape)} for logits {tuple(student_logits.shape)}."
        )
    return cross_entropy(student_logits, target_ids)
