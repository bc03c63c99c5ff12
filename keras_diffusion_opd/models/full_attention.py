"""Full (bidirectional) attention in KerasHub backbones that were trained causally, and back again."""

from collections.abc import Callable
from typing import Any

from keras import ops

#: Backbones (with their subclasses, as Llama3) whose layers ask one method of their own for the mask.
SWITCHABLE = ("LlamaBackbone", "Qwen3Backbone")
_METHOD = "_compute_self_attention_mask"


def is_switchable(backbone: Any) -> bool:
    """Whether `full_attention` knows this class of backbone."""
    return any(cls.__name__ in SWITCHABLE for cls in type(backbone).__mro__)


def is_full(backbone: Any) -> bool:
    """Whether `full_attention` is in force on `backbone`."""
    return is_switchable(backbone) and all(_METHOD in vars(layer) for layer in backbone.transformer_layers)


def full_attention(backbone: Any) -> None:
    """Let every position of `backbone` see every position that is not padding. Changes `backbone` itself.

    Whatever shares the backbone, a `CausalLM` task too, attends in both directions from then on, until
    `causal_attention(backbone)`. Functions that were compiled before keep the mask they were compiled with.
    The weights stay as they are: a model that was trained causally must be trained on before its scores mean
    anything (Gong et al., "Scaling Diffusion Language Models via Adaptation from Autoregressive Models",
    2024, arXiv:2410.17891). A preset does not hold the change; a saved scorer does.

    A sliding window, where the model has one, stays: it then reaches to both sides.

    Args:
        backbone: `keras_hub.models.Llama3Backbone`, `LlamaBackbone` or `Qwen3Backbone`.

    Raises:
        ValueError: if `backbone` is of another class.

    Example:

    ```python
    import keras_hub
    from keras_diffusion_opd.models import causal_attention, full_attention

    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=11, num_layers=1, hidden_dim=4, intermediate_dim=4,
        num_query_heads=1, num_key_value_heads=1
    )
    full_attention(backbone)  # every position now sees every other one
    causal_attention(backbone)  # and now only those before it
    ```
    """
    _check(backbone)
    for layer in backbone.transformer_layers:
        setattr(layer, _METHOD, _padding_mask)


def causal_attention(backbone: Any) -> None:
    """Undo `full_attention(backbone)`; without effect where it is not in force.

    Args:
        backbone: `keras_hub.models.Llama3Backbone`, `LlamaBackbone` or `Qwen3Backbone`.

    Raises:
        ValueError: if `backbone` is of another class.

    Example:

    ```python
    import keras_hub
    from keras_diffusion_opd.models import causal_attention, token_scorer

    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=11, num_layers=1, hidden_dim=4, intermediate_dim=4,
        num_query_heads=1, num_key_value_heads=1
    )
    scorer = token_scorer(backbone, bidirectional=True)
    causal_attention(backbone)  # to generate from left to right again
    ```
    """
    _check(backbone)
    for layer in backbone.transformer_layers:
        if _METHOD in vars(layer):
            delattr(layer, _METHOD)


def _check(backbone: Any) -> None:
    method: Callable[..., Any] | None = None
    if is_switchable(backbone):
        method = getattr(backbone.transformer_layers[0], _METHOD, None)
    if method is None:
        raise ValueError(
            "`backbone` must be a KerasHub Llama3, Llama or Qwen3 backbone. "
            f"Received {type(backbone).__name__}. "
            "Gemma3 and Gemma4 take use_bidirectional_attention=True where they are built or loaded."
        )


def _padding_mask(
    decoder_sequence: Any,
    decoder_padding_mask: Any = None,
    decoder_attention_mask: Any = None,
    self_attention_cache: Any = None,
    self_attention_cache_update_index: Any = None,
) -> Any:
    """int32 (B, L, L): 1 where the key is not padding, and where `decoder_attention_mask` allows it."""
    if self_attention_cache is not None or self_attention_cache_update_index is not None:
        raise ValueError(
            "A backbone under `full_attention` cannot generate with a cache: each token changes all others. "
            "Call causal_attention(backbone) to generate from left to right again."
        )
    batch, length = ops.shape(decoder_sequence)[:2]
    mask = ops.ones((batch, length, length), dtype="int32")
    if decoder_padding_mask is not None:
        mask = mask * ops.expand_dims(ops.cast(decoder_padding_mask, "int32"), 1)
    if decoder_attention_mask is not None:
        mask = mask * ops.cast(decoder_attention_mask, "int32")
    return mask
