"""Losses: sums that carry their weight, divergences, distillation."""

from keras_diffusion_opd.losses.alignment import AlignmentReport, alignment_self_test
from keras_diffusion_opd.losses.distillation import DistillationLoss, TokenCrossEntropyLoss
from keras_diffusion_opd.losses.divergences import token_cross_entropy, token_divergence
from keras_diffusion_opd.losses.keras_losses import TeacherDivergence, TokenCrossEntropy
from keras_diffusion_opd.losses.sampled import sampled_divergence
from keras_diffusion_opd.losses.top_k import top_k_divergence
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum

__all__ = [
    "AlignmentReport",
    "DistillationLoss",
    "LossOutput",
    "TeacherDivergence",
    "TokenCrossEntropy",
    "TokenCrossEntropyLoss",
    "WeightedSum",
    "alignment_self_test",
    "sampled_divergence",
    "token_cross_entropy",
    "token_divergence",
    "top_k_divergence",
]
