"""Logits from a backbone whose token embedding also reads out (a tied, or reversible, embedding)."""

import importlib
from typing import Any

import keras

from keras_diffusion_opd.data.output_head import OutputHead
from keras_diffusion_opd.models.full_attention import full_attention, is_full


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TiedTokenScorer(keras.layers.Layer):
    """The inputs of `backbone` -> logits (B, L, V) at every position, by its token embedding in reverse.

    Holds the backbone whole and saves its configuration, since the configurations of KerasHub's inner layers
    do not always rebuild them. All variables are the backbone's own.

    Args:
        backbone: `keras_hub.models.Backbone` with a `keras.layers.ReversibleEmbedding` as `token_embedding`.
        bidirectional: if True, `full_attention(backbone)` is called, here and whenever the layer is loaded.

    Example:

    ```python
    import keras
    import keras_hub
    from keras_diffusion_opd.models import TiedTokenScorer

    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=11, num_layers=1, hidden_dim=4, intermediate_dim=4,
        num_query_heads=1, num_key_value_heads=1
    )
    ones = keras.ops.ones((2, 3), dtype="int32")
    logits = TiedTokenScorer(backbone, bidirectional=True)({"token_ids": ones, "padding_mask": ones})
    assert tuple(logits.shape) == (2, 3, 11)
    ```
    """

    def __init__(self, backbone: Any, *, bidirectional: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs, autocast=False)
        if bidirectional:
            full_attention(backbone)
        self.backbone = backbone
        self.built = True

    @property
    def bidirectional(self) -> bool:
        """Whether `full_attention` is in force on the backbone now."""
        return is_full(self.backbone)

    def call(self, inputs: dict[str, Any]) -> Any:
        """`inputs`: as the backbone's, `token_ids: int32 (B, L)` among them. Returns float (B, L, V)."""
        return self.backbone.token_embedding(self.hidden_states(inputs), reverse=True)

    def hidden_states(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        """The inputs as for `call` -> float (B, L, D): what the embedding scores in reverse."""
        hidden = self.backbone(inputs, training=training)
        return hidden["sequence_output"] if isinstance(hidden, dict) else hidden

    def output_head(self) -> OutputHead:
        """The embedding in reverse, as its variables are now."""
        embedding = self.backbone.token_embedding
        tied = embedding.tie_weights
        weight = embedding.embeddings if tied else embedding.reverse_embeddings
        trainable = bool(weight.trainable) if hasattr(weight, "trainable") else True
        return OutputHead(
            keras.ops.convert_to_tensor(weight),
            softcap=embedding.logit_soft_cap,
            transposed=tied,
            trainable=trainable,
        )

    def compute_output_spec(self, inputs: dict[str, Any]) -> Any:
        """(B, L, V) in the dtype in which the embedding reads out."""
        embedding = self.backbone.token_embedding
        dtype = embedding.reverse_dtype or embedding.compute_dtype
        return keras.KerasTensor((*inputs["token_ids"].shape, embedding.input_dim), dtype)

    def get_config(self) -> dict[str, Any]:
        """The backbone's configuration, and whether its attention was made bidirectional."""
        backbone = keras.saving.serialize_keras_object(self.backbone)
        return {**super().get_config(), "backbone": backbone, "bidirectional": self.bidirectional}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TiedTokenScorer":
        """Rebuild the backbone, which needs KerasHub."""
        try:
            importlib.import_module("keras_hub")
        except ImportError as error:
            raise ImportError(
                "This model holds a KerasHub backbone. Install it: pip install 'keras-diffusion-opd[hub]'"
            ) from error
        return cls(**{**config, "backbone": keras.saving.deserialize_keras_object(config["backbone"])})
