"""A small class-conditional denoiser of masked tokens, for canvases of a fixed size."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from keras_diffusion_opd.validation import finite_real, positive_int


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TokenDenoiser(keras.Model):
    """Scores every position of a partly masked canvas: which of V ordered levels belongs there.

    The whole canvas goes through one residual network: a vector of `channels` numbers per position, all
    positions side by side, then `depth` blocks of width `width`, then `channels` numbers per position again
    and a shared head with a bias for every position. On canvases of a hundred tokens this reaches a better
    bound than a transformer of the same size in a tenth of the time. It takes no time input: how much is
    masked can be seen.

    Args:
        vocabulary_size: int V >= 2, number of levels; ids 0 to V - 1. The id V is the mask: an input, never
            scored.
        length: int L >= 1, tokens of a canvas.
        num_classes: int >= 1.
        width: int >= 1, of the residual stream.
        depth: int >= 1, number of residual blocks.
        channels: int >= 1, numbers per position.
        dropout: float in [0, 1), inside the blocks and before the head.
        name, dtype: as for any Keras model.

    Inputs: a dict `{"token_ids": int (B, L) in [0, V], "class_ids": int (B,) in [0, num_classes)}`.

    Returns: float (B, L, V), logits in the compute dtype; position i scores token i.

    Raises:
        ValueError: an argument is out of its range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.models import TokenDenoiser

    denoiser = TokenDenoiser(vocabulary_size=17, length=64, num_classes=10, width=16, depth=1, channels=2)
    logits = denoiser({"token_ids": np.full((3, 64), denoiser.mask_id), "class_ids": np.array([0, 1, 2])})
    assert logits.shape == (3, 64, 17)
    ```
    """

    def __init__(
        self,
        vocabulary_size: int,
        length: int,
        num_classes: int,
        *,
        width: int = 128,
        depth: int = 5,
        channels: int = 6,
        dropout: float = 0.0,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.vocabulary_size = positive_int("vocabulary_size", vocabulary_size)
        if self.vocabulary_size < 2:
            raise ValueError(f"`vocabulary_size` must be at least 2. Received {vocabulary_size!r}.")
        self.length = positive_int("length", length)
        self.num_classes = positive_int("num_classes", num_classes)
        self.width = positive_int("width", width)
        self.depth = positive_int("depth", depth)
        self.channels = positive_int("channels", channels)
        self.dropout = finite_real("dropout", dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must lie in [0, 1). Received {dropout!r}.")
        policy = self.dtype_policy
        self.class_embedding = layers.Embedding(self.num_classes, self.width, dtype=policy, name="class_embedding")
        self.encoder = layers.Dense(self.width, dtype=policy, name="encoder")
        self.blocks = [
            _ResidualBlock(self.width, self.dropout, dtype=policy, name=f"block_{i}") for i in range(self.depth)
        ]
        self.final_norm = layers.LayerNormalization(epsilon=1e-6, dtype=policy, name="final_norm")
        self.final_dropout = layers.Dropout(self.dropout, dtype=policy, name="final_dropout")
        self.decoder = layers.Dense(self.length * self.channels, dtype=policy, name="decoder")
        self.head = layers.Dense(self.vocabulary_size, use_bias=False, dtype=policy, name="head")
        self._features = token_features(self.vocabulary_size)

    @property
    def mask_id(self) -> int:
        """The id of the mask, V."""
        return self.vocabulary_size

    def build(self, input_shape: Any = None) -> None:
        """Create the weights; the shapes follow from the constructor's arguments."""
        if self.built:
            return
        self.class_embedding.build((None,))
        self.encoder.build((None, self.length * self._features.shape[1]))
        for block in self.blocks:
            block.build((None, self.width))
        self.final_norm.build((None, self.width))
        self.decoder.build((None, self.width))
        self.head.build((None, self.length, self.channels))
        self.position_bias = self.add_weight(
            shape=(self.length, self.vocabulary_size), initializer="zeros", name="position_bias"
        )
        self.built: bool = True

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        """See the class."""
        if "attention_mask" in inputs:
            raise ValueError(
                "A TokenDenoiser has no attention for an 'attention_mask' to act on: every token sees the whole "
                "canvas. Use TransformerDenoiser for block diffusion."
            )
        features = ops.convert_to_tensor(self._features, dtype=self.compute_dtype)
        canvas = ops.take(features, ops.cast(inputs["token_ids"], "int32"), axis=0)
        x = self.encoder(ops.reshape(canvas, (-1, self.length * self._features.shape[1])))
        x = x + self.class_embedding(inputs["class_ids"])
        for block in self.blocks:
            x = block(x, training=training)
        x = self.decoder(self.final_dropout(self.final_norm(x), training=training))
        logits = self.head(ops.reshape(x, (-1, self.length, self.channels)))
        return logits + ops.cast(self.position_bias, logits.dtype)

    def compute_output_shape(self, input_shape: dict[str, Any]) -> tuple[Any, int, int]:
        """(B, L, V)."""
        return (input_shape["token_ids"][0], self.length, self.vocabulary_size)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("vocabulary_size", "length", "num_classes", "width", "depth", "channels", "dropout", "name")
        policy = keras.saving.serialize_keras_object(self.dtype_policy)
        return {**{name: getattr(self, name) for name in names}, "dtype": policy}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TokenDenoiser":
        """The inverse of `get_config`."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class _ResidualBlock(layers.Layer):
    """`x + Dense(Dropout(gelu(Dense(LayerNorm(x)))))`, float (B, width) -> (B, width)."""

    def __init__(self, width: int, dropout: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.width, self.rate = width, dropout
        policy = self.dtype_policy
        self.norm = layers.LayerNormalization(epsilon=1e-6, dtype=policy, name="norm")
        self.inner = layers.Dense(width, activation="gelu", dtype=policy, name="inner")
        self.dropout = layers.Dropout(dropout, dtype=policy, name="dropout")
        # Blocks begin close to the identity.
        small = keras.initializers.VarianceScaling(0.1)
        self.outer = layers.Dense(width, kernel_initializer=small, dtype=policy, name="outer")

    def build(self, input_shape: Any) -> None:
        for layer in (self.norm, self.inner, self.outer):
            layer.build(input_shape)
        self.built = True

    def call(self, x: Any, training: bool | None = None) -> Any:
        return x + self.outer(self.dropout(self.inner(self.norm(x)), training=training))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "dropout": self.rate}


def token_features(vocabulary_size: int) -> np.ndarray:
    """Fixed features of ordered levels and the mask, float32 (V + 1, 5).

    Level in [-1, 1] and a cosine of it, whether it is the lowest, whether it is the highest, and whether it
    is a level at all: the mask's row is zero.
    """
    level = np.linspace(0.0, 1.0, vocabulary_size)
    rows = np.stack(
        [2 * level - 1, np.cos(2 * np.pi * level), level == 0, level == 1, np.ones_like(level)], axis=1
    ).astype("float32")
    return np.concatenate([rows, np.zeros((1, rows.shape[1]), "float32")])
