"""How much better a sample is than the others of its group."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_diffusion_opd.validation import finite_real, positive_int


class GroupAdvantages(NamedTuple):
    """What `group_advantages` returns.

    Args:
        values: float64 (N,), the advantages; 0 where the reward is masked.
        valid: bool (N,): False where the reward is masked. As a sample weight it keeps those rows out.
        masked: how many rewards were masked, on all processes.
        constant_groups: how many groups have no spread, and so teach nothing, on all processes.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import GroupAdvantages

    assert GroupAdvantages(np.zeros(2), np.array([True, False]), 1, 1).valid.sum() == 1
    ```
    """

    values: np.ndarray
    valid: np.ndarray
    masked: int
    constant_groups: int


def group_advantages(
    rewards: Any,
    groups: Any,
    *,
    size: int | None = None,
    eps: float = 1e-4,
    std: str = "group",
    valid: Any = None,
    group_count: int | None = None,
    reduce: Callable[[np.ndarray], np.ndarray] | None = None,
) -> GroupAdvantages:
    """`(reward - mean of its group) / (standard deviation + eps)`, for groups of K samples of one prompt.

    A reward that is not finite, or not `valid`, is left out of mean and deviation and counted; its group stays
    finite. A group whose rewards are all equal has advantages of exactly 0. Of K samples no advantage exceeds
    `sqrt(K - 1)`: a clip of 5 does nothing for K < 27.

    Args:
        rewards: real (N,).
        groups: int (N,), the group of each sample.
        size: K, at least 2, or None for whatever size all groups share.
        eps: > 0. The paper uses 1e-4.
        std: "group" for the deviation within each group, "global" for that of all rewards.
        valid: None, or bool (N,): False where a reward does not count, as in `RewardResult.valid`.
        group_count: None, or int G: groups are 0 to G - 1, on all processes together.
        reduce: None, or a function that adds float64 arrays over processes, for groups spread over several of
            them. It is called with arrays of the same shape everywhere, and needs `group_count`.

    Returns:
        `GroupAdvantages`, in float64.

    Raises:
        TypeError: groups that are no integers.
        ValueError: a group that has not exactly K samples, by its id; shapes or settings that do not fit.

    Source: Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300; Zheng et al., "DiffusionNFT", 2025,
    arXiv:2509.16117.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import group_advantages

    out = group_advantages(np.array([0.0, 0.0, 1.0, 1.0, 0.3, np.nan, 0.3, 0.3]), np.repeat([7, 9], 4), size=4)
    assert np.round(out.values, 4).tolist() == [-0.9998, -0.9998, 0.9998, 0.9998, 0.0, 0.0, 0.0, 0.0]
    assert (out.masked, out.constant_groups) == (1, 1)
    ```
    """
    eps = finite_real("eps", eps)
    if eps <= 0 or std not in ("group", "global"):
        raise ValueError(f"`eps` must be above 0 and `std` 'group' or 'global'. Received {eps} and {std!r}.")
    if reduce is not None and group_count is None:
        raise ValueError("`reduce` needs `group_count`: processes add tables of one shape, one row for each group.")
    rewards, index, names = _rows(rewards, groups, group_count)
    count = len(names)
    counted = np.isfinite(rewards)
    if valid is not None:
        valid = np.asarray(valid)
        if valid.shape != rewards.shape or valid.dtype != np.bool_:
            raise ValueError(f"`valid` must be bool {rewards.shape}. Received {valid.dtype} {valid.shape}.")
        counted &= valid
    values = np.where(counted, rewards, 0.0)
    together = reduce or (lambda table: table)

    def over_groups(*rows: np.ndarray) -> np.ndarray:
        tables = [np.bincount(index, weights=row, minlength=count) for row in rows]
        return np.asarray(together(np.stack(tables)), "float64")

    # 1. Sums of each group, over all processes; what was masked counts as a sample, but has no value.
    sizes, numbers, totals, largest = over_groups(np.ones(len(values)), counted, values, np.abs(values))
    _require_size(sizes, names, size)
    means = totals / np.maximum(numbers, 1)
    # 2. Deviations. One that the rounding of the sum could have made is none: a constant group gives exactly 0.
    deviations = np.where(counted, values - means[index], 0.0)
    rounding = (sizes * np.finfo("float64").eps * largest)[index]
    deviations[np.abs(deviations) <= rounding] = 0.0
    # 3. Spread, of the groups or of all.
    (squares,) = over_groups(deviations**2)
    spread = np.sqrt(squares / np.maximum(numbers, 1))
    constant = int(np.sum(squares == 0))
    if std == "global":
        between = numbers * (means - np.sum(totals) / max(np.sum(numbers), 1)) ** 2
        spread = np.full(count, math.sqrt(np.sum(squares + between) / max(np.sum(numbers), 1)))
    return GroupAdvantages(deviations / (spread[index] + eps), counted, int(np.sum(sizes - numbers)), constant)


def _rows(rewards: Any, groups: Any, group_count: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards float64 (N,), the index of each group int (N,), and the ids of the groups."""
    rewards, groups = np.asarray(rewards), np.asarray(groups)
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise ValueError(
            f"`rewards` and `groups` must both have shape (N,). Received {rewards.shape} and {groups.shape}."
        )
    if not np.issubdtype(groups.dtype, np.integer):
        raise TypeError(f"`groups` must be integers, the group of each sample. Received {groups.dtype}.")
    if group_count is None:
        if len(groups) == 0:
            raise ValueError("`rewards` must hold at least one group. Received none.")
        names, index = np.unique(groups, return_inverse=True)
        return rewards.astype("float64"), np.reshape(index, groups.shape), names
    group_count = positive_int("group_count", group_count)
    wrong = (groups < 0) | (groups >= group_count)
    if np.any(wrong):
        raise ValueError(
            f"`groups` must lie in [0, {group_count}) with group_count={group_count}. Received "
            f"{groups[np.argmax(wrong)]} in row {np.argmax(wrong)}."
        )
    return rewards.astype("float64"), groups, np.arange(group_count)


