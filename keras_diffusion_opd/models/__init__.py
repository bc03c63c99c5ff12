"""Models: the bridge that makes KerasHub models token scorers, and a small denoiser of our own.

- `token_scorer(model)`: a KerasHub masked language model (or a bidirectional backbone) as a model from tokens
  to logits at every position, with shared variables.
- `full_attention(backbone)`, `causal_attention(backbone)`: switch Llama3 and Qwen3 backbones.
- `MLPDenoiser`: class-conditional flow denoiser of small images, for demos and tests.
- `TokenDenoiser`: class-conditional masked-token denoiser of small canvases, for demos and tests.
- `TeacherScorer`: a teacher in this process as a source of targets.
- `TransformerDenoiser`: a small transformer that takes an attention mask: block diffusion, for demos and tests.
- `block_diffusion_mask`, `block_causal_mask`: who sees whom in block diffusion.
- `hidden_route(model)`: its hidden states and its head, for losses that do without all the logits; `OffersHidden`:
  what a model of your own has to say for that.
- `ControlNet`, `ControlledModel`: copies of the first blocks that read an image, and the denoiser that follows it.
- `EveryPosition`, `TiedTokenScorer`: the layers a scorer is made of.
"""

from keras_diffusion_opd.data.block_masks import block_causal_mask, block_diffusion_mask
from keras_diffusion_opd.models.control_net import ControlNet
from keras_diffusion_opd.models.controlled_model import ControlledModel
from keras_diffusion_opd.models.copies import copy_model
from keras_diffusion_opd.models.every_position import EveryPosition
from keras_diffusion_opd.models.full_attention import causal_attention, full_attention
from keras_diffusion_opd.models.hidden_route import HiddenRoute, OffersHidden, hidden_route
from keras_diffusion_opd.models.mlp_denoiser import MLPDenoiser
from keras_diffusion_opd.models.teacher_scorer import TeacherScorer
from keras_diffusion_opd.models.tied_token_scorer import TiedTokenScorer
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser
from keras_diffusion_opd.models.token_scorer import token_scorer
from keras_diffusion_opd.models.transformer_denoiser import TransformerDenoiser

__all__ = [
    "ControlNet",
    "ControlledModel",
    "EveryPosition",
    "HiddenRoute",
    "MLPDenoiser",
    "OffersHidden",
    "TeacherScorer",
    "TiedTokenScorer",
    "TokenDenoiser",
    "TransformerDenoiser",
    "block_causal_mask",
    "block_diffusion_mask",
    "causal_attention",
    "copy_model",
    "full_attention",
    "hidden_route",
    "token_scorer",
]
