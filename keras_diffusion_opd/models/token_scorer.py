"""The bridge that makes KerasHub models token scorers for masked diffusion."""

import sys
from typing import Any

import keras

from keras_diffusion_opd.models.every_position import EveryPosition
from keras_diffusion_opd.models.full_attention import is_full, is_switchable
from keras_diffusion_opd.models.tied_token_scorer import TiedTokenScorer

_TEXT_INPUTS = {"token_ids", "padding_mask", "position_ids", "segment_ids"}
_WANTED = (
    "a KerasHub MaskedLM task, a KerasHub backbone with bidirectional attention and a reversible token "
    "embedding, or a keras.Model with logits (batch, length, vocabulary)"
)


def token_scorer(model: Any, *, bidirectional: bool = False) -> keras.Model:
    """A model from token inputs to logits at every position, which shares every variable with `model`.

    Position `i` of the logits scores the token at position `i`, seen from both sides. Nothing shifts.
    What trains the scorer trains `model`: `task.save_to_preset(directory)` then writes a stock preset.

    | `model` | scored by |
    |---|---|
    | a KerasHub `MaskedLM` task (see below) | its own head, at every position |
    | Gemma3, Gemma4 (backbone or `CausalLM`) with `use_bidirectional_attention=True` | its tied embedding |
    | T5Gemma (backbone or task) | its encoder and the decoder's embedding; the decoder is not used |
    | Llama3, Llama, Qwen3 (backbone or `CausalLM`) with `bidirectional=True` | its embedding in reverse |
    | any other `keras.Model` with logits (B, L, V) | itself: it is returned as it is |

    The `MaskedLM` tasks are those of Bert, Roberta, XLMRoberta, DebertaV3, DistilBert, Albert, FNet,
    RoformerV2 and ESM; whatever takes `mask_positions` beside `token_ids` is taken for one. Their
    preprocessor is not used. Causal models are refused: a position that cannot see what follows cannot fill
    in a mask. A `keras.Model` that is not KerasHub's is taken at its word.

    Args:
        model: see the table.
        bidirectional: calls `full_attention(backbone)` where the backbone is Llama3, Llama or Qwen3. This
            changes the backbone itself (`causal_attention(backbone)` undoes it); its scores need training.

    Returns:
        `keras.Model`: the token inputs of `model` under their own names, int32 (B, L), to logits (B, L, V) in
        the dtype in which `model` gives them. It saves and loads as `.keras`.

    Raises:
        TypeError: if `model` is not a model.
        ValueError: if it is causal, or has no logits at every position, or they are probabilities.

    Example:

    ```python
    import keras
    import keras_hub
    from keras_diffusion_opd.models import token_scorer

    # or keras_hub.models.BertMaskedLM.from_preset(directory_or_name)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=11, num_layers=1, num_heads=1, hidden_dim=4, intermediate_dim=4, max_sequence_length=8
    )
    scorer = token_scorer(keras_hub.models.BertMaskedLM(backbone))
    ones = keras.ops.ones((2, 3), dtype="int32")
    logits = scorer({"token_ids": ones, "segment_ids": 0 * ones, "padding_mask": ones})
    assert tuple(logits.shape) == (2, 3, 11)
    ```
    """
    if not isinstance(model, keras.Model):
        raise TypeError(_not_a_model(model))
    if isinstance(_inputs(model), dict) and "mask_positions" in model.input:
        return _by_its_head(model)
    backbone = _hub_backbone(model)
    if backbone is not None:
        return _by_its_embedding(backbone, bidirectional)
    if bidirectional:
        raise ValueError(
            "`bidirectional=True` needs a KerasHub Llama3, Llama or Qwen3 model. "
            f"Received {type(model).__name__}. Build the model with bidirectional attention instead."
        )
    _check_logits(model)
    return model


def _by_its_head(task: Any) -> keras.Model:
    inputs = {name: tensor for name, tensor in task.input.items() if name != "mask_positions"}
    if "token_ids" not in inputs:
        raise ValueError(f"`model` must take `token_ids` beside `mask_positions`. Received inputs {sorted(inputs)}.")
    _check_logits(task)
    positions = EveryPosition(name="every_position")(inputs["token_ids"])
    return keras.Model(inputs, task({**inputs, "mask_positions": positions}), name="token_scorer")


def _by_its_embedding(backbone: Any, bidirectional: bool) -> keras.Model:
    if type(backbone).__name__ == "T5GemmaBackbone":
        return _by_its_encoder(backbone)
    _check_sees_both_sides(backbone, bidirectional)
    inputs = dict(backbone.input)
    if not set(inputs) <= _TEXT_INPUTS:
        raise ValueError(
            f"`model` must take text only. Received {type(backbone).__name__} with inputs {sorted(inputs)}. "
            "Load it without its image and audio encoders (vision_encoder=None, audio_encoder=None)."
        )
    scored = TiedTokenScorer(backbone, bidirectional=bidirectional and is_switchable(backbone), name="tied_scorer")
    return keras.Model(inputs, scored(inputs), name="token_scorer")


