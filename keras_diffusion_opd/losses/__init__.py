"""Losses: sums that carry their weight, divergences, distillation."""

from keras_diffusion_opd.losses.chunked.distillation import (
    ChunkedDistillationLoss,
    HiddenScores,
    chunked_distillation,
)
from keras_diffusion_opd.losses.distillation import DistillationLoss, TokenCrossEntropyLoss
from keras_diffusion_opd.losses.divergences import token_cross_entropy, token_divergence
from keras_diffusion_opd.losses.keras_losses import TeacherDivergence, TokenCrossEntropy
from keras_diffusion_opd.losses.top_k import top_k_divergence
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum

__all__ = [
    "ChunkedDistillationLoss",
    "DistillationLoss",
    "HiddenScores",
    "LossOutput",
    "TeacherDivergence",
    "TokenCrossEntropy",
    "TokenCrossEntropyLoss",
    "WeightedSum",
    "chunked_distillation",
    "token_cross_entropy",
    "token_divergence",
    "top_k_divergence",
]
