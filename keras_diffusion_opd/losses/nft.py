"""DiffusionNFT: reinforcement learning of a flow model on the forward process, without likelihoods."""

from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.losses.sample_rows import SampleRows, column, row_mean
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum
from keras_diffusion_opd.validation import finite_real

# The smallest divisor of the adaptive weight, as in the paper.
_SMALLEST_ERROR = 1e-5


def nft_loss(
    velocity: Any,
    old_velocity: Any,
    x_s: Any,
    x0: Any,
    time: Any,
    reward: Any,
    *,
    beta: float = 1.0,
    reference_velocity: Any = None,
    kl_weight: float = 0.0,
    adaptive: bool = True,
    advantage_clip: float = 5.0,
    sample_weight: Any = None,
) -> LossOutput:
    """Pull the policy towards good samples and push it away from bad ones, in two implicit branches.

    With `v(+-) = old_velocity +- beta (velocity - old_velocity)` and `err(+-) = x_s - time v(+-) - x0`, the loss
    of a sample is `advantage_clip / beta (reward mean(err+^2) / w+ + (1 - reward) mean(err-^2) / w-)
    + kl_weight mean((velocity - reference_velocity)^2)`.

    Without the adaptive weight its minimum over all functions is `old + 2 / beta Cov(reward, e - x0 | x_s)`. At
    `velocity = old_velocity` the value does not depend on the reward, but the gradient does. A reward of 1/2
    only pulls towards the old policy. For advantages within the clip the gradient depends on `beta` and
    `advantage_clip` through their product alone.

    Args:
        velocity: float (B, ...), of the policy at `(x_s, time)`. The gradient flows into it alone.
        old_velocity: float (B, ...), of the policy that drew the samples.
        x_s: float (B, ...), `(1 - time) x0 + time e` with fresh noise e.
        x0: float (B, ...), samples of the old policy.
        time: float (B,), in [0, 1]: 0 = data, 1 = noise.
        reward: float (B,), in [0, 1]: the probability that the sample is good, from `reward_weights`.
        beta: > 0, how far the branches stand from the old policy, in steps of policy minus old. The paper uses 1
            and .1.
        reference_velocity: None, or float (B, ...), of the model that training started from.
        kl_weight: >= 0. The paper uses 1e-4. Above 0 it needs `reference_velocity`.
        adaptive: whether to divide by `w(+-)`, the mean absolute error of the branch in that sample, at least 1e-5,
            through which no gradient flows.
        advantage_clip: > 0, what the advantages were clipped to before they became `reward`.
        sample_weight: None, or real (B,), at least 0. A row of weight 0 does not enter, whatever it holds.

    Returns:
        `LossOutput`, float32 (float64 where an input is), with the metrics `"nft/positive_loss"` and
        `"nft/negative_loss"` (the errors of the two branches, weighted by how much the rewards ask for them),
        `"nft/old_deviation"` (mean squared distance from the old policy: exactly 0 if they are equal) and, with a
        reference, `"nft/kl"` (the same from the reference).

    Raises:
        ValueError: shapes that do not fit; a time or reward out of [0, 1]; a setting out of range.

    Source: Zheng et al., "DiffusionNFT: Online Diffusion Reinforcement with Forward Process", 2025,
    arXiv:2509.16117.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import nft_loss

    x0, noise, time = np.array([[0.5]]), np.array([[-0.6]]), np.array([1.0])
    output = nft_loss(                                       # the target velocity is noise - x0 = -1.1
        np.array([[0.9]]), np.array([[0.4]]), noise, x0, time, np.array([0.8]),
        beta=0.3, advantage_clip=0.3, adaptive=False,
    )
    assert abs(float(output.primary.mean()) - 2.5425) < 1e-6
    ```
    """
    beta, advantage_clip = _positive("beta", beta), _positive("advantage_clip", advantage_clip)
    kl_weight = finite_real("kl_weight", kl_weight)
    if kl_weight < 0 or (kl_weight and reference_velocity is None):
        raise ValueError(
            "`kl_weight` must be at least 0, and above 0 it needs `reference_velocity`. Received "
            f"kl_weight={kl_weight} and {'no' if reference_velocity is None else 'a'} reference."
        )
    # 1. Silence rows of weight 0, and all gradients but the policy's.
    given = {"velocity": velocity, "old_velocity": old_velocity, "x_s": x_s, "x0": x0}
    if reference_velocity is not None:
        given["reference_velocity"] = reference_velocity
    rows = SampleRows(given, sample_weight)
    time = rows.per_row("time", time, 0.0, 1.0)
    reward = ops.stop_gradient(rows.per_row("reward", reward, 0.0, 1.0))
    v, old, x_s, x0 = (rows["velocity"], *(ops.stop_gradient(rows[name]) for name in ("old_velocity", "x_s", "x0")))
    # 2. The error of both branches.
    step, time = beta * (v - old), column(ops.stop_gradient(time), v)
    positive = _branch_loss(x_s - time * (old + step) - x0, adaptive)
    negative = _branch_loss(x_s - time * (old - step) - x0, adaptive)
    # 3. What the rewards ask for.
    values = (advantage_clip / beta) * (reward * positive + (1.0 - reward) * negative)
    # 4. Stay near the reference, and say how far the policy has gone.
    metrics = {
        "nft/positive_loss": rows.sum(positive, reward),
        "nft/negative_loss": rows.sum(negative, 1.0 - reward),
        "nft/old_deviation": rows.sum(row_mean(ops.square(v - old))),
    }
    if reference_velocity is not None:
        distance = row_mean(ops.square(v - ops.stop_gradient(rows["reference_velocity"])))
        metrics["nft/kl"] = rows.sum(distance)
        if kl_weight:
            values = values + kl_weight * distance
    silent = {name: WeightedSum(ops.stop_gradient(m.total), m.weight) for name, m in metrics.items()}
    return LossOutput(rows.sum(values), silent)


