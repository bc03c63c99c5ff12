"""A mask schedule from two functions of one's own."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.schedules.mask_schedule import MaskSchedule


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class CustomMaskSchedule(MaskSchedule):
    """A schedule of your own.

    Args:
        alpha_fn: function t -> alpha(t), of NumPy arrays and of tensors, falling from 1 to 0. Register it
            with `keras.saving.register_keras_serializable` to save what holds the schedule.
        derivative_fn: function t -> d alpha / d t, of the same.
        eps: float in (0, 1), smallest time.

    Raises:
        TypeError: a function cannot be called.
        ValueError: `eps` is out of range; alpha leaves [0, 1] or rises; the derivative is not alpha's.

    Example:

    ```python
    from keras_diffusion_opd.schedules import CustomMaskSchedule

    square = CustomMaskSchedule(lambda t: 1 - t**2, lambda t: -2 * t)
    assert abs(float(square.loss_weight(0.5)) - 4.0) < 1e-12
    ```
    """

    def __init__(self, alpha_fn: Callable[[Any], Any], derivative_fn: Callable[[Any], Any], eps: float = 1e-3) -> None:
        super().__init__(eps)
        for name, function in (("alpha_fn", alpha_fn), ("derivative_fn", derivative_fn)):
            if not callable(function):
                raise TypeError(f"`{name}` must be a function of t. Received {function!r}.")
        self.alpha_fn = alpha_fn
        self.derivative_fn = derivative_fn
        self._check()

    def _check(self) -> None:
        t = np.linspace(self.eps, 1.0, 101)
        alpha = np.asarray(self.alpha_fn(t), "float64")
        inside = alpha.shape == t.shape and alpha.min() >= -1e-9 and alpha.max() <= 1 + 1e-9
        if not inside or np.any(np.diff(alpha) > 1e-12):
            raise ValueError(
                "`alpha_fn` must fall within [0, 1] as t goes from 0 to 1 and keep the shape of t. Received "
                f"values from {alpha.min()} to {alpha.max()}, shape {alpha.shape}."
            )
        middle, h = t[1:-1], 1e-5
        slope = (np.asarray(self.alpha_fn(middle + h)) - np.asarray(self.alpha_fn(middle - h))) / (2 * h)
        given = np.broadcast_to(np.asarray(self.derivative_fn(middle), "float64"), middle.shape)
        worst = int(np.argmax(np.abs(slope - given)))
        # Central differences of a smooth alpha in float64 are good to about 1e-9; kinks are allowed for.
        if abs(slope[worst] - given[worst]) > 1e-3 * max(1.0, abs(slope[worst])):
            raise ValueError(
                f"`derivative_fn` must be the derivative of `alpha_fn`: at t = {middle[worst]:.3f} it gives "
                f"{given[worst]:.6g} where differences give {slope[worst]:.6g}."
            )

    def _alpha(self, xp: Any, t: Any) -> Any:
        return self.alpha_fn(t)

    def _derivative(self, xp: Any, t: Any) -> Any:
        return self.derivative_fn(t) * xp.ones_like(t)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, the functions serialised."""
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "alpha_fn": serialize(self.alpha_fn),
            "derivative_fn": serialize(self.derivative_fn),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CustomMaskSchedule":
        """The inverse of `get_config`."""
        functions = {
            name: keras.saving.deserialize_keras_object(config[name]) for name in ("alpha_fn", "derivative_fn")
        }
        return cls(**functions, eps=config["eps"])
