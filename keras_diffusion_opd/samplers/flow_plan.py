"""What a flow sampler does at each evaluation of the denoiser, as numbers: one line of coefficients per row.

Every solver here is linear: the next state is `keep * base + now * v + before * v_before + spread * noise`, where
`base` is the state, or the state at the start of the step (`restart`). So one compiled step serves all of them, and
rows at different steps, of different lengths, with different noise. The numbers are made on the host, in float64.
"""

from typing import Any

import numpy as np

SOLVERS = ("euler", "heun", "multistep")
STOCHASTICITY = ("ode", "sde", "renoise")
DEFAULT_ETA = {"ode": 0.0, "sde": 0.7, "renoise": 1.0}


def flow_plan(times: np.ndarray, *, solver: str, stochasticity: str, eta: np.ndarray) -> dict[str, np.ndarray]:
    """The coefficients of every evaluation.

    Args:
        times: float (B, steps + 1), falling.
        solver: one of `SOLVERS`.
        stochasticity: one of `STOCHASTICITY`.
        eta: float (B,), amount of noise.

    Returns:
        dict of `time`, `keep`, `now`, `before`, `spread`, float32 (evaluations, B), and `restart`, `ends`, bool
        (evaluations, B): whether the evaluation belongs to the second half of a step, and whether it ends the step.
    """
    t = np.asarray(times, "float64")
    s, after = t[:, :-1], t[:, 1:]
    zero, h = np.zeros_like(s), after - s
    lines = {"time": s, "keep": zero + 1, "now": h, "before": zero, "spread": zero}
    if stochasticity == "sde":
        lines |= _sde(s, after, eta)
    elif stochasticity == "renoise":
        lines |= _renoise(s, after, eta)
    elif solver == "multistep":
        # Adams and Bashforth: the velocity goes on as it changed over the last step, which had another length.
        ratio = np.zeros_like(h)
        ratio[:, 1:] = h[:, 1:] / (2 * h[:, :-1])
        lines |= {"now": h * (1 + ratio), "before": -h * ratio}
    flags = {"restart": zero.astype(bool), "ends": ~zero.astype(bool)}
    if solver == "heun":
        lines, flags = _heun(s, after, h)
    return {name: value.T.astype("float32") for name, value in lines.items()} | {n: f.T for n, f in flags.items()}


def _sde(s: np.ndarray, after: np.ndarray, eta: np.ndarray) -> dict[str, np.ndarray]:
    """Euler and Maruyama's step of dx = [v + g^2 / (2 s) (x + (1 - s) v)] ds + g dw, g = eta sqrt(s / (1 - s)).

    At s = 1, where g has no end, it is taken from the next time. The last step, to 0, is that of the ODE: its noise
    would stay in the sample.
    """
    h = after - s
    inner = np.where(s < 1, s, after)
    square = np.where(after > 0, eta[:, None] ** 2 * inner / (1 - inner), 0.0)
    return {
        "keep": 1 + h * square / (2 * s),
        "now": h * (1 + square * (1 - s) / (2 * s)),
        "spread": np.sqrt(-h * square),
    }


def _renoise(s: np.ndarray, after: np.ndarray, eta: np.ndarray) -> dict[str, np.ndarray]:
    """The predicted data, noised to the next time: by fresh noise to the part eta, by the predicted noise else."""
    kept = after * np.sqrt(1 - eta[:, None] ** 2)
    return {
        "keep": (1 - after) + kept,
        "now": -(1 - after) * s + kept * (1 - s),
        "spread": after * eta[:, None],
    }


def _heun(s: np.ndarray, after: np.ndarray, h: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A step of Euler's, then the mean of the velocities at both its ends; the last step, to 0, is Euler's alone."""
    rows, steps = s.shape

    def both(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        turns = np.stack([first, second], axis=2).reshape(rows, 2 * steps)
        return turns[:, : 2 * steps - 1] if np.all(after[:, -1] == 0) else turns

    zero, one = np.zeros_like(s), np.ones_like(s)
    lines = {
        "time": both(s, after),
        "keep": both(one, one),
        "now": both(h, h / 2),
        "before": both(zero, h / 2),
        "spread": both(zero, zero),
    }
    restart = both(zero, one).astype(bool)
    ends = restart.copy()
    ends[:, -1] = True
    return lines, {"restart": restart, "ends": ends}


def flow_guidance(time: np.ndarray, guidance: np.ndarray, interval: tuple[float, float]) -> np.ndarray:
    """The guidance of every evaluation, float32 (evaluations, B): 1 outside the interval.

    Args:
        time: float (evaluations, B).
        guidance: float (B,).
        interval: (low, high), times within which guidance acts.
    """
    within = (time >= np.float32(interval[0])) & (time <= np.float32(interval[1]))
    return np.where(within, guidance[None], 1.0).astype("float32")


def rows_of(arrays: dict[str, Any], taken: np.ndarray) -> dict[str, Any]:
    """The rows `taken` of arrays (evaluations, B)."""
    return {name: value[:, taken] for name, value in arrays.items()}
