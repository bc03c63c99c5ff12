"""What a flow sampler is called with, checked before anything runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_diffusion_opd.data.inference import batch_conditions
from keras_diffusion_opd.samplers.arguments import step_callback
from keras_diffusion_opd.samplers.row_noise import normal, row_keys
from keras_diffusion_opd.schedules import shift_time, timestep_grid
from keras_diffusion_opd.validation import finite_real, positive_int


@dataclass(frozen=True)
class FlowCall:
    """One call of a flow sampler: arrays of all its rows."""

    times: np.ndarray  # float32 (B, steps + 1)
    keys: np.ndarray  # int32 (B, 2)
    noise: np.ndarray  # float32 (B, ...)
    start: np.ndarray  # float32 (B, ...)
    conditions: dict[str, np.ndarray]
    unconditional: dict[str, np.ndarray]
    guidance: np.ndarray  # float32 (B,)
    rescale: np.ndarray  # float32 (B,)
    interval: tuple[float, float]
    eta: np.ndarray  # float32 (B,)
    size: int  # rows of one call of the denoiser
    callback: Callable[..., None] | None
    progress: bool


def checked_call(
    *,
    shape: Any,
    steps: Any,
    seed: Any,
    conditions: Any,
    unconditional: Any,
    guidance: Any,
    guidance_rescale: Any,
    guidance_interval: Any,
    shift: Any,
    times: Any,
    eta: Any,
    noise: Any,
    init_image: Any,
    strength: Any,
    batch_size: Any,
    callback: Any,
    progress: bool,
    reserved: tuple[str, ...],
    eta_most: float,
) -> FlowCall:
    """The arguments of `FlowSampler.sample`, checked and made arrays; else TypeError or ValueError."""
    shape = sample_shape(shape)
    rows = shape[0]
    share = row_values("strength", strength, rows, above=0.0, most=1.0)
    grid = row_times(steps, shift, share, times, rows)
    keys = row_keys(seed, rows)
    noise = (
        normal(np, keys, np.zeros(rows, "int32"), int(np.prod(shape[1:]))).reshape(shape)
        if noise is None
        else sample_array("noise", noise, shape)
    )
    if init_image is None:
        if np.any(grid[:, 0] != 1):
            raise ValueError(
                f"Sampling that starts at time {grid[:, 0].min():g}, below 1, needs an `init_image` to be noised to "
                "that time. Without one leave `strength` at 1 and begin `times` with 1."
            )
        start = noise
    else:
        s = grid[:, 0].reshape(-1, *(1,) * (len(shape) - 1))
        start = (1 - s) * sample_array("init_image", init_image, shape) + s * noise
    weights = row_values("guidance", guidance, rows)
    conditions = batch_conditions(conditions, rows, reserved)
    free = unconditional_inputs(unconditional, conditions, rows, reserved, needed=bool(np.any(weights != 1)))
    return FlowCall(
        times=grid,
        keys=keys,
        noise=noise,
        start=start.astype("float32"),
        conditions=conditions,
        unconditional=free,
        guidance=weights,
        rescale=row_values("guidance_rescale", guidance_rescale, rows, least=0.0, most=1.0),
        interval=interval_of_times(guidance_interval),
        eta=row_values("eta", eta, rows, least=0.0, most=eta_most),
        size=rows if batch_size is None else min(positive_int("batch_size", batch_size), rows),
        callback=step_callback(callback),
        progress=bool(progress),
    )


def sample_shape(shape: Any) -> tuple[int, ...]:
    """`(rows, ...)` as ints, at least two of them; else ValueError."""
    if not isinstance(shape, tuple | list) or len(shape) < 2:
        raise ValueError(f"`shape` must be (rows, ...), at least two whole numbers. Received {shape!r}.")
    return tuple(positive_int(f"shape[{i}]", size) for i, size in enumerate(shape))


def sample_array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """`value` as finite float32 of this shape; else ValueError."""
    array = np.asarray(value)
    if array.shape != shape or array.dtype.kind not in "fiu":
        raise ValueError(f"`{name}` must be real, of shape {shape}. Received {array.dtype}, shape {array.shape}.")
    if not np.all(np.isfinite(array)):
        row = int(np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))[0])
        raise ValueError(f"`{name}` must be finite. Received NaN or infinity, first in row {row}.")
    return array.astype("float32")


def row_values(
    name: str,
    value: Any,
    rows: int,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = float("inf"),
) -> np.ndarray:
    """float32 (rows,) of one number or one per row, finite and in range; else ValueError."""
    array = np.asarray(finite_real(name, value) if np.ndim(value) == 0 else value, "float64")
    if array.shape not in ((), (rows,)):
        raise ValueError(f"`{name}` must be one number, or {rows}, one per row. Received shape {array.shape}.")
    low = above if least is None else least
    below = False if low is None else np.any(array < low) or (least is None and np.any(array == low))
    if not np.all(np.isfinite(array)) or below or np.any(array > most):
        words = "" if low is None else f", {'above' if least is None else 'at least'} {low:g}"
        words += "" if most == float("inf") else f" and at most {most:g}"
        raise ValueError(f"`{name}` must be finite{words}. Received {value!r}.")
    return np.broadcast_to(array, (rows,)).astype("float32")


def row_times(steps: Any, shift: Any, strength: np.ndarray, times: Any, rows: int) -> np.ndarray:
    """The times of every row, float32 (rows, steps + 1)."""
    steps = positive_int("steps", steps)
    if times is not None:
        grid = np.asarray(times, "float32")
        if grid.shape not in ((steps + 1,), (rows, steps + 1)):
            raise ValueError(
                f"`times` must have shape ({steps + 1},) or ({rows}, {steps + 1}), one more than the steps. "
                f"Received {grid.shape}."
            )
        if not (np.all(np.diff(grid) < 0) and np.all(grid >= 0) and np.all(grid <= 1)):
            raise ValueError(f"`times` must fall strictly within [0, 1]. Received {times!r}.")
        if np.any(strength != 1):
            raise ValueError("`strength` says where to start, and so do `times`. Leave `strength` at 1.")
        return np.broadcast_to(grid, (rows, steps + 1))
    k = row_values("shift", shift, rows, above=0.0)
    if np.all(strength == 1):
        return timestep_grid(steps, shift=k)
    even = strength[:, None].astype("float64") * np.linspace(1.0, 0.0, steps + 1)
    return shift_time(even, k[:, None].astype("float64")).astype("float32")


def interval_of_times(interval: Any) -> tuple[float, float]:
    """`(low, high)`, 0 <= low < high <= 1; else ValueError."""
    if not isinstance(interval, tuple | list) or len(interval) != 2:
        raise ValueError(f"`guidance_interval` must be (low, high), two times. Received {interval!r}.")
    low, high = (finite_real("guidance_interval", value) for value in interval)
    if not 0 <= low < high <= 1:
        raise ValueError(f"`guidance_interval` must be 0 <= low < high <= 1. Received {interval!r}.")
    return low, high


def unconditional_inputs(
    unconditional: Any, conditions: dict[str, np.ndarray], rows: int, reserved: tuple[str, ...], *, needed: bool
) -> dict[str, np.ndarray]:
    """What the denoiser gets without the condition: `conditions` with those of `unconditional` in their place."""
    if unconditional is None and needed:
        raise ValueError(
            "`guidance` other than 1 needs `unconditional`: a dict of the conditions that are to be replaced, by name "
            "(an empty prompt's embedding, the null class), each (B, ...) or with one row. Received None."
        )
    found = {} if unconditional is None else dict(unconditional)
    unknown = sorted(set(found) - set(conditions))
    if unknown:
        raise ValueError(f"`unconditional` names {unknown}, which `conditions` does not hold: {sorted(conditions)}.")
    if needed and not found:
        raise ValueError("`unconditional` must name at least one of the conditions. Received none.")
    for name, value in found.items():
        array = np.asarray(value)
        if array.shape[:1] == (1,) and rows > 1:
            array = np.broadcast_to(array, (rows, *array.shape[1:]))
        if array.shape != conditions[name].shape:
            raise ValueError(
                f"`unconditional[{name!r}]` must have the shape of the condition, {conditions[name].shape}. "
                f"Received {array.shape}."
            )
        found[name] = array.astype(conditions[name].dtype)
    return {**conditions, **batch_conditions(found, rows, reserved)}
