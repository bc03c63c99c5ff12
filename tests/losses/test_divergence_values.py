"""Every named divergence against its definition, and its published numbers; directions never interchange."""

import numpy as np
import pytest
from keras import ops
from tests.oracles import (
    DIVERGENCES,
    WITH_BETA,
    divergence_of,
    float64_scope,
    numerical_gradient,
    numpy,
    reference,
    softmax,
    tensor,
    value_and_grad,
)

from keras_diffusion_opd.losses import token_divergence

CASES = [(name, beta) for name in DIVERGENCES for beta in ((0.1, 0.5, 0.9) if name in WITH_BETA else (None,))]
P, Q = [0.9, 0.1], [0.5, 0.5]
P4, Q4 = [0.5, 0.3, 0.15, 0.05], [0.6, 0.2, 0.1, 0.1]


def value(p, q, name="forward_kl", **arguments):
    """The divergence of one pair of distributions, given by their probabilities."""
    teacher, student = tensor(np.log([p])), tensor(np.log([q]))
    return float(numpy(token_divergence(student, teacher, divergence=name, **arguments))[0])


def of_logits(teacher, student, **arguments):
    return float(numpy(token_divergence(tensor([student]), tensor([teacher]), **arguments))[0])


def gradient(teacher, student, name="forward_kl", dtype="float32", **arguments):
    def total(s):
        return ops.sum(token_divergence(s, tensor(teacher, dtype), divergence=name, **arguments))

    return value_and_grad(total, tensor(student, dtype))[1]


# ---- against the definitions ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("name, beta", CASES)
def test_value_is_that_of_the_definition_times_temperature_squared(name, beta, temperature):
    draw = np.random.default_rng(0)
    scales = np.array([0.01, 1.0, 10.0])[:, None, None]
    teacher, student = (draw.normal(size=(3, 8, 7)) * scales for _ in range(2))
    got = numpy(token_divergence(tensor(student), tensor(teacher), divergence=name, beta=beta, temperature=temperature))
    want = reference(name, student.astype("float32"), teacher.astype("float32"), temperature, beta)
    assert got.dtype == "float32" and got.shape == (3, 8)
    # A float32 log-probability is off by 1e-7; against differences of 0.01 that is 1e-5, and twice that squared.
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-8)


@pytest.mark.parametrize("name, beta", CASES)
def test_float64_value_and_gradient_have_float64_precision(name, beta):
    draw = np.random.default_rng(1)
    teacher, student = draw.normal(size=(4, 5)), draw.normal(size=(4, 5))
    with float64_scope():
        total, got = value_and_grad(
            lambda s: ops.sum(
                token_divergence(s, tensor(teacher, "float64"), divergence=name, beta=beta, temperature=1.5)
            ),
            tensor(student, "float64"),
        )
    assert total.dtype == got.dtype == "float64"
    assert total == pytest.approx(reference(name, student, teacher, 1.5, beta).sum(), rel=1e-10)
    want = numerical_gradient(lambda s: reference(name, s, teacher, 1.5, beta).sum(), student)
    # Central differences with step 1e-5 are good to 1e-9.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


def test_gradient_of_forward_kl_is_student_minus_teacher():
    for teacher, student in np.random.default_rng(2).normal(size=(5, 2, 1, 4)) * 3:
        # One rounding of float32.
        np.testing.assert_allclose(gradient(teacher, student), softmax(student) - softmax(teacher), atol=3e-7)
    np.testing.assert_allclose(gradient([np.log(P)], [np.log(Q)]), [[-0.4, 0.4]], atol=1e-6)


def test_sum_is_over_the_vocabulary_and_not_a_mean():
    assert value(P, Q) == pytest.approx(0.368064, abs=1e-6)
    assert value(P, Q) != pytest.approx(0.184032, abs=1e-3)


# ---- published numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, beta, want",
    [
        ("forward_kl", None, 0.368064),
        ("reverse_kl", None, 0.510826),
        ("jsd", 0.5, 0.101749),
        ("jsd", 0.001, 0.00036774),
        ("jsd", 0.1, 0.033603),
        ("jsd", 0.3, 0.081336),
        ("jsd", 0.9, 0.043074),
        ("jsd", 0.999, 0.00050994),
    ],
)
def test_numbers_of_a_pair_of_two_point_distributions(name, beta, want):
    assert value(P, Q, name, beta=beta) == pytest.approx(want, rel=2e-5)


@pytest.mark.parametrize(
    "name, beta, want",
    [
        ("forward_kl", None, 0.056641),
        ("reverse_kl", None, 0.057068),
        ("skew_forward_kl", 0.1, 0.045654),
        ("skew_reverse_kl", 0.1, 0.045826),
        ("jsd", 0.5, 0.014074),
        ("alpha", 0.5, 0.056573),
        ("total_variation", None, 0.15),
    ],
)
def test_numbers_of_a_pair_of_four_point_distributions(name, beta, want):
    assert value(P4, Q4, name, beta=beta) == pytest.approx(want, abs=1e-6)


def test_mixture_of_the_jsd_is_one_of_probabilities_and_not_of_logarithms():
    geometric = softmax((np.log(P) + np.log(Q)) / 2)
    wrong = (divergence_of("forward_kl", np.array(P), geometric) + divergence_of("forward_kl", np.array(Q), geometric)) / 2
    assert abs(wrong - 0.101749) > 1e-3
    assert value(P, Q, "jsd") == pytest.approx(0.101749, abs=1e-6)


