"""Positions of weight 0 may hold anything and change nothing, bit for bit: value, metrics, gradient, other rows."""

import numpy as np
import pytest
from tests.batches import prepared
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import DIVERGENCES, compiled_value_and_grad, numpy, tensor

from keras_diffusion_opd.data import DenseTargets, PreparedBatch
from keras_diffusion_opd.losses import DistillationLoss, TokenCrossEntropyLoss

B, L, V = 2, 4, 5
WEIGHTS = np.array([[0.5, 0.0, 2.0, 0.0], [0.0, 0.0, 1.0, 0.25]], "float32")
OFF = WEIGHTS == 0
GARBAGE = [np.nan, np.inf, -np.inf, 3e38, -3e38]
LOSSES = {
    "soft": DistillationLoss(),
    "soft and hard": DistillationLoss(temperature=2.0, soft_weight=0.5, hard_weight=0.5),
    "reverse": DistillationLoss(divergence="reverse_kl", hard_weight=1.0),
    "cross-entropy": TokenCrossEntropyLoss(),
}


def clean():
    student, teacher = np.random.default_rng(0).normal(size=(2, B, L, V)).astype("float32")
    ids = np.random.default_rng(1).integers(V, size=(B, L)).astype("int32")
    return student, teacher, ids


def dirty(value, sentinel):
    student, teacher, ids = clean()
    student[OFF], teacher[OFF], ids[OFF] = value, value, sentinel
    return student, teacher, ids


def program(loss):
    def mean(student, teacher, ids, weights):
        batch = PreparedBatch(ids, ids, weights, DenseTargets(teacher))
        return loss(student, batch).primary.mean()

    return mean


# Each compiled once, for the clean arrays and every kind of garbage.
COMPILED = {name: compiled_value_and_grad(program(loss)) for name, loss in LOSSES.items()}


def value_and_gradient(name, arrays, weights=WEIGHTS):
    student, teacher, ids = arrays
    return COMPILED[name](tensor(student), tensor(teacher), tensor(ids, "int32"), tensor(weights))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("sentinel", [-1, 99, -(2**31)])
def test_garbage_at_weight_zero_changes_neither_value_nor_gradient_by_a_bit(name, value, sentinel):
    want_value, want_gradient = value_and_gradient(name, clean())
    value, gradient = value_and_gradient(name, dirty(value, sentinel))
    assert value == want_value and np.isfinite(value)
    np.testing.assert_array_equal(gradient, want_gradient)
    assert not gradient[OFF].any() and gradient[~OFF].any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*GARBAGE, 0.0, 1e-40, -7.0]), min_size=V, max_size=V), st.integers(-(2**31), 2**31 - 1))
def test_any_garbage_changes_nothing(row, sentinel):
    want_value, want_gradient = value_and_gradient("soft and hard", clean())
    value, gradient = value_and_gradient("soft and hard", dirty(row, sentinel))
    assert value == want_value
    np.testing.assert_array_equal(gradient, want_gradient)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_garbage_changes_no_divergence_and_no_metric_by_a_bit(divergence):
    loss, values = DistillationLoss(divergence=divergence, hard_weight=0.3), []
    for student, teacher, ids in (clean(), dirty(np.nan, 99)):
        output = loss(tensor(student), prepared(WEIGHTS, ids=ids, teacher=teacher))
        values.append([float(numpy(x)) for part in (output.primary, *output.metrics.values()) for x in part])
    assert values[0] == values[1] and np.isfinite(values[0]).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("value", GARBAGE)
def test_batch_of_weight_zero_has_loss_zero_and_gradient_exactly_zero(name, value):
    arrays = clean()
    for array in arrays[:2]:
        array[:] = value
    loss, gradient = value_and_gradient(name, arrays, np.zeros_like(WEIGHTS))
    assert loss == 0.0
    assert gradient.shape == (B, L, V) and not gradient.any()


def test_batch_of_weight_zero_reports_sums_of_zero_over_zero():
    nan = np.full((B, L, V), np.nan, "float32")
    output = DistillationLoss(soft_weight=0.5, hard_weight=0.5)(tensor(nan), prepared(np.zeros((B, L)), teacher=nan))
    for part in (output.primary, *output.metrics.values()):
        assert [float(numpy(x)) for x in (*part, part.mean())] == [0.0, 0.0, 0.0]


def test_second_position_of_nan_in_both_models_and_a_sentinel_leaves_the_first():
    student, teacher = np.full((2, B, L, V), -np.inf, "float32")
    ids = clean()[2]
    student[0, 0, :2], teacher[0, 0, :2], ids[0, :2] = [2.0, -1.0], [-1.0, 2.0], [1, -1]
    student[0, 1], teacher[0, 1] = np.nan, np.inf
    weights = np.zeros((B, L), "float32")
    weights[0, 0] = 1.0
    value, gradient = value_and_gradient("soft", (student, teacher, ids), weights)
    assert value == pytest.approx(2.71544476, rel=1e-6)
    assert np.isfinite(gradient).all() and not gradient[0, 1].any() and gradient[0, 0].any()


@pytest.mark.parametrize("name", LOSSES)
def test_padding_rows_from_4_to_64_positions_changes_nothing(name):
    def padded(x, fill):
        return np.pad(x, [(0, 0), (0, 60)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)

    student, teacher, ids = clean()
    value, gradient = value_and_gradient(name, (student, teacher, ids))
    long = (padded(student, np.nan), padded(teacher, np.inf), padded(ids, -100))
    long_value, long_gradient = value_and_gradient(name, long, padded(WEIGHTS, 0))
    # The sums have more terms, all of them 0; only their order may change.
    assert long_value == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(long_gradient[:, :L], gradient, rtol=1e-6)
    assert not long_gradient[:, L:].any()


def test_prompt_and_padding_ids_have_no_influence_on_the_loss():
    student, teacher, ids = clean()
    other = ids.copy()
    other[OFF] = (other[OFF] + 1) % V
    values = [numpy(TokenCrossEntropyLoss()(tensor(student), prepared(WEIGHTS, ids=i)).primary.mean()) for i in (ids, other)]
    assert values[0] == values[1]
    other[~OFF] = (other[~OFF] + 1) % V
    assert numpy(TokenCrossEntropyLoss()(tensor(student), prepared(WEIGHTS, ids=other)).primary.mean()) != values[0]
