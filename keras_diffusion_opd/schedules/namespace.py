"""The functions that a formula is written in: NumPy on the host, `keras.ops` on a device."""

from typing import Any

import keras
import numpy as np


def namespace_of(t: Any) -> tuple[Any, Any]:
    """(NumPy, float64 array) for host values, (keras.ops, tensor) for tensors."""
    if isinstance(t, np.ndarray | np.generic | float | int | list | tuple):
        return np, np.asarray(t, "float64")
    return keras.ops, t
