"""A ratio of sums: streaming equals one-shot, whatever the shapes of the batches."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_diffusion_opd.losses import WeightedSum
from keras_diffusion_opd.metrics import WeightedRatio
from tests.oracles import compiled, numpy, tensor

LENGTHS = (1, 7, 3, 12)


def tokens(length, seed=0):
    draw = np.random.default_rng([seed, length])
    return draw.normal(size=(2, length)), draw.uniform(size=(2, length)) * (draw.uniform(size=(2, length)) > 0.3)


def result(metric):
    return float(numpy(metric.result()))


def test_streaming_over_batches_of_different_length_equals_one_shot_and_not_a_mean_of_means():
    streamed, means = WeightedRatio(), []
    for length in LENGTHS:
        values, weights = tokens(length)
        streamed.update_state(values, sample_weight=weights)
        means.append((values * weights).sum() / max(weights.sum(), 1e-9))
    values, weights = (np.concatenate(x, 1) for x in zip(*(tokens(n) for n in LENGTHS), strict=True))
    once = WeightedRatio()
    once.update_state(values, sample_weight=weights)
    want = (values * weights).sum() / weights.sum()
    assert result(streamed) == pytest.approx(want, rel=1e-5) == pytest.approx(result(once), rel=1e-5)
    assert abs(np.mean(means) - want) > 1e-2


def test_keras_mean_would_be_another_number():
    ours, keras_mean = WeightedRatio(), keras.metrics.Mean()
    for length in LENGTHS:
        values, weights = tokens(length)
        ours.update_state(values, sample_weight=weights)
        keras_mean.update_state(values, sample_weight=weights)
    assert abs(result(ours) - float(numpy(keras_mean.result()))) > 1e-3


def test_fractional_weights_are_not_clamped_to_one():
    metric = WeightedRatio()
    metric.add_sum(WeightedSum(2.0, 0.2))
    metric.add_sum(WeightedSum(6.0, 0.3))
    assert result(metric) == pytest.approx(16.0, rel=1e-6)


def test_weight_is_not_bounded_from_below_and_nothing_is_added_to_it():
    metric = WeightedRatio()
    metric.add_sum(WeightedSum(3.0, 0.0))
    metric.add_sum(WeightedSum(1.0, 1e-6))
    assert result(metric) == pytest.approx(4e6, rel=1e-5)


def test_sums_of_two_steps_give_the_ratio_of_their_sums():
    metric = WeightedRatio()
    for _ in range(2):
        metric.add_sum(WeightedSum(tensor(10.0), tensor(5.0)))
    assert result(metric) == 2.0
    metric.reset_state()
    for _ in range(2):
        metric.add_sum(WeightedSum(tensor(6.0), tensor(2.0)))
    assert result(metric) == 3.0


def test_empty_result_is_zero_and_so_is_that_of_weight_zero():
    metric = WeightedRatio()
    assert result(metric) == 0.0
    metric.update_state(np.array([np.nan, np.inf]), sample_weight=np.zeros(2))
    assert result(metric) == 0.0


def test_value_of_weight_zero_does_not_enter_whatever_it_is():
    metric = WeightedRatio()
    metric.update_state(np.array([2.0, np.nan, np.inf]), sample_weight=np.array([0.5, 0.0, 0.0]))
    assert result(metric) == 2.0


def test_without_weights_every_value_counts_once():
    metric = WeightedRatio()
    metric.update_state(np.array([[1.0, 2.0], [3.0, 6.0]]))
    metric.update_state(np.array(8.0))
    assert result(metric) == 4.0


@pytest.mark.parametrize("dtype", ["bool", "int32", "float16"])
def test_weights_of_any_dtype_count_as_numbers(dtype):
    metric = WeightedRatio()
    metric.update_state(np.array([1.0, 5.0, 2.0]), sample_weight=np.array([1, 0, 1]).astype(dtype))
    assert result(metric) == 1.5


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_weights_of_fewer_axes_broadcast_from_the_left(shape):
    values = np.arange(6.0).reshape(2, 3)
    weights = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    full = np.broadcast_to(weights.reshape(shape + (1,) * (2 - len(shape))), (2, 3))
    metric = WeightedRatio()
    metric.update_state(values, sample_weight=weights)
    assert result(metric) == pytest.approx((values * full).sum() / full.sum(), rel=1e-6)


def test_reset_clears_both_sums():
    metric = WeightedRatio()
    metric.update_state(np.array([5.0]))
    metric.reset_state()
    assert result(metric) == 0.0
    metric.update_state(np.array([1.0]))
    assert result(metric) == 1.0


def test_half_precision_values_are_summed_in_float32():
    metric = WeightedRatio(dtype="bfloat16")
    metric.update_state(tensor(np.ones(1000), "bfloat16"))
    metric.update_state(tensor(np.ones(1), "bfloat16"))
    # bfloat16 has no 1001.
    assert float(numpy(metric.weight.value)) == 1001.0 and {str(v.dtype) for v in metric.variables} == {"float32"}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 10)), min_size=1, max_size=6))
def test_ratio_is_that_of_the_sums_for_any_stream(stream):
    metric = WeightedRatio()
    for value, weight in stream:
        metric.update_state(np.array([value]), sample_weight=np.array([weight]))
    values, weights = np.array(stream, "float32").astype("float64").T
    total = weights.sum()
    want = (values * weights).sum() / total if total else 0.0
    # Six float32 additions of numbers up to 1000 in size.
    assert result(metric) == pytest.approx(want, rel=1e-4, abs=1e-3 / max(total, 1e-3))


def test_metric_is_updated_without_state_of_its_own():
    metric = WeightedRatio()

    def step(state, values, weights):
        return metric.stateless_update_state(state, values, sample_weight=weights)

    state = [v.value for v in metric.variables]
    for _ in range(2):
        state = compiled(step)(state, tensor([1.0, 5.0]), tensor([3.0, 1.0]))
    assert float(numpy(metric.stateless_result(state))) == 2.0
    assert result(metric) == 0.0


def test_config_round_trip():
    metric = WeightedRatio(name="ratio")
    back = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(metric))
    assert isinstance(back, WeightedRatio) and back.name == "ratio"
