"""Row noise: the Gumbel distribution, and independence of the batch."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.backend import compiled
from keras_diffusion_opd.samplers.row_noise import gumbel, row_keys


def draw(seed, rows, step=0, length=8, width=5):
    keys = ops.convert_to_tensor(row_keys(seed, rows))
    steps = ops.convert_to_tensor(np.full(rows, step, "int32"))
    program = compiled(lambda keys, steps: gumbel(keys, steps, length, width))
    return ops.convert_to_numpy(program(keys, steps))


def test_the_moments_are_those_of_the_gumbel_distribution():
    x = draw(0, 500, length=20, width=20).astype("float64").ravel()
    n = x.size
    assert abs(x.mean() - np.euler_gamma) < 5 * np.pi / np.sqrt(6 * n)  # five standard errors
    assert abs(x.var() - np.pi**2 / 6) < 5 * np.sqrt(4.4 * (np.pi**2 / 6) ** 2 / n)  # kurtosis 5.4
    assert np.all(np.isfinite(x))


def test_the_largest_of_gumbel_noise_and_logits_follows_the_softmax():
    logits = np.array([2.0, 0.0, -1.0, -6.0])
    winners = np.argmax(draw(3, 2000, length=100, width=4) + logits, axis=-1)
    n = winners.size
    p = np.exp(logits) / np.exp(logits).sum()
    share = np.bincount(winners.ravel(), minlength=4) / n
    assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / n))


def test_a_row_has_the_same_noise_in_every_batch():
    whole = draw(7, 6)
    assert np.array_equal(draw(7, 2), whole[:2])
    own = draw(np.array([5, 9, 5]), 3)
    assert np.array_equal(own[0], own[2])
    assert np.array_equal(draw(np.array([9]), 1)[0], own[1])
    assert np.array_equal(row_keys(7, 2, first_row=4), row_keys(7, 6)[4:])


def test_rows_steps_positions_and_seeds_have_other_noise():
    x = draw(1, 4)
    assert len(np.unique(x)) == x.size
    assert not np.any(x == draw(2, 4))
    assert not np.any(x == draw(1, 4, step=1))


@pytest.mark.parametrize("seed", [1.5, np.array([1, 2]), np.array([[1], [2], [3]])])
def test_seeds_must_be_integers_one_per_row(seed):
    with pytest.raises(ValueError, match="`seed` must be an integer"):
        row_keys(seed, 3)