def _by_its_encoder(backbone: Any) -> keras.Model:
    embedding, hidden = backbone.decoder_token_embedding, backbone.output["encoder_sequence_output"]
    if embedding.output_dim != hidden.shape[-1]:
        raise ValueError(
            "`model` must have an encoder as wide as its decoder, whose embedding scores the tokens. "
            f"Received encoder_hidden_dim={hidden.shape[-1]}, decoder_hidden_dim={embedding.output_dim}."
        )
    inputs = {name: backbone.input[name] for name in ("encoder_token_ids", "encoder_padding_mask")}
    return keras.Model(inputs, embedding(hidden, reverse=True), name="token_scorer")


def _check_sees_both_sides(backbone: Any, bidirectional: bool) -> None:
    """Raise, with the mend, unless every position of `backbone` sees every other one."""
    name, flag = type(backbone).__name__, getattr(backbone, "use_bidirectional_attention", None)
    reversible = isinstance(getattr(backbone, "token_embedding", None), keras.layers.ReversibleEmbedding)
    if reversible and (flag or is_full(backbone) or (bidirectional and is_switchable(backbone))):
        return
    models = sys.modules["keras_hub"].models
    family = name.removesuffix("Backbone")
    masked = next((n for n in (f"{family}MaskedLM", f"{family}MaskedPLM") if hasattr(models, n)), None)
    causal = f"`model` must see both sides of every position, but {name} attends only to what comes before. "
    if masked is not None:
        raise ValueError(
            f"`model` must give logits. Received {name}, which gives hidden states. "
            f"Wrap it: token_scorer(keras_hub.models.{masked}(backbone))."
        )
    if flag is not None:
        raise ValueError(
            causal + f"Build or load it with it: {name}.from_preset(..., use_bidirectional_attention=True)."
        )
    if is_switchable(backbone):
        raise ValueError(causal + "Pass token_scorer(model, bidirectional=True) to make its attention full.")
    if hasattr(models, f"{family}CausalLM"):
        raise ValueError(causal + f"There is no known way to make its attention full. Give {_WANTED}.")
    raise ValueError(f"`model` must give logits at every token. Received {name}, which does not. Give {_WANTED}.")


def _hub_backbone(model: Any) -> Any:
    """The KerasHub backbone of a backbone or a language-modelling task; None for what is not KerasHub's."""
    hub = sys.modules.get("keras_hub")  # whoever holds a KerasHub model has imported it
    if hub is None:
        return None
    if isinstance(model, hub.models.Backbone):
        return model
    if isinstance(model, hub.models.CausalLM):
        return model.backbone
    if isinstance(model, hub.models.Task):
        raise ValueError(
            "`model` must give logits at every token. "
            f"Received the task {type(model).__name__}, which does not. Give {_WANTED}."
        )
    return None


def _inputs(model: Any) -> Any:
    """The symbolic inputs of a functional model; None for a subclassed one."""
    try:
        return model.input
    except (AttributeError, ValueError):
        return None


def _check_logits(model: Any) -> None:
    """Raise unless a functional `model` has one float output (B, L, V) that is not a softmax."""
    if _inputs(model) is None:
        return  # a subclassed model has no symbolic output; its logits are checked with the first batch
    outputs = keras.tree.flatten(model.output)
    shapes = [tuple(x.shape) for x in outputs]
    if len(outputs) != 1 or len(shapes[0]) != 3 or not keras.backend.is_float_dtype(outputs[0].dtype):
        raise ValueError(
            "`model` must have one floating-point output (batch, length, vocabulary). "
            f"Received {type(model).__name__} with outputs {shapes} of {[str(x.dtype) for x in outputs]}. "
            f"Give {_WANTED}."
        )
    last = {layer.name: layer for layer in model.layers}.get(model.output_names[0])
    activation = getattr(last, "activation", None)
    if isinstance(last, keras.layers.Softmax) or activation is keras.activations.softmax:
        raise ValueError(
            "`model` must give logits. "
            f"Received {type(model).__name__}, which ends in a softmax. Build it with activation=None."
        )


def _not_a_model(received: Any) -> str:
    mend = f"Give {_WANTED}."
    if isinstance(received, str):
        mend = "Load it first: token_scorer(keras_hub.models.MaskedLM.from_preset(...))."
    elif isinstance(received, type):
        mend = "Give an instance, not the class."
    return f"`model` must be a keras.Model. Received {received!r:.80} of type {type(received).__name__}. {mend}"
