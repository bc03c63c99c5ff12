"""A metric that is a ratio of two sums, and the token metrics made of it."""

from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.losses.weighted_sum import WeightedSum


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class WeightedRatio(keras.metrics.Metric):
    """`sum(weight * value) / sum(weight)` over everything seen since the last reset; 0 when nothing weighed.

    Streaming equals one-shot whatever the shapes of the batches: nothing is averaged before the end.
    `keras.metrics.Mean` averages within a batch first, which is another number as soon as lengths differ.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.metrics import WeightedRatio

    ratio = WeightedRatio(name="ratio")
    ratio.update_state(np.array([1.0, 2.0]), sample_weight=np.array([1.0, 0.0]))
    ratio.update_state(np.array([[5.0]]), sample_weight=np.array([[3.0]]))
    assert float(ratio.result()) == 4.0
    ```
    """

    def __init__(self, name: str = "weighted_ratio", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        self.total = self.add_variable((), initializer="zeros", name="total", dtype="float32")
        self.weight = self.add_variable((), initializer="zeros", name="weight", dtype="float32")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add `values` (...) with weights of the same shape, or fewer axes that broadcast from the left.

        A value whose weight is 0 does not enter, whatever it is.
        """
        values = ops.cast(values, "float32")
        if sample_weight is None:
            self.add_sum(WeightedSum(ops.sum(values), ops.cast(ops.size(values), "float32")))
            return
        weights = ops.cast(sample_weight, "float32")
        while len(weights.shape) < len(values.shape):
            weights = ops.expand_dims(weights, -1)
        weights = ops.broadcast_to(weights, ops.shape(values))
        values = ops.where(ops.not_equal(weights, 0), values, ops.zeros_like(values))
        self.add_sum(WeightedSum(ops.sum(weights * values), ops.sum(weights)))

    def add_sum(self, part: WeightedSum) -> None:
        """Add a sum that already carries its weight."""
        self.total.assign_add(ops.cast(part.total, "float32"))
        self.weight.assign_add(ops.cast(part.weight, "float32"))

    def result(self) -> Any:
        """The ratio, float32 scalar."""
        return WeightedSum(self.total.value, self.weight.value).mean()
