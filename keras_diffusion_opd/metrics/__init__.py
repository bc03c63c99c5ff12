"""Metrics: ratios of sums, what to watch while distilling, bounds on the likelihood."""

from keras_diffusion_opd.metrics.distillation import (
    Acceptance,
    StudentEntropy,
    TeacherEntropy,
    TeacherKL,
    TokenMetric,
    TopOneAgreement,
    distillation_diagnostics,
)
from keras_diffusion_opd.metrics.likelihood import LikelihoodBound, masked_likelihood_bound
from keras_diffusion_opd.metrics.targets import RetainedMass, TargetsMetric, TeacherCrossEntropy
from keras_diffusion_opd.metrics.weighted_ratio import WeightedRatio

__all__ = [
    "Acceptance",
    "LikelihoodBound",
    "RetainedMass",
    "StudentEntropy",
    "TargetsMetric",
    "TeacherCrossEntropy",
    "TeacherEntropy",
    "TeacherKL",
    "TokenMetric",
    "TopOneAgreement",
    "WeightedRatio",
    "distillation_diagnostics",
    "masked_likelihood_bound",
]
