"""Forward KL towards a teacher that is known by ids drawn from it."""

from typing import Any

from keras import ops

from keras_diffusion_opd.data.log_space import EXCLUDED, computation_dtype, log_probabilities
from keras_diffusion_opd.data.sampled_targets import SampledTargets
from keras_diffusion_opd.validation import positive_temperature


def sampled_divergence(student_logits: Any, targets: SampledTargets, *, temperature: float = 1.0) -> Any:
    """An estimate of KL(teacher || student) from drawn ids at every position, times `temperature ** 2`.

    The value is `-sum(w log q)` with the weights w of the ids, less the teacher's entropy where the targets give
    it. With the entropy its expectation over the draws is the KL, and a single value may be negative. Without, it
    is the cross-entropy: the KL plus an entropy that the student cannot change. The gradient is
    `temperature (q sum(w) - w)` either way, and that of the KL in expectation.

    Args:
        student_logits: float (..., V), any float dtype.
        targets: `SampledTargets`, (..., N). No gradient flows into them.
        temperature: > 0, that of the targets.

    Returns:
        float32 or float64 (...); +inf where an id was drawn that has student probability 0 or is not in the
        vocabulary, with gradient 0.

    Raises:
        TypeError: `targets` are no `SampledTargets`.
        ValueError: a temperature that is not that of the targets; shapes that do not fit.

    Source: Anshumann et al., "Sparse Logit Sampling: Accelerating Knowledge Distillation in LLMs", 2025,
    arXiv:2503.16870.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import SampledTargets
    from keras_diffusion_opd.losses import sampled_divergence

    targets = SampledTargets(np.array([[[0, 1]]]), np.array([[[3, 1]]]))
    student = np.log([[[0.6, 0.2, 0.1, 0.1]]]).astype("float32")
    cross_entropy = -0.75 * np.log(0.6) - 0.25 * np.log(0.2)
    assert abs(float(sampled_divergence(student, targets)[0, 0]) - cross_entropy) < 1e-6
    ```
    """
    if not isinstance(targets, SampledTargets):
        raise TypeError(f"`targets` must be SampledTargets. Received {type(targets).__name__}.")
    temperature = positive_temperature(temperature)
    if (reason := targets.refusal("forward_kl", temperature)) is not None:
        raise ValueError(reason)
    student_logits = ops.convert_to_tensor(student_logits)
    ids = ops.cast(ops.convert_to_tensor(targets.ids), "int32")
    if tuple(student_logits.shape[:-1]) != tuple(ids.shape[:-1]):
        raise ValueError(
            "`student_logits` and `targets` must score the same positions. Received logits "
            f"{tuple(student_logits.shape)} and ids {tuple(ids.shape)}."
        )
    weights = ops.stop_gradient(ops.convert_to_tensor(targets.weights()))
    dtype = computation_dtype(student_logits, weights)
    log_q = log_probabilities(student_logits, temperature, dtype)
    drawn = ops.not_equal(weights, 0)
    # Backends disagree on an id outside of the vocabulary (an error, NaN, another id): here it is infinitely wrong.
    known = ops.logical_and(ids >= 0, ids < student_logits.shape[-1])
    chosen = ops.take_along_axis(log_q, ops.where(known, ids, ops.zeros_like(ids)), axis=-1)
    lost = ops.logical_and(drawn, ops.logical_not(ops.logical_and(known, chosen > EXCLUDED)))
    terms = ops.where(
        ops.logical_and(drawn, ops.logical_not(lost)), ops.cast(weights, dtype) * chosen, ops.zeros_like(chosen)
    )
    values = -ops.sum(terms, axis=-1)
    if targets.entropy is not None:
        values = values - ops.stop_gradient(ops.cast(targets.entropy, dtype))
    lost = ops.any(lost, axis=-1)
    return ops.where(lost, ops.full_like(values, float("inf")), values) * temperature**2
