"""Flow-GRPO: policy gradients over the steps of a stochastic sampler, whose transitions are Gaussian."""

import math
from typing import Any

from keras import ops

from keras_diffusion_opd.losses.numerics import excess
from keras_diffusion_opd.losses.sample_rows import SampleRows, column, row_mean
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum
from keras_diffusion_opd.validation import finite_real


def flow_sde_step(
    x_s: Any, velocity: Any, time: Any, next_time: Any, *, noise: float = 0.7, largest_time: float = 0.98
) -> tuple[Any, Any]:
    """Mean and standard deviation of one stochastic step that keeps the marginals of the flow.

    With `sigma = noise sqrt(s / (1 - s))` and `h = next_time - time < 0` the mean is `x_s (1 + sigma^2 h / (2 s))
    + velocity h (1 + sigma^2 (1 - s) / (2 s))` and the deviation `sigma sqrt(-h)`. Without noise it is Euler's step.

    Args:
        x_s: float (B, ...).
        velocity: float (B, ...), at `(x_s, time)`.
        time: float (B,), in (0, 1].
        next_time: float (B,), below `time`.
        noise: >= 0. The paper uses .7.
        largest_time: in (0, 1): what stands for a `time` above it in `sigma`, which is infinite at 1. The second
            time of the sampler's grid is usual.

    Returns:
        Mean (B, ...) and deviation (B,), float32 (float64 where an input is).

    Raises:
        ValueError: shapes or settings that do not fit.

    Source: Liu et al., "Flow-GRPO: Training Flow Matching Models via Online RL", 2025, arXiv:2505.05470.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import flow_sde_step

    mean, deviation = flow_sde_step(np.ones((1, 2)), np.ones((1, 2)), np.array([0.5]), np.array([0.25]), noise=0.0)
    assert np.array(mean).tolist() == [[0.75, 0.75]] and float(deviation[0]) == 0.0
    ```
    """
    noise, largest_time = finite_real("noise", noise), finite_real("largest_time", largest_time)
    if noise < 0 or not 0 < largest_time < 1:
        raise ValueError(
            f"`noise` must be at least 0 and `largest_time` lie in (0, 1). Received {noise} and {largest_time}."
        )
    rows = SampleRows({"x_s": x_s, "velocity": velocity})
    s, following = rows.per_row("time", time, 0.0, 1.0), rows.per_row("next_time", next_time, 0.0, 1.0)
    bounded = ops.where(s < largest_time, s, ops.full_like(s, largest_time))
    variance, h = noise**2 * bounded / (1.0 - bounded), following - s
    pull = variance * h / (2.0 * s)
    x, v = rows["x_s"], rows["velocity"]
    mean = x * (1.0 + column(pull, x)) + v * column(h + pull * (1.0 - s), x)
    return mean, ops.sqrt(-variance * h)


