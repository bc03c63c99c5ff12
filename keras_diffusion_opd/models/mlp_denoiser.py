"""`MLPDenoiser`: a class-conditional denoiser of small images or vectors, for demos and tests."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.layers.time_embedding import TimeEmbedding
from keras_diffusion_opd.validation import positive_int


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class MLPDenoiser(keras.Model):
    """A residual network of dense layers from noised samples, time and class to a velocity.

    The last layer begins at 0, so that a new model says velocity 0. Built when it is made.

    Args:
        sample_shape: tuple of int, of one sample.
        num_classes: int >= 1. The class id `num_classes` is the null class, for guidance.
        width: int >= 1, of the residual stream.
        depth: int >= 1, residual blocks.
        frequencies: int >= 1, of the time embedding.
        **kwargs: `name`, `dtype`, as for any model.

    Raises:
        ValueError, TypeError: an argument out of range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.models import MLPDenoiser

    model = MLPDenoiser((8, 8, 1), 10, width=16, depth=1)
    x = np.ones((2, 8, 8, 1), "float32")
    velocity = model({"x": x, "time": np.array([0.5, 1.0], "float32"), "label": np.array([3, 10])})  # 10: no class
    assert tuple(velocity.shape) == (2, 8, 8, 1)
    ```
    """

    def __init__(
        self,
        sample_shape: Sequence[int],
        num_classes: int,
        *,
        width: int = 160,
        depth: int = 4,
        frequencies: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.autocast = False  # the time itself must not be rounded
        self.sample_shape = tuple(positive_int("sample_shape", size) for size in sample_shape)
        self.num_classes = positive_int("num_classes", num_classes)
        self.width, self.depth = positive_int("width", width), positive_int("depth", depth)
        self.frequencies = positive_int("frequencies", frequencies)
        policy, size = self.dtype_policy, math.prod(self.sample_shape)
        self.time = TimeEmbedding(width, frequencies=frequencies, scale=100.0, dtype=policy, name="time")
        self.label = keras.layers.Embedding(num_classes + 1, width, dtype=policy, name="label")
        self.entry = keras.layers.Dense(width, dtype=policy, name="entry")
        self.norms, self.expands, self.contracts = [], [], []
        for index in range(depth):
            self.norms.append(keras.layers.LayerNormalization(dtype=policy, name=f"norm_{index}"))
            self.expands.append(keras.layers.Dense(width, "silu", dtype=policy, name=f"expand_{index}"))
            self.contracts.append(keras.layers.Dense(width, dtype=policy, name=f"contract_{index}"))
        self.exit = keras.layers.Dense(size, kernel_initializer="zeros", dtype=policy, name="exit")
        self.time.build((None,))
        self.label.build((None,))
        self.entry.build((None, size))
        for layer in (*self.norms, *self.expands, *self.contracts, self.exit):
            layer.build((None, width))
        self.built = True

    def call(self, inputs: Mapping[str, Any]) -> Any:
        """The velocity.

        Args:
            inputs: `"x"`: float (B, *sample_shape). `"time"`: float32 (B,), 0 = data, 1 = noise. `"label"`: int (B,),
                in [0, num_classes].

        Returns:
            float of the shape of x, in the policy's compute dtype.
        """
        x = ops.cast(inputs["x"], self.compute_dtype)
        condition = self.time(inputs["time"]) + self.label(inputs["label"])
        hidden = self.entry(ops.reshape(x, (-1, math.prod(self.sample_shape))))
        for norm, expand, contract in zip(self.norms, self.expands, self.contracts, strict=True):
            hidden = hidden + contract(expand(norm(hidden) + condition))
        return ops.reshape(self.exit(hidden), (-1, *self.sample_shape))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {name: getattr(self, name) for name in ("num_classes", "width", "depth", "frequencies")}
        policy = keras.saving.serialize_keras_object(self.dtype_policy)
        return {"sample_shape": list(self.sample_shape), **own, "name": self.name, "dtype": policy}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "MLPDenoiser":
        """The inverse of `get_config`."""
        dtype = keras.saving.deserialize_keras_object(config["dtype"], custom_objects=custom_objects)
        return cls(**{**config, "dtype": dtype})
