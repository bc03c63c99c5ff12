"""Copies of models: weights of their own, the same outputs."""

from typing import Any

import keras
from keras import ops


def copy_model(model: Any, *, name: str | None = None) -> Any:
    """A frozen copy of a built Keras model.

    Args:
        model: a built `keras.Model` that serialises (`get_config`).
        name: None for the model's own name.

    Returns:
        A model of the same class and configuration with weights of its own, equal now, that are not trained.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: it is not built, or does not serialise into a model with the same weights.

    Example:

    ```python
    import keras, numpy as np
    from keras_diffusion_opd.models import copy_model

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    old = copy_model(model)
    model.layers[0].kernel.assign(np.zeros((3, 2)))
    assert np.abs(old.get_weights()[0]).sum() > 0 and not old.trainable_variables
    ```
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a keras.Model. Received {type(model).__name__}.")
    if not model.built:
        raise ValueError("`model` must be built before it is copied. Call it on an input first.")
    try:
        config = keras.saving.serialize_keras_object(model)
        config.pop("compile_config", None)
        copied = keras.saving.deserialize_keras_object(config, safe_mode=False)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"`model` of class {type(model).__name__} cannot be copied, since it does not serialise: {error} Give it "
            "get_config()/from_config() and keras.saving.register_keras_serializable()."
        ) from error
    ours, theirs = ([tuple(v.shape) for v in m.variables] for m in (copied, model))
    if ours != theirs:
        raise ValueError(
            f"`model` of class {type(model).__name__} comes back from its config with {len(ours)} weights, not "
            f"{len(theirs)} of the same shapes: build its weights in the constructor or in build()."
        )
    for variable, source in zip(copied.variables, model.variables, strict=True):
        variable.assign(ops.copy(source.value))  # JAX would share the buffer, and donate it twice
    copied.trainable = False
    return copied