def gaussian_step_log_prob(sample: Any, mean: Any, deviation: Any, *, reduction: str = "mean") -> Any:
    """Log-density of a step, over its elements.

    Args:
        sample: float (B, ...), where the step went. No gradient flows into it.
        mean: float (B, ...), of the policy.
        deviation: float (B,), above 0.
        reduction: "mean" over the elements, as the paper's code has it, so that clips do not depend on the size
            of an image; or "sum", the log-density itself.

    Returns:
        (B,), float32 (float64 where an input is).

    Raises:
        ValueError: shapes that do not fit; another `reduction`.

    Source: Liu et al., "Flow-GRPO", 2025, arXiv:2505.05470.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import gaussian_step_log_prob

    found = gaussian_step_log_prob(np.zeros((1, 4)), np.zeros((1, 4)), np.ones(1), reduction="sum")
    assert abs(float(found[0]) + 2 * np.log(2 * np.pi)) < 1e-6
    ```
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"`reduction` must be 'mean' or 'sum'. Received {reduction!r}.")
    rows = SampleRows({"sample": sample, "mean": mean})
    spread = rows.per_row("deviation", deviation, 0.0)
    residual = (ops.stop_gradient(rows["sample"]) - rows["mean"]) / column(spread, rows["mean"])
    terms = -ops.square(residual) / 2 - column(ops.log(spread), residual) - math.log(2 * math.pi) / 2
    return row_mean(terms) if reduction == "mean" else ops.sum(terms, axis=tuple(range(1, len(rows.shape))))


def gaussian_step_kl(mean: Any, reference_mean: Any, deviation: Any) -> Any:
    """KL between two steps of one deviation, per element: `mean((mean - reference_mean)^2) / (2 deviation^2)`.

    Args:
        mean: float (B, ...), of the policy.
        reference_mean: float (B, ...), of the reference. No gradient flows into it.
        deviation: float (B,), above 0.

    Returns:
        (B,), float32 (float64 where an input is).

    Raises:
        ValueError: shapes that do not fit.

    Source: Liu et al., "Flow-GRPO", 2025, arXiv:2505.05470.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import gaussian_step_kl

    assert float(gaussian_step_kl(np.array([[2.0]]), np.array([[0.0]]), np.array([2.0]))[0]) == 0.5
    ```
    """
    rows = SampleRows({"mean": mean, "reference_mean": reference_mean})
    spread = rows.per_row("deviation", deviation, 0.0)
    difference = rows["mean"] - ops.stop_gradient(rows["reference_mean"])
    return row_mean(ops.square(difference)) / (2.0 * ops.square(spread))


def flow_grpo_loss(
    log_probs: Any,
    old_log_probs: Any,
    advantages: Any,
    *,
    clip: float = 1e-4,
    kl: Any = None,
    kl_weight: float = 0.0,
    advantage_clip: float = 5.0,
    sample_weight: Any = None,
) -> LossOutput:
    """PPO's clipped objective, `-min(ratio A, clip(ratio, 1 - c, 1 + c) A) + kl_weight kl`.

    At the weights that drew the samples the ratio is exactly 1 and the gradient that of `-A log_probs`.

    Args:
        log_probs: float (B,) or (B, steps), of the policy, from `gaussian_step_log_prob`.
        old_log_probs: of the same shape, as they were when drawn.
        advantages: float (B,), from `group_advantages`.
        clip: c > 0. The paper's code uses 1e-4 to 1e-5 with log-densities averaged over elements.
        kl: None for none, or float of the shape of `log_probs`: from `gaussian_step_kl`.
        kl_weight: >= 0; above 0 it needs `kl`. The paper uses .01 to .04.
        advantage_clip: > 0. The paper's code uses 5.
        sample_weight: None, or real (B,), at least 0. A row of weight 0 does not enter, whatever it holds.

    Returns:
        `LossOutput` with the metrics `"grpo/ratio"`, `"grpo/clip_fraction"`, `"grpo/old_kl"` (the estimate
        `ratio - 1 - log ratio`, never negative) and, where given, `"grpo/kl"`.

    Raises:
        ValueError: shapes or settings that do not fit.

    Source: Liu et al., "Flow-GRPO", 2025, arXiv:2505.05470; Schulman et al., 2017, arXiv:1707.06347.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import flow_grpo_loss

    log_probs = np.array([-1.2, 0.3])
    output = flow_grpo_loss(log_probs, log_probs, np.array([1.0, -0.5]))
    assert float(output.metrics["grpo/ratio"].mean()) == 1.0
    assert abs(float(output.primary.mean()) + 0.25) < 1e-6
    ```
    """
    clip, kl_weight = finite_real("clip", clip), finite_real("kl_weight", kl_weight)
    advantage_clip = finite_real("advantage_clip", advantage_clip)
    if clip <= 0 or advantage_clip <= 0:
        raise ValueError(f"`clip` and `advantage_clip` must be above 0. Received {clip} and {advantage_clip}.")
    if kl_weight < 0 or (kl_weight and kl is None):
        raise ValueError(f"`kl_weight` must be at least 0, and above 0 it needs `kl`. Received {kl_weight}.")
    given = {"log_probs": log_probs, "old_log_probs": old_log_probs}
    if kl is not None:
        given["kl"] = kl
    rows = SampleRows(given, sample_weight)
    log_probs = rows["log_probs"]
    advantages = ops.stop_gradient(rows.per_row("advantages", advantages))
    advantages = column(ops.clip(advantages, -advantage_clip, advantage_clip), log_probs)
    # 1. How much likelier the step has become.
    log_ratio = log_probs - ops.stop_gradient(rows["old_log_probs"])
    ratio = ops.exp(log_ratio)
    # 2. The worse of the ratio and the clipped ratio.
    plain, clipped = ratio * advantages, ops.clip(ratio, 1.0 - clip, 1.0 + clip) * advantages
    values = row_mean(-ops.where(clipped < plain, clipped, plain))
    outside = ops.cast(ops.abs(ratio - 1.0) > clip, rows.dtype)
    metrics = {
        "grpo/ratio": rows.sum(row_mean(ratio)),
        "grpo/clip_fraction": rows.sum(row_mean(outside)),
        "grpo/old_kl": rows.sum(row_mean(excess(-log_ratio, ops.ones_like(ratio), ratio))),
    }
    # 3. Stay near the reference.
    if kl is not None:
        distance = row_mean(rows["kl"])
        metrics["grpo/kl"] = rows.sum(distance)
        values = values + kl_weight * distance
    silent = {name: WeightedSum(ops.stop_gradient(m.total), m.weight) for name, m in metrics.items()}
    return LossOutput(rows.sum(values), silent)
