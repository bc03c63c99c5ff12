"""Nests of arrays: to NumPy, split into samples, compared. What differs is shown from both sides."""

from typing import Any

import keras
import numpy as np
from keras import ops


def to_numpy(nest: Any) -> Any:
    """`nest` with every tensor as NumPy; half precision becomes float32, which NumPy can compute with."""

    def convert(x: Any) -> np.ndarray:
        if keras.backend.standardize_dtype(x.dtype) in ("bfloat16", "float16"):
            x = ops.cast(x, "float32")
        return np.asarray(ops.convert_to_numpy(x))

    return keras.tree.map_structure(convert, nest)


def to_dtype(nest: Any, dtype: str) -> Any:
    """`nest` as tensors, the floating ones of `dtype`."""

    def convert(x: Any) -> Any:
        floating = np.issubdtype(np.asarray(x).dtype, np.floating)
        return ops.convert_to_tensor(x, dtype=dtype if floating else None)

    return keras.tree.map_structure(convert, nest)


def symbols_of(nest: Any) -> Any:
    """A `keras.Input` with a free batch for each array of `nest`; in a mapping, named after its key."""

    def convert(x: Any, name: str | None = None) -> Any:
        return keras.Input(np.shape(x)[1:], dtype=keras.backend.standardize_dtype(x.dtype), name=name)

    if isinstance(nest, dict) and all(hasattr(x, "dtype") for x in nest.values()):
        return {name: convert(x, name) for name, x in nest.items()}
    return keras.tree.map_structure(convert, nest)


def rows(nest: Any, index: Any) -> Any:
    """The samples `index` (a slice or an integer array) of every array of `nest`."""
    return keras.tree.map_structure(lambda x: np.asarray(x)[index], nest)


def batch_of(nest: Any) -> int:
    """The number of samples: the length of the first axis, which all arrays must share."""
    sizes = {np.shape(x)[0] for x in keras.tree.flatten(nest)}
    assert len(sizes) == 1, f"the arrays must share their first axis. Received lengths {sorted(sizes)}."
    return int(sizes.pop())


def require_finite(nest: Any, what: str) -> None:
    """Every value of `nest` is finite."""
    for x in keras.tree.flatten(to_numpy(nest)):
        count = int(np.sum(~np.isfinite(x)))
        assert not count, f"{what} must be finite. Of {x.size} values, {count} are NaN or infinite."


def require_close(received: Any, expected: Any, what: str, tolerance: float) -> None:
    """The nests agree within `tolerance`, relative to the largest expected value; 0 asks for equality."""
    keras.tree.assert_same_structure(received, expected)
    pairs = zip(keras.tree.flatten(to_numpy(received)), keras.tree.flatten(to_numpy(expected)), strict=True)
    for got, want in pairs:
        assert got.shape == want.shape, f"{what}: expected shape {want.shape}, received {got.shape}."
        if got.size == 0 or np.array_equal(got, want, equal_nan=want.dtype.kind == "f"):
            continue
        difference = np.abs(got.astype("float64") - want.astype("float64"))
        allowed = tolerance * max(1.0, float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want))))
        if not np.all(difference <= allowed):
            at = np.unravel_index(np.argmax(np.nan_to_num(difference, nan=np.inf)), got.shape)
            place = f" at {tuple(map(int, at))}" if at else ""
            raise AssertionError(
                f"{what}: expected {want[at]:.8g}{place}, received {got[at]:.8g}; they may differ by {allowed:.2g}."
            )
