"""The low-rank factors of many adapters at one layer, one choice of them for each sample."""

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class BankedSite(keras.layers.Layer):
    """What the adapters that each sample chose add to the outputs of one layer.

    `y[i] = sum over s of weights[i, s] * (x[i] A[slots[i, s]]) B[slots[i, s]]`, with the scale of each adapter
    folded into its B. The factors of a sample are gathered and multiplied as one matrix of rank
    `stack * max_rank`: the cost does not grow with the number of slots, the number of a slot changes no bit, and a
    slot of NaN reaches only the samples that chose it. Slot 0 is zeros. A rank below `max_rank` is padded with
    zeros, which changes nothing.

    Args:
        in_features: int, rows of the layer's matrix.
        out_features: int, columns of it.
        slots: int, adapters besides slot 0.
        max_rank: int, largest rank of an adapter.
        dora: bool, whether adapters may rescale the layer's own outputs (see `gain_of`).
        looks_up: bool, whether inputs are ids, as those of an embedding.
        name, dtype: as for any Keras layer.

    Call arguments:
        x: (batch, P, in_features), or int (batch, P) ids with `looks_up`.
        slots: int (batch, stack).
        weights: float (batch, stack); 0 leaves a slot unread.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv:2106.09685; for many at
    once, Sheng et al., "S-LoRA", 2023, arXiv:2311.03285.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.layers import BankedSite

    site = BankedSite(in_features=3, out_features=2, slots=4, max_rank=2)
    site.write(1, np.ones((3, 1), "float32"), 0.5 * np.ones((1, 2), "float32"))
    x = np.ones((2, 1, 3), "float32")
    y = site(x, np.array([[0], [1]]), np.array([[0.0], [1.0]], "float32"))
    assert np.allclose(y, [[[0.0, 0.0]], [[1.5, 1.5]]])
    ```
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        slots: int = 16,
        max_rank: int = 32,
        dora: bool = False,
        looks_up: bool = False,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.in_features, self.out_features = in_features, out_features
        self.slots, self.max_rank = slots, max_rank
        self.dora, self.looks_up = dora, looks_up
        self._allow_non_tensor_positional_args = True
        # Not cast to the compute dtype as they are: only what is gathered is.
        shared = {"initializer": "zeros", "trainable": False, "autocast": False}
        first = (in_features, max_rank) if looks_up else (max_rank, in_features)
        self.a = self.add_weight(name="a", shape=(slots + 1, *first), **shared)
        self.b = self.add_weight(name="b", shape=(slots + 1, max_rank, out_features), **shared)
        self.gain = self.add_weight(name="gain", shape=(slots + 1, out_features), **shared) if dora else None
        self.built = True

    def call(self, x: Any, slots: Any, weights: Any) -> Any:
        """See the class."""
        if self.looks_up:
            return self._looked_up(x, slots, weights)
        a = self._by_row(ops.take(self.a.value, slots, axis=0), x.dtype)  # (batch, stack * rank, in)
        hidden = ops.einsum("bpi,bri->bpr", x, a)
        return ops.einsum("bpr,bro->bpo", hidden, self._weighted_b(slots, weights, x.dtype))

    def reversed(self, x: Any, slots: Any, weights: Any) -> Any:
        """What is added to the logits of a table used in reverse: features (batch, P, out) -> (batch, P, in)."""
        hidden = ops.einsum("bpo,bro->bpr", x, self._weighted_b(slots, weights, x.dtype))
        a = ops.cast(ops.take(self.a.value, slots, axis=0), x.dtype)  # (batch, stack, in, rank)
        a = self._by_row(ops.transpose(a, (0, 1, 3, 2)), x.dtype)
        return ops.einsum("bpr,bri->bpi", hidden, a)

    def gain_of(self, slots: Any, weights: Any, dtype: Any) -> Any:
        """What DoRA multiplies the layer's own outputs with, less 1: (batch, 1, out).

        A slot holds `magnitude / |W + scale A B| - 1` for each column; 0 is plain LoRA.
        """
        assert self.gain is not None
        used = ops.expand_dims(weights, -1)
        gain = ops.take(self.gain.value, slots, axis=0) * ops.cast(used, self.gain.dtype)
        return ops.cast(ops.sum(ops.where(used == 0, ops.zeros_like(gain), gain), axis=1, keepdims=True), dtype)

    def write(self, slot: int, a: Any, b: Any, gain: Any = None) -> None:
        """Put the factors of an adapter into a slot; without them, zeros.

        Args:
            slot: int, 1 to `slots`.
            a: float (in_features, rank).
            b: float (rank, out_features), with the scale in it.
            gain: float (out_features,), or None for plain LoRA.
        """
        rank = a.shape[1]
        a, b = ops.convert_to_tensor(a, self.a.dtype), ops.convert_to_tensor(b, self.b.dtype)
        a = ops.pad(a, [(0, 0), (0, self.max_rank - rank)])
        self._put(self.a, slot, a if self.looks_up else ops.transpose(a))
        self._put(self.b, slot, ops.pad(b, [(0, self.max_rank - rank), (0, 0)]))
        if self.gain is not None:
            gain = ops.zeros((self.out_features,)) if gain is None else gain
            self._put(self.gain, slot, ops.convert_to_tensor(gain, self.gain.dtype))

    def clear(self, slot: int) -> None:
        """Put zeros into a slot."""
        self.write(slot, ops.zeros((self.in_features, 0)), ops.zeros((0, self.out_features)))

    def compute_output_shape(self, x_shape: Any, *_: Any) -> tuple[Any, ...]:
        """(batch, P, out_features)."""
        return (*x_shape[:2], self.out_features)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {name: getattr(self, name) for name in ("in_features", "out_features", "slots", "max_rank")}
        dtype = keras.saving.serialize_keras_object(self.dtype_policy)
        return {**own, "dora": self.dora, "looks_up": self.looks_up, "name": self.name, "dtype": dtype}

    def _looked_up(self, ids: Any, slots: Any, weights: Any) -> Any:
        table = ops.reshape(self.a.value, (-1, self.max_rank))
        index = ops.expand_dims(slots * self.in_features, 1) + ops.expand_dims(ids, -1)  # (batch, P, stack)
        hidden = ops.take(table, index, axis=0)
        hidden = ops.reshape(hidden, (*tuple(ops.shape(ids)), slots.shape[1] * self.max_rank))
        return ops.einsum("bpr,bro->bpo", hidden, self._weighted_b(slots, weights, self.b.dtype))

    def _weighted_b(self, slots: Any, weights: Any, dtype: Any) -> Any:
        """(batch, stack * rank, out)."""
        used = ops.cast(ops.expand_dims(ops.expand_dims(weights, -1), -1), self.b.dtype)
        return self._by_row(ops.take(self.b.value, slots, axis=0) * used, dtype)

    def _by_row(self, factors: Any, dtype: Any) -> Any:
        shape = tuple(ops.shape(factors))
        return ops.cast(ops.reshape(factors, (shape[0], shape[1] * self.max_rank, shape[3])), dtype)

    @staticmethod
    def _put(variable: Any, slot: int, value: Any) -> None:
        start = (slot, *(0 for _ in value.shape))
        variable.assign(ops.slice_update(variable.value, start, ops.expand_dims(value, 0)))
