"""Losses of whole samples: one value a row, weights a row, rows of weight 0 that nothing is computed from."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import shape_of
from keras_diffusion_opd.data.log_space import computation_dtype
from keras_diffusion_opd.losses.weighted_sum import WeightedSum


def column(rows: Any, like: Any) -> Any:
    """`rows` (B,) with as many axes as `like` (B, ...), to be broadcast against it."""
    for _ in range(len(like.shape) - len(rows.shape)):
        rows = ops.expand_dims(rows, -1)
    return rows


def row_mean(values: Any) -> Any:
    """The mean over everything but the first axis: float (B, ...) -> (B,)."""
    axes = tuple(range(1, len(values.shape)))
    return ops.mean(values, axis=axes) if axes else values


class SampleRows:
    """Arrays of a batch of samples, in float32 or better, with the rows of weight 0 replaced by zeros.

    Args:
        arrays: by name, all float (B, ...) of one shape.
        sample_weight: None for ones, or real (B,), at least 0.

    Raises:
        ValueError: shapes that differ, no axis of samples, weights of another shape, negative or not finite.
    """

    def __init__(self, arrays: Mapping[str, Any], sample_weight: Any = None) -> None:
        tensors = {name: ops.convert_to_tensor(array) for name, array in arrays.items()}
        first = next(iter(tensors))
        self.shape = shape_of(tensors[first])
        if not self.shape:
            raise ValueError(f"`{first}` must have an axis of samples first, (B, ...). Received a scalar.")
        for name, array in tensors.items():
            if shape_of(array) != self.shape:
                raise ValueError(
                    f"`{name}` must have the shape of `{first}`, {self.shape}: nothing broadcasts. Received "
                    f"{shape_of(array)}."
                )
        self.dtype = computation_dtype(*tensors.values())
        self.weights = self._weights(sample_weight, tensors[first])
        self.active = ops.not_equal(self.weights, 0)
        self._arrays = {name: self.silenced(array) for name, array in tensors.items()}

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def _weights(self, sample_weight: Any, like: Any) -> Any:
        if sample_weight is None:
            return ops.ones(ops.shape(like)[:1], self.dtype)
        weights = ops.convert_to_tensor(sample_weight)
        self._require_rows("sample_weight", weights)
        if (values := backend.concrete(weights)) is not None:
            values = values.astype("float64")
            wrong = ~np.isfinite(values) | (values < 0)
            if np.any(wrong):
                row = int(np.argmax(wrong))
                raise ValueError(f"`sample_weight` must be finite and at least 0. Received {values[row]} in row {row}.")
        return ops.stop_gradient(ops.cast(weights, self.dtype))

    def _require_rows(self, name: str, values: Any) -> None:
        if shape_of(values) != self.shape[:1]:
            raise ValueError(
                f"`{name}` must have one value for each sample, shape {self.shape[:1]}. Received {shape_of(values)}."
            )

    def silenced(self, values: Any) -> Any:
        """`values` (B, ...) in the dtype of the computation, 0 in rows of weight 0: selected, so NaN there is gone."""
        values = ops.cast(values, self.dtype)
        return ops.where(column(self.active, values), values, ops.zeros_like(values))

    def per_row(self, name: str, values: Any, low: float | None = None, high: float | None = None) -> Any:
        """(B,) `values`, silenced; ValueError where they can be read and an active one is not within [low, high]."""
        values = ops.convert_to_tensor(values)
        self._require_rows(name, values)
        values = self.silenced(values)
        if (read := backend.concrete(values)) is not None:
            wrong = ~np.isfinite(read)
            if low is not None:
                wrong |= ~(read >= low)
            if high is not None:
                wrong |= ~(read <= high)
            if np.any(wrong):
                row = int(np.argmax(wrong))
                within = "be finite" if low is None and high is None else f"lie in [{low}, {high}]"
                raise ValueError(f"`{name}` must {within}. Received {read[row]} in row {row}.")
        return values

    def sum(self, values: Any, factor: Any = None) -> WeightedSum:
        """The weighted sum of (B,) `values`, each weight times `factor` (B,); what has weight 0 does not enter."""
        weights = self.weights if factor is None else self.weights * factor
        values = ops.where(ops.not_equal(weights, 0), values, ops.zeros_like(values))
        return WeightedSum(ops.sum(weights * values), ops.sum(weights))
