"""The weight of every token, from `sample_weight` and from the mask that Keras carries along."""

from typing import Any

import keras
from keras import ops


class _Ones(keras.losses.Loss):  # type: ignore[misc]
    """1 for every token. Reduced by Keras it is the mask of the student's output.

    Keras keeps the mask of a JAX tracer in a table of its own, and only its own losses read it.
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__(name="token_weights", reduction="none", dtype=dtype)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.ones_like(y_pred[..., 0])


def token_weights(y_pred: Any, sample_weight: Any = None) -> Any:
    """Weights of tokens: the Keras mask of `y_pred`, times `sample_weight`.

    Args:
        y_pred: float (..., V), logits as the model returned them.
        sample_weight: None, or (...) or fewer axes that broadcast from the left.

    Returns:
        float32 (...).
    """
    dtype = keras.backend.standardize_dtype(ops.convert_to_tensor(y_pred).dtype)
    weights = ops.cast(_Ones(dtype)(y_pred, y_pred), "float32")
    if sample_weight is None:
        return weights
    given = ops.cast(sample_weight, "float32")
    while len(given.shape) < len(weights.shape):
        given = ops.expand_dims(given, -1)
    return weights * given
