"""Mask schedules: derivatives against differences, weights against closed forms, NumPy against tensors."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.schedules import (
    CosineMaskSchedule,
    CustomMaskSchedule,
    GeometricMaskSchedule,
    LinearMaskSchedule,
    LogLinearMaskSchedule,
    MaskSchedule,
    get_mask_schedule,
)


@keras.saving.register_keras_serializable(package="tests")
def cubic(t):
    return 1 - t**3


@keras.saving.register_keras_serializable(package="tests")
def cubic_slope(t):
    return -3 * t**2


def schedules():
    return [
        LinearMaskSchedule(),
        LogLinearMaskSchedule(floor=0.01),
        CosineMaskSchedule(),
        GeometricMaskSchedule(),
        CustomMaskSchedule(cubic, cubic_slope),
    ]


every_schedule = pytest.mark.parametrize("schedule", schedules(), ids=lambda s: type(s).__name__)
T = np.linspace(0.01, 0.99, 50)


@every_schedule
def test_alpha_falls_from_one_to_zero(schedule):
    alpha = schedule.alpha(np.linspace(0, 1, 200))
    assert alpha[0] > 0.99
    assert alpha[-1] < 0.011
    assert np.all(np.diff(alpha) <= 0)


@every_schedule
def test_the_derivative_is_that_of_alpha(schedule):
    h = 1e-6
    slope = (schedule.alpha(T + h) - schedule.alpha(T - h)) / (2 * h)
    # Rounding of a central difference in float64: 1e-16 / 1e-6 absolute, and 1e-6**2 of truncation.
    np.testing.assert_allclose(schedule.alpha_derivative(T), slope, rtol=1e-6, atol=1e-8)


@every_schedule
def test_the_weight_is_minus_the_slope_over_the_mask_probability(schedule):
    expected = -schedule.alpha_derivative(T) / (1 - schedule.alpha(T))
    # 1 - alpha loses digits where little is masked; the schedule itself does not.
    np.testing.assert_allclose(schedule.loss_weight(T), expected, rtol=1e-9)
    np.testing.assert_allclose(schedule.mask_probability(T), 1 - schedule.alpha(T), rtol=1e-9)


def test_the_weight_of_the_linear_schedules_is_one_over_t():
    np.testing.assert_allclose(LinearMaskSchedule().loss_weight(T), 1 / T, rtol=1e-15)
    np.testing.assert_allclose(LogLinearMaskSchedule().loss_weight(T), 1 / T, rtol=1e-15)


@every_schedule
def test_the_expected_total_weight_does_not_depend_on_the_schedule_but_through_its_ends(schedule):
    # The integral of weight(t) * P(masked at t) over t is alpha(eps) - alpha(1), whatever the path.
    t = np.linspace(schedule.eps, 1, 200_001)
    density = schedule.loss_weight(t) * schedule.mask_probability(t)
    integral = np.sum((density[1:] + density[:-1]) / 2 * np.diff(t))
    ends = schedule.alpha(schedule.eps) - schedule.alpha(1.0)
    np.testing.assert_allclose(integral, ends, rtol=1e-6)  # trapezia of width 5e-6


@every_schedule
def test_times_below_eps_count_as_eps(schedule):
    for function in (schedule.alpha, schedule.alpha_derivative, schedule.loss_weight):
        assert np.array_equal(function(np.zeros(3)), function(np.full(3, schedule.eps)))
    assert np.all(np.isfinite(schedule.loss_weight(np.zeros(1))))


@every_schedule
def test_tensors_give_what_numpy_gives(schedule):
    t = np.linspace(0.1, 0.99, 50).astype("float32")
    tensor = ops.convert_to_tensor(t)
    for name in ("alpha", "alpha_derivative", "mask_probability", "loss_weight"):
        ours = getattr(schedule, name)(tensor)
        assert keras.backend.standardize_dtype(ours.dtype) == "float32"
        # 1 - alpha of a schedule of one's own is good to an ulp of 1, 6e-8, and here at least 1e-3.
        np.testing.assert_allclose(ops.convert_to_numpy(ours), getattr(schedule, name)(t), rtol=1e-4, atol=2e-7)


@every_schedule
def test_a_schedule_survives_serialisation(schedule):
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert type(again) is type(schedule)
    assert np.array_equal(again.loss_weight(T), schedule.loss_weight(T))
    assert get_mask_schedule(keras.saving.serialize_keras_object(schedule)).eps == schedule.eps


@every_schedule
def test_a_sampler_ends_with_nothing_masked_and_never_masks_again(schedule):
    left = [int(schedule.masked_left(64, k / 10)) for k in range(11)]
    assert left[0] == 64
    assert left[-1] == 0
    assert left == sorted(left, reverse=True)


def test_the_linear_schedule_reveals_the_same_number_at_every_step():
    left = [int(LinearMaskSchedule().masked_left(64, k / 16)) for k in range(17)]
    assert np.diff(left).tolist() == [-4] * 16
    assert LinearMaskSchedule().masked_left(np.array([0, 8]), 0.5).tolist() == [0, 4]


def test_names_give_schedules():
    assert isinstance(get_mask_schedule("linear"), LinearMaskSchedule)
    assert isinstance(get_mask_schedule("cosine"), CosineMaskSchedule)
    schedule = GeometricMaskSchedule(sigma_max=5.0)
    assert get_mask_schedule(schedule) is schedule


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"`eps`.* must lie in"):
        LinearMaskSchedule(eps=0.0)
    with pytest.raises(ValueError, match="`eps` must be a finite real"):
        LinearMaskSchedule(eps=float("nan"))
    with pytest.raises(ValueError, match="`floor` must lie in"):
        LogLinearMaskSchedule(floor=1.0)
    with pytest.raises(ValueError, match="`sigma_min` must be above 0"):
        GeometricMaskSchedule(sigma_min=3.0, sigma_max=2.0)
    with pytest.raises(ValueError, match="`alpha_fn` must fall"):
        CustomMaskSchedule(lambda t: t, lambda t: 1 + 0 * t)
    with pytest.raises(ValueError, match="`derivative_fn` must be the derivative"):
        CustomMaskSchedule(cubic, lambda t: -2 * t)
    with pytest.raises(TypeError, match="`alpha_fn` must be a function"):
        CustomMaskSchedule(0.5, cubic_slope)
    with pytest.raises(ValueError, match="`schedule` must be one of"):
        get_mask_schedule("quadratic")
    with pytest.raises(TypeError, match="`schedule` must be one of"):
        get_mask_schedule(3)
    with pytest.raises(TypeError, match="abstract"):
        MaskSchedule()
