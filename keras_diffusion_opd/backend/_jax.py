"""JAX: see the package's docstring."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np


def read_values(x: Any) -> np.ndarray | None:
    """The values of `x` as NumPy, or None for a tracer, an abstract array or a shard of something larger."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_fully_addressable:
        return np.asarray(x)
    return None


def is_traced(x: Any) -> bool:
    """Whether `x` is a tracer: an array of a program that is being made."""
    return isinstance(x, jax.core.Tracer)


def is_argument(variable: Any) -> bool:
    """Whether the value of `variable` is an argument of the program that is being made, and no constant of it."""
    return isinstance(variable.value, jax.core.Tracer)


def float64_enabled() -> bool:
    """Whether this process keeps float64 (`jax_enable_x64`)."""
    return bool(jax.config.jax_enable_x64)


def register_pytree(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[tuple[str, Any]], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
) -> None:
    """Make `cls` a JAX pytree node. `flatten(x)` gives `((name, child), ...)` and static data."""

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, static = flatten(x)
        return [(jax.tree_util.GetAttrKey(name), child) for name, child in children], static

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)


def compiled(function: Callable[..., Any], models: Sequence[Any] = ()) -> Callable[..., Any]:
    """`function(*args)` under `jax.jit`, with the variables of `models` passed in as arguments.

    Changes that the function makes to variables (counters, random seeds) are dropped: inference is pure.
    """
    variables = list({id(v): v for v in itertools.chain(*(m.variables for m in models))}.values())

    @jax.jit
    def program(values: list[Any], args: tuple[Any, ...]) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*args)

    def call(*args: Any) -> Any:
        return program([v.value for v in variables], args)

    return call


def wide_product(a: Any, b: Any, *, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """See the package's docstring."""
    common = jnp.promote_types(a.dtype, b.dtype)
    over = (((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ()))
    wide = "float64" if common == jnp.float64 else "float32"
    return jax.lax.dot_general(a.astype(common), b.astype(common), over, preferred_element_type=wide)


def product_operand(x: Any) -> Any:
    """See the package's docstring."""
    return x
