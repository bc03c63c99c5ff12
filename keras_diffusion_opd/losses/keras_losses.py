"""The same losses as `keras.losses.Loss`, for a plain `model.compile`."""

from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.losses.divergences import resolve_divergence, token_cross_entropy, token_divergence
from keras_diffusion_opd.losses.token_weights import token_weights
from keras_diffusion_opd.losses.weighted_sum import WeightedSum
from keras_diffusion_opd.validation import positive_temperature


class _TokenLoss(keras.losses.Loss):
    """A loss per token whose mean carries its denominator, and whose ids keep their dtype.

    Keras's own `__call__` casts `y_true` to the loss's dtype (an id of 257 becomes 256 in bfloat16) and
    multiplies by weights after the values are computed (0 times NaN is NaN). Here values at weight 0 are
    selected away, and the default reduction divides by the sum of the weights.
    """

    def __init__(self, reduction: str = "mean_with_sample_weight", name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        with keras.name_scope(self.name):
            weights = token_weights(y_pred, sample_weight)
            y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
            active = ops.not_equal(weights, 0)
            y_pred = ops.where(ops.expand_dims(active, -1), y_pred, ops.zeros_like(y_pred))
            spread = active if len(y_true.shape) == len(active.shape) else ops.expand_dims(active, -1)
            values = self.call(ops.where(spread, y_true, ops.zeros_like(y_true)), y_pred)
            return self._reduce(ops.where(active, values, ops.zeros_like(values)), weights)

    def _reduce(self, values: Any, weights: Any) -> Any:
        weights = ops.cast(weights, values.dtype)
        values = values * weights
        if self.reduction in (None, "none"):
            return values
        total = ops.sum(values)
        if self.reduction == "sum":
            return total
        tokens = ops.cast(ops.size(values), values.dtype)
        return WeightedSum(total, ops.sum(weights) if self.reduction == "mean_with_sample_weight" else tokens).mean()


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TeacherDivergence(_TokenLoss):
    """`token_divergence` as a Keras loss: `y_true` are the teacher's logits, `y_pred` the student's.

    For exact accumulation, `evaluate` and metrics use `PreparedTrainer`; this is for a plain
    `model.compile(loss=TeacherDivergence(...))`.

    Args:
        divergence: a name from `token_divergence`.
        temperature: > 0.
        beta: in (0, 1), for divergences that have one.
        reduction: `"mean_with_sample_weight"` (default: over the sum of the weights), `"sum"`,
            `"sum_over_batch_size"` / `"mean"` (over the number of tokens), or `"none"`.
        name: of the loss.
        dtype: dtype policy of the loss; the computation is never below float32.

    Raises:
        ValueError: a setting out of range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import TeacherDivergence

    loss = TeacherDivergence(divergence="reverse_kl", temperature=2.0)
    assert float(loss(np.ones((2, 3, 5)), np.ones((2, 3, 5)))) == 0.0
    ```
    """

    def __init__(
        self,
        divergence: str = "forward_kl",
        temperature: float = 1.0,
        beta: float | None = None,
        reduction: str = "mean_with_sample_weight",
        name: str | None = "teacher_divergence",
        dtype: Any = None,
    ) -> None:
        super().__init__(reduction=reduction, name=name, dtype=dtype)
        resolve_divergence(divergence, beta)
        self.divergence = divergence
        self.temperature = positive_temperature(temperature)
        self.beta = beta

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """float (..., V) teacher and student logits -> float (...)."""
        return token_divergence(
            y_pred, y_true, divergence=self.divergence, temperature=self.temperature, beta=self.beta
        )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        config = super().get_config()
        return {**config, "divergence": self.divergence, "temperature": self.temperature, "beta": self.beta}


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TokenCrossEntropy(_TokenLoss):
    """`token_cross_entropy` as a Keras loss: `y_true` int (...) ids, `y_pred` float (..., V) logits.

    Args:
        reduction: see `TeacherDivergence`.
        name: of the loss.
        dtype: dtype policy of the loss; the computation is never below float32.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import TokenCrossEntropy

    value = TokenCrossEntropy()(np.array([[1, -1]]), np.zeros((1, 2, 4)), sample_weight=np.array([[1.0, 0.0]]))
    assert abs(float(value) - np.log(4)) < 1e-6
    ```
    """

    def __init__(
        self,
        reduction: str = "mean_with_sample_weight",
        name: str | None = "token_cross_entropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(reduction=reduction, name=name, dtype=dtype)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """int (...) ids, float (..., V) logits -> float (...)."""
        return token_cross_entropy(y_pred, y_true)
