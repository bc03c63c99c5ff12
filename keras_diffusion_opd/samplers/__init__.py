"""Samplers: one step and the loop around it, the same object for rollouts, evaluation and serving."""

from keras_diffusion_opd.samplers.masked import MaskedSampler

__all__ = ["MaskedSampler"]
