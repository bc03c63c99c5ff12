"""What is drawn for a row in training: a function of (seed, step, sample id), computed on the device."""

import math
from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd.counter_random import split_words, threefry2x32, uniform32

TIMES = ("logit_normal", "uniform")
_TRAIN, _EVALUATE = 0, 1
_TIME, _DROP, _NOISE = 0, 1, 2


class FlowDraws:
    """Noise, time and class dropout of the rows of a micro-batch.

    Args:
        seed: int.
        step: None while evaluating (every row then has its own fixed draws), or int scalar: the update.
        sample_ids: int32 (B, 2).
    """

    def __init__(self, seed: int, step: Any, sample_ids: Any) -> None:
        low, high = split_words(np.array([seed], "int64"))
        number = ops.cast(0 if step is None else step, "int32")
        stream = ops.full((1,), _EVALUATE if step is None else _TRAIN, "int32")
        key = (ops.convert_to_tensor(low), ops.convert_to_tensor(high))
        of_step = threefry2x32(ops, key, (ops.reshape(number, (1,)), stream))
        ids = ops.cast(sample_ids, "int32")
        self._keys = threefry2x32(ops, of_step, (ids[:, 0], ids[:, 1]))

    def _uniforms(self, stream: int, count: int) -> tuple[Any, Any]:
        """Two float32 (B, count) in (0, 1]."""
        key = (ops.expand_dims(self._keys[0], 1), ops.expand_dims(self._keys[1], 1))
        index = ops.expand_dims(ops.arange(count, dtype="int32"), 0)
        first, second = threefry2x32(ops, key, (index, ops.full_like(index, stream)))
        return uniform32(ops, first), uniform32(ops, second)

    def _normals(self, stream: int, count: int) -> Any:
        """float32 (B, count), standard normal, by pairs (Box and Muller, 1958)."""
        first, second = self._uniforms(stream, -(-count // 2))
        radius, angle = ops.sqrt(-2.0 * ops.log(first)), (2.0 * math.pi) * second
        return ops.concatenate([radius * ops.cos(angle), radius * ops.sin(angle)], axis=1)[:, :count]

    def times(self, kind: str) -> Any:
        """float32 (B,) in [0, 1]: `"uniform"`, or `"logit_normal"` with mean 0 and deviation 1."""
        if kind == "uniform":
            return self._uniforms(_TIME, 1)[0][:, 0]
        return ops.sigmoid(self._normals(_TIME, 1)[:, 0])

    def noise(self, like: Any) -> Any:
        """Standard normal, of the shape and dtype of `like` (B, ...)."""
        shape = tuple(like.shape[1:])
        flat = self._normals(_NOISE, math.prod(shape))
        return ops.cast(ops.reshape(flat, (-1, *shape)), like.dtype)

    def dropped(self, probability: float) -> Any:
        """bool (B,): whether the row loses its conditions."""
        return self._uniforms(_DROP, 1)[0][:, 0] <= probability
