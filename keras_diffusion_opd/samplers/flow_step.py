"""One evaluation of a flow sampler: guidance, the linear step, the log-probability of what was drawn."""

import math
from typing import Any

from keras import ops


def per_row(value: Any, like: Any) -> Any:
    """`value` (B,), shaped to multiply every element of the rows of `like` (B, ...)."""
    return ops.reshape(value, (-1,) + (1,) * (len(like.shape) - 1))


def guided_velocity(conditional: Any, unconditional: Any, guidance: Any, rescale: Any = None) -> Any:
    """Classifier-free guidance, `v_u + w (v_c - v_u)`, with a guidance for each row.

    A row of guidance 1 gets `conditional` to the bit.

    Args:
        conditional: float (B, ...), velocity with the condition.
        unconditional: float (B, ...), velocity without it.
        guidance: float (B,).
        rescale: None, or float (B,) in [0, 1]: how far the spread of the result over a row is brought back to that of
            `conditional`.

    Returns:
        float (B, ...).

    Source: Ho and Salimans, "Classifier-Free Diffusion Guidance", 2022, arXiv:2207.12598; Lin et al., "Common
    Diffusion Noise Schedules and Sample Steps are Flawed", 2023, arXiv:2305.08891 (rescale).

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.samplers import guided_velocity

    v = guided_velocity(np.ones((2, 1), "float32"), np.zeros((2, 1), "float32"), np.array([1.0, 3.0], "float32"))
    assert np.array(v).tolist() == [[1.0], [3.0]]
    ```
    """
    conditional, unconditional = ops.convert_to_tensor(conditional), ops.convert_to_tensor(unconditional)
    w = per_row(ops.convert_to_tensor(guidance), conditional)
    guided = unconditional + w * (conditional - unconditional)
    if rescale is not None:
        axes = tuple(range(1, len(conditional.shape)))
        wanted = ops.std(conditional, axis=axes, keepdims=True)
        found = ops.std(guided, axis=axes, keepdims=True)
        ratio = ops.where(found > 0, wanted / ops.where(found > 0, found, ops.ones_like(found)), ops.ones_like(found))
        share = per_row(ops.convert_to_tensor(rescale), conditional)
        guided = guided * (share * ratio + (1 - share))
    return ops.where(w == 1, conditional, guided)


def flow_log_prob(x: Any, velocity: Any, x_next: Any, *, keep: Any, now: Any, spread: Any) -> Any:
    """The log-probability of a stochastic step, mean over the elements of a row.

    The step is Gaussian: `x_next ~ N(keep x + now v, spread^2)`. The mean, not the sum, keeps float32 exact enough for
    ratios: times the number of elements it is the log-density. Differentiable in `velocity`.

    Args:
        x: float (B, ...), the state before the step.
        velocity: float (B, ...), there.
        x_next: float (B, ...), the state after it.
        keep, now, spread: float (B,), of the step; `FlowRollout.coefficients` has them.

    Returns:
        float32 (B,); 0 where `spread` is 0, where nothing is drawn.

    Source: Liu et al., "Flow-GRPO: Training Flow Matching Models via Online RL", 2025, arXiv:2505.05470.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.samplers import flow_log_prob

    x, v, one = np.zeros((1, 4), "float32"), np.ones((1, 4), "float32"), np.ones(1, "float32")
    log_prob = flow_log_prob(x, v, v, keep=one, now=one, spread=one)       # at the mean
    assert abs(float(log_prob[0]) + 0.5 * np.log(2 * np.pi)) < 1e-6
    ```
    """
    x, velocity, x_next = (ops.cast(ops.convert_to_tensor(a), "float32") for a in (x, velocity, x_next))
    keep, now, spread = (ops.cast(ops.convert_to_tensor(a), "float32") for a in (keep, now, spread))
    mean = per_row(keep, x) * x + per_row(now, x) * velocity
    return gaussian_log_prob(x_next, mean, spread)


def gaussian_log_prob(x: Any, mean: Any, spread: Any) -> Any:
    """Mean over the elements of a row of log N(x; mean, spread^2), float32 (B,); 0 where `spread` is 0."""
    drawn = spread > 0
    safe = ops.where(drawn, spread, ops.ones_like(spread))
    square = ops.mean(ops.square((x - mean) / per_row(safe, x)), axis=tuple(range(1, len(x.shape))))
    found = -0.5 * square - ops.log(safe) - 0.5 * math.log(2 * math.pi)
    return ops.where(drawn, found, ops.zeros_like(found))
