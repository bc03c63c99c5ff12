"""What counts as an array, and the static facts about one: shape, dtype, kind."""

from collections.abc import Iterator
from typing import Any

import keras

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
)


def is_array(x: Any) -> bool:
    """Whether `x` has a shape and a dtype: NumPy, a backend's tensor or tracer, or an abstract array."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, list | tuple | dict)


def require_array(name: str, x: Any) -> None:
    """TypeError unless `x` is an array. Python lists are never taken: their dtype would be a guess."""
    if not is_array(x):
        raise TypeError(
            f"`{name}` must be a NumPy array or a tensor of the backend (an abstract array such as "
            f"jax.ShapeDtypeStruct or keras.KerasTensor also serves). Received {type(x).__name__}: "
            f"{_short(x)}. Wrap it in numpy.asarray(..., dtype=...)."
        )


def shape_of(x: Any) -> tuple[int | None, ...]:
    """The static shape; None where it is unknown (TensorFlow graphs, symbolic Keras tensors)."""
    shape = x.shape
    if getattr(shape, "rank", 0) is None:
        raise ValueError("The rank of an array must be known. Received a tensor of unknown rank; set its shape.")
    return tuple(None if d is None else int(d) for d in shape)


def dtype_of(x: Any) -> str:
    """The dtype's name, the same on every backend; NumPy's own name for what a backend does not have."""
    try:
        return str(keras.backend.standardize_dtype(x.dtype))
    except (ValueError, TypeError):
        return str(x.dtype)


def is_integer(x: Any) -> bool:
    """Whether the dtype is a signed or unsigned integer (bool is not)."""
    return dtype_of(x) in _INTEGERS


def is_floating(x: Any) -> bool:
    """Whether the dtype is a floating-point one."""
    return dtype_of(x) in _FLOATS


def is_real(x: Any) -> bool:
    """Whether the dtype is bool, integer or floating (not complex, string or object)."""
    return dtype_of(x) == "bool" or is_integer(x) or is_floating(x)


def same_shape(a: tuple[int | None, ...], b: tuple[int | None, ...]) -> bool:
    """Whether two static shapes can be the same; an unknown size agrees with anything."""
    return len(a) == len(b) and all(x is None or y is None or x == y for x, y in zip(a, b, strict=True))


def leaves_with_paths(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists, tuples and named tuples, each with a readable path."""
    if isinstance(tree, dict):
        for key in tree:
            yield from leaves_with_paths(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for field in tree._fields:
            yield from leaves_with_paths(getattr(tree, field), f"{path}.{field}")
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from leaves_with_paths(child, f"{path}[{index}]")
    elif tree is not None:
        yield path, tree


def map_leaves(function: Any, tree: Any) -> Any:
    """`function` of every leaf of nested dicts, lists, tuples and named tuples, in the same structure."""
    if isinstance(tree, dict):
        return type(tree)((key, map_leaves(function, child)) for key, child in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, child) for child in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(function, child) for child in tree)
    return None if tree is None else function(tree)


def _short(x: Any) -> str:
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."
