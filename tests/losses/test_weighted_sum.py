"""A mean that carries its denominator: added up anywhere, divided once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import compiled, compiled_value_and_grad, float64_scope, numpy, tensor, value_and_grad

from keras_diffusion_opd.losses import LossOutput, WeightedSum

# Splits of 12 tokens into micro-batches: even, uneven, one token against many, one batch, one by one.
SPLITS = [(4, 4, 4), (1, 7, 4), (1, 1, 10), (12,), (1,) * 12]


def parts_of(values, weights, split):
    edges = np.cumsum((0, *split))
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        yield WeightedSum(tensor(np.sum(values[a:b] * weights[a:b])), tensor(np.sum(weights[a:b])))


def mean(parts):
    return float(numpy(sum(parts).mean()))


# ---- the denominator -----------------------------------------------------------------------------------


def test_mean_is_over_all_tokens_and_not_a_mean_of_means():
    short, long = WeightedSum(1.0, 1.0), WeightedSum(9 * 0.1, 9.0)
    assert mean([short, long]) == pytest.approx(0.19, rel=1e-6)
    assert np.mean([mean([short]), mean([long])]) == pytest.approx(0.55)


def test_fractional_denominators_are_not_clamped_to_one():
    assert mean([WeightedSum(2.0, 0.2), WeightedSum(6.0, 0.3)]) == pytest.approx(16.0, rel=1e-6)


@pytest.mark.parametrize(
    "weights", [(4, 4, 4, 4), (1, 7, 3, 5), (1, 1, 100, 1), (0.05, 0.1, 0.2, 0.25)], ids=["equal", "uneven", "one heavy", "fractional"]
)
def test_sums_are_divided_by_the_sum_of_their_weights(weights):
    totals = np.array([3.0, -1.0, 2.5, 8.0])
    got = mean(WeightedSum(tensor(t), tensor(w)) for t, w in zip(totals, weights, strict=True))
    assert got == pytest.approx(totals.sum() / np.sum(weights), rel=1e-6)
    mean_of_means = np.mean(totals / weights)
    assert (abs(got - mean_of_means) > 1e-3) == (len(set(weights)) > 1)


@pytest.mark.parametrize("weights", [(2.0, 6.0), (0.2, 0.3)])
def test_equal_sums_of_unequal_weight_share_one_denominator(weights):
    g = 1.5
    assert mean([WeightedSum(g, w) for w in weights]) == pytest.approx(2 * g / sum(weights), rel=1e-6)


def test_plain_values_count_with_weight_one():
    assert mean([WeightedSum(1.0, 1.0), WeightedSum(2.0, 1.0)]) == 1.5


def test_one_sum_is_divided_by_its_own_weight():
    assert mean([WeightedSum(6.0, 4.0)]) == 1.5
    assert mean([WeightedSum(6.0, 1.0)]) == 6.0


def test_two_steps_that_report_10_over_5_and_6_over_2():
    assert mean([WeightedSum(10.0, 5.0)] * 2) == 2.0
    assert mean([WeightedSum(6.0, 2.0)] * 2) == 3.0
    assert mean([WeightedSum(10.0, 5.0), WeightedSum(6.0, 2.0)]) == pytest.approx(16 / 7, rel=1e-6)


def test_weighted_mean_squared_error_over_two_micro_batches():
    errors = (np.array([1.0, -1.0, 0.0, 3.0]) - np.array([0.5, -0.5, 1.0, -1.0])) ** 2
    weights = np.array([0.1, 0.0, 0.2, 0.3])
    assert mean(parts_of(errors, weights, (2, 2))) == pytest.approx(5.025 / 0.6, rel=1e-6)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split_into_micro_batches_gives_the_same_mean(split):
    draw = np.random.default_rng(0)
    values, weights = draw.normal(size=12), draw.uniform(size=12) * (draw.uniform(size=12) > 0.3)
    whole = np.sum(values * weights) / np.sum(weights)
    # Twelve float32 additions.
    assert mean(parts_of(values, weights, split)) == pytest.approx(whole, rel=1e-5)


def test_part_whose_tokens_are_all_masked_adds_nothing():
    # Divergences [1, .1, .1] cut into 2 + 1 with the last masked: the mean of the valid two, not half of it.
    values, weights = np.array([1.0, 0.1, 0.1]), np.array([1.0, 1.0, 0.0])
    parts = list(parts_of(values, weights, (2, 1)))
    assert numpy(parts[1].total) == 0 and numpy(parts[1].weight) == 0
    assert mean(parts) == pytest.approx(0.55, rel=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0, 1e3)), min_size=1, max_size=8), st.randoms())
def test_order_and_grouping_do_not_matter(pairs, random):
    parts = [WeightedSum(np.float64(v * w), np.float64(w)) for v, w in pairs]
    shuffled = random.sample(parts, len(parts))
    cut = random.randint(0, len(parts))
    grouped = sum(shuffled[:cut]) + sum(shuffled[cut:]) if 0 < cut < len(parts) else sum(shuffled)
    # Sums of the same float64 numbers in another order.
    np.testing.assert_allclose(grouped, sum(parts), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16", "float32", "float64"])
def test_weights_of_any_dtype_count_as_numbers(dtype):
    weights = np.array([1, 0, 1]).astype(dtype)
    values = np.array([1.0, 5.0, 2.0], "float32")
    part = WeightedSum(tensor(np.sum(values * weights)), np.sum(weights))
    got = numpy(part.mean())
    assert got == 1.5 and got.dtype in ("float32", "float64")


def test_integers_are_divided_as_numbers():
    assert numpy(WeightedSum(3, 2).mean()) == 1.5


# ---- nothing to divide by ------------------------------------------------------------------------------


def test_mean_of_weight_zero_is_zero_with_a_finite_gradient():
    def function(x):
        return WeightedSum(x[0], x[1]).mean()

    for value, gradient in (
        value_and_grad(function, tensor([0.0, 0.0])),
        compiled_value_and_grad(function)(tensor([0.0, 0.0])),
    ):
        assert value == 0 and np.isfinite(gradient).all()


def test_gradient_of_the_mean_is_that_of_the_total_over_the_weight():
    _, gradient = value_and_grad(lambda x: WeightedSum(x * x, tensor(2.0)).mean(), tensor(3.0))
    assert gradient == 6.0 / 2.0
    _, other = value_and_grad(lambda x: WeightedSum(x * x, tensor(1.0)).mean(), tensor(3.0))
    assert other == 6.0


def test_empty_sum_is_zero():
    assert sum([]) == 0
    assert numpy(WeightedSum(0.0, 0.0).mean()) == 0.0


# ---- what it is ----------------------------------------------------------------------------------------


def test_sum_crosses_a_compiled_function():
    both = compiled(lambda a, b: a + b)(WeightedSum(tensor(2.0), tensor(0.2)), WeightedSum(tensor(6.0), tensor(0.3)))
    assert isinstance(both, WeightedSum) and float(numpy(both.mean())) == pytest.approx(16.0, rel=1e-6)


def test_float64_stays_float64():
    with float64_scope():
        value = numpy(WeightedSum(tensor(1.0, "float64"), tensor(3.0, "float64")).mean())
    assert value.dtype == "float64" and value == 1 / 3


@pytest.mark.parametrize("other", [1.0, 3, None, (1.0, 2.0)])
def test_weighted_and_plain_values_do_not_mix(other):
    with pytest.raises(TypeError):
        WeightedSum(1.0, 2.0) + other
    with pytest.raises(TypeError):
        other + WeightedSum(1.0, 2.0)


def test_list_of_weighted_and_plain_values_does_not_add_up():
    with pytest.raises(TypeError):
        sum([WeightedSum(1.0, 2.0), 1.0])


def test_factor_scales_the_total_and_leaves_the_weight():
    assert 2 * WeightedSum(3.0, 4.0) == WeightedSum(3.0, 4.0) * 2 == WeightedSum(6.0, 4.0)
    with pytest.raises(TypeError):
        WeightedSum(1.0, 2.0) * WeightedSum(1.0, 2.0)


def test_loss_output_holds_a_primary_sum_and_metrics_by_name():
    output = LossOutput(WeightedSum(3.0, 2.0), {"a": WeightedSum(1.0, 2.0)})
    assert output.primary.mean() == 1.5 and output.metrics["a"].total == 1.0
