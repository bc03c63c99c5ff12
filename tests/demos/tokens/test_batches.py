"""Batches of the demo: what is in an epoch, how it is dealt, and what it is stamped with."""

import keras
import numpy as np

from keras_diffusion_opd.data import Stamp
from keras_diffusion_opd.demos.tokens.batches import Batches, Teacher, digit_corruption, in_turn
from keras_diffusion_opd.demos.tokens.digits import LEVELS, Scans, load_scans, one_of_each
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.samplers import MaskedSampler


def scans(count=40):
    rng = np.random.default_rng(0)
    return Scans(rng.integers(0, LEVELS, (count, 64)).astype("int32"), (np.arange(count) % 10).astype("int32"))


def batches(**arguments):
    return Batches(digit_corruption(), **{"seed": 0, "count": 10, "size": 8, **arguments})


def small():
    keras.utils.set_random_seed(0)
    model = TokenDenoiser(LEVELS, 64, 10, width=4, depth=1, channels=2)
    model.build()
    return model


def test_the_split_is_fixed_and_covers_every_scan_once():
    training, held_out = load_scans()
    assert (len(training), len(held_out)) == (1437, 360)
    rows = {row.tobytes() for row in np.concatenate([training.token_ids, held_out.token_ids])}
    assert len(rows) == 1797  # all scans differ, so none is in both parts
    assert training.token_ids.min() == 0
    assert training.token_ids.max() == 16
    assert np.bincount(held_out.class_ids).tolist() == [36] * 10
    again, _ = load_scans()
    assert np.array_equal(again.token_ids, training.token_ids)


def test_pictures_show_every_class_in_order():
    training, _ = load_scans()
    shown = one_of_each(training, rows=2)
    assert shown.shape == (20, 64)
    assert np.array_equal(shown[13], training.token_ids[np.flatnonzero(training.class_ids == 3)[1]])


def test_an_epoch_takes_every_scan_equally_often():
    epoch = batches().prepare(scans(40), Stamp())
    assert [batch.rows for batch in epoch] == [8] * 10
    targets = np.concatenate([batch.target_ids for batch in epoch])
    _, counts = np.unique(targets, axis=0, return_counts=True)
    assert counts.tolist() == [2] * 40


def test_every_batch_holds_all_diffusion_times():
    epoch = batches(count=50, size=16).prepare(scans(40), Stamp())
    masked = np.array([np.sort((batch.loss_weights > 0).sum(axis=1)) for batch in epoch])
    # One row from each sixteenth of the times: the rows of a batch are spread evenly over 64 counts.
    assert np.all(np.abs(masked.mean(axis=1) - 32) < 3)
    assert np.all(masked[:, 0] <= 8)
    assert np.all(masked[:, -1] >= 56)


def test_another_version_is_another_corruption_of_the_same_scans():
    source = batches()
    first, again, later = (source.prepare(scans(), Stamp(policy_version=v)) for v in (0, 0, 10))
    assert np.array_equal(first[3].loss_weights, again[3].loss_weights)
    assert not np.array_equal(first[3].loss_weights, later[3].loss_weights)


def test_own_samples_are_stamped_with_the_student_that_drew_them_and_scored_by_the_teacher():
    model, seen = small(), []
    teacher = Teacher(small(), rows=16)
    source = batches(teacher=teacher)
    epoch = source.of_samples(MaskedSampler(LEVELS), 20, 4, seen)(model, 30)
    assert len(epoch) == 10
    for batch in epoch:
        assert batch.stamp.policy_version == 30
        assert batch.stamp.policy_digest == digest(model)
        assert batch.stamp.teacher_digest == teacher.digest
        assert batch.stamp.sampler["steps"] == 4
    assert [stamp.policy_version for stamp in seen] == [30]
    expected = keras.ops.convert_to_numpy(teacher.model(epoch[0].model_inputs))
    np.testing.assert_allclose(epoch[0].teacher.logits, expected, rtol=1e-4, atol=1e-5)  # another batch size


def test_the_teacher_scores_any_number_of_rows():
    teacher = Teacher(small(), rows=16)
    inputs = {"token_ids": scans(37).token_ids, "class_ids": scans(37).class_ids}
    whole = teacher(inputs).logits
    assert whole.shape == (37, 64, 17)
    part = teacher({name: value[20:25] for name, value in inputs.items()}).logits
    assert np.array_equal(part, whole[20:25])  # the same program, so the same bits


def test_a_mixture_takes_from_both_in_turn():
    def tell(name, count):
        return lambda model, version: [f"{name}{i}" for i in range(count)]

    assert in_turn(tell("a", 3), tell("b", 2))(None, 0) == ["a0", "b0", "a1", "b1", "a2"]
