"""Advantages within groups: known values, exact zeros, masked rewards, groups over several processes."""

import threading

import numpy as np
import pytest

from keras_diffusion_opd.losses import group_advantages, reward_weights
from tests.oracles import numpy, tensor


def test_known_values() -> None:
    values = group_advantages([0.0, 0.0, 1.0, 1.0], [3, 3, 3, 3], eps=1e-4).values
    np.testing.assert_allclose(values, 0.5 / 0.5001 * np.array([-1, -1, 1, 1]), rtol=1e-12)
    assert np.round(values, 4).tolist() == [-0.9998, -0.9998, 0.9998, 0.9998]


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7e8])
@pytest.mark.parametrize("size", [2, 3, 24])
def test_constant_group_is_exactly_zero(value: float, size: int) -> None:
    out = group_advantages(np.full(size, value), np.zeros(size, int))
    assert not out.values.any() and out.constant_groups == 1


def test_smallest_difference_of_float32_is_none_of_rounding() -> None:
    one = np.float32(1.0)
    out = group_advantages(np.array([one, np.nextafter(one, np.float32(2))]), np.zeros(2, int), eps=1e-12)
    np.testing.assert_allclose(out.values, [-1, 1], rtol=1e-4)


def test_groups_are_by_id_and_advantages_of_each_have_mean_zero() -> None:
    random = np.random.default_rng(0)
    groups = random.permutation(np.repeat([5, -2, 900], 8))
    rewards = random.normal(size=24)
    out = group_advantages(rewards, groups, size=8)
    for group in np.unique(groups):
        part = rewards[groups == group]
        expected = (part - part.mean()) / (part.std() + 1e-4)
        np.testing.assert_allclose(out.values[groups == group], expected, rtol=1e-12)
        assert abs(out.values[groups == group].mean()) < 1e-15


def test_masked_reward_is_counted_and_its_group_is_that_of_the_others() -> None:
    rewards = np.array([0.0, np.nan, 1.0, 2.0, 5.0, np.inf, 3.0, 1.0])
    valid = np.array([True] * 7 + [False])
    out = group_advantages(rewards, np.repeat([0, 1], 4), valid=valid)
    rest = np.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(out.values[[0, 2, 3]], (rest - 1) / (rest.std() + 1e-4), rtol=1e-12)
    np.testing.assert_allclose(out.values[[4, 6]], np.array([1, -1]) / (1 + 1e-4), rtol=1e-12)
    assert out.valid.tolist() == [True, False, True, True, True, False, True, False]
    assert not out.values[~out.valid].any() and out.masked == 3


def test_group_of_which_nothing_is_left_is_zero() -> None:
    out = group_advantages([np.nan, np.nan, 1.0, 2.0], [0, 0, 1, 1])
    assert out.values[:2].tolist() == [0, 0] and out.masked == 2 and np.isfinite(out.values).all()


def test_no_advantage_exceeds_the_root_of_the_others_and_a_clip_of_5_binds_from_27_on() -> None:
    for size in (4, 26, 27):
        extreme = group_advantages([1.0] + [0.0] * (size - 1), [0] * size, eps=1e-12).values.max()
        np.testing.assert_allclose(extreme, np.sqrt(size - 1), rtol=1e-9)
        assert (extreme > 5.0 + 1e-9) == (size >= 27)


def test_deviation_of_all_rewards() -> None:
    rewards, groups = np.array([0.0, 1.0, 10.0, 13.0]), np.array([0, 0, 1, 1])
    values = group_advantages(rewards, groups, std="global").values
    np.testing.assert_allclose(values, np.array([-0.5, 0.5, -1.5, 1.5]) / (rewards.std() + 1e-4), rtol=1e-12)


@pytest.mark.parametrize("std", ["group", "global"])
def test_groups_spread_over_two_processes_are_those_of_one(std: str) -> None:
    random = np.random.default_rng(1)
    rewards, groups = random.normal(size=12), np.tile([0, 1, 2], 4)
    rewards[4], rewards[groups == 2] = np.nan, 0.1
    tables: list[np.ndarray] = [np.zeros(0), np.zeros(0)]
    barrier, parts = threading.Barrier(2, timeout=20), [slice(0, 5), slice(5, 12)]
    found = {}

    def process(rank: int) -> None:
        def reduce(table: np.ndarray) -> np.ndarray:
            tables[rank] = table
            barrier.wait()
            total = tables[0] + tables[1]
            barrier.wait()
            return total

        part = parts[rank]
        found[rank] = group_advantages(rewards[part], groups[part], std=std, size=4, group_count=3, reduce=reduce)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = group_advantages(rewards, groups, std=std)
    together = np.concatenate([found[0].values, found[1].values])
    np.testing.assert_allclose(together, whole.values, rtol=1e-12, atol=1e-15)
    assert not together[groups == 2].any()
    for out in found.values():
        assert (out.masked, out.constant_groups) == (whole.masked, whole.constant_groups) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": [0, 0, 0, 1]}, "exactly 3 samples. Received 1 in group 1"),
        ({"size": 4}, "exactly 4 samples. Received 2 in group 0, and 1 more"),
        ({"groups": [0, 1, 2, 3]}, "at least 2 samples"),
        ({"groups": [0, 0, 1]}, r"Received \(4,\) and \(3,\)"),
        ({"eps": 0.0}, "`eps` must be above 0"),
        ({"std": "batch"}, "'group' or 'global'"),
        ({"reduce": lambda table: table}, "`reduce` needs `group_count`"),
        ({"group_count": 1}, r"must lie in \[0, 1\).*Received 1 in row 2"),
        ({"valid": [1, 1, 1, 1]}, "`valid` must be bool"),
        ({"rewards": [], "groups": np.zeros(0, int)}, "at least one group"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict, message: str) -> None:
    given = {"rewards": [0.0, 1.0, 2.0, 3.0], "groups": [0, 0, 1, 1], **arguments}
    with pytest.raises(ValueError, match=message):
        group_advantages(given.pop("rewards"), given.pop("groups"), **given)


def test_groups_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="`groups` must be integers"):
        group_advantages([0.0, 1.0], [0.5, 0.5])


def test_reward_weights_of_arrays_and_tensors() -> None:
    advantages = np.array([-7.0, -5.0, -1.0, 0.0, 2.5, 5.0, 9.0])
    expected = [0.0, 0.0, 0.4, 0.5, 0.75, 1.0, 1.0]
    np.testing.assert_allclose(reward_weights(advantages, 5.0), expected, rtol=1e-12)
    np.testing.assert_allclose(numpy(reward_weights(tensor(advantages), 5.0)), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="`clip` must be above 0"):
        reward_weights(advantages, 0.0)