def _branch_loss(error: Any, adaptive: bool) -> Any:
    """mean(error^2), over mean|error| where adaptive: float (B, ...) -> (B,)."""
    squared = row_mean(ops.square(error))
    if not adaptive:
        return squared
    size = ops.stop_gradient(row_mean(ops.abs(error)))
    return squared / ops.where(size > _SMALLEST_ERROR, size, ops.full_like(size, _SMALLEST_ERROR))


def _positive(name: str, value: Any) -> float:
    value = finite_real(name, value)
    if value <= 0:
        raise ValueError(f"`{name}` must be above 0. Received {value}.")
    return value


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class NFTLoss:
    """The settings of `nft_loss`: what `trainers.DiffusionNFTTrainer` takes.

    Args:
        beta: > 0. The paper uses 1, and .1 for single rewards; a smaller one learns faster and hacks the reward sooner.
        kl_weight: >= 0, pull to the reference. The paper uses 1e-4. A larger one (.1) keeps samples close to the data.
        adaptive: whether the branches are weighted by their own error.
        advantage_clip: > 0. The paper uses 5.

    Raises:
        ValueError: a setting out of range.

    Source: Zheng et al., "DiffusionNFT", 2025, arXiv:2509.16117.

    Example:

    ```python
    from keras_diffusion_opd.losses import NFTLoss

    assert NFTLoss(kl_weight=0.1).get_config()["beta"] == 1.0
    ```
    """

    metric_names = ("nft/positive_loss", "nft/negative_loss", "nft/old_deviation", "nft/kl")

    def __init__(
        self, *, beta: float = 1.0, kl_weight: float = 1e-4, adaptive: bool = True, advantage_clip: float = 5.0
    ) -> None:
        self.beta, self.advantage_clip = _positive("beta", beta), _positive("advantage_clip", advantage_clip)
        self.kl_weight = finite_real("kl_weight", kl_weight)
        if self.kl_weight < 0:
            raise ValueError(f"`kl_weight` must be at least 0. Received {kl_weight}.")
        self.adaptive = bool(adaptive)

    def __call__(
        self,
        velocity: Any,
        old_velocity: Any,
        x_s: Any,
        x0: Any,
        time: Any,
        reward: Any,
        reference_velocity: Any,
        sample_weight: Any = None,
    ) -> LossOutput:
        """`nft_loss` with these settings."""
        return nft_loss(
            velocity,
            old_velocity,
            x_s,
            x0,
            time,
            reward,
            reference_velocity=reference_velocity,
            sample_weight=sample_weight,
            **self.get_config(),
        )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "beta": self.beta,
            "kl_weight": self.kl_weight,
            "adaptive": self.adaptive,
            "advantage_clip": self.advantage_clip,
        }
