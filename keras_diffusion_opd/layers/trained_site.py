"""The low-rank factors of one adapter at one layer, as variables that are trained."""

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TrainedSite(keras.layers.Layer):
    """What the adapter in training adds to the outputs of one layer: `weight * scale * (x A) B`.

    Args:
        in_features: int, rows of the layer's matrix.
        out_features: int, columns of it.
        rank: int, of the adapter here.
        scale: float, alpha / rank or alpha / sqrt(rank).
        dora: bool, whether a magnitude for each column is trained too.
        looks_up: bool, whether inputs are ids, as those of an embedding.
        dropout: float in [0, 1), share of the input features that the adapter does not see in training.
        seed: int, of the dropout.
        name, dtype: as for any Keras layer.

    Call arguments:
        x: (batch, P, in_features), or int (batch, P) ids with `looks_up`.
        weights: float (batch,), how much each sample has of this adapter; 0 leaves it untouched.
        training: bool, whether dropout acts.

    Source: Hu et al., "LoRA", 2021, arXiv:2106.09685; Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation",
    2024, arXiv:2402.09353.

    Example:

    ```python
    import keras, numpy as np
    from keras_diffusion_opd.layers import TrainedSite

    site = TrainedSite(in_features=3, out_features=2, rank=1, scale=2.0)
    y = site(np.ones((2, 1, 3), "float32"), np.ones(2, "float32"))
    assert not keras.ops.convert_to_numpy(y).any()  # B begins at zero
    ```
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        scale: float,
        *,
        dora: bool = False,
        looks_up: bool = False,
        dropout: float = 0.0,
        seed: int = 0,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.in_features, self.out_features, self.rank, self.scale = in_features, out_features, rank, scale
        self.dora, self.looks_up, self.dropout, self.seed = dora, looks_up, dropout, seed
        self._allow_non_tensor_positional_args = True
        uniform = keras.initializers.HeUniform(seed=seed)
        self.a = self.add_weight(name="a", shape=(in_features, rank), initializer=uniform, autocast=False)
        self.b = self.add_weight(name="b", shape=(rank, out_features), initializer="zeros", autocast=False)
        self.magnitude = None
        if dora:
            self.magnitude = self.add_weight(
                name="magnitude", shape=(out_features,), initializer="ones", autocast=False
            )
        self.seed_generator = keras.random.SeedGenerator(seed) if dropout else None
        self.built = True

    def call(self, x: Any, weights: Any, training: bool | None = None) -> Any:
        """See the class."""
        if self.looks_up:
            hidden = ops.take(self.a.value, x, axis=0)
        else:
            if training and self.dropout:
                x = keras.random.dropout(x, self.dropout, seed=self.seed_generator)
            hidden = ops.einsum("bpi,bri->bpr", x, self._for_each_row(ops.transpose(self.a.value), x))
        y = ops.einsum("bpr,bro->bpo", hidden, self._for_each_row(self.b.value * self.scale, hidden))
        return self._of_its_rows(y, weights)

    def reversed(self, x: Any, weights: Any) -> Any:
        """What is added to the logits of a table used in reverse: (batch, P, out) -> (batch, P, in)."""
        hidden = ops.matmul(x, ops.cast(ops.transpose(self.b.value) * self.scale, x.dtype))
        return self._of_its_rows(ops.matmul(hidden, ops.cast(ops.transpose(self.a.value), x.dtype)), weights)

    def column_factor(self, matrix: Any) -> Any:
        """DoRA's `magnitude / |W + scale A B|`, float32 (out,); the norm is taken as a constant.

        Args:
            matrix: float (in, out), the layer's own matrix.
        """
        assert self.magnitude is not None
        whole = ops.cast(matrix, "float32") + self.scale * ops.matmul(self.a.value, self.b.value)
        norm = ops.stop_gradient(ops.sqrt(ops.sum(ops.square(whole), axis=0)))
        return self.magnitude.value / norm

    def compute_output_shape(self, x_shape: Any, *_: Any) -> tuple[Any, ...]:
        """(batch, P, out_features)."""
        return (*x_shape[:2], self.out_features)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("in_features", "out_features", "rank", "scale", "dora", "looks_up", "dropout", "seed", "name")
        dtype = keras.saving.serialize_keras_object(self.dtype_policy)
        return {**{name: getattr(self, name) for name in names}, "dtype": dtype}

    @staticmethod
    def _for_each_row(factor: Any, like: Any) -> Any:
        """A factor once for each row: XLA on a CPU is ten times slower with the gradient of a shared thin one."""
        return ops.cast(ops.broadcast_to(factor, (ops.shape(like)[0], *factor.shape)), like.dtype)

    @staticmethod
    def _of_its_rows(y: Any, weights: Any) -> Any:
        """`y` times its weight; nothing, be it NaN, where the weight is 0."""
        used = ops.cast(ops.reshape(weights, (-1, 1, 1)), y.dtype)
        return ops.where(used == 0, ops.zeros_like(y), y * used)
