"""Callbacks: what happens around the windows of `fit`."""

from keras_diffusion_opd.callbacks.on_policy_rollout import OnPolicyRollout
from keras_diffusion_opd.callbacks.provenance_checkpoint import ProvenanceCheckpoint
from keras_diffusion_opd.callbacks.resuming import resume
from keras_diffusion_opd.callbacks.reward_rollout import RewardRollout
from keras_diffusion_opd.callbacks.rollout_refresh import RolloutRefresh

__all__ = ["OnPolicyRollout", "ProvenanceCheckpoint", "RewardRollout", "RolloutRefresh", "resume"]