def test_beta_weighs_the_teacher_and_is_not_swapped():
    # The other convention gives .329516, .146687 and .276745 at .1, .3 and .9.
    for beta, swapped in ((0.1, 0.329516), (0.3, 0.146687), (0.9, 0.276745)):
        assert abs(value(P, Q, "jsd", beta=beta) - swapped) > 0.05


def test_plain_jsd_vanishes_at_its_ends_as_documented():
    assert value(P, Q, "jsd", beta=1e-3) < 1e-3 and value(P, Q, "jsd", beta=1 - 1e-3) < 1e-3


@pytest.mark.parametrize("p, q", [(P, Q), (P4, Q4), (Q4, P4)])
def test_normalized_jsd_goes_continuously_to_both_kls(p, q):
    for beta in (1e-2, 1e-4, 1e-6):
        # The first correction is linear in beta.
        assert value(p, q, "normalized_jsd", beta=beta) == pytest.approx(value(p, q), rel=2 * beta + 1e-6)
        assert value(p, q, "normalized_jsd", beta=1 - beta) == pytest.approx(value(p, q, "reverse_kl"), rel=2 * beta + 1e-6)


@pytest.mark.parametrize("p, q", [(P, Q), (P4, Q4), (Q4, P4)])
def test_alpha_goes_continuously_to_both_kls(p, q):
    for small in (1e-2, 1e-4, 1e-6):
        assert value(p, q, "alpha", beta=1 - small) == pytest.approx(value(p, q), rel=2 * small + 1e-6)
        assert value(p, q, "alpha", beta=small) == pytest.approx(value(p, q, "reverse_kl"), rel=2 * small + 1e-6)


@pytest.mark.parametrize("name, limit", [("normalized_jsd", "reverse_kl"), ("alpha", "forward_kl")])
def test_gradients_go_continuously_to_those_of_the_kls(name, limit):
    teacher, student = np.log([P4]), np.log([Q4])
    got = gradient(teacher, student, name, beta=1 - 1e-6)
    np.testing.assert_allclose(got, gradient(teacher, student, limit), atol=2e-6)


def test_no_two_divergences_are_interchangeable():
    values = [value(P, Q, name, beta=0.3 if name in WITH_BETA else None) for name in DIVERGENCES]
    assert np.min(np.abs(np.subtract.outer(values, values)) + np.eye(len(values))) > 1e-3


def test_direction_changes_with_the_order_of_the_arguments():
    assert value(P, Q) == pytest.approx(value(Q, P, "reverse_kl"), rel=1e-6)
    assert value(P, Q, "skew_forward_kl", beta=0.3) == pytest.approx(value(Q, P, "skew_reverse_kl", beta=0.3), rel=1e-6)
    assert value(P, Q, "jsd", beta=0.3) == pytest.approx(value(Q, P, "jsd", beta=0.7), rel=1e-5)


def test_every_entry_counts_and_none_is_clipped():
    p, q = np.array(P4), np.array(Q4)
    clipped = np.minimum(p * np.log(p / q), 0.05).sum()
    assert clipped < 0.056641 - 1e-2
    assert value(P4, Q4) == pytest.approx(0.056641, abs=1e-6)


def test_forward_kl_subtracts_the_teachers_entropy():
    assert value(P, P) == 0.0


def test_reverse_kl_has_the_gradient_of_its_expectation():
    q = np.array([0.6, 0.4])
    reward = np.log(q / np.array(P))
    # sum_a q(a) grad log q(a) r(a): the exact policy gradient; a constant reward has none.
    scores = np.eye(2) - q
    np.testing.assert_allclose(q @ (scores * 3.0), [0, 0], atol=1e-12)
    np.testing.assert_allclose(gradient([np.log(P)], [np.log(q)], "reverse_kl"), [q @ (scores * reward[:, None])], atol=1e-6)
    assert gradient([np.log(P)], [np.log(q)], "reverse_kl")[0, 1] == pytest.approx(0.430022, abs=1e-6)


# ---- temperature ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature, want", [(1.0, 0.912983), (2.0, 1.091222), (4.0, 1.088009), (1e3, 1.0)])
def test_temperature_squared_multiplies_the_divergence(temperature, want):
    # At T = 1000 the divergence is 1e-6 of a distribution that is almost flat.
    assert of_logits([2.0, 0.0, -1.0], [0.0, 1.0, 0.0], temperature=temperature) == pytest.approx(want, rel=2e-3 if temperature > 10 else 2e-6)


def test_temperature_divides_logits_and_renormalises():
    teacher, student = np.array([2.0, 0.0, -1.0]), np.array([0.0, 1.0, 0.0])
    halved = np.exp(np.log(softmax(teacher)) / 2).sum()
    assert halved == pytest.approx(1.461474, abs=1e-6)
    assert of_logits(teacher, student, temperature=2.0) / 4 == pytest.approx(0.272806, abs=1e-6)


def test_constant_added_to_logits_changes_nothing():
    # A softmax is there: the divergence of raw logits (16.118, or 32.236 after + 3) is another thing.
    assert of_logits([5.0, 3.0, 2.0], [0.0, 1.0, 0.0]) == pytest.approx(0.912983, abs=1e-6)
