"""The few things that `keras.ops` cannot say, behind one interface for the three backends.

- `concrete(x)`: the values of an array that is really there on this process, else None.
- `register_pytree(cls, flatten, unflatten)`: makes a dataclass a node of the backend's trees.
- `compiled(function, models)`: `function` compiled for inference; the weights of `models` are arguments
  of the compiled program, so that an update of the weights is seen and never retraces.
- `float64_enabled()`: whether float64 stays float64.
"""

import keras

BACKEND: str = keras.backend.backend()

if BACKEND == "jax":
    from keras_diffusion_opd.backend._jax import compiled, concrete, float64_enabled, register_pytree
elif BACKEND == "tensorflow":
    from keras_diffusion_opd.backend._tensorflow import compiled, concrete, float64_enabled, register_pytree
elif BACKEND == "torch":
    from keras_diffusion_opd.backend._torch import compiled, concrete, float64_enabled, register_pytree
else:
    raise ImportError(
        f"keras_diffusion_opd needs a backend that can train: jax, tensorflow or torch. Received {BACKEND!r}. "
        "Set the environment variable KERAS_BACKEND before importing keras."
    )

__all__ = ["BACKEND", "compiled", "concrete", "float64_enabled", "register_pytree"]
