"""The few things that `keras.ops` cannot say, behind one interface for the three backends.

- `concrete(x)`: the values of an array that is really there on this process, else None. Inside
  `with values_hidden():` always None: a trainer checks values on the device, once, instead.
- `register_pytree(cls, flatten, unflatten)`: makes a dataclass a node of the backend's trees.
- `compiled(function, models)`: `function` compiled for inference; the weights of `models` are arguments
  of the compiled program, so that an update of the weights is seen and never retraces.
- `float64_enabled()`: whether float64 stays float64.
- `wide_product(a, b, *, transpose_a=False, transpose_b=False)`: the product of two matrices with sums and
  result in float32 (float64 where one has it), whatever their dtypes: not a low-precision product, widened.
- `product_operand(x)`: a matrix that takes part in many such products, ready for them: widened once where the
  backend cannot multiply low precision into float32, as it is elsewhere.
- `is_traced(x)`: whether `x` belongs to a program that is being made, which would keep other arrays as constants.
- `is_argument(variable)`: whether a program that is being made reads the variable anew each time it runs.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

BACKEND: str = keras.backend.backend()

if BACKEND == "jax":
    from keras_diffusion_opd.backend._jax import (
        compiled,
        float64_enabled,
        is_argument,
        is_traced,
        product_operand,
        read_values,
        register_pytree,
        wide_product,
    )
elif BACKEND == "tensorflow":
    from keras_diffusion_opd.backend._tensorflow import (
        compiled,
        float64_enabled,
        is_argument,
        is_traced,
        product_operand,
        read_values,
        register_pytree,
        wide_product,
    )
elif BACKEND == "torch":
    from keras_diffusion_opd.backend._torch import (
        compiled,
        float64_enabled,
        is_argument,
        is_traced,
        product_operand,
        read_values,
        register_pytree,
        wide_product,
    )
else:
    raise ImportError(
        f"keras_diffusion_opd needs a backend that can train: jax, tensorflow or torch. Received {BACKEND!r}. "
        "Set the environment variable KERAS_BACKEND before importing keras."
    )

_hidden: contextvars.ContextVar[bool] = contextvars.ContextVar("values_hidden", default=False)


def concrete(x: Any) -> np.ndarray | None:
    """The values of `x` as NumPy; None for a tracer, an abstract array, or a shard of something larger."""
    return None if _hidden.get() else read_values(x)


@contextlib.contextmanager
def values_hidden() -> Iterator[None]:
    """Within it no value is read on the host: validation is of structure, shapes and dtypes only."""
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


__all__ = [
    "BACKEND",
    "compiled",
    "concrete",
    "float64_enabled",
    "is_argument",
    "is_traced",
    "product_operand",
    "register_pytree",
    "values_hidden",
    "wide_product",
]
