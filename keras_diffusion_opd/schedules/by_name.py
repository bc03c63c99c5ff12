"""Mask schedules by name."""

from typing import Any

import keras

from keras_diffusion_opd.schedules.closed_forms import (
    CosineMaskSchedule,
    GeometricMaskSchedule,
    LinearMaskSchedule,
    LogLinearMaskSchedule,
)
from keras_diffusion_opd.schedules.mask_schedule import MaskSchedule

_BY_NAME: dict[str, type[MaskSchedule]] = {
    "linear": LinearMaskSchedule,
    "log_linear": LogLinearMaskSchedule,
    "cosine": CosineMaskSchedule,
    "geometric": GeometricMaskSchedule,
}


def get_mask_schedule(schedule: Any) -> MaskSchedule:
    """A schedule from its name, its serialised form, or itself.

    Args:
        schedule: `MaskSchedule`, a dict of `keras.saving.serialize_keras_object`, or one of "linear",
            "log_linear", "cosine", "geometric".

    Returns:
        `MaskSchedule`.

    Raises:
        ValueError, TypeError: no such schedule.

    Example:

    ```python
    from keras_diffusion_opd.schedules import get_mask_schedule

    assert get_mask_schedule("linear").eps == 1e-3
    ```
    """
    if isinstance(schedule, MaskSchedule):
        return schedule
    if isinstance(schedule, str):
        if schedule not in _BY_NAME:
            raise ValueError(f"`schedule` must be one of {sorted(_BY_NAME)} or a MaskSchedule. Received {schedule!r}.")
        return _BY_NAME[schedule]()
    if isinstance(schedule, dict):
        found = keras.saving.deserialize_keras_object(schedule)
        if isinstance(found, MaskSchedule):
            return found
    raise TypeError(
        f"`schedule` must be one of {sorted(_BY_NAME)} or a MaskSchedule. Received {type(schedule).__name__}."
    )
