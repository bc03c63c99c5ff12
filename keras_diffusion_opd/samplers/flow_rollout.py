"""`FlowRollout`: samples of a flow model with all that led to them."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FlowRollout:
    """What `FlowSampler.rollout` returns.

    Args:
        samples: float32 (B, ...).
        times: float32 (B, steps + 1), falling.
        noise: float32 (B, ...), at the start.
        states: float32 (B, steps + 1, ...), the first what sampling began with, the last the samples.
        log_probs: float32 (B, steps), of every step, mean over elements; 0 where nothing is drawn.
        coefficients: dict of `time`, `keep`, `now`, `spread`, float32 (B, steps): a stochastic step is
            `N(keep x + now v, spread^2)`; `samplers.flow_log_prob` takes them. Of Heun's method there are two lines a
            step but the last.
        conditions: dict of arrays (B, ...).

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.samplers import FlowSampler, flow_log_prob

    def denoiser(inputs):
        return inputs["x"]

    rollout = FlowSampler(stochasticity="sde").rollout(denoiser, shape=(2, 3), steps=4, seed=0)
    x, line = rollout.states[:, 1], {k: rollout.coefficients[k][:, 1] for k in ("keep", "now", "spread")}
    again = flow_log_prob(x, x, rollout.states[:, 2], **line)
    assert np.allclose(again, rollout.log_probs[:, 1], atol=1e-6)
    ```
    """

    samples: np.ndarray
    times: np.ndarray
    noise: np.ndarray
    states: Any
    log_probs: Any
    coefficients: dict[str, np.ndarray]
    conditions: dict[str, np.ndarray]
