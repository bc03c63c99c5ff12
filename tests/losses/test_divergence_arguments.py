"""What `token_divergence` and `token_cross_entropy` refuse, and the values of the cross-entropy."""

import re

import numpy as np
import pytest
from keras import ops
from tests.oracles import DIVERGENCES, cross_entropy, float64_scope, numpy, softmax, tensor, value_and_grad

from keras_diffusion_opd.losses import token_cross_entropy, token_divergence

X = np.zeros((2, 3, 4), "float32")


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 1, 4), (1, 3, 4), (2, 3, 4, 1), (4,)])
def test_logits_of_different_shapes_are_refused_and_nothing_broadcasts(shape):
    words = f"`student_logits` and `teacher_logits` must have identical shapes.*{re.escape('(2, 3, 4)')}.*{re.escape(str(shape))}"
    with pytest.raises(ValueError, match=words):
        token_divergence(X, np.zeros(shape, "float32"))


@pytest.mark.parametrize("name", ["kl", "KL", "forward-kl", "", None, 0.5])
def test_divergence_is_named_and_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"`divergence` must be one of .*'forward_kl'.*Received {re.escape(repr(name))}"):
        token_divergence(X, X, divergence=name)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0])
def test_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match=f"`temperature` must be positive. Received {float(temperature)}"):
        token_divergence(X, X, temperature=temperature)


@pytest.mark.parametrize("argument", ["temperature", "beta"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, True, "1", [1.0], np.float32("nan"), 1j, ops])
def test_setting_that_is_no_finite_real_is_refused(argument, value):
    with pytest.raises(ValueError, match=f"`{argument}` must be a finite real scalar. Received .*of type {type(value).__name__}"):
        token_divergence(X, X, divergence="jsd", **{argument: value})


@pytest.mark.parametrize("value", [1, np.float32(2), np.int64(1), np.array(2.0)])
def test_every_real_scalar_is_a_temperature(value):
    assert numpy(token_divergence(X, X, temperature=value)).shape == (2, 3)


def test_nan_tensor_of_the_backend_is_refused_as_a_temperature():
    with pytest.raises(ValueError, match="`temperature` must be a finite real scalar"):
        token_divergence(X, X, temperature=tensor(np.nan))


@pytest.mark.parametrize("name", ["jsd", "normalized_jsd", "alpha", "skew_forward_kl"])
@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1.5])
def test_beta_at_or_beyond_its_ends_is_refused_and_sent_to_the_named_limit(name, beta):
    with pytest.raises(ValueError, match=f"`beta` must lie strictly between 0 and 1. Received {beta}.*'forward_kl' or 'reverse_kl'"):
        token_divergence(X, X, divergence=name, beta=beta)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("shape", [(4,), (1, 2, 3, 4)])
def test_any_leading_shape_is_kept(name, shape):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    assert numpy(token_divergence(x, x * 0.5, divergence=name)).shape == shape[:-1]


def test_vocabulary_of_one_has_nothing_to_tell_apart():
    assert not numpy(token_divergence(np.ones((2, 1), "float32"), np.zeros((2, 1), "float32"))).any()


# ---- vocabularies of different size --------------------------------------------------------------------------


def test_padding_a_smaller_vocabulary_with_zeros_would_be_wrong_and_minus_inf_is_right():
    teacher, student = [1.0, 0.0, -1.0], [1.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="identical shapes"):
        token_divergence(tensor([student]), tensor([[*teacher, -30.0]]))
    zeros = numpy(token_divergence(tensor([[*student, 0.0]]), tensor([[*teacher, -30.0]])))
    assert zeros[0] == pytest.approx(0.218917, abs=1e-6)
    assert softmax([*student, 0.0])[-1] == pytest.approx(0.1966, abs=1e-4)
    excluded = numpy(token_divergence(tensor([[*student, -np.inf]]), tensor([[*teacher, -np.inf]])))
    assert excluded[0] == 0.0


# ---- cross-entropy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_cross_entropy_is_that_of_the_definition(dtype):
    draw = np.random.default_rng(0)
    logits, ids = draw.normal(size=(2, 3, 4)).astype("float32") * 5, draw.integers(4, size=(2, 3))
    got = numpy(token_cross_entropy(logits, ids.astype(dtype)))
    assert got.dtype == "float32"
    np.testing.assert_allclose(got, cross_entropy(logits, ids), rtol=1e-5, atol=1e-6)


def test_cross_entropy_of_half_precision_logits_is_float32_and_keeps_ids_above_256():
    logits = np.zeros((1, 1000), "float32")
    logits[0, 257] = 4.0
    got = numpy(token_cross_entropy(tensor(logits, "bfloat16"), np.array([257])))
    assert got.dtype == "float32" and got[0] == pytest.approx(cross_entropy(logits, [257])[0], rel=1e-5)


def test_gradient_of_the_cross_entropy_is_student_minus_one_hot():
    logits = np.array([[2.0, -1.0, 0.5, 0.0]], "float32")
    value, gradient = value_and_grad(lambda s: ops.sum(token_cross_entropy(s, np.array([1]))), logits)
    np.testing.assert_allclose(gradient, softmax(logits) - np.eye(4)[1], atol=1e-6)


def test_gradient_of_the_cross_entropy_of_a_certain_student_is_not_halved():
    value, gradient = value_and_grad(
        lambda s: ops.sum(token_cross_entropy(s, np.array([0]))), np.array([[20.0, 0.0, 0.0, 0.0]], "float32")
    )
    assert value == pytest.approx(0.0, abs=1e-7)
    assert gradient[0, 1] == pytest.approx(np.exp(-20.0), rel=1e-5)


def test_cross_entropy_of_an_excluded_target_is_infinite_with_a_finite_gradient():
    value, gradient = value_and_grad(
        lambda s: ops.sum(token_cross_entropy(s, np.array([1]))), np.array([[0.5, -np.inf, 0.0, 1.0]], "float32")
    )
    assert np.isposinf(value) and np.isfinite(gradient).all()


def test_cross_entropy_in_float64_is_float64():
    logits = np.random.default_rng(1).normal(size=(1, 4))
    with float64_scope():
        got = numpy(token_cross_entropy(tensor(logits, "float64"), np.array([2])))
    assert got.dtype == "float64" and got[0] == pytest.approx(cross_entropy(logits, [2])[0], rel=1e-14)


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 3, 1), (2, 3, 4)])
def test_ids_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=f"`target_ids` must have the shape of `student_logits`.*{re.escape(str(shape))}.*{re.escape('(2, 3, 4)')}"):
        token_cross_entropy(X, np.zeros(shape, "int32"))
