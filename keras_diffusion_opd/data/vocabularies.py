"""Logits of one vocabulary size brought to another, where the rest is padding."""

from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import dtype_of, is_floating, require_array, shape_of
from keras_diffusion_opd.data.log_space import log_probabilities
from keras_diffusion_opd.validation import finite_real, positive_int


def fit_vocabulary(
    logits: Any, vocabulary_size: int, *, loss_weights: Any = None, tolerance: float | None = 1e-3
) -> Any:
    """Logits over `vocabulary_size` ids: columns of padding are cut off or added.

    Heads are padded to sizes that suit a device, 152,064 for 151,936 tokens, and a teacher may be padded
    otherwise than its student. Ids are the same in both up to the smaller size. What is added is -inf, an id
    of probability 0, never 0, which would take part in the softmax. What is cut off must be padding: a teacher
    that gives those ids mass has another vocabulary, and its other probabilities are not comparable.

    Args:
        logits: float (..., V).
        vocabulary_size: at least 1, that of the result: of the tokenizer, or of the student's logits.
        loss_weights: None, or (...): where 0 the logits may hold anything and are not checked.
        tolerance: in [0, 1), the probability at temperature 1 that ids to be cut off may have together at any
            position. None: not checked, for a student, whose padding was never trained, and inside compiled
            functions, where values cannot be read.

    Returns:
        (..., vocabulary_size), of the dtype of the logits; NumPy for NumPy.

    Raises:
        TypeError, ValueError: logits that are no float array; arguments out of range; more mass than `tolerance`
            on what is cut off; values that cannot be read to check it.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import fit_vocabulary

    teacher = np.array([[[1.0, 0.0, -1.0, -30.0]]], "float32")
    assert fit_vocabulary(teacher, 3).shape == (1, 1, 3)
    assert fit_vocabulary(teacher, 5)[0, 0, 4] == -np.inf
    ```
    """
    require_array("logits", logits)
    if not is_floating(logits):
        raise TypeError(f"`logits` must have a floating-point dtype. Received {dtype_of(logits)}.")
    size, have = positive_int("vocabulary_size", vocabulary_size), int(shape_of(logits)[-1] or 0)
    if tolerance is not None and not 0.0 <= finite_real("tolerance", tolerance) < 1.0:
        raise ValueError(f"`tolerance` must be None or lie in [0, 1). Received {tolerance}.")
    if size == have:
        return logits
    if size > have:
        shape = (*logits.shape[:-1], size - have)
        if isinstance(logits, np.ndarray):
            return np.concatenate([logits, np.full(shape, -np.inf, logits.dtype)], axis=-1)
        return ops.concatenate([logits, ops.full(shape, -float("inf"), dtype=logits.dtype)], axis=-1)
    if tolerance is not None:
        _require_padding(logits, size, loss_weights, tolerance)
    return logits[..., :size]


def _require_padding(logits: Any, size: int, loss_weights: Any, tolerance: float) -> None:
    """ValueError unless the columns from `size` on have little mass at every active position."""
    values, weights = backend.concrete(logits), None if loss_weights is None else backend.concrete(loss_weights)
    if values is None or (loss_weights is not None and weights is None):
        raise ValueError(
            "`logits` must have values that can be read, to see that what is cut off is padding. Received a tracer, an "
            "abstract array or a shard. Cut outside of the compiled function, or pass tolerance=None."
        )
    log_p = ops.convert_to_numpy(log_probabilities(ops.convert_to_tensor(logits)))
    mass = np.exp(log_p[..., size:]).sum(axis=-1)
    wrong = mass > tolerance if weights is None else (mass > tolerance) & (weights != 0)
    if np.any(wrong):
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"`logits` must be padding from id {size} on, with at most {tolerance} of the mass. Received "
            f"{mass[place]:.3g} at {place}, and {int(wrong.sum()) - 1} more. Teacher and student have different "
            "vocabularies: check the tokenizers, or raise `tolerance` if these ids can never be targets."
        )
