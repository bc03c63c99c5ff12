"""What the loss of a velocity counts at each time, by name."""

from typing import Any

from keras_diffusion_opd.schedules.namespace import namespace_of
from keras_diffusion_opd.validation import finite_real

WEIGHTS = ("none", "min_snr", "min_rf", "data", "noise", "cosmap")


def flow_weight(name: str, s: Any, *, gamma: float = 5.0) -> Any:
    """The weight of the squared error of a velocity at time s.

    With x_s = (1 - s) x0 + s e, an error dv of the velocity is an error s dv of the data and (1 - s) dv of the noise,
    and the signal-to-noise ratio is SNR = ((1 - s) / s)^2.

    Args:
        name: "none": 1.
            "min_snr": min(SNR, gamma) s^2: the error of the data counts min(SNR, gamma), which is bounded near the
            data and falls towards the noise.
            "min_rf": min(1, gamma s^2): the error of the data counts 1 / s^2, as in the plain loss of a velocity,
            but never more than gamma; differs from "none" only where s < gamma^(-1/2).
            "data": s^2, the error of the data counts 1.
            "noise": (1 - s)^2, the error of the noise counts 1.
            "cosmap": 2 / (pi (1 - 2 s + 2 s^2)), the times of the cosine schedule of diffusion models.
        s: float array or tensor, times in [0, 1].
        gamma: float > 0, for "min_snr" and "min_rf".

    Returns:
        Weights >= 0 of the shape of `s`: float64 of NumPy for host values, else a tensor.

    Raises:
        ValueError: no such name, or a `gamma` that is not above 0.

    Source: Hang et al., "Efficient Diffusion Training via Min-SNR Weighting Strategy", 2023, arXiv:2303.09556; Esser
    et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024, arXiv:2403.03206
    ("cosmap").

    Example:

    ```python
    from keras_diffusion_opd.schedules import flow_weight

    assert flow_weight("min_snr", 0.5) == 0.25          # SNR 1, an error of the data of dv / 2
    assert flow_weight("min_rf", [0.1, 0.5]).round(6).tolist() == [0.05, 1.0]
    ```
    """
    if name not in WEIGHTS:
        raise ValueError(f"`name` of a weight must be one of {list(WEIGHTS)}. Received {name!r}.")
    gamma = finite_real("gamma", gamma)
    if gamma <= 0:
        raise ValueError(f"`gamma` must be above 0. Received {gamma}.")
    xp, s = namespace_of(s)
    if name == "none":
        return xp.ones_like(s)
    if name == "min_snr":
        return xp.minimum((1.0 - s) ** 2, gamma * s**2)
    if name == "min_rf":
        return xp.minimum(xp.ones_like(s), gamma * s**2)
    if name == "data":
        return s**2
    if name == "noise":
        return (1.0 - s) ** 2
    return 0.6366197723675814 / (1.0 - 2.0 * s + 2.0 * s**2)
