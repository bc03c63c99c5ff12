"""Flow-GRPO: the stochastic step, its log-density and KL in closed form, the clipped ratio."""

import math
from typing import Any

import numpy as np
import pytest

from keras_diffusion_opd.losses import flow_grpo_loss, flow_sde_step, gaussian_step_kl, gaussian_step_log_prob
from tests.oracles import numpy, tensor, value_and_grad


def test_stochastic_step_keeps_the_marginal_to_second_order() -> None:
    # Data N(0, .25): velocity k x; one step maps the variance of s to that of s + h up to O(h^2).
    s, c2 = 0.6, 0.25

    def variance(time: float) -> float:
        return (1 - time) ** 2 * c2 + time**2

    k = (s - (1 - s) * c2) / variance(s)
    errors = []
    for h in (0.08, 0.04):
        one = np.array([[1.0]])
        mean, deviation = flow_sde_step(tensor(one), tensor(k * one), tensor([s]), tensor([s - h]), noise=0.7)
        errors.append(abs(float(mean[0, 0]) ** 2 * variance(s) + float(deviation[0]) ** 2 - variance(s - h)))
    assert 3.0 < errors[0] / errors[1] < 5.0  # halved steps: a quarter of the error


def test_noise_at_time_one_is_that_of_the_largest_time() -> None:
    one = tensor([[1.0]])
    _, deviation = flow_sde_step(one, one, tensor([1.0]), tensor([0.75]), noise=0.7, largest_time=0.75)
    assert abs(float(deviation[0]) - 0.7 * math.sqrt(3 * 0.25)) < 1e-6


def test_log_density_and_kl_are_those_of_gaussians() -> None:
    random = np.random.default_rng(0)
    sample, mean, reference = random.normal(size=(3, 2, 4))
    deviation = np.array([0.3, 1.7])
    density = -(((sample - mean) / deviation[:, None]) ** 2) / 2 - np.log(deviation[:, None] * math.sqrt(2 * math.pi))
    arrays = tensor(sample), tensor(mean), tensor(deviation)
    np.testing.assert_allclose(numpy(gaussian_step_log_prob(*arrays)), density.mean(1), rtol=1e-5)
    np.testing.assert_allclose(numpy(gaussian_step_log_prob(*arrays, reduction="sum")), density.sum(1), rtol=1e-5)
    kl = numpy(gaussian_step_kl(tensor(mean), tensor(reference), tensor(deviation)))
    np.testing.assert_allclose(kl, ((mean - reference) ** 2).mean(1) / (2 * deviation**2), rtol=1e-5)


OLD, ADVANTAGES = np.array([-1.2, 0.3, 2.0, 0.1]), np.array([1.0, -2.0, 0.5, 9.0])


def loss(log_probs: Any, **settings: Any) -> Any:
    return flow_grpo_loss(log_probs, tensor(OLD), tensor(ADVANTAGES), **settings)


def test_at_the_weights_of_the_rollout_the_ratio_is_exactly_one() -> None:
    output = loss(tensor(OLD), clip=1e-4)
    assert float(output.metrics["grpo/ratio"].mean()) == 1.0
    assert float(output.metrics["grpo/clip_fraction"].mean()) == float(output.metrics["grpo/old_kl"].mean()) == 0.0
    _, gradient = value_and_grad(lambda x: loss(x).primary.mean(), tensor(OLD))
    np.testing.assert_allclose(gradient, -np.clip(ADVANTAGES, -5, 5) / 4, rtol=1e-6)


def test_clip_stops_what_has_gone_far_enough_and_never_what_goes_back() -> None:
    moved = OLD + np.array([0.5, 0.5, -0.5, -0.5])  # up and good, up and bad, down and good, down and good
    value, gradient = value_and_grad(lambda x: loss(x, clip=0.2).primary.mean(), tensor(moved))
    ratio, a = np.exp(moved - OLD), np.clip(ADVANTAGES, -5, 5)
    assert abs(value + np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a).mean()) < 1e-5
    np.testing.assert_allclose(gradient, -np.array([0, 1, 1, 1]) * ratio * a / 4, rtol=1e-5, atol=1e-7)
    metrics = loss(tensor(moved), clip=0.2).metrics
    assert float(metrics["grpo/clip_fraction"].mean()) == 1.0
    assert abs(float(metrics["grpo/old_kl"].mean()) - (ratio - 1 - np.log(ratio)).mean()) < 1e-6


def test_kl_is_added_with_its_weight() -> None:
    kl = np.array([0.1, 0.2, 0.3, 0.4])
    extra = float(loss(tensor(OLD), kl=tensor(kl), kl_weight=2.0).primary.mean()) - float(
        loss(tensor(OLD)).primary.mean()
    )
    assert abs(extra - 0.5) < 1e-5


def test_row_of_weight_zero_changes_nothing_even_of_nan() -> None:
    weight = tensor([1.0, 0.0, 2.0, 1.0])
    spoiled = [np.array(OLD), np.array(OLD), np.array(ADVANTAGES)]
    clean = flow_grpo_loss(*(tensor(a) for a in spoiled), sample_weight=weight).primary
    for a in spoiled:
        a[1] = np.nan
    dirty = flow_grpo_loss(*(tensor(a) for a in spoiled), sample_weight=weight).primary
    assert float(clean.total) == float(dirty.total) and float(dirty.weight) == 4.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip": 0.0}, "`clip` and `advantage_clip` must be above 0"),
        ({"kl_weight": 0.1}, "above 0 it needs `kl`"),
        ({"kl": np.zeros((4, 1))}, "`kl` must have the shape of `log_probs`"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss(tensor(OLD), **settings)
