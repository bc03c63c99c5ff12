"""An exponential moving average of what is trained, kept where checkpoints and compiled steps find it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops


class _Held:
    """Variables of others: Keras would take those in a list for this layer's own."""

    def __init__(self, variables: list[Any]) -> None:
        self.variables = list(variables)


class WeightAverage(keras.layers.Layer):
    """`average <- decay average + (1 - decay) weight` after every update, starting from the weights themselves.

    Its weights are not trained, so that they are saved, resumed and carried through compiled steps as any others.

    Args:
        variables: those that are trained.
        decay: float in [0, 1).
    """

    def __init__(self, variables: list[Any], decay: float, name: str = "weight_average") -> None:
        super().__init__(name=name, trainable=False, dtype="float32")
        self.decay = float(decay)
        self._sources = _Held(variables)
        self.averages = [
            self.add_weight(
                shape=v.shape, initializer="zeros", trainable=False, dtype=_dtype(v), name=f"average_{index}"
            )
            for index, v in enumerate(variables)
        ]
        for average, variable in zip(self.averages, variables, strict=True):
            average.assign(_copy(variable))
        self.built = True

    def advance(self) -> None:
        """One step of the average: in the compiled step, after an update."""
        for average, variable in zip(self.averages, self._sources.variables, strict=True):
            value = ops.cast(ops.convert_to_tensor(variable), average.dtype)
            average.assign(average.value + (1.0 - self.decay) * (value - average.value))

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """The averages in place of the weights, which come back whatever happens."""
        before = [_copy(v) for v in self._sources.variables]
        try:
            for average, variable in zip(self.averages, self._sources.variables, strict=True):
                variable.assign(_copy(average))
            yield
        finally:
            for value, variable in zip(before, self._sources.variables, strict=True):
                variable.assign(value)


def _dtype(variable: Any) -> str:
    """float32 or wider: in bfloat16 small steps would be lost."""
    return "float64" if keras.backend.standardize_dtype(variable.dtype) == "float64" else "float32"


def _copy(variable: Any) -> np.ndarray:
    """The value, in memory of its own: two variables of one buffer could not both be given away to a step."""
    return np.array(ops.convert_to_numpy(variable.value))
