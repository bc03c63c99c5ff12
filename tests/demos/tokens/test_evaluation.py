"""The numbers of the table, against closed forms."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.demos.tokens.batches import digit_corruption
from keras_diffusion_opd.demos.tokens.digits import LEVELS, Scans
from keras_diffusion_opd.demos.tokens.evaluation import Examiner, mean_and_error, sliced_wasserstein
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser


def scans(count=30, seed=0):
    rng = np.random.default_rng(seed)
    return Scans(rng.integers(0, LEVELS, (count, 64)).astype("int32"), (np.arange(count) % 10).astype("int32"))


def model():
    net = TokenDenoiser(LEVELS, 64, 10, width=4, depth=1, channels=2)
    net.build()
    return net


def uniform():
    net = model()
    net.head.kernel.assign(np.zeros((2, 17)))
    return net


def test_a_model_beside_itself_has_no_distance_and_agrees():
    net = model()
    scores = Examiner(net, net, digit_corruption(), 0)(scans(), draws=2)
    assert scores.kl == 0.0
    assert scores.agreement == 1.0


def test_a_uniform_model_pays_log2_of_the_levels_for_every_pixel():
    net = uniform()
    draws = 40
    examiner = Examiner(net, net, digit_corruption(), 0)
    # Each token counts 1/t with probability t: on average once. The standard error is measured.
    bits, error = mean_and_error(examiner.bits(net, scans(60), draws))
    assert abs(bits - np.log2(17)) < 5 * error


def test_the_bound_is_the_weighted_cross_entropy_over_the_masks_of_its_seed():
    net, data, corruption = model(), scans(), digit_corruption()
    expected = np.zeros(30)
    for draw in range(2):
        out = corruption(5, draw, np.arange(30), data.token_ids)
        logits = ops.convert_to_numpy(net({"token_ids": out.token_ids, "class_ids": data.class_ids}))
        log_q = logits - np.log(np.exp(logits.astype("float64")).sum(-1, keepdims=True))
        chosen = np.take_along_axis(log_q, data.token_ids[..., None], axis=-1)[..., 0]
        expected -= np.sum(out.weights * chosen, axis=1) / (2 * 64 * np.log(2))
    bits = Examiner(net, net, corruption, 5).bits(net, data, 2, rows=8)
    np.testing.assert_allclose(bits, expected, rtol=1e-5)  # float32


def test_the_divergence_from_a_uniform_teacher_is_that_of_the_formula():
    student, teacher = model(), uniform()
    data, corruption = scans(), digit_corruption()
    scores = Examiner(student, teacher, corruption, 5)(data, draws=1)
    out = corruption(5, 0, np.arange(30), data.token_ids)
    logits = ops.convert_to_numpy(student({"token_ids": out.token_ids, "class_ids": data.class_ids})).astype("float64")
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    kl = -np.log(17) - log_q.mean(-1)
    assert scores.kl == pytest.approx(kl[out.mask].mean(), rel=1e-4)  # float32 logits near 0


def test_the_numbers_do_not_depend_on_how_many_rows_go_at_once():
    examiner = Examiner(model(), uniform(), digit_corruption(), 3)
    whole, parts = examiner(scans(), 2), examiner(scans(), 2, rows=8)
    assert parts.kl == pytest.approx(whole.kl, rel=1e-4)  # another batch shape in float32
    assert parts.agreement == whole.agreement


def test_the_standard_error_is_that_of_the_mean():
    mean, error = mean_and_error(np.array([1.0, 3.0]))
    assert (mean, error) == (2.0, 1.0)


def test_the_sample_distance_is_zero_for_equal_scans_and_known_for_a_shift():
    data = scans(200)
    assert sliced_wasserstein(data, data) == 0.0
    moved = Scans(data.token_ids + 2, data.class_ids)
    # A shift v moves the projection on u by u.v: on average over directions |v|^2 / 64 = 4, in the square.
    # With 128 directions the mean square has a relative standard error of sqrt(2 / 128).
    assert abs(sliced_wasserstein(data, moved) ** 2 - 4) < 5 * 4 * np.sqrt(2 / 128)
    assert sliced_wasserstein(data, moved) == pytest.approx(sliced_wasserstein(moved, data))


def test_the_sample_distance_looks_at_classes():
    data = scans(200)
    mixed = Scans(data.token_ids + data.class_ids[:, None], data.class_ids)
    wrong = Scans(mixed.token_ids, (mixed.class_ids + 5) % 10)
    assert sliced_wasserstein(mixed, wrong) > 1  # the classes are five levels apart
