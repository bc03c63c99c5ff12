"""Losses: sums that carry their weight, divergences, distillation, scores of a policy."""

from keras_diffusion_opd.data.inference import exclude_id
from keras_diffusion_opd.losses.alignment import AlignmentReport, alignment_self_test
from keras_diffusion_opd.losses.chunked.distillation import (
    ChunkedDistillationLoss,
    HiddenScores,
    chunked_distillation,
)
from keras_diffusion_opd.losses.distillation import DistillationLoss, TokenCrossEntropyLoss
from keras_diffusion_opd.losses.divergences import token_cross_entropy, token_divergence
from keras_diffusion_opd.losses.dmd import dmd_gradient, dmd_loss, gan_critic_loss, gan_generator_loss
from keras_diffusion_opd.losses.flow_grpo import flow_grpo_loss, flow_sde_step, gaussian_step_kl, gaussian_step_log_prob
from keras_diffusion_opd.losses.flow_matching import FlowMatchingLoss, flow_matching_loss
from keras_diffusion_opd.losses.group_advantage import GroupAdvantages, group_advantages, reward_weights
from keras_diffusion_opd.losses.keras_losses import TeacherDivergence, TokenCrossEntropy
from keras_diffusion_opd.losses.nft import NFTLoss, nft_loss
from keras_diffusion_opd.losses.sampled import sampled_divergence
from keras_diffusion_opd.losses.token_scores import TokenScores, token_entropy, token_log_probs
from keras_diffusion_opd.losses.top_k import top_k_divergence
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum

__all__ = [
    "AlignmentReport",
    "ChunkedDistillationLoss",
    "DistillationLoss",
    "FlowMatchingLoss",
    "GroupAdvantages",
    "HiddenScores",
    "LossOutput",
    "NFTLoss",
    "TeacherDivergence",
    "TokenCrossEntropy",
    "TokenCrossEntropyLoss",
    "TokenScores",
    "WeightedSum",
    "alignment_self_test",
    "chunked_distillation",
    "dmd_gradient",
    "dmd_loss",
    "exclude_id",
    "flow_grpo_loss",
    "flow_matching_loss",
    "flow_sde_step",
    "gan_critic_loss",
    "gan_generator_loss",
    "gaussian_step_kl",
    "gaussian_step_log_prob",
    "group_advantages",
    "nft_loss",
    "reward_weights",
    "sampled_divergence",
    "token_cross_entropy",
    "token_divergence",
    "token_entropy",
    "token_log_probs",
    "top_k_divergence",
]
