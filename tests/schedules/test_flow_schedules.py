"""Grids, shifts, times and weights of flow models: closed forms, and independence of the batch."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.schedules import (
    flow_weight,
    grid_times,
    logit_normal_times,
    resolution_shift,
    shift_time,
    timestep_grid,
    uniform_times,
)

U = np.linspace(0, 1, 21)


def test_shift_of_a_half_by_three_is_three_quarters():
    assert shift_time(0.5, 3.0) == 0.75


def test_shifts_compose_by_multiplication_and_the_inverse_is_the_reciprocal():
    assert np.allclose(shift_time(shift_time(U, 2.5), 4.0), shift_time(U, 10.0), rtol=0, atol=1e-15)
    assert np.allclose(shift_time(shift_time(U, 7.0), 1 / 7.0), U, rtol=0, atol=1e-15)
    assert np.array_equal(shift_time(U, 1.0), U)


def test_shift_keeps_the_ends_and_the_order():
    shifted = shift_time(U[None], np.array([[0.2], [3.0], [50.0]]))
    assert np.all(shifted[:, 0] == 0) and np.all(shifted[:, -1] == 1)
    assert np.all(np.diff(shifted) > 0)


def test_shift_of_tensors_is_that_of_numpy():
    tensor = shift_time(ops.convert_to_tensor(U.astype("float32")), ops.convert_to_tensor(np.float32(3.0)))
    assert np.allclose(ops.convert_to_numpy(tensor), shift_time(U, 3.0), atol=1e-6)  # float32


@pytest.mark.parametrize("k", [0.0, -1.0, np.nan, [1.0, 0.0]])
def test_shift_must_be_above_zero(k):
    with pytest.raises(ValueError, match="shift must be finite and above 0"):
        shift_time(U, k if np.ndim(k) == 0 else np.array(k)[:, None])


def test_grid_of_four_steps_with_shift_five():
    assert timestep_grid(4, shift=5.0).round(6).tolist() == np.float32([1, 0.9375, 0.833333, 0.625, 0]).tolist()
    assert timestep_grid(4).tolist() == [1, 0.75, 0.5, 0.25, 0]
    assert timestep_grid(1, shift=9.0).tolist() == [1, 0]


def test_grids_of_rows_are_the_grids_of_their_shifts():
    shifts = np.array([1.0, 3.0, 5.0])
    rows = timestep_grid(7, shift=shifts)
    assert rows.shape == (3, 8) and rows.dtype == np.float32
    assert all(np.array_equal(row, timestep_grid(7, shift=k)) for row, k in zip(rows, shifts, strict=True))


@pytest.mark.parametrize("steps", [0, 2.5, True])
def test_grid_needs_at_least_one_whole_step(steps):
    with pytest.raises(ValueError, match="`steps`"):
        timestep_grid(steps)


def test_grid_whose_steps_fall_together_is_refused():
    with pytest.raises(ValueError, match="fall together in float32"):
        timestep_grid(1000, shift=1e6)


def test_resolution_shifts():
    # Four times the pixels, twice the shift; the reference itself.
    assert resolution_shift(4096) == 3.0
    assert resolution_shift(4 * 4096) == 6.0
    assert resolution_shift(100, reference=(400, 1.0)) == 0.5
    # Flux: the logarithm is .5 at 256 tokens, 1.15 at 4096 and linear between.
    tokens = np.array([256, (256 + 4096) // 2, 4096])
    assert np.allclose(np.log(resolution_shift(tokens, rule="exponential")), [0.5, 0.825, 1.15], atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "`tokens` must be at least 1"),
        ({"tokens": 9, "rule": "linear"}, "`rule` must be one of"),
        ({"tokens": 9, "reference": (1, 2, 3, 4)}, "must be 2 numbers above 0"),
        ({"tokens": 9, "rule": "exponential", "reference": (5, 2, 5, 4)}, "must be 4 numbers above 0"),
    ],
)
def test_resolution_shift_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        resolution_shift(**arguments)


draws = pytest.mark.parametrize(
    "draw",
    [uniform_times, logit_normal_times, lambda *a, **k: grid_times(*a, timestep_grid(50), **k)],
    ids=["uniform", "logit_normal", "grid"],
)


@draws
def test_time_of_a_row_is_its_own_whatever_the_batch(draw):
    ids = np.arange(40)
    whole = draw(3, 5, ids, spread="independent")
    assert np.array_equal(draw(3, 5, ids[7:9], spread="independent"), whole[7:9])
    assert np.array_equal(draw(3, 5, ids[::-1], spread="independent"), whole[::-1])
    # Spread evenly over a step, a part of the step has the times that it has in the whole.
    even = draw(3, 5, ids, spread="low_discrepancy")
    assert np.array_equal(draw(3, 5, ids[30:], spread="low_discrepancy", batch_ids=ids), even[30:])
    for other in (draw(4, 5, ids, spread="independent"), draw(3, 6, ids, spread="independent")):
        assert np.mean(other == whole) < 0.2


@pytest.mark.parametrize("spread", ["independent", "low_discrepancy", "antithetic"])
def test_uniform_times_are_uniform_in_their_range(spread):
    n = 4000
    s = np.sort(uniform_times(1, 2, np.arange(n), low=0.02, high=0.98, spread=spread).astype("float64"))
    ideal = 0.02 + 0.96 * (np.arange(n) + 0.5) / n
    bound = 1.95 / np.sqrt(n) if spread == "independent" else 1.5 / n  # Kolmogorov at .001; one cell of the grid
    assert np.abs(s - ideal).max() < bound
    assert s[0] >= 0.02 - 1e-7 and s[-1] <= 0.98 + 1e-7


def test_logit_of_logit_normal_times_has_the_moments_and_a_shift_moves_it_by_its_logarithm():
    ids = np.arange(20_000)
    s = logit_normal_times(0, 0, ids, mean=-0.5, std=1.3, spread="low_discrepancy").astype("float64")
    logit = np.log(s / (1 - s))
    # Evenly spread quantiles: the error of the mean is of the order of the tail beyond 1 / n.
    assert abs(logit.mean() + 0.5) < 2e-3 and abs(logit.std() - 1.3) < 5e-3
    shifted = logit_normal_times(0, 0, ids, mean=-0.5, std=1.3, shift=3.0, spread="low_discrepancy")
    other = logit_normal_times(0, 0, ids, mean=-0.5 + np.log(3.0), std=1.3, spread="low_discrepancy")
    assert np.allclose(shifted, other, atol=1e-6)  # float32


def test_draw_from_a_grid_covers_all_of_its_steps_equally():
    grid = timestep_grid(8, shift=3.0)
    for step in range(5):
        times = grid_times(0, step, np.arange(24), grid)
        assert [int((times == t).sum()) for t in grid] == [3] * 8 + [0]
    independent = grid_times(0, 0, np.arange(8000), grid, spread="independent")
    share = np.array([(independent == t).mean() for t in grid[:-1]])
    assert np.abs(share - 1 / 8).max() < 5 * np.sqrt(7 / 64 / 8000)  # five standard errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform_times(0, 0, [0], low=0.5, high=0.5), "0 <= low < high <= 1"),
        (lambda: uniform_times(0, 0, [0], spread="even"), "`spread` must be one of"),
        (lambda: uniform_times(0, 0, [0.5]), "`sample_ids` must be integers"),
        (lambda: uniform_times(0, -1, [0]), "`step` must be at least 0"),
        (lambda: logit_normal_times(0, 0, [0], std=0.0), "`std` must be above 0"),
        (lambda: grid_times(0, 0, [0], [0.0, 1.0]), "`grid` must be falling times"),
    ],
)
def test_times_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_weights_are_their_closed_forms_for_numpy_and_for_tensors():
    s = np.array([0.1, 0.25, 0.5, 0.9])
    snr = ((1 - s) / s) ** 2
    expected = {
        "none": np.ones(4),
        "min_snr": np.minimum(snr, 5.0) * s**2,
        "min_rf": np.minimum(1 / s**2, 5.0) * s**2,
        "data": s**2,
        "noise": (1 - s) ** 2,
        "cosmap": 2 / (np.pi * (1 - 2 * s + 2 * s**2)),
    }
    for name, weight in expected.items():
        assert np.allclose(flow_weight(name, s), weight, rtol=1e-12)
        tensor = flow_weight(name, ops.convert_to_tensor(s.astype("float32")))
        assert np.allclose(ops.convert_to_numpy(tensor), weight, rtol=1e-6)  # float32
    assert np.allclose(flow_weight("min_snr", s, gamma=1e9), (1 - s) ** 2)


def test_weights_are_finite_at_both_ends_and_cosmap_is_a_density():
    ends = np.array([0.0, 1.0])
    assert all(np.all(np.isfinite(flow_weight(name, ends))) for name in ("none", "min_snr", "min_rf", "cosmap"))
    fine = (np.arange(2000) + 0.5) / 2000
    assert abs(flow_weight("cosmap", fine).mean() - 1) < 1e-6  # midpoint rule, error of order 1 / n^2


def test_weight_names_what_is_wrong():
    with pytest.raises(ValueError, match="`name` of a weight must be one of"):
        flow_weight("minsnr", 0.5)
    with pytest.raises(ValueError, match="`gamma` must be above 0"):
        flow_weight("min_snr", 0.5, gamma=0.0)
