"""Schedules: diffusion time -> how much of the data is left, and the weight of the loss there.

- `MaskSchedule` and its kinds: tokens, how likely one is still there.
- `timestep_grid`, `shift_time`, `resolution_shift`: the times that a sampler of a flow model visits.
- `uniform_times`, `logit_normal_times`, `grid_times`: the times at which it is trained.
- `flow_weight`: what its loss counts there.
"""

from keras_diffusion_opd.schedules.by_name import get_mask_schedule
from keras_diffusion_opd.schedules.closed_forms import (
    CosineMaskSchedule,
    GeometricMaskSchedule,
    LinearMaskSchedule,
    LogLinearMaskSchedule,
)
from keras_diffusion_opd.schedules.custom import CustomMaskSchedule
from keras_diffusion_opd.schedules.flow_grid import resolution_shift, shift_time, timestep_grid
from keras_diffusion_opd.schedules.flow_times import grid_times, logit_normal_times, uniform_times
from keras_diffusion_opd.schedules.flow_weights import flow_weight
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
    "flow_weight",
    "get_mask_schedule",
    "get_old_policy_decay",
    "grid_times",
    "logit_normal_times",
    "resolution_shift",
    "shift_time",
    "timestep_grid",
    "uniform_times",
]
