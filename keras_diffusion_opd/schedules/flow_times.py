"""Times at which flow models are trained: a function of (seed, step, sample id), never of the batch."""

import statistics
from typing import Any

import numpy as np

from keras_diffusion_opd.schedules.diffusion_times import TIMES, spread_times
from keras_diffusion_opd.schedules.flow_grid import shift_time
from keras_diffusion_opd.validation import finite_real, whole_number

_NORMAL = np.vectorize(statistics.NormalDist().inv_cdf, otypes=["float64"])


def uniform_times(
    seed: int,
    step: int,
    sample_ids: Any,
    *,
    low: float = 0.0,
    high: float = 1.0,
    shift: float = 1.0,
    spread: str = "independent",
    batch_ids: Any = None,
) -> np.ndarray:
    """Times that are uniform in [low, high], one for each sample of a step.

    Args:
        seed: int.
        step: int >= 0.
        sample_ids: int (B,), whose times they are.
        low: float, the earliest time.
        high: float, the latest; 0 <= low < high <= 1.
        shift: float > 0, see `shift_time`; applied within [0, 1], before `low` and `high`.
        spread: "independent": each time for itself. "low_discrepancy": the times of a step lie evenly, in random
            order, from a common random offset; each is still uniform, and means over a step vary much less.
            "antithetic": that, and every odd step is the mirror image of the one before.
        batch_ids: None, or int (N,): the ids of the whole step where `sample_ids` are a part of it, as on one device
            of several. For "independent" they do not matter.

    Returns:
        float32 (B,).

    Raises:
        ValueError: an argument is out of its range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.schedules import uniform_times

    times = uniform_times(0, 3, np.arange(6))
    assert np.array_equal(uniform_times(0, 3, np.arange(4, 6)), times[4:])
    ```
    """
    low, high = finite_real("low", low), finite_real("high", high)
    if not 0 <= low < high <= 1:
        raise ValueError(f"`low` and `high` must be 0 <= low < high <= 1. Received {low} and {high}.")
    u = shift_time(_uniforms(seed, step, sample_ids, spread, batch_ids), shift)
    return (low + (high - low) * u).astype("float32")


def logit_normal_times(
    seed: int,
    step: int,
    sample_ids: Any,
    *,
    mean: float = 0.0,
    std: float = 1.0,
    shift: float = 1.0,
    spread: str = "independent",
    batch_ids: Any = None,
) -> np.ndarray:
    """Times whose logit is normal: most of them in the middle, where a velocity is hardest to tell.

    Args:
        seed, step, sample_ids, spread, batch_ids: see `uniform_times`.
        mean: float, of the logit; above 0 towards the noise.
        std: float > 0, of the logit.
        shift: float > 0, see `shift_time`; the same as adding log(shift) to `mean`.

    Returns:
        float32 (B,), in [0, 1].

    Raises:
        ValueError: an argument is out of its range.

    Source: Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024,
    arXiv:2403.03206.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.schedules import logit_normal_times

    times = logit_normal_times(0, 0, np.arange(1000), spread="low_discrepancy")
    assert abs(np.median(times) - 0.5) < 2e-3
    ```
    """
    mean, std = finite_real("mean", mean), finite_real("std", std)
    if std <= 0:
        raise ValueError(f"`std` must be above 0. Received {std}.")
    u = np.clip(_uniforms(seed, step, sample_ids, spread, batch_ids), 2.0**-53, 1 - 2.0**-53)
    times = 1 / (1 + np.exp(-(mean + std * _NORMAL(u))))
    return np.asarray(shift_time(times, shift)).astype("float32")


def grid_times(
    seed: int, step: int, sample_ids: Any, grid: Any, *, spread: str = "low_discrepancy", batch_ids: Any = None
) -> np.ndarray:
    """Times out of those that a sampler visits, all equally likely: the last, 0, is never asked for.

    With "low_discrepancy" a step of at least as many samples as grid times holds every one of them.

    Args:
        seed, step, sample_ids, spread, batch_ids: see `uniform_times`.
        grid: float (steps + 1,), from `timestep_grid`.

    Returns:
        float32 (B,), each one of `grid[:-1]`.

    Raises:
        ValueError: an argument is out of its range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.schedules import grid_times, timestep_grid

    times = grid_times(0, 0, np.arange(8), timestep_grid(4, shift=3.0))
    assert sorted(times) == sorted(np.repeat(timestep_grid(4, shift=3.0)[:-1], 2))
    ```
    """
    grid = np.asarray(grid, "float32")
    if grid.ndim != 1 or len(grid) < 2 or not np.all(np.diff(grid) < 0):
        raise ValueError(f"`grid` must be falling times (steps + 1,), from timestep_grid. Received shape {grid.shape}.")
    u = _uniforms(seed, step, sample_ids, spread, batch_ids)
    return grid[np.minimum((u * (len(grid) - 1)).astype("int64"), len(grid) - 2)]


def _uniforms(seed: int, step: int, sample_ids: Any, spread: str, batch_ids: Any) -> np.ndarray:
    if spread not in TIMES:
        raise ValueError(f"`spread` must be one of {list(TIMES)}. Received {spread!r}.")
    ids = np.asarray(sample_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"`sample_ids` must be integers of shape (B,). Received {ids.dtype}, shape {ids.shape}.")
    seed, step = whole_number("seed", seed, None), whole_number("step", step)
    return spread_times(spread, seed, step, ids.astype("int64"), batch_ids)[:, 0]
