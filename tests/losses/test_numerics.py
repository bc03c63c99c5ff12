"""The building blocks of the divergences, each against its formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from keras import ops

from keras_diffusion_opd.data.log_space import EXCLUDED, log_probabilities
from keras_diffusion_opd.losses.numerics import excess, log_mixture_ratio
from tests.oracles import float64_scope, numpy, tensor, value_and_grad

ROWS, V = 32, 6
logits = arrays("float32", (ROWS, V), elements=st.floats(-1e4, 1e4, width=32))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(logits)
def test_log_probabilities_are_at_most_zero_and_sum_to_one(x):
    log_p = numpy(log_probabilities(tensor(x)))
    assert log_p.max() <= 0.0
    np.testing.assert_allclose(np.exp(log_p.astype("float64")).sum(-1), 1.0, rtol=1e-5)


def test_excluded_id_has_probability_exactly_zero():
    log_p = numpy(log_probabilities(tensor([[0.0, -np.inf, 1.0]])))
    assert log_p[0, 1] == np.float32(EXCLUDED) and np.exp(log_p[0, 1]) == 0.0
    np.testing.assert_allclose(log_p[0, [0, 2]], [-1.3132617, -0.3132617], rtol=1e-6)


@pytest.mark.parametrize("dtype, result", [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")])
def test_log_probabilities_are_float32_or_better(dtype, result):
    with float64_scope():
        assert numpy(log_probabilities(tensor([[0.1, 0.7]], dtype))).dtype == result


@pytest.mark.parametrize("dtype, tolerance", [("float32", 3e-6), ("float64", 1e-9)])
def test_excess_is_its_formula_and_never_negative(dtype, tolerance):
    r = np.concatenate([np.linspace(-3, 3, 601), np.geomspace(1e-6, 1, 50), -np.geomspace(1e-6, 1, 50)])
    r = r.astype(dtype).astype("float64")
    a = np.full_like(r, 0.3)
    with float64_scope():
        got = numpy(excess(tensor(r, dtype), tensor(a, dtype), tensor(a * np.exp(-r), dtype)))
    assert got.min() >= 0.0 and got[np.abs(r) == 0].max(initial=0.0) == 0.0
    # In float64 the formula loses the square of a small r to cancellation: expm1 keeps it.
    want = a * (np.expm1(-r) + r)
    large = np.abs(r) > 1e-3
    np.testing.assert_allclose(got[large], want[large], rtol=tolerance * 10, atol=tolerance * 1e-2)
    np.testing.assert_allclose(got[~large], (a * r * r / 2 * (1 - r / 3))[~large], rtol=1e-5)


@pytest.mark.parametrize("weight", [1e-9, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6])
def test_log_mixture_ratio_is_its_formula_without_overflow(weight):
    d = np.concatenate([np.linspace(-60, 60, 241), [-1e4, 1e4, -1e30, 1e30]]).astype("float32")
    got = numpy(log_mixture_ratio(tensor(d), weight)).astype("float64")
    with np.errstate(over="ignore"):
        x = d.astype("float64")
        want = np.where(x > -700, -np.log(weight + (1 - weight) * np.exp(-np.maximum(x, -700))), x - np.log1p(-weight))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert numpy(log_mixture_ratio(tensor([0.0]), weight))[0] == 0.0


@pytest.mark.parametrize("weight", [1e-9, 0.1, 0.9])
def test_log_mixture_ratio_has_a_finite_gradient_at_its_ends(weight):
    d = tensor([-1e30, -50.0, -20.0, 0.0, 1.0, 50.0, 1e30])
    _, gradient = value_and_grad(lambda x: ops.sum(log_mixture_ratio(x, weight)), d)
    assert np.isfinite(gradient).all() and gradient.min() >= 0.0 and gradient.max() <= 1.0 + 1e-6
