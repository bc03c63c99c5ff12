"""Metrics: ratios of sums, and what to watch while distilling."""

from keras_diffusion_opd.metrics.distillation import (
    Acceptance,
    StudentEntropy,
    TeacherEntropy,
    TeacherKL,
    TokenMetric,
    TopOneAgreement,
    distillation_diagnostics,
)
from keras_diffusion_opd.metrics.targets import RetainedMass, TargetsMetric, TeacherCrossEntropy
from keras_diffusion_opd.metrics.weighted_ratio import WeightedRatio

__all__ = [
    "Acceptance",
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
]
