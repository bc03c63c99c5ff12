"""`TimeEmbedding`: what a denoiser is told of the time."""

import math
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.validation import finite_real, positive_int


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TimeEmbedding(keras.layers.Layer):
    """Sines and cosines of the time at many frequencies, then two dense layers.

    The phase is computed in float32 whatever the dtype policy: in bfloat16 neighbouring times would fall together.

    Args:
        units: int >= 1, width of the result.
        frequencies: int >= 1; they fall from `scale` to `scale / max_period` geometrically.
        scale: float > 0, what times in [0, 1] are multiplied with.
        max_period: float > 1.
        **kwargs: `name`, `dtype`, `trainable`, as for any layer.

    Raises:
        ValueError, TypeError: an argument out of range.

    Source: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762; Peebles and Xie, "Scalable Diffusion
    Models with Transformers", 2022, arXiv:2212.09748.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.layers import TimeEmbedding

    embedded = TimeEmbedding(8)(np.array([0.0, 0.5, 1.0], "float32"))
    assert tuple(embedded.shape) == (3, 8)
    ```
    """

    def __init__(
        self, units: int, *, frequencies: int = 64, scale: float = 1000.0, max_period: float = 10000.0, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.units = positive_int("units", units)
        self.frequencies = positive_int("frequencies", frequencies)
        self.scale, self.max_period = finite_real("scale", scale), finite_real("max_period", max_period)
        if self.scale <= 0 or self.max_period <= 1:
            raise ValueError(
                f"`scale` must be above 0 and `max_period` above 1. Received {self.scale} and {self.max_period}."
            )
        self.autocast = False  # the time itself must not be rounded
        self.first = keras.layers.Dense(self.units, activation="silu", dtype=self.dtype_policy, name="first")
        self.second = keras.layers.Dense(self.units, dtype=self.dtype_policy, name="second")

    def build(self, input_shape: Any) -> None:
        """Create the dense layers' weights."""
        self.first.build((*input_shape, 2 * self.frequencies))
        self.second.build((*input_shape, self.units))
        self.built = True

    def call(self, time: Any) -> Any:
        """Embed times.

        Args:
            time: float (B,), in [0, 1].

        Returns:
            float (B, units), in the policy's compute dtype.
        """
        time = ops.cast(time, "float32")
        steps = ops.arange(self.frequencies, dtype="float32") / max(self.frequencies - 1, 1)
        phase = ops.expand_dims(time, -1) * (self.scale * ops.exp(-math.log(self.max_period) * steps))
        waves = ops.concatenate([ops.cos(phase), ops.sin(phase)], axis=-1)
        return self.second(self.first(ops.cast(waves, self.compute_dtype)))

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, ...]:
        """(B, units)."""
        return (*input_shape, self.units)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {name: getattr(self, name) for name in ("units", "frequencies", "scale", "max_period")}
        return {**super().get_config(), **own}
