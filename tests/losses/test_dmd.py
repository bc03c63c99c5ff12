"""DMD between Gaussians in closed form, by quadrature that is exact for them; rows that do not enter."""

from typing import Any

import numpy as np
import pytest

from keras_diffusion_opd.losses import dmd_gradient, dmd_loss, gan_critic_loss, gan_generator_loss
from tests.oracles import compiled_value_and_grad, numpy, tensor

# Five nodes a dimension: exact for the polynomials of degree 2 that the expectations are.
NODES, MASSES = np.polynomial.hermite_e.hermegauss(5)
Z, E = (axis.ravel() for axis in np.meshgrid(NODES, NODES))
WEIGHT = np.outer(MASSES, MASSES).ravel() / MASSES.sum() ** 2


def _loss(x0: Any, real: Any, fake: Any, weight: Any) -> Any:
    gradient = dmd_gradient(x0, real, fake, normalize=False, sample_weight=weight)
    return dmd_loss(x0, gradient, sample_weight=weight).primary.mean()


PROGRAM = compiled_value_and_grad(_loss)


def denoised(x: np.ndarray, s: float, mean: float, deviation: float) -> np.ndarray:
    """E[x0 | x_s = x] of Gaussian data."""
    variance = (1 - s) ** 2 * deviation**2 + s**2
    return mean + (1 - s) * deviation**2 / variance * (x - (1 - s) * mean)


def student_gradient(s: float, a: float, p: float, b: float, q: float) -> tuple[float, float]:
    """What the loss pulls at mean a and width p of a student a + p z, the teacher being N(b, q^2)."""
    x0 = a + p * Z
    x_s = (1 - s) * x0 + s * E
    arrays = (x0, denoised(x_s, s, b, q), denoised(x_s, s, a, p))
    _, gradient = PROGRAM(*(tensor(array[:, None]) for array in arrays), tensor(WEIGHT))
    return float(gradient[:, 0].sum()), float((gradient[:, 0] * Z).sum())


@pytest.mark.parametrize(("s", "expected"), [(0.1, 0.070588), (0.5, 1.2), (0.9, 1.495385)])
def test_gradient_of_the_mean_of_equal_widths(s: float, expected: float) -> None:
    found, _ = student_gradient(s, 1.0, 0.5, -0.5, 0.5)
    assert abs(found - expected) < 2e-6
    variance = (1 - s) ** 2 * 0.25 + s**2
    slope_of_kl = (1 - s) ** 2 * 1.5 / variance  # of KL(N((1 - s) a, v) || N((1 - s) b, v)), by a
    assert abs((1 - s) ** 2 / s**2 * found - slope_of_kl) < 2e-6 * max(1, 1 / s**2)


@pytest.mark.parametrize(("p", "expected"), [(0.8, 0.152195), (0.3, -0.035229)])
def test_gradient_of_the_width_has_the_sign_of_the_excess(p: float, expected: float) -> None:
    assert abs(student_gradient(0.5, 0.0, p, 0.0, 0.5)[1] - expected) < 2e-6


def test_student_that_is_the_teacher_stays() -> None:
    assert student_gradient(0.5, 0.3, 0.7, 0.3, 0.7) == (0.0, 0.0)


def test_gradient_of_the_loss_is_the_direction_over_the_number_of_elements() -> None:
    random = np.random.default_rng(0)
    x0, d = random.normal(size=(25, 1)) * 1e4, random.normal(size=(25, 1))
    arrays = tensor(x0), tensor(np.zeros_like(d)), tensor(d), tensor(np.ones(25))
    value, gradient = PROGRAM(*arrays)
    # Samples ten thousand times as large as the direction cost it no digits.
    np.testing.assert_allclose(gradient, d / 25, rtol=1e-6)
    assert abs(value - (d**2).mean() / 2) < 1e-6


def test_normalised_by_the_mean_absolute_error_of_the_teacher_in_each_sample() -> None:
    random = np.random.default_rng(1)
    x0, real, fake = random.normal(size=(3, 4, 2, 3))
    found = numpy(dmd_gradient(tensor(x0), tensor(real), tensor(fake)))
    size = np.abs(x0 - real).mean((1, 2), keepdims=True)
    np.testing.assert_allclose(found, (fake - real) / size, rtol=1e-5)
    assert not numpy(dmd_gradient(tensor(x0), tensor(x0), tensor(x0))).any()


def test_row_of_weight_zero_changes_nothing_by_a_bit_even_of_nan() -> None:
    arrays = [np.random.default_rng(i).normal(size=(25, 1)) for i in range(3)]
    weight = np.ones(25)
    weight[3] = 0
    clean = PROGRAM(*(tensor(a) for a in arrays), tensor(weight))
    for a in arrays:
        a[3] = np.nan
    dirty = PROGRAM(*(tensor(a) for a in arrays), tensor(weight))
    assert clean[0] == dirty[0] and np.isfinite(clean[0])
    assert np.array_equal(clean[1], dirty[1]) and dirty[1][3, 0] == 0


def test_losses_of_the_discriminator_and_their_gradients() -> None:
    real, fake = np.array([[2.0], [-1.0]]), np.array([[0.5], [-3.0]])
    critic = gan_critic_loss(tensor(real), tensor(fake))
    expected = (np.log1p(np.exp(-real)) + np.log1p(np.exp(fake))).mean()
    assert abs(float(critic.primary.mean()) - expected) < 1e-6
    assert float(critic.metrics["gan/accuracy"].mean()) == 0.5
    slope = compiled_value_and_grad(lambda x: gan_generator_loss(x).primary.mean())(tensor(fake))[1]
    np.testing.assert_allclose(slope, -1 / (1 + np.exp(fake)) / 2, rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="`fake_x0` must have the shape of `x0`"):
        dmd_gradient(np.zeros((2, 3)), np.zeros((2, 3)), np.zeros((2, 1)))
    with pytest.raises(ValueError, match="`sample_weight` must have one value for each sample"):
        dmd_loss(np.zeros((2, 3)), np.zeros((2, 3)), sample_weight=np.ones((2, 1)))
