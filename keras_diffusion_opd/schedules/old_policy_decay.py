"""How slowly the policy that draws samples follows the policy that is trained."""

from typing import Any

import keras

from keras_diffusion_opd.validation import finite_real, whole_number


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class OldPolicyDecay:
    """The share of the old policy that is kept after each round: `old <- d old + (1 - d) policy`.

    `d` is 0 until update `start` (the old policy is the policy), then grows by `slope` for each update, up to
    `limit`.

    Args:
        slope: >= 0.
        limit: in [0, 1).
        start: int >= 0, updates.

    Raises:
        ValueError: an argument out of its range.

    Source: Zheng et al., "DiffusionNFT", 2025, arXiv:2509.16117.

    Example:

    ```python
    from keras_diffusion_opd.schedules import OldPolicyDecay

    decay = OldPolicyDecay(slope=0.001, limit=0.5)
    assert [decay(step) for step in (0, 100, 9000)] == [0.0, 0.1, 0.5]
    ```
    """

    def __init__(self, slope: float, limit: float, start: int = 0) -> None:
        self.slope = finite_real("slope", slope)
        self.limit = finite_real("limit", limit)
        self.start = whole_number("start", start)
        if self.slope < 0:
            raise ValueError(f"`slope` must be at least 0. Received {self.slope}.")
        if not 0 <= self.limit < 1:
            raise ValueError(
                f"`limit` must lie in [0, 1): at 1 the old policy would never follow. Received {self.limit}."
            )

    def __call__(self, step: int) -> float:
        """The decay after `step` updates, in [0, limit]."""
        return min(self.slope * max(whole_number("step", step) - self.start, 0), self.limit)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"slope": self.slope, "limit": self.limit, "start": self.start}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OldPolicyDecay":
        """The inverse of `get_config`."""
        return cls(**config)


_BY_NAME: dict[str, dict[str, Any]] = {
    "on_policy": {"slope": 0.0, "limit": 0.0},
    "type1": {"slope": 0.001, "limit": 0.5},
    "type2": {"slope": 0.0075, "limit": 0.999, "start": 75},
}


def get_old_policy_decay(decay: Any) -> OldPolicyDecay:
    """A decay by name, or the object itself.

    Args:
        decay: "on_policy" (always 0), "type1" (`min(.001 step, .5)`), "type2" (0 until update 75, then
            `min(.0075 (step - 75), .999)`), or an `OldPolicyDecay`.

    Returns:
        `OldPolicyDecay`.

    Raises:
        ValueError: the name is not known.

    Source: Zheng et al., "DiffusionNFT", 2025, arXiv:2509.16117.

    Example:

    ```python
    from keras_diffusion_opd.schedules import get_old_policy_decay

    assert [get_old_policy_decay("type2")(step) for step in (75, 95, 1000)] == [0.0, 0.15, 0.999]
    ```
    """
    if isinstance(decay, OldPolicyDecay):
        return decay
    if decay not in _BY_NAME:
        raise ValueError(f"`decay` must be one of {list(_BY_NAME)} or an OldPolicyDecay. Received {decay!r}.")
    return OldPolicyDecay(**_BY_NAME[decay])
