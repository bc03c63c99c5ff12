"""Calling a model for its logits: without dropout, built, and with an output that is checked."""

from collections.abc import Callable, Collection
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.data.arrays import dtype_of, is_array, is_floating, same_shape, shape_of


def for_inference(name: str, model: Any) -> tuple[Callable[[Any], Any], list[Any]]:
    """How to call `model` for inference, and the list of models whose variables that reads.

    Args:
        name: of the argument, for the error.
        model: a Keras model or layer, called with `training=False`, or a function that holds no variables.

    Raises:
        TypeError: it cannot be called.
    """
    is_layer = isinstance(model, keras.layers.Layer)
    if isinstance(model, type) or not (is_layer or callable(model)):
        raise TypeError(
            f"`{name}` must be a Keras model or layer, or a function from its inputs to logits. Received {model!r} of "
            f"type {type(model).__name__}."
        )
    if is_layer and model._call_has_training_arg:
        return lambda inputs: model(inputs, training=False), [model]
    return model, [model] if is_layer else []


def build_for(model: Any, inputs: Any) -> None:
    """Create the weights of a layer that has none yet: inside a compiled function they would be tracers."""
    if isinstance(model, keras.layers.Layer) and not model.built:
        model(inputs)


def require_logits(name: str, logits: Any, rows: int | None, length: int | None) -> None:
    """Raise unless what the model `name` gave is float (rows, length, V), V >= 1: also while it is traced."""
    what = f"`{name}` must give logits of shape [rows, length, vocabulary]"
    if not is_array(logits):
        raise TypeError(f"{what}, one tensor. Received {type(logits).__name__}. Wrap it in a function that picks them.")
    shape = shape_of(logits)
    if len(shape) != 3 or not same_shape(shape[:2], (rows, length)) or shape[2] == 0:
        raise ValueError(
            f"{what}, here ({rows}, {length}, vocabulary): position i scores token i. Received shape {shape}."
        )
    if not is_floating(logits):
        raise TypeError(f"{what} in a floating dtype. Received {dtype_of(logits)}. Probabilities and ids will not do.")


def batch_conditions(
    conditions: dict[str, Any] | None, rows: int, reserved: Collection[str | None]
) -> dict[str, np.ndarray]:
    """The conditions as arrays of `rows` rows, none under a `reserved` name; else TypeError or ValueError."""
    if conditions is not None and not isinstance(conditions, dict):
        raise TypeError(f"`conditions` must be None or a dict of arrays by name. Received {type(conditions).__name__}.")
    arrays = {name: np.asarray(value) for name, value in (conditions or {}).items()}
    for name, array in arrays.items():
        if name in reserved:
            raise ValueError(
                f"`conditions` must not hold {name!r}: that input is given by the sampler or the corruption."
            )
        if array.ndim == 0 or array.shape[0] != rows:
            raise ValueError(f"`conditions[{name!r}]` must have {rows} rows. Received shape {array.shape}.")
    return arrays


def exclude_id(logits: Any, excluded_id: int | None) -> Any:
    """The logits with `excluded_id` at minus infinity: a model that scores its mask token never predicts it.

    Losses, scores, bounds and samplers agree with each other where all of them exclude the same id: the
    "substitution" of masked diffusion, whose other half (what is not masked stays as it is) follows from
    weights of 0.

    Args:
        logits: float (..., V).
        excluded_id: int, or None for none; at or beyond V it changes nothing.

    Returns:
        float (..., V).

    Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import exclude_id

    assert np.array(exclude_id(np.zeros((1, 3), "float32"), 2)).tolist() == [[0.0, 0.0, -np.inf]]
    ```
    """
    logits = ops.convert_to_tensor(logits)
    if excluded_id is None or excluded_id >= logits.shape[-1]:
        return logits
    excluded = ops.equal(ops.arange(logits.shape[-1]), excluded_id)
    return ops.where(excluded, ops.full_like(logits, -float("inf")), logits)
