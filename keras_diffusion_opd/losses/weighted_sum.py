"""A mean that carries its denominator, and what a loss returns."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from keras import ops

from keras_diffusion_opd.data.log_space import computation_dtype


class WeightedSum(NamedTuple):
    """A sum of weighted values together with the sum of their weights.

    Losses and metrics stay in this form over positions, micro-batches, devices, processes and
    evaluation batches; the division happens once, at the very end. `+` adds both parts, a factor
    scales the total alone. A named tuple is a tree node on every backend, so a `WeightedSum` crosses
    `jit` and `vmap`.

    Args:
        total: float scalar, `sum(weight_i * value_i)`.
        weight: float scalar, `sum(weight_i)`, at least 0.

    Example:

    ```python
    from keras_diffusion_opd.losses import WeightedSum

    window = WeightedSum(2.0, 0.2) + WeightedSum(6.0, 0.3)
    assert abs(float(window.mean()) - 16.0) < 1e-5
    ```
    """

    total: Any
    weight: Any

    def __add__(self, other: Any) -> "WeightedSum":
        if not isinstance(other, WeightedSum):
            return NotImplemented
        return WeightedSum(self.total + other.total, self.weight + other.weight)

    def __radd__(self, other: Any) -> "WeightedSum":
        # `sum()` of a list of weighted sums starts at the number 0. Raised, not NotImplemented: Python would
        # go on to join two tuples.
        if isinstance(other, int) and other == 0:
            return self
        raise TypeError(
            f"A WeightedSum adds to another WeightedSum. Received {type(other).__name__}. A plain value of weight w is "
            "WeightedSum(w * value, w)."
        )

    def __mul__(self, factor: Any) -> "WeightedSum":
        if isinstance(factor, tuple):
            return NotImplemented
        return WeightedSum(self.total * factor, self.weight)

    def __rmul__(self, factor: Any) -> "WeightedSum":
        return self * factor

    def mean(self) -> Any:
        """`total / weight`, float32 or float64 scalar; 0, with a finite gradient, where the weight is 0."""
        total, weight = ops.convert_to_tensor(self.total), ops.convert_to_tensor(self.weight)
        dtype = computation_dtype(total, weight)
        total, weight = ops.cast(total, dtype), ops.cast(weight, dtype)
        some = ops.not_equal(weight, 0)
        return ops.where(some, total / ops.where(some, weight, ops.ones_like(weight)), ops.zeros_like(total))


class LossOutput(NamedTuple):
    """What every loss of this library returns.

    Args:
        primary: `WeightedSum` to be minimised. Trainers differentiate its `total` and divide once.
        metrics: `dict[str, WeightedSum | scalar]` to be logged. A plain scalar counts with weight 1
            for each micro-batch.

    Example:

    ```python
    from keras_diffusion_opd.losses import LossOutput, WeightedSum

    output = LossOutput(WeightedSum(3.0, 2.0), {"distill/soft_loss": WeightedSum(1.0, 2.0)})
    assert float(output.primary.mean()) == 1.5
    ```
    """

    primary: WeightedSum
    metrics: Mapping[str, Any]
