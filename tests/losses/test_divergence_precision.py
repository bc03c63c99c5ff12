"""Exactly zero for equal logits, never negative, and float32 digits from half-precision logits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from keras import ops
from tests.oracles import (
    BACKEND,
    DIVERGENCES,
    compiled,
    compiled_value_and_grad,
    float64_scope,
    numpy,
    reference,
    softmax,
    tensor,
)

from keras_diffusion_opd.losses import token_divergence

INF = np.inf
ROWS, V, LARGE = 64, 8, 248_320


def every_divergence(student, teacher):
    """(divergences, rows), at their default beta."""
    return ops.stack([token_divergence(student, teacher, divergence=name) for name in DIVERGENCES])


COMPILED = compiled(every_divergence)
GRADIENT = compiled_value_and_grad(lambda student, teacher: ops.sum(every_divergence(student, teacher)[:-1]))
FORWARD = compiled_value_and_grad(lambda student, teacher: ops.sum(token_divergence(student, teacher)))


def draw(seed, scale=3.0):
    return np.random.default_rng(seed).normal(size=(ROWS, V)) * scale


# ---- equal logits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [every_divergence, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_identical_logits_give_exactly_zero(run, dtype):
    scales = np.geomspace(1e-3, 300.0, ROWS)[:, None]
    with float64_scope():
        logits, again = (tensor(draw(0, 1.0) * scales, dtype) for _ in range(2))
        assert not numpy(run(logits, again)).any()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(arrays("float32", (ROWS, V), elements=st.floats(-1e4, 1e4, width=32) | st.just(-INF)))
def test_identical_logits_give_exactly_zero_whatever_they_are(logits):
    logits[:, 0] = np.where(np.isneginf(logits).all(-1), 0.0, logits[:, 0])
    assert not numpy(COMPILED(tensor(logits), tensor(logits.copy()))).any()


@pytest.mark.skipif(BACKEND == "torch", reason="torch trains eagerly: the eager test below is the same")
def test_identical_logits_give_exactly_zero_over_248320_ids_in_a_compiled_program():
    logits = np.random.default_rng(0).normal(size=(1, LARGE)) * 4
    assert not numpy(COMPILED(tensor(logits, "bfloat16"), tensor(logits, "bfloat16"))).any()


def test_identical_logits_give_exactly_zero_over_248320_ids_eagerly():
    logits = tensor(np.random.default_rng(1).normal(size=(1, LARGE)) * 4, "bfloat16")
    for name in DIVERGENCES:
        assert not numpy(token_divergence(logits, logits + 0, divergence=name)).any()


def test_value_and_gradient_vanish_at_identical_logits_in_one_compiled_program():
    # All but total variation, which has a kink there.
    value, gradient = GRADIENT(tensor(draw(2)), tensor(draw(2)))
    assert value == 0.0
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


# ---- never negative ---------------------------------------------------------------------------------------


def neighbours(seed):
    """bfloat16 logits, and the same with one of them moved to the next bfloat16."""
    teacher = numpy(tensor(draw(seed), "bfloat16"))
    student = teacher.copy()
    student.view("uint32")[np.arange(ROWS), np.random.default_rng(seed).integers(V, size=ROWS)] += 1 << 16
    return student, teacher


def test_ten_thousand_random_bfloat16_pairs_are_never_negative():
    for seed in range(10_000 // ROWS + 1):
        scale = 10.0 ** (seed % 5 - 2)
        values = COMPILED(tensor(draw(seed, scale), "bfloat16"), tensor(draw(seed + 1000, scale), "bfloat16"))
        assert numpy(values).min() >= 0.0


def test_near_identical_pairs_are_never_negative_and_keep_their_digits():
    for seed in range(40):
        student, teacher = neighbours(seed)
        values = numpy(COMPILED(tensor(student, "bfloat16"), tensor(teacher, "bfloat16")))
        assert values.min() >= 0.0
        # A step of 2^-8 of one logit; a log-probability in float32 is off by 1e-7.
        np.testing.assert_allclose(values[0], reference("forward_kl", student, teacher), rtol=1e-2, atol=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(arrays("float32", (2, ROWS, V), elements=st.floats(-1e4, 1e4, width=32)))
def test_no_pair_of_logits_gives_a_negative_or_undefined_value(pair):
    values = numpy(COMPILED(tensor(pair[0]), tensor(pair[1])))
    assert np.isfinite(values).all() and values.min() >= 0.0


# ---- half precision ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_divergence_of_bfloat16_logits_near_convergence_is_right_to_one_percent(noise):
    generator = np.random.default_rng(3)
    teacher = tensor(generator.normal(size=(4, 32_000)) * 2, "bfloat16")
    student = tensor(numpy(teacher) + generator.normal(size=(4, 32_000)) * noise, "bfloat16")
    values = numpy(COMPILED(student, teacher))
    assert values.dtype == "float32"
    for name, got in zip(DIVERGENCES[:3], values[:3], strict=True):
        want = reference(name, numpy(student), numpy(teacher))
        assert want.max() < 2e-3
        np.testing.assert_allclose(got, want, rtol=1e-2, err_msg=name)


def test_gradient_from_bfloat16_logits_is_right_to_half_a_bfloat16_digit():
    generator = np.random.default_rng(4)
    teacher = tensor(generator.normal(size=(1, 2_000)), "bfloat16")
    student = tensor(numpy(teacher) + generator.normal(size=(1, 2_000)) * 0.05, "bfloat16")
    _, gradient = FORWARD(student, teacher)
    want = softmax(numpy(student)) - softmax(numpy(teacher))
    # The gradient of bfloat16 logits is itself bfloat16: 8 bits.
    np.testing.assert_allclose(gradient, want, rtol=2**-8, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_give_float32_values_equal_to_those_of_the_widened_logits(dtype):
    student, teacher = tensor(draw(5), dtype), tensor(draw(6), dtype)
    got = token_divergence(student, teacher)
    wide = token_divergence(tensor(numpy(student)), tensor(numpy(teacher)))
    np.testing.assert_array_equal(numpy(got), numpy(wide))
    assert numpy(got).dtype == "float32"


def test_dtypes_may_differ_and_the_wider_one_counts():
    student, teacher = tensor(draw(5), "bfloat16"), tensor(draw(6), "float32")
    np.testing.assert_array_equal(
        numpy(token_divergence(student, teacher)), numpy(token_divergence(tensor(numpy(student)), teacher))
    )
