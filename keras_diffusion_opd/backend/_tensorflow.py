"""TensorFlow: see the package's docstring."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def read_values(x: Any) -> np.ndarray | None:
    """The values of `x` as NumPy, or None for a symbolic tensor."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, tf.Tensor | tf.Variable) and hasattr(x, "numpy") and tf.executing_eagerly():
        return np.asarray(x.numpy())
    return None


def is_traced(x: Any) -> bool:
    """Whether `x` is a symbolic tensor of a graph that is being made."""
    return isinstance(x, tf.Tensor) and not hasattr(x, "numpy")


def is_argument(variable: Any) -> bool:
    """A graph reads variables when it runs."""
    del variable
    return True


def float64_enabled() -> bool:
    """TensorFlow keeps float64."""
    return True


def register_pytree(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[tuple[str, Any]], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
) -> None:
    """`tf.nest` has no open registry: the classes travel through `as_fit()` instead."""
    del cls, flatten, unflatten


def compiled(function: Callable[..., Any], models: Sequence[Any] = ()) -> Callable[..., Any]:
    """`function(*args)` as a `tf.function`, which reads variables when it runs."""
    del models
    graph = tf.function(tf.autograph.experimental.do_not_convert(function), reduce_retracing=True)

    def call(*args: Any) -> Any:
        tensors = tf.nest.map_structure(
            lambda x: tf.convert_to_tensor(x) if isinstance(x, np.ndarray | np.generic | float | int) else x, args
        )
        return graph(*tensors)

    return call


def wide_product(a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """See the package's docstring."""
    wide = tf.float64 if tf.float64 in (a.dtype, b.dtype) else tf.float32
    return tf.matmul(tf.cast(a, wide), tf.cast(b, wide), transpose_a=transpose_a, transpose_b=transpose_b)


def product_operand(x: Any) -> Any:
    """See the package's docstring."""
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
