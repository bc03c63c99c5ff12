"""Schedules: diffusion time -> how much of the data is left, and the weight of the loss there."""

from keras_diffusion_opd.schedules.by_name import get_mask_schedule
from keras_diffusion_opd.schedules.closed_forms import (
    CosineMaskSchedule,
    GeometricMaskSchedule,
    LinearMaskSchedule,
    LogLinearMaskSchedule,
)
from keras_diffusion_opd.schedules.custom import CustomMaskSchedule
from keras_diffusion_opd.schedules.mask_schedule import MaskSchedule
from keras_diffusion_opd.schedules.old_policy_decay import OldPolicyDecay, get_old_policy_decay

__all__ = [
    "CosineMaskSchedule",
    "CustomMaskSchedule",
    "GeometricMaskSchedule",
    "LinearMaskSchedule",
    "LogLinearMaskSchedule",
    "MaskSchedule",
    "OldPolicyDecay",
    "get_mask_schedule",
    "get_old_policy_decay",
]
