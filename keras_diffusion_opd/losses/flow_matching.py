"""Flow matching: the squared error of a velocity, weighted by when it is asked for."""

from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.losses.sample_rows import SampleRows, row_mean
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum
from keras_diffusion_opd.schedules.flow_weights import WEIGHTS, flow_weight
from keras_diffusion_opd.validation import finite_real


def flow_matching_loss(velocity: Any, x0: Any, noise: Any, *, weight: Any = None) -> Any:
    """The mean squared error of the velocity of each sample: mean over all axes but the first.

    Args:
        velocity: float (B, ...), of the denoiser at `x_s = (1 - s) x0 + s noise`.
        x0: float (B, ...), data.
        noise: float (B, ...), standard normal.
        weight: None, or real (B,), at least 0, multiplies the values. A row of weight 0 is 0, whatever it holds.

    Returns:
        float32 (float64 where an input is) (B,): `weight * mean((velocity - (noise - x0))^2)`.

    Raises:
        ValueError: shapes that differ, or weights that are negative or not finite.

    Source: Lipman et al., "Flow Matching for Generative Modeling", 2023, arXiv:2210.02747; Liu et al., "Flow Straight
    and Fast: Learning to Generate and Transfer Data with Rectified Flow", 2022, arXiv:2209.03003.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import flow_matching_loss

    x0, noise = np.array([[0.5, 0.0]]), np.array([[1.5, 1.0]])     # the target is [1, 1]
    loss = flow_matching_loss(np.array([[1.0, 3.0]]), x0, noise)
    assert abs(float(loss[0]) - 2.0) < 1e-6
    ```
    """
    rows = SampleRows({"velocity": velocity, "x0": x0, "noise": noise}, weight)
    return rows.weights * _errors(rows)


def _errors(rows: SampleRows) -> Any:
    target = ops.stop_gradient(rows["noise"] - rows["x0"])
    return row_mean(ops.square(rows["velocity"] - target))


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class FlowMatchingLoss:
    """Flow matching as a sum that carries its weight: what `FlowMatchingTrainer` minimises.

    An error dv of the velocity at time s is an error s dv of the data, and the signal-to-noise ratio there is
    `SNR = ((1 - s) / s)^2`.

    Args:
        weighting: how the error of a time counts. `"none"`: 1. `"min_snr"`: `s^2 min(SNR, gamma)`: the error of
            the data counts its SNR, but no more than gamma. `"min_rf"`: `min(1, gamma s^2)`: as `"none"`, but the
            error of the data counts no more than gamma.
        gamma: float > 0.

    Raises:
        ValueError: no such weighting, or a gamma that is not above 0.

    Source: Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", 2023, arXiv:2303.09556.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import FlowMatchingLoss

    one = np.ones((1, 2), "float32")
    output = FlowMatchingLoss("min_snr")(2 * one, 0 * one, one, np.array([0.5], "float32"))
    assert abs(float(output.primary.mean()) - 0.25) < 1e-6        # an error of 1, at SNR 1, where s^2 = 1/4
    ```
    """

    metric_names = ("flow/velocity_error",)

    def __init__(self, weighting: str = "none", gamma: float = 5.0) -> None:
        if weighting not in WEIGHTS:
            raise ValueError(f"`weighting` must be one of {list(WEIGHTS)}. Received {weighting!r}.")
        self.weighting, self.gamma = weighting, finite_real("gamma", gamma)
        if self.gamma <= 0:
            raise ValueError(f"`gamma` must be above 0. Received {gamma}.")

    def __call__(self, velocity: Any, x0: Any, noise: Any, time: Any, sample_weight: Any = None) -> LossOutput:
        """The unreduced loss.

        Args:
            velocity, x0, noise: float (B, ...), as for `flow_matching_loss`.
            time: float (B,), in [0, 1].
            sample_weight: None, or real (B,), at least 0.

        Returns:
            `LossOutput` with the metric `"flow/velocity_error"`: the same without weighting.
        """
        rows = SampleRows({"velocity": velocity, "x0": x0, "noise": noise}, sample_weight)
        errors = _errors(rows)
        weighted = errors * self._factor(rows.per_row("time", time, 0.0, 1.0))
        plain = rows.sum(ops.stop_gradient(errors))
        return LossOutput(rows.sum(weighted), {"flow/velocity_error": WeightedSum(plain.total, plain.weight)})

    def _factor(self, s: Any) -> Any:
        return flow_weight(self.weighting, ops.stop_gradient(s), gamma=self.gamma)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"weighting": self.weighting, "gamma": self.gamma}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FlowMatchingLoss":
        """The inverse of `get_config`."""
        return cls(**config)
