"""Mask schedules with a closed form: linear, log-linear, cosine, geometric."""

import math
from typing import Any

import keras

from keras_diffusion_opd.schedules.mask_schedule import MaskSchedule
from keras_diffusion_opd.validation import finite_real


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class LinearMaskSchedule(MaskSchedule):
    """`alpha(t) = 1 - t`, weight `1 / t`: a token is masked with probability t.

    Args:
        eps: float in (0, 1), smallest time.

    Raises:
        ValueError: `eps` is not in (0, 1).

    Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524
    (there "log-linear", after the total noise `-log(1 - t)`).

    Example:

    ```python
    from keras_diffusion_opd.schedules import LinearMaskSchedule

    assert float(LinearMaskSchedule().loss_weight(0.25)) == 4.0
    ```
    """

    def _alpha(self, xp: Any, t: Any) -> Any:
        return 1.0 - t

    def _derivative(self, xp: Any, t: Any) -> Any:
        return -xp.ones_like(t)

    def _masked(self, xp: Any, t: Any) -> Any:
        return t


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class LogLinearMaskSchedule(MaskSchedule):
    """`alpha(t) = 1 - (1 - floor) t`, weight `1 / t`: linear, but a share `floor` survives at t = 1.

    Args:
        floor: float in [0, 1), what is left at t = 1: the total noise `-log alpha` stays finite.
        eps: float in (0, 1), smallest time.

    Raises:
        ValueError: an argument is out of its range.

    Source: Lou et al., "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution",
    2023, arXiv:2310.16834.

    Example:

    ```python
    from keras_diffusion_opd.schedules import LogLinearMaskSchedule

    assert abs(float(LogLinearMaskSchedule(floor=0.01).alpha(1.0)) - 0.01) < 1e-12
    ```
    """

    def __init__(self, floor: float = 1e-3, eps: float = 1e-3) -> None:
        super().__init__(eps)
        self.floor = finite_real("floor", floor)
        if not 0 <= self.floor < 1:
            raise ValueError(f"`floor` must lie in [0, 1): what is not masked at t = 1. Received {floor!r}.")

    def _alpha(self, xp: Any, t: Any) -> Any:
        return 1.0 - (1.0 - self.floor) * t

    def _derivative(self, xp: Any, t: Any) -> Any:
        return -(1.0 - self.floor) * xp.ones_like(t)

    def _masked(self, xp: Any, t: Any) -> Any:
        return (1.0 - self.floor) * t

    def _weight(self, xp: Any, t: Any) -> Any:
        return 1.0 / t

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "floor": self.floor}


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class CosineMaskSchedule(MaskSchedule):
    """`alpha(t) = 1 - cos(pi/2 (1 - t))`, weight `pi/2 tan(pi/2 (1 - t))`.

    A sampler that follows it reveals few tokens at first, when it knows little, and many at the end.

    Args:
        eps: float in (0, 1), smallest time.

    Raises:
        ValueError: `eps` is not in (0, 1).

    Source: Chang et al., "MaskGIT: Masked Generative Image Transformer", 2022, arXiv:2202.04200.

    Example:

    ```python
    from keras_diffusion_opd.schedules import CosineMaskSchedule

    assert CosineMaskSchedule().masked_left(64, 0.5) == 45      # 64 cos(pi / 4)
    ```
    """

    def _alpha(self, xp: Any, t: Any) -> Any:
        return 1.0 - self._masked(xp, t)

    def _derivative(self, xp: Any, t: Any) -> Any:
        return -0.5 * math.pi * xp.cos(0.5 * math.pi * t)

    def _masked(self, xp: Any, t: Any) -> Any:
        # cos(pi/2 (1 - t)) = sin(pi/2 t), which keeps its digits for small t.
        return xp.sin(0.5 * math.pi * t)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class GeometricMaskSchedule(MaskSchedule):
    """`alpha(t) = exp(-sigma(t))` with `sigma(t) = sigma_min^(1 - t) sigma_max^t`.

    Args:
        sigma_min: float > 0, total noise at t = 0.
        sigma_max: float > sigma_min, total noise at t = 1.
        eps: float in (0, 1), smallest time.

    Raises:
        ValueError: an argument is out of its range.

    Source: Lou et al., "Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution",
    2023, arXiv:2310.16834.

    Example:

    ```python
    from keras_diffusion_opd.schedules import GeometricMaskSchedule

    assert float(GeometricMaskSchedule().alpha(1.0)) < 1e-8
    ```
    """

    def __init__(self, sigma_min: float = 1e-3, sigma_max: float = 20.0, eps: float = 1e-3) -> None:
        super().__init__(eps)
        self.sigma_min = finite_real("sigma_min", sigma_min)
        self.sigma_max = finite_real("sigma_max", sigma_max)
        if not 0 < self.sigma_min < self.sigma_max:
            raise ValueError(
                f"`sigma_min` must be above 0 and below `sigma_max`. Received sigma_min={sigma_min!r}, "
                f"sigma_max={sigma_max!r}."
            )

    def _sigma(self, xp: Any, t: Any) -> Any:
        return self.sigma_min * xp.exp(self._rate * t)

    @property
    def _rate(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def _alpha(self, xp: Any, t: Any) -> Any:
        return xp.exp(-self._sigma(xp, t))

    def _derivative(self, xp: Any, t: Any) -> Any:
        sigma = self._sigma(xp, t)
        return -self._rate * sigma * xp.exp(-sigma)

    def _masked(self, xp: Any, t: Any) -> Any:
        return -xp.expm1(-self._sigma(xp, t))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "sigma_min": self.sigma_min, "sigma_max": self.sigma_max}
