"""PyTorch: see the package's docstring."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch.utils import _pytree


def read_values(x: Any) -> np.ndarray | None:
    """The values of `x` as NumPy, or None while torch traces or on the meta device."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, torch.Tensor) and x.device.type != "meta" and not torch.compiler.is_compiling():
        x = x.detach().cpu()
        return np.asarray((x.float() if x.dtype is torch.bfloat16 else x).numpy())
    return None


def is_traced(x: Any) -> bool:
    """PyTorch runs as it goes, and `torch.compile` takes what it closes over as inputs."""
    del x
    return False


def is_argument(variable: Any) -> bool:
    """Every run reads variables anew."""
    del variable
    return True


def float64_enabled() -> bool:
    """PyTorch keeps float64."""
    return True


def register_pytree(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[tuple[str, Any]], Any]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
) -> None:
    """Make `cls` a node of torch's own trees (torch.export, torch.func)."""

    def flatten_children(x: Any) -> tuple[list[Any], Any]:
        children, static = flatten(x)
        return [child for _, child in children], static

    _pytree.register_pytree_node(cls, flatten_children, lambda children, static: unflatten(static, list(children)))


def compiled(function: Callable[..., Any], models: Sequence[Any] = ()) -> Callable[..., Any]:
    """`function(*args)` without gradients. Eager: torch has nothing to gain from a trace of small steps.

    NumPy arrays become tensors first: a Keras model does not take a dict that holds both.
    """
    del models

    def call(*args: Any) -> Any:
        tensors = keras.tree.map_structure(
            lambda x: keras.ops.convert_to_tensor(x) if isinstance(x, np.ndarray | np.generic) else x, args
        )
        with torch.no_grad():
            return function(*tensors)

    return call


def wide_product(a: torch.Tensor, b: torch.Tensor, *, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """See the package's docstring."""
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return (a.T if transpose_a else a).to(wide) @ (b.T if transpose_b else b).to(wide)


def product_operand(x: torch.Tensor) -> torch.Tensor:
    """See the package's docstring."""
    return x if x.dtype is torch.float64 else x.to(torch.float32)
