"""Masking: expectations in closed form, and independence of how a batch is cut."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import BlockCorruption, DenseTargets, MaskedCorruption, Stamp, UniformCorruption
from keras_diffusion_opd.schedules import CosineMaskSchedule, LinearMaskSchedule

MASK = 9


def tokens(rows, length=16):
    return np.random.default_rng(0).integers(0, 9, (rows, length)).astype("int32")


KINDS = {
    "masked": lambda **k: MaskedCorruption(MASK, **k),
    "block": lambda **k: BlockCorruption(MASK, block_size=4, **k),
    "uniform": lambda **k: UniformCorruption(9, weights="replaced", **k),
}
FIELDS = ("token_ids", "mask", "times", "weights")

both = pytest.mark.parametrize("times", ["low_discrepancy", "independent"])
all_times = pytest.mark.parametrize("times", ["low_discrepancy", "antithetic", "independent"])
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@all_times
def test_a_batch_and_its_shares_are_corrupted_the_same(kind, times):
    corruption = KINDS[kind](times=times)
    ids, clean = np.array([40, 7, 2**40, 3, 12]), tokens(5)
    whole = corruption(3, 11, ids, clean)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3]):
        part = corruption(3, 11, ids[order], clean[order], batch_ids=ids)
        for name in FIELDS:
            assert np.array_equal(getattr(part, name), getattr(whole, name)[order]), name


@kinds
@all_times
@pytest.mark.parametrize("devices, rows", [(1, 8), (2, 4), (8, 1)])
def test_corruption_is_the_same_however_many_devices_share_a_step_and_after_a_resume(kind, times, devices, rows):
    ids, clean = 100 + np.arange(8) * 3, tokens(8)
    alone = [KINDS[kind](times=times)(5, step, ids, clean) for step in range(4)]
    # Another process each, begun anew at step 2: nothing is remembered from the steps before.
    for step in (2, 3):
        for device in range(devices):
            share = slice(device * rows, (device + 1) * rows)
            part = KINDS[kind](times=times)(5, step, ids[share], clean[share], batch_ids=ids)
            for name in FIELDS:
                assert np.array_equal(getattr(part, name), getattr(alone[step], name)[share]), name


@kinds
def test_an_odd_antithetic_step_mirrors_the_one_before(kind):
    corruption = KINDS[kind](times="antithetic")
    even, odd = (corruption(0, step, np.arange(6), tokens(6)) for step in (4, 5))
    np.testing.assert_allclose(even.times + odd.times, 1 + corruption.schedule.eps, rtol=1e-6)  # float32
    # Linear: P(masked in neither, or in both) is eps at most.
    assert np.mean(even.mask != odd.mask) > 0.98
    plain = KINDS[kind](times="low_discrepancy")(0, 4, np.arange(6), tokens(6))
    assert np.array_equal(plain.mask, even.mask)
    following = corruption(0, 6, np.arange(6), tokens(6))
    assert not np.array_equal(following.mask, even.mask)


def test_blocks_of_the_whole_length_are_the_masked_corruption():
    for times in ("low_discrepancy", "antithetic", "independent"):
        whole = MaskedCorruption(MASK, "cosine", times=times)(1, 2, np.arange(5), tokens(5))
        block = BlockCorruption(MASK, "cosine", block_size=16, times=times)(1, 2, np.arange(5), tokens(5))
        for name in ("token_ids", "mask", "weights"):
            assert np.array_equal(getattr(block, name), getattr(whole, name)), name
        assert np.array_equal(block.times, whole.times[:, None])


def test_times_of_blocks_are_one_even_grid_within_rows_and_over_them():
    t = BlockCorruption(MASK, block_size=4)(0, 5, np.arange(6) * 7, tokens(6)).times.astype("float64")
    assert t.shape == (6, 4)
    np.testing.assert_allclose(np.diff(np.sort(t.ravel())), 0.999 / 24, rtol=1e-4)  # float32
    np.testing.assert_allclose(np.diff(np.sort(t, axis=1), axis=1), 0.999 / 4, rtol=1e-4)


@both
def test_every_block_of_a_sample_sees_all_times(times):
    corruption = BlockCorruption(MASK, block_size=4, times=times)
    t = np.stack([corruption(0, step, np.arange(3), tokens(3)).times for step in range(400)])
    # Standard error of the mean of 400 uniform times: 0.0144.
    assert np.all(np.abs(t.mean(axis=0) - 0.5) < 5 * 0.0144)
    assert np.all(np.abs(t.std(axis=0) - 12**-0.5) < 0.05)


def test_a_short_last_block_has_a_time_of_its_own_and_weights_follow_the_blocks():
    corruption = BlockCorruption(MASK, block_size=6)
    out = corruption(0, 0, np.arange(5), tokens(5))
    assert out.times.shape == (5, 3)
    expected = np.where(out.mask, 1 / out.times[:, np.arange(16) // 6], 0)
    np.testing.assert_allclose(out.weights, expected, rtol=1e-6)  # the times are rounded to float32


def test_block_prepare_lays_noised_and_clean_side_by_side_with_the_mask_of_both():
    frozen = np.zeros((4, 16), bool)
    frozen[:, :3] = True
    batch = BlockCorruption(MASK, block_size=4).prepare(0, 1, np.arange(4), tokens(4), frozen=frozen)
    both_sides, mask = batch.model_inputs["token_ids"], batch.model_inputs["attention_mask"]
    assert both_sides.shape == (4, 32) and mask.shape == (4, 32, 32) and mask.dtype == bool
    assert np.array_equal(both_sides[:, 16:], tokens(4))
    assert np.array_equal(both_sides[:, :16] == MASK, batch.loss_weights > 0)
    assert np.array_equal(both_sides[:, :3], tokens(4)[:, :3])
    without = BlockCorruption(MASK, block_size=4, attention_key=None).prepare(0, 1, np.arange(4), tokens(4))
    assert set(without.model_inputs) == {"token_ids"}


def test_uniform_replacements_are_uniform_at_the_schedules_rate():
    corruption = UniformCorruption(9, "cosine")
    drawn = [corruption(0, step, np.arange(50), np.full((50, 40), 4)) for step in range(60)]
    t = np.concatenate([d.times for d in drawn]).astype("float64")
    mask = np.concatenate([d.mask for d in drawn])
    share = mask.mean(axis=1) - corruption.schedule.mask_probability(t)
    assert abs(share.mean()) < 5 * 0.5 / np.sqrt(40 * t.size)  # five standard errors
    values = np.concatenate([d.token_ids[d.mask] for d in drawn])
    counts = np.bincount(values, minlength=9) / values.size
    assert np.all(np.abs(counts - 1 / 9) < 5 * np.sqrt(8 / 81 / values.size))


def test_uniform_weights_are_what_their_name_says():
    clean, frozen = tokens(6), np.zeros((6, 16), bool)
    frozen[:, 10:] = True
    everywhere = UniformCorruption(9)(0, 0, np.arange(6), clean, frozen=frozen)
    assert np.array_equal(everywhere.weights, np.where(frozen, 0.0, 1.0))
    replaced = UniformCorruption(9, weights="replaced")(0, 0, np.arange(6), clean, frozen=frozen)
    expected = np.where(replaced.mask, 1 / replaced.times[:, None], 0)
    np.testing.assert_allclose(replaced.weights, expected, rtol=1e-6)  # the times are rounded to float32
    assert not replaced.mask[:, 10:].any()
    assert np.array_equal(replaced.token_ids, everywhere.token_ids)
    assert np.array_equal(replaced.token_ids[~replaced.mask], clean[~replaced.mask])


@both
def test_seed_step_and_sample_each_give_another_corruption(times):
    corruption = MaskedCorruption(MASK, times=times)
    clean = np.repeat(tokens(1, 64), 8, axis=0)
    ids = np.arange(8)
    base = corruption(0, 0, ids, clean)
    assert len({row.tobytes() for row in base.mask}) == 8
    assert not np.array_equal(base.mask, corruption(1, 0, ids, clean).mask)
    assert not np.array_equal(base.mask, corruption(0, 1, ids, clean).mask)
    assert np.array_equal(base.mask, corruption(0, 0, ids, clean).mask)


@both
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_times_are_uniform_and_masks_follow_the_schedule(times, schedule):
    corruption = MaskedCorruption(MASK, schedule, times=times)
    drawn = [corruption(0, step, np.arange(50), tokens(50, 40)) for step in range(200)]
    t = np.concatenate([d.times for d in drawn]).astype("float64")
    assert t.min() >= corruption.schedule.eps
    assert t.max() <= 1
    n = t.size  # 10,000 times; five standard errors of independent draws, and fewer for even ones
    assert abs(t.mean() - 0.5) < 5 / np.sqrt(12 * n)
    masked = np.concatenate([d.mask.mean(axis=1) for d in drawn])
    expected = corruption.schedule.mask_probability(t)
    assert abs((masked - expected).mean()) < 5 * 0.5 / np.sqrt(40 * n)


@both
def test_every_sample_sees_all_times(times):
    corruption = MaskedCorruption(MASK, times=times)
    t = np.stack([corruption(0, step, np.arange(8), tokens(8)).times for step in range(400)])
    # Standard error of one sample's mean over 400 steps: 0.0144. A rank tied to the id would show at once.
    assert np.all(np.abs(t.mean(axis=0) - 0.5) < 5 * 0.0144)
    assert np.all(np.abs(t.std(axis=0) - 12**-0.5) < 0.05)


def test_the_expected_weight_of_a_row_is_its_length():
    corruption = MaskedCorruption(MASK)
    weights = [corruption(0, step, np.arange(64), tokens(64, 32)).weights.sum() / 64 for step in range(400)]
    # sum over tokens of P(masked) / t = L; the standard error is measured.
    assert abs(np.mean(weights) - 32) < 5 * np.std(weights) / np.sqrt(len(weights))


def test_low_discrepancy_times_are_evenly_spread():
    t = np.sort(MaskedCorruption(MASK)(0, 5, np.arange(10) * 17, tokens(10)).times.astype("float64"))
    np.testing.assert_allclose(np.diff(t), 0.0999, rtol=1e-4)  # (1 - eps) / 10 in float32


def test_weights_are_those_of_the_schedule_where_masked_and_zero_elsewhere():
    corruption = MaskedCorruption(MASK, CosineMaskSchedule())
    out = corruption(0, 0, np.arange(6), tokens(6))
    expected = np.where(out.mask, corruption.schedule.loss_weight(out.times)[:, None], 0)
    np.testing.assert_allclose(out.weights, expected, rtol=1e-5)  # the times are rounded to float32
    assert np.array_equal(out.token_ids == MASK, out.mask)
    assert np.array_equal(out.token_ids[~out.mask], tokens(6)[~out.mask])
    assert out.token_ids.dtype == np.int32


def test_frozen_positions_are_never_masked_and_do_not_move_the_others():
    corruption = MaskedCorruption(MASK)
    frozen = np.zeros((6, 16), bool)
    frozen[:, :5] = True
    clean = tokens(6)
    clean[0, 0] = MASK  # padding may be the mask id itself
    out = corruption(0, 0, np.arange(6), clean, frozen=frozen)
    assert not out.mask[:, :5].any()
    assert out.weights[:, :5].sum() == 0
    free = corruption(0, 0, np.arange(6), tokens(6))
    assert np.array_equal(out.mask[:, 5:], free.mask[:, 5:])


def test_prepare_gives_a_batch_with_clean_targets_and_the_teachers_scores():
    stamp = Stamp(policy_version=3)
    batch = MaskedCorruption(MASK).prepare(
        0,
        1,
        np.arange(4),
        tokens(4),
        conditions={"class_ids": np.arange(4)},
        teacher=lambda inputs: DenseTargets(np.eye(10, dtype="float32")[inputs["token_ids"]]),
        stamp=stamp,
    )
    assert np.array_equal(batch.target_ids, tokens(4))
    assert np.array_equal(batch.loss_weights > 0, batch.model_inputs["token_ids"] == MASK)
    assert batch.teacher.logits.shape == (4, 16, 10)
    assert batch.stamp is stamp
    assert set(batch.model_inputs) == {"token_ids", "class_ids"}


@kinds
def test_the_corruption_survives_serialisation(kind):
    corruption = KINDS[kind](schedule=LinearMaskSchedule(eps=0.01), times="independent")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(corruption))
    assert again.get_config() == corruption.get_config()
    assert np.array_equal(again(0, 0, np.arange(3), tokens(3)).mask, corruption(0, 0, np.arange(3), tokens(3)).mask)


def test_golden_values_are_the_same_on_every_backend_and_machine():
    out = MaskedCorruption(MASK)(1234, 56, np.array([7, 8, 9]), np.zeros((3, 12), "int32"))
    assert ["".join("#" if m else "." for m in row) for row in out.mask] == [
        ".#.##.###...",
        ".......#....",
        "####.#.#####",
    ]


def test_errors_name_the_argument():
    corruption = MaskedCorruption(MASK)
    with pytest.raises(ValueError, match="`mask_id`"):
        MaskedCorruption(-1)
    with pytest.raises(ValueError, match="`times` must be one of"):
        MaskedCorruption(MASK, times="sobol")
    with pytest.raises(ValueError, match="`tokens` must be integers"):
        corruption(0, 0, np.arange(2), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="`sample_ids` must be integers of shape"):
        corruption(0, 0, np.arange(3), tokens(2))
    with pytest.raises(ValueError, match="`frozen` must be bool"):
        corruption(0, 0, np.arange(2), tokens(2), frozen=np.zeros((2, 16)))
    with pytest.raises(ValueError, match="must not hold the mask id 9"):
        corruption(0, 0, np.arange(2), np.full((2, 3), MASK))
    with pytest.raises(ValueError, match="`batch_ids` must hold every one"):
        corruption(0, 0, np.arange(2), tokens(2), batch_ids=np.array([0, 5]))
    with pytest.raises(ValueError, match="`step`"):
        corruption(0, -1, np.arange(2), tokens(2))
    with pytest.raises(ValueError, match="`conditions` must not hold 'token_ids'"):
        corruption.prepare(0, 0, np.arange(2), tokens(2), conditions={"token_ids": np.arange(2)})
    with pytest.raises(TypeError, match="`conditions` must be None or a dict"):
        corruption.prepare(0, 0, np.arange(2), tokens(2), conditions=[1])


def test_what_used_to_fail_far_from_its_cause_is_named_before_anything_runs():
    corruption = MaskedCorruption(MASK)
    with pytest.raises(ValueError, match="`mask_id` must be a whole number. Received 'a' of type str"):
        MaskedCorruption("a")
    with pytest.raises(ValueError, match="`tokens` must have a dtype that holds the mask id 300.*uint8.*astype"):
        MaskedCorruption(300)(0, 0, np.arange(2), np.zeros((2, 3), "uint8"))
    with pytest.raises(TypeError, match="`teacher` must be None or a function.*Received 't' of type str"):
        corruption.prepare(0, 0, np.arange(2), tokens(2), teacher="t")
    with pytest.raises(ValueError, match="`sample_ids` must not hold an id twice.*Received 5 2 times.*running number"):
        corruption(0, 0, np.array([5, 5]), tokens(2))
    with pytest.raises(ValueError, match="`batch_ids` must not hold an id twice"):
        corruption(0, 0, np.arange(2), tokens(2), batch_ids=np.array([0, 1, 1]))
    with pytest.raises(ValueError, match="`block_size` must be a whole number"):
        BlockCorruption(MASK, block_size=0)
    with pytest.raises(ValueError, match="`conditions` must not hold 'attention_mask'"):
        BlockCorruption(MASK, block_size=2).prepare(
            0, 0, np.arange(2), tokens(2), conditions={"attention_mask": np.ones((2, 1))}
        )
    with pytest.raises(ValueError, match="`vocabulary_size` must be at least 2"):
        UniformCorruption(1)
    with pytest.raises(ValueError, match="`weights` must be one of"):
        UniformCorruption(9, weights="elbo")
    with pytest.raises(ValueError, match=r"`tokens` must lie in \[0, 5\) where not frozen. Received [5-8]"):
        UniformCorruption(5)(0, 0, np.arange(4), tokens(4))
    with pytest.raises(ValueError, match="holds the ids up to 299"):
        UniformCorruption(300)(0, 0, np.arange(2), np.zeros((2, 3), "uint8"))
