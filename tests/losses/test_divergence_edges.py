"""Where divergences break elsewhere: excluded ids, saturation, NaN; in compiled programs, which cannot raise."""

import numpy as np
import pytest
from keras import ops
from tests.oracles import (
    DIVERGENCES,
    WITH_BETA,
    compiled,
    compiled_value_and_grad,
    numpy,
    reference,
    softmax,
    tensor,
    value_and_grad,
)

from keras_diffusion_opd.losses import token_divergence

INF = np.inf
VARIANTS = [(name, beta) for name in DIVERGENCES for beta in ((0.1, 0.9) if name in WITH_BETA else (None,))]
ROWS, V = 64, 8


def every_divergence(student, teacher):
    """(variants, rows): all of them at once, so that one compilation serves."""
    return ops.stack([token_divergence(student, teacher, divergence=name, beta=beta) for name, beta in VARIANTS])


def forward_kl(student, teacher):
    return ops.sum(token_divergence(student, teacher))


def reverse_kl(student, teacher):
    return ops.sum(token_divergence(student, teacher, divergence="reverse_kl"))


VALUES = compiled(every_divergence)
GRADIENT = compiled_value_and_grad(lambda student, teacher: ops.sum(every_divergence(student, teacher)))
FORWARD, REVERSE = compiled_value_and_grad(forward_kl), compiled_value_and_grad(reverse_kl)


def draw(seed, scale=3.0):
    return np.random.default_rng(seed).normal(size=(ROWS, V)) * scale


def filled(row):
    """A row of few logits as (ROWS, V), the other ids excluded."""
    return np.tile(np.concatenate([row, np.full(V - len(row), -INF)]), (ROWS, 1))


# ---- excluded ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [-INF, np.finfo("float32").min])
def test_id_excluded_in_both_adds_nothing_and_has_gradient_exactly_zero(mask):
    kept_t, kept_s = draw(3)[:, :-1], draw(4)[:, :-1]
    teacher, student = (np.concatenate([x, np.full((ROWS, 1), mask)], 1) for x in (kept_t, kept_s))
    value, gradient = GRADIENT(tensor(student), tensor(teacher))
    want = sum(reference(n, kept_s.astype("float32"), kept_t.astype("float32"), beta=b).sum() for n, b in VARIANTS)
    assert value == pytest.approx(want, rel=1e-4)
    assert np.isfinite(gradient).all() and not gradient[:, -1].any() and gradient[:, :-1].any()


def test_mask_token_excluded_in_both_gives_the_known_value_and_gradient():
    value, gradient = FORWARD(tensor([[0.5, 0.2, -INF]]), tensor([[1.0, 0.0, -INF]]))
    assert value == pytest.approx(0.0528346, abs=1e-6)
    np.testing.assert_allclose(gradient, [[-0.156616, 0.156616, 0.0]], atol=1e-6)
    assert gradient[0, 2] == 0.0


def test_reverse_kl_with_an_excluded_padding_column_is_finite():
    value, gradient = REVERSE(tensor([[1.0, 0.0, -INF]]), tensor([[0.5, 0.2, -INF]]))
    assert value == pytest.approx(reference("reverse_kl", [1.0, 0.0], [0.5, 0.2]), rel=1e-5)
    assert np.isfinite(gradient).all() and gradient[0, 2] == 0.0


@pytest.mark.parametrize("excluder, infinite", [("student", "forward_kl"), ("teacher", "reverse_kl")])
def test_id_excluded_on_one_side_is_infinite_where_it_truly_is_and_never_nan(excluder, infinite):
    teacher, student = draw(5), draw(6)
    (student if excluder == "student" else teacher)[:, 2] = -INF
    values = numpy(VALUES(tensor(student), tensor(teacher)))
    for got, (name, beta) in zip(values, VARIANTS, strict=True):
        want = reference(name, student.astype("float32"), teacher.astype("float32"), beta=beta)
        assert np.isposinf(got).all() == (name == infinite)
        np.testing.assert_allclose(got, want, rtol=1e-4, err_msg=f"{name} {beta}")
    value, gradient = GRADIENT(tensor(student), tensor(teacher))
    assert np.isposinf(value) and np.isfinite(gradient).all()
    if excluder == "student":
        assert not gradient[:, 2].any()


# ---- saturation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("z", [18.0, 30.0, 80.0, 1000.0])
def test_saturated_logits_keep_value_and_gradient(z):
    value, gradient = FORWARD(tensor([[0.0, z, 0.0]]), tensor([[z, 0.0, 0.0]]))
    assert value == pytest.approx(z, rel=1e-5)
    np.testing.assert_allclose(gradient, [[-1.0, 1.0, 0.0]], atol=1e-6)


def test_every_divergence_of_saturated_logits_has_a_finite_gradient():
    student, teacher = filled(np.array([0.0, 3.0, -8.0]) / 0.05), filled(np.array([0.0, 2.0, -1.0]) / 0.05)
    value, gradient = GRADIENT(tensor(student), tensor(teacher))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_reverse_kl_of_saturated_logits_has_the_right_gradient():
    value, gradient = REVERSE(tensor([[0.0, 60.0, -160.0]]), tensor([[0.0, 40.0, -20.0]]))
    assert np.isfinite(value) and np.isfinite(gradient).all()
    # q_0 (log(q_0 / p_0) - KL) with q_0 = e^-60. The entry of the almost certain id is as small, and may round.
    assert gradient[0, 0] == pytest.approx(-1.7513e-25, rel=1e-3)
    assert abs(gradient[0, 1]) < 1e-24 and abs(gradient[0, 2]) < 1e-40


def test_gradient_of_reverse_kl_survives_a_value_many_digits_larger():
    # KL = 48, and no entry of the gradient is above 1e-9: float32 rounds 48 to 4e-6.
    teacher, student = np.array([[0.0, 48.0, 1.0]]), np.array([[25.0, 0.0, 0.5]])
    q, p = softmax(student), softmax(teacher)
    ratio = np.log(q) - np.log(p)
    want = q * (ratio - (q * ratio).sum())
    _, gradient = REVERSE(tensor(student), tensor(teacher))
    assert 0 < np.abs(want).max() < 1e-8
    np.testing.assert_allclose(gradient, want, atol=1e-2 * np.abs(want).max())


# ---- not a number ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, INF])
@pytest.mark.parametrize("side", ["student", "teacher"])
def test_nan_in_a_row_is_seen_in_its_value_and_in_no_other_row(side, value):
    pair = {"student": draw(7), "teacher": draw(8)}
    pair[side][5, 1] = value
    values = numpy(VALUES(tensor(pair["student"]), tensor(pair["teacher"])))
    assert np.isnan(values[:, 5]).all() and np.isfinite(np.delete(values, 5, axis=1)).all()


def test_no_gradient_flows_into_the_teacher():
    student = tensor(draw(9))
    _, gradient = value_and_grad(lambda t: ops.sum(every_divergence(student, t)), tensor(draw(10)))
    assert not gradient.any()
