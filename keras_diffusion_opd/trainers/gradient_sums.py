"""The arithmetic of a window: sums of gradients, their dtype, and the one division."""

from typing import Any

import keras
from keras import ops


class GradientSums:
    """Part of `WindowTrainer`: what becomes of the gradients of unreduced sums."""

    trainable_variables: Any
    _half_precision: bool

    def gradient_scale(self, weight: Any) -> Any:
        """A power of two that a float16 loss is multiplied with before it is differentiated, else 1.

        The sum over all tokens of a micro-batch is large where a mean is not; together with the loss scale
        its gradients would overflow float16 in most windows. The factor is undone in float32.

        Args:
            weight: float scalar, the micro-batch's weight.
        """
        if not self._half_precision:
            return 1.0
        weight = ops.stop_gradient(ops.where(weight > 0, weight, ops.ones_like(weight)))
        return ops.power(2.0, -ops.ceil(ops.log2(weight)))

    def mean_gradients(self, sums: list[Any], weight: Any) -> list[Any]:
        """Divide the window's gradient sums by its weight, once; 0 where the weight is 0."""
        some = weight > 0
        safe = ops.where(some, weight, ops.ones_like(weight))
        return [
            ops.cast(ops.where(some, g / ops.cast(safe, g.dtype), ops.zeros_like(g)), v.dtype)
            for g, v in zip(sums, self.trainable_variables, strict=True)
        ]

    def weight_dtype(self) -> str:
        """dtype of the window's weight: that of the widest gradient sum."""
        return max((self.sum_dtype(v) for v in self.trainable_variables), default="float32")

    @staticmethod
    def sum_dtype(variable: Any) -> str:
        """dtype of a gradient sum: float32, or float64 for float64 variables; never less."""
        return "float64" if keras.backend.standardize_dtype(variable.dtype) == "float64" else "float32"
