"""A small transformer that scores masked tokens, in whole sequences or block by block."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from keras_diffusion_opd.data.block_masks import block_causal_mask, block_diffusion_mask
from keras_diffusion_opd.validation import finite_real, positive_int


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TransformerDenoiser(keras.Model):
    """Scores every position of a partly masked sequence, seeing what an attention mask lets it see.

    Pre-norm transformer blocks with learned positions. It takes no time input: how much is masked can be
    seen. Given noised and clean tokens side by side, `[x_t ; x_0]` as `BlockCorruption` lays them out, it
    counts positions from 0 again in the second half, and scores the first.

    Args:
        vocabulary_size: int V >= 2; ids 0 to V - 1. The id V is the mask: an input, never scored.
        length: int L >= 1, tokens of a sequence.
        width: int >= 1, of the residual stream; a multiple of `heads`.
        depth: int >= 1, number of blocks.
        heads: int >= 1.
        num_classes: None, or int >= 1: the model then has an input `class_ids` as well.
        block_size: None, or int >= 1: what is seen where there is no `attention_mask`: with L tokens
            `block_causal_mask`, with 2L `block_diffusion_mask`. It spares every batch the mask, 4 L^2 bytes a
            row: give `attention_key=None` to `BlockCorruption` and `BlockSampler`.
        dropout: float in [0, 1), after attention and inside the blocks.
        name, dtype: as for any Keras model.

    Inputs: a dict with
        token_ids: int (B, L) in [0, V], or (B, 2L).
        attention_mask: bool (B, S, S) for S tokens, True where the row's position sees the column's; left
            out, everything sees everything, or what `block_size` says.
        class_ids: int (B,) in [0, num_classes), where there are classes.

    Returns: float (B, L, V), logits in the compute dtype; position i scores token i.

    Raises:
        ValueError: an argument is out of its range, or inputs do not fit one another.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import BlockCorruption
    from keras_diffusion_opd.models import TransformerDenoiser

    denoiser = TransformerDenoiser(vocabulary_size=9, length=4, width=8, depth=1, heads=2)
    batch = BlockCorruption(denoiser.mask_id, block_size=2).prepare(0, 0, np.arange(3), np.ones((3, 4), "int32"))
    assert denoiser(batch.model_inputs).shape == (3, 4, 9)
    ```
    """

    def __init__(
        self,
        vocabulary_size: int,
        length: int,
        *,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        num_classes: int | None = None,
        block_size: int | None = None,
        dropout: float = 0.0,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.vocabulary_size = positive_int("vocabulary_size", vocabulary_size)
        if self.vocabulary_size < 2:
            raise ValueError(f"`vocabulary_size` must be at least 2. Received {vocabulary_size!r}.")
        self.length = positive_int("length", length)
        self.width, self.depth, self.heads = (
            positive_int(n, v) for n, v in (("width", width), ("depth", depth), ("heads", heads))
        )
        if self.width % self.heads:
            raise ValueError(f"`width` must be a multiple of `heads`. Received width={width}, heads={heads}.")
        self.num_classes = None if num_classes is None else positive_int("num_classes", num_classes)
        self.block_size = None if block_size is None else positive_int("block_size", block_size)
        self.dropout = finite_real("dropout", dropout)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must lie in [0, 1). Received {dropout!r}.")
        policy = self.dtype_policy
        self.token_embedding = layers.Embedding(self.vocabulary_size + 1, self.width, dtype=policy, name="tokens")
        self.position_embedding = layers.Embedding(self.length, self.width, dtype=policy, name="positions")
        self.class_embedding = None
        if self.num_classes is not None:
            self.class_embedding = layers.Embedding(self.num_classes, self.width, dtype=policy, name="classes")
        self.blocks = [
            _TransformerBlock(self.width, self.heads, self.dropout, dtype=policy, name=f"block_{i}")
            for i in range(self.depth)
        ]
        self.final_norm = layers.LayerNormalization(epsilon=1e-6, dtype=policy, name="final_norm")
        self.head = layers.Dense(self.vocabulary_size, dtype=policy, name="head")

    @property
    def mask_id(self) -> int:
        """The id of the mask, V."""
        return self.vocabulary_size

    def build(self, input_shape: Any = None) -> None:
        """Create the weights; the shapes follow from the constructor's arguments."""
        if self.built:
            return
        for embedding in (self.token_embedding, self.position_embedding, self.class_embedding):
            if embedding is not None:
                embedding.build((None,))
        stream = (None, None, self.width)
        for layer in (*self.blocks, self.final_norm, self.head):
            layer.build(stream)
        self.built: bool = True

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        """See the class."""
        tokens, mask, classes = self._parts(inputs)
        seen = tokens.shape[1]
        positions = ops.arange(seen, dtype="int32") % self.length
        x = self.token_embedding(tokens) + ops.expand_dims(self.position_embedding(positions), 0)
        if self.class_embedding is not None:
            x = x + ops.expand_dims(self.class_embedding(classes), 1)
        for block in self.blocks:
            x = block(x, attention_mask=mask, training=training)
        return self.head(self.final_norm(x[:, : self.length]))

    def _parts(self, inputs: dict[str, Any]) -> tuple[Any, Any, Any]:
        known = {"token_ids", "attention_mask"} | ({"class_ids"} if self.class_embedding is not None else set())
        needed = known - {"attention_mask"}
        if not isinstance(inputs, dict) or not needed <= set(inputs) <= known:
            got = sorted(inputs) if isinstance(inputs, dict) else type(inputs).__name__
            raise ValueError(f"Inputs must be a dict of {sorted(needed)}, and 'attention_mask' if any. Received {got}.")
        tokens, mask = ops.cast(inputs["token_ids"], "int32"), inputs.get("attention_mask")
        seen = tokens.shape[1]
        if seen not in (self.length, 2 * self.length):
            raise ValueError(
                f"`token_ids` must have {self.length} tokens, or {2 * self.length} (noised and clean ones). Received "
                f"shape {tuple(tokens.shape)}."
            )
        if mask is None and self.block_size is not None:
            own = block_causal_mask if seen == self.length else block_diffusion_mask
            mask = np.expand_dims(own(self.length, self.block_size), 0)
        if mask is None and seen == 2 * self.length:
            raise ValueError(
                "Noised and clean tokens side by side need an 'attention_mask', or the model reads the answer. "
                "BlockCorruption gives it, keras_diffusion_opd.models.block_diffusion_mask makes it; or give the "
                "model a `block_size`."
            )
        if mask is not None and tuple(mask.shape[1:]) != (seen, seen):
            raise ValueError(f"`attention_mask` must have shape (rows, {seen}, {seen}). Received {tuple(mask.shape)}.")
        return tokens, None if mask is None else ops.cast(mask, "bool"), inputs.get("class_ids")

    def compute_output_shape(self, input_shape: dict[str, Any]) -> tuple[Any, int, int]:
        """(B, L, V)."""
        return (input_shape["token_ids"][0], self.length, self.vocabulary_size)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("vocabulary_size", "length", "width", "depth", "heads", "num_classes", "block_size", "dropout", "name")
        policy = keras.saving.serialize_keras_object(self.dtype_policy)
        return {**{name: getattr(self, name) for name in names}, "dtype": policy}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TransformerDenoiser":
        """The inverse of `get_config`."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class _TransformerBlock(layers.Layer):
    """Attention and a two-layer network, each on a normed stream and added to it: (B, S, width) -> the same."""

    def __init__(self, width: int, heads: int, dropout: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.width, self.heads, self.rate = width, heads, dropout
        policy = self.dtype_policy
        self.attention_norm = layers.LayerNormalization(epsilon=1e-6, dtype=policy, name="attention_norm")
        self.attention = layers.MultiHeadAttention(
            heads, width // heads, dropout=dropout, dtype=policy, name="attention"
        )
        self.norm = layers.LayerNormalization(epsilon=1e-6, dtype=policy, name="norm")
        self.inner = layers.Dense(4 * width, activation="gelu", dtype=policy, name="inner")
        self.dropout = layers.Dropout(dropout, dtype=policy, name="dropout")
        self.outer = layers.Dense(width, dtype=policy, name="outer")

    def build(self, input_shape: Any) -> None:
        for layer in (self.attention_norm, self.norm, self.inner):
            layer.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.outer.build((*input_shape[:-1], 4 * self.width))
        self.built = True

    def call(self, x: Any, attention_mask: Any = None, training: bool | None = None) -> Any:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, attention_mask=attention_mask, training=training)
        return x + self.outer(self.dropout(self.inner(self.norm(x)), training=training))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "heads": self.heads, "dropout": self.rate}