def _require_size(sizes: np.ndarray, names: np.ndarray, size: int | None) -> None:
    """ValueError unless every group has the same number of samples, at least 2."""
    expected = int(sizes[0]) if size is None else positive_int("size", size)
    if expected < 2:
        raise ValueError(f"A group needs at least 2 samples to compare. Received groups of {expected}.")
    wrong = sizes != expected
    if np.any(wrong):
        first = int(np.argmax(wrong))
        raise ValueError(
            f"Every group must have exactly {expected} samples. Received {int(sizes[first])} in group {names[first]}, "
            f"and {int(np.sum(wrong)) - 1} more groups of another size."
        )


def reward_weights(advantages: Any, clip: float = 5.0) -> Any:
    """The probability that a sample is good: `clip(A, -c, c) / c / 2 + 1/2`, the `reward` of `nft_loss`.

    Args:
        advantages: real, any shape, NumPy or tensor. NaN stays NaN.
        clip: c > 0. The paper uses 5.

    Returns:
        Of the same shape and kind, in [0, 1]: 1/2 where the advantage is 0.

    Raises:
        ValueError: `clip` is not above 0.

    Source: Zheng et al., "DiffusionNFT", 2025, arXiv:2509.16117.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.losses import reward_weights

    assert reward_weights(np.array([-9.0, 0.0, 2.5]), clip=5.0).tolist() == [0.0, 0.5, 0.75]
    ```
    """
    clip = finite_real("clip", clip)
    if clip <= 0:
        raise ValueError(f"`clip` must be above 0. Received {clip}.")
    if isinstance(advantages, np.ndarray | np.generic | float | int | list | tuple):
        return np.clip(np.asarray(advantages, "float64") / clip, -1.0, 1.0) / 2 + 0.5
    return ops.clip(advantages / clip, -1.0, 1.0) / 2 + 0.5
