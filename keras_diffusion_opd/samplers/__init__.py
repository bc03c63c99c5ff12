"""Samplers: one step and the loop around it, the same object for rollouts, evaluation and serving."""

from keras_diffusion_opd.samplers.block import BlockSampler
from keras_diffusion_opd.samplers.flow import FlowSampler
from keras_diffusion_opd.samplers.flow_rollout import FlowRollout
from keras_diffusion_opd.samplers.flow_step import flow_log_prob, guided_velocity
from keras_diffusion_opd.samplers.masked import MaskedSampler
from keras_diffusion_opd.samplers.rollout import TokenRollout

__all__ = [
    "BlockSampler",
    "FlowRollout",
    "FlowSampler",
    "MaskedSampler",
    "TokenRollout",
    "flow_log_prob",
    "guided_velocity",
]
