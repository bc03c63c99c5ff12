"""Timesteps of flow models: time runs from 1, noise, to 0, data, and a shift moves it towards the noise."""

import math
from typing import Any

import numpy as np

from keras_diffusion_opd.schedules.namespace import namespace_of
from keras_diffusion_opd.validation import finite_real, positive_int

RULES = ("square_root", "exponential")


def shift_time(u: Any, k: Any) -> Any:
    """`k u / (1 + (k - 1) u)`: the time u, shifted by k.

    k above 1 spends more of the steps, or of the training, near the noise, as larger images need. Shifts compose by
    multiplication, and the inverse of k is 1 / k; 0 and 1 stay where they are.

    Args:
        u: float array or tensor, times in [0, 1].
        k: float > 0, or an array or tensor that broadcasts against `u`.

    Returns:
        Times in [0, 1]: float64 of NumPy for host values, else a tensor of the dtype of `u`.

    Raises:
        ValueError: a `k` on the host that is not finite and above 0.

    Source: Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024,
    arXiv:2403.03206.

    Example:

    ```python
    from keras_diffusion_opd.schedules import shift_time

    assert shift_time(0.5, 3.0) == 0.75
    assert abs(shift_time(shift_time(0.3, 2.0), 4.0) - shift_time(0.3, 8.0)) < 1e-15
    ```
    """
    on_host = isinstance(k, np.ndarray | np.generic | float | int | list | tuple)
    if on_host and not (np.all(np.isfinite(k)) and np.all(np.asarray(k) > 0)):
        raise ValueError(f"The shift must be finite and above 0. Received {k!r}. 1 leaves times as they are.")
    if not on_host and isinstance(u, np.ndarray | np.generic | float | int | list | tuple):
        namespace, k = namespace_of(k)
        u = namespace.cast(namespace.convert_to_tensor(u), k.dtype)
    _, u = namespace_of(u)
    return u / (u + (1 - u) / k)  # so written, 1 stays exactly 1


def timestep_grid(steps: int, *, shift: Any = 1.0) -> np.ndarray:
    """The times that a sampler of `steps` steps visits, from 1 to 0: even steps, shifted.

    Args:
        steps: int >= 1.
        shift: float > 0, or float (B,) for grids of rows.

    Returns:
        float32 (steps + 1,), or (B, steps + 1): falling strictly, the first exactly 1 and the last exactly 0.

    Raises:
        ValueError: an argument is out of its range.

    Example:

    ```python
    from keras_diffusion_opd.schedules import timestep_grid

    assert timestep_grid(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert abs(timestep_grid(4, shift=5.0) - [1.0, 0.9375, 0.833333, 0.625, 0.0]).max() < 1e-6
    ```
    """
    even = np.linspace(1.0, 0.0, positive_int("steps", steps) + 1)
    grid = shift_time(even, np.asarray(shift, "float64")[..., None]).astype("float32")
    if not np.all(np.diff(grid) < 0):
        raise ValueError(
            f"{steps} steps with a shift of {shift!r} fall together in float32. Take fewer steps or a smaller shift."
        )
    return grid


def resolution_shift(tokens: Any, *, rule: str = "square_root", reference: Any = None) -> Any:
    """The shift that an image of so many tokens wants.

    A larger image holds more pixels that say the same, and needs more noise to be as uncertain.

    Args:
        tokens: int >= 1 or int array, positions that the denoiser sees: latent pixels over the patch area.
        rule: "square_root" (Stable Diffusion 3): the uncertainty of an average over the tokens stays what it is at
            the reference, shift = shift_0 * sqrt(tokens / tokens_0).
            "exponential" (Flux): the logarithm of the shift is linear in the tokens.
        reference: None, or what the rule is fixed by. "square_root": `(tokens_0, shift_0)`, (4096, 3.0) where None,
            1024 x 1024 pixels. "exponential": `(tokens_0, shift_0, tokens_1, shift_1)`,
            (256, exp(0.5), 4096, exp(1.15)) where None.

    Returns:
        The shift, float or float64 array of the shape of `tokens`.

    Raises:
        ValueError: no such rule, or a number that is not above 0.

    Source: Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024,
    arXiv:2403.03206, section 5.3.2 ("square_root").

    Example:

    ```python
    from keras_diffusion_opd.schedules import resolution_shift

    assert resolution_shift(4096) == 3.0 and resolution_shift(1024) == 1.5
    assert abs(resolution_shift(256, rule="exponential") - 1.648721) < 1e-6
    ```
    """
    count = np.asarray(tokens, "float64")
    if not (np.all(np.isfinite(count)) and np.all(count >= 1)):
        raise ValueError(f"`tokens` must be at least 1. Received {tokens!r}.")
    if rule not in RULES:
        raise ValueError(f"`rule` must be one of {list(RULES)}. Received {rule!r}.")
    usual = (4096, 3.0) if rule == "square_root" else (256, math.exp(0.5), 4096, math.exp(1.15))
    numbers = [finite_real("reference", number) for number in (usual if reference is None else reference)]
    if len(numbers) != len(usual) or min(numbers) <= 0 or (len(numbers) == 4 and numbers[0] == numbers[2]):
        raise ValueError(
            f"`reference` of {rule!r} must be {len(usual)} numbers above 0, tokens and shift in turn. "
            f"Received {reference!r}."
        )
    if rule == "square_root":
        shift = numbers[1] * np.sqrt(count / numbers[0])
    else:
        slope = (math.log(numbers[3]) - math.log(numbers[1])) / (numbers[2] - numbers[0])
        shift = np.exp(math.log(numbers[1]) + slope * (count - numbers[0]))
    return float(shift) if shift.ndim == 0 else shift
