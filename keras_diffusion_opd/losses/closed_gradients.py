"""The common losses with their gradients in closed form, which saves passes over the logits and memory.

First derivatives only: a gradient of these gradients is not that of the loss.

Left to automatic differentiation each softmax is walked back on its own, and XLA on CPU works the sum of the
ways back out anew for every place that reads it (three, after a dense layer). Written down, the gradient is
one expression: student minus teacher, or student minus one-hot.
"""

from collections.abc import Callable
from typing import Any

from keras import ops

from keras_diffusion_opd.data.log_space import EXCLUDED, gather_ids, log_probabilities
from keras_diffusion_opd.losses.numerics import excess


def _differentiated(function: Callable[[Any], tuple[Any, Callable[[Any], Any]]], logits: Any) -> Any:
    """`function(logits)[0]`, whose gradient is `function(logits)[1](upstream)` on every backend."""

    @ops.custom_gradient
    def wrapped(logits: Any) -> Any:
        value, gradient = function(logits)

        def backward(*arguments: Any, upstream: Any = None) -> Any:
            upstream = arguments[0] if upstream is None else upstream
            return ops.cast(gradient(upstream), logits.dtype)

        return value, backward

    return wrapped(logits)


def select_active(active: Any, logits: Any) -> Any:
    """Logits (B, L, V) with 0 where bool (B, L) `active` is False; the gradient passes through as it is.

    For losses that give inactive positions weight 0: their gradient there is 0 already, and to select it once
    more costs passes over the logits.
    """
    active = ops.expand_dims(active, -1)

    def function(logits: Any) -> tuple[Any, Callable[[Any], Any]]:
        return ops.where(active, logits, ops.zeros_like(logits)), lambda upstream: upstream

    return _differentiated(function, ops.convert_to_tensor(logits))


def forward_kl(student_logits: Any, teacher_logits: Any, temperature: float, dtype: str) -> Any:
    """`temperature ** 2 KL(teacher || student)`, float (..., V) twice -> `dtype` (...).

    Its gradient is `temperature (q - p)`; 0 where the value is infinite.
    """
    log_p = log_probabilities(teacher_logits, temperature, dtype)

    def function(logits: Any) -> tuple[Any, Callable[[Any], Any]]:
        log_q = log_probabilities(logits, temperature, dtype)
        p, q = ops.exp(log_p), ops.exp(log_q)
        values = ops.sum(excess(log_p - log_q, p, q), axis=-1)
        lost = ops.any(ops.logical_and(p > 0, log_q <= EXCLUDED), axis=-1)
        values = ops.where(lost, ops.full_like(values, float("inf")), values)

        def gradient(upstream: Any) -> Any:
            scale = ops.where(lost, ops.zeros_like(values), ops.cast(upstream, dtype) * temperature)
            return ops.expand_dims(scale, -1) * (q - p)

        return values * temperature**2, gradient

    return _differentiated(function, student_logits)


def cross_entropy(student_logits: Any, target_ids: Any) -> Any:
    """`-log softmax(student_logits)[target_ids]`, float (..., V) and int (...) -> float (...).

    Its gradient is `q - one_hot(target)`; 0 where the value is infinite: an id of logit -inf, or none of the
    vocabulary.
    """
    vocabulary = student_logits.shape[-1]
    # Backends disagree on an id outside of the vocabulary (an error, NaN, another id): here it has no mass.
    known = ops.logical_and(target_ids >= 0, target_ids < vocabulary)
    inside = ops.where(known, target_ids, ops.zeros_like(target_ids))

    def function(logits: Any) -> tuple[Any, Callable[[Any], Any]]:
        log_q = log_probabilities(logits)
        chosen = gather_ids(log_q, inside)
        lost = ops.logical_not(ops.logical_and(known, chosen > EXCLUDED))
        values = ops.where(lost, ops.full_like(chosen, float("inf")), -chosen)

        def gradient(upstream: Any) -> Any:
            ids = ops.expand_dims(ops.cast(inside, "int32"), -1)
            hit = ops.equal(ops.arange(vocabulary, dtype="int32"), ids)
            scale = ops.where(lost, ops.zeros_like(chosen), ops.cast(upstream, chosen.dtype))
            return ops.expand_dims(scale, -1) * (ops.exp(log_q) - ops.cast(hit, log_q.dtype))

        return values, gradient

    return _differentiated(function, student_logits)
