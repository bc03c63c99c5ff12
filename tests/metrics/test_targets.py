"""Metrics of a teacher's targets: weighted ratios, for every kind that knows the number."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, SampledTargets, TopKTargets
from keras_diffusion_opd.metrics import RetainedMass, TeacherCrossEntropy
from tests.oracles import softmax, tensor

RANDOM = np.random.default_rng(0)
STUDENT, TEACHER = (2 * RANDOM.normal(size=(2, 2, 5, 7))).astype("float32")
WEIGHTS = RANDOM.random((2, 5)).astype("float32") * (RANDOM.random((2, 5)) < 0.7)


def result(metric, targets, weights=WEIGHTS, student=STUDENT):
    metric.update_state(targets, tensor(student), sample_weight=None if weights is None else tensor(weights))
    return float(metric.result())


def test_retained_mass_is_a_ratio_of_sums():
    p = np.sort(softmax(TEACHER), axis=-1)[..., -3:].sum(-1)
    top_k = TopKTargets.from_logits(tensor(TEACHER), 3)
    assert result(RetainedMass(), top_k) == pytest.approx(np.average(p, weights=WEIGHTS), rel=1e-5)
    assert result(RetainedMass(), top_k, None) == pytest.approx(p.mean(), rel=1e-5)
    metric = RetainedMass()
    for row in range(2):
        metric.update_state(top_k.map(lambda x, r=row: x[r : r + 1]), STUDENT[row : row + 1], WEIGHTS[row : row + 1])
    assert float(metric.result()) == pytest.approx(np.average(p, weights=WEIGHTS), rel=1e-5)
    assert result(RetainedMass(), DenseTargets(TEACHER)) == 1.0
    assert result(RetainedMass(), SampledTargets.from_logits(TEACHER, 4, seed=0)) == pytest.approx(1.0, rel=1e-6)


def test_cross_entropy_of_dense_targets_is_exact_and_of_drawn_ones_near_it():
    log_q = np.log(softmax(STUDENT))
    want = -(softmax(TEACHER) * log_q).sum(-1)
    assert result(TeacherCrossEntropy(), DenseTargets(TEACHER)) == pytest.approx(
        np.average(want, weights=WEIGHTS), rel=1e-5
    )
    many = SampledTargets.from_logits(TEACHER, 4000, seed=0, draws="systematic")
    assert result(TeacherCrossEntropy(), many) == pytest.approx(np.average(want, weights=WEIGHTS), rel=1e-3)
    few = SampledTargets(np.full((2, 5, 1), 3), np.ones((2, 5, 1), "int32"), temperature=2.0)
    log_q = np.log(softmax(STUDENT, 2.0))[..., 3]
    assert result(TeacherCrossEntropy(), few) == pytest.approx(np.average(-log_q, weights=WEIGHTS), rel=1e-5)


@pytest.mark.parametrize("metric", [RetainedMass, TeacherCrossEntropy])
def test_positions_of_weight_zero_may_hold_anything(metric):
    teacher, student = TEACHER.copy(), STUDENT.copy()
    teacher[WEIGHTS == 0] = student[WEIGHTS == 0] = np.nan
    assert result(metric(), DenseTargets(teacher), student=student) == pytest.approx(
        result(metric(), DenseTargets(TEACHER))
    )


@pytest.mark.parametrize("metric", [RetainedMass, TeacherCrossEntropy])
def test_config_round_trip_and_empty_result(metric):
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric(name="mine")))
    assert type(again) is metric and again.name == "mine" and float(again.result()) == 0.0


def test_excluded_id_that_the_teacher_needs_is_infinite():
    student = STUDENT.copy()
    student[..., 0] = -np.inf
    assert result(TeacherCrossEntropy(), DenseTargets(TEACHER), student=student) == np.inf
    teacher = TEACHER.copy()
    teacher[..., 0] = -np.inf
    assert np.isfinite(result(TeacherCrossEntropy(), DenseTargets(teacher), student=student))


def test_what_does_not_know_the_number_is_refused():
    with pytest.raises(TypeError, match="needs DenseTargets or SampledTargets. Received TopKTargets"):
        result(TeacherCrossEntropy(), TopKTargets.from_logits(tensor(TEACHER), 3))
    with pytest.raises(TypeError, match="needs a batch with a teacher. Received NoneType"):
        result(RetainedMass(), None)
