"""Masking: expectations in closed form, and independence of how a batch is cut."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, Stamp
from keras_diffusion_opd.data.corruption import MaskedCorruption
from keras_diffusion_opd.schedules import CosineMaskSchedule, LinearMaskSchedule

MASK = 9


def tokens(rows, length=16):
    return np.random.default_rng(0).integers(0, 9, (rows, length)).astype("int32")


both = pytest.mark.parametrize("times", ["low_discrepancy", "independent"])


@both
def test_a_batch_and_its_shares_are_corrupted_the_same(times):
    corruption = MaskedCorruption(MASK, times=times)
    ids, clean = np.array([40, 7, 2**40, 3, 12]), tokens(5)
    whole = corruption(3, 11, ids, clean)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3]):
        part = corruption(3, 11, ids[order], clean[order], batch_ids=ids)
        for name in ("token_ids", "mask", "times", "weights"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[order]), name


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


def test_the_corruption_survives_serialisation():
    corruption = MaskedCorruption(MASK, LinearMaskSchedule(eps=0.01), times="independent")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(corruption))
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
