"""DiffusionNFT: closed forms of one point and of a population, rows that do not enter, refusals."""

import functools
from typing import Any

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.losses import nft_loss, reward_weights
from tests.oracles import compiled_value_and_grad, float64_scope, numpy, tensor

ROWS = np.random.default_rng(0).normal(size=(6, 5, 3))
TIME = np.array([0.2, 0.5, 0.9, 0.7, 0.4])
REWARD = np.array([0.0, 0.3, 0.5, 0.8, 1.0])


@functools.cache
def program(**settings: Any) -> Any:
    """Mean loss and its gradient with respect to the velocity, compiled once for each setting and shape."""

    def loss(v: Any, old: Any, x_s: Any, x0: Any, time: Any, reward: Any, weight: Any, reference: Any) -> Any:
        chosen = dict(settings)
        if chosen.pop("with_reference", False):
            chosen["reference_velocity"] = reference
        return nft_loss(v, old, x_s, x0, time, reward, sample_weight=weight, **chosen).primary.mean()

    return compiled_value_and_grad(loss)


def run(v: Any, reward: Any = REWARD, weight: Any = None, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """The loss of the policy velocity `v` (5, 3), everything else fixed, in float32."""
    weight = np.ones(5) if weight is None else weight
    _, old, x0, noise, _, reference = ROWS
    x_s = (1 - TIME[:, None]) * x0 + TIME[:, None] * noise
    arrays = (v, old, x_s, x0, TIME, reward, weight, reference)
    return program(**settings)(*(tensor(a) for a in arrays))


def formula(v: np.ndarray, *, beta: float, clip: float, adaptive: bool, kl: float = 0.0) -> float:
    """The objective as the paper writes it, in float64."""
    _, old, x0, noise, _, reference = ROWS
    s, r = TIME[:, None], REWARD
    total = kl * ((v - reference) ** 2).mean(1)
    for sign, share in ((1, r), (-1, 1 - r)):
        error = (1 - s) * x0 + s * noise - s * (old + sign * beta * (v - old)) - x0
        width = np.maximum(np.abs(error).mean(1), 1e-5) if adaptive else 1.0
        total = total + clip * share * (error**2).mean(1) / width / beta
    return float(total.mean())


@pytest.mark.parametrize("adaptive", [True, False])
def test_value_is_that_of_the_paper(adaptive: bool) -> None:
    settings = {"beta": 0.4, "advantage_clip": 3.0, "adaptive": adaptive, "kl_weight": 0.2}
    value, _ = run(ROWS[0], with_reference=True, **settings)
    expected = formula(ROWS[0], beta=0.4, clip=3.0, adaptive=adaptive, kl=0.2)
    assert abs(value - expected) < 2e-6 * expected  # a few roundings of float32


def test_no_gradient_flows_through_the_adaptive_weight_or_anything_but_the_velocity() -> None:
    # With the divisors frozen the gradient is that of a quadratic form, linear in the branch errors.
    _, gradient = run(ROWS[0], beta=0.4, adaptive=True)
    v, old, x0, noise = ROWS[:4]
    s, expected = TIME[:, None], 0.0
    for sign, share in ((1, REWARD), (-1, 1 - REWARD)):
        error = s * (noise - x0) - s * (old + sign * 0.4 * (v - old))
        width = np.abs(error).mean(1, keepdims=True)
        expected = expected - 5.0 * share[:, None] * sign * 2 * s * error / width / (5 * 3)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


def one_point(v: float, reward: float, beta: float = 0.3) -> tuple[float, float]:
    """One element at s = 1 with clip = beta, so that the factor of the branches is 1: v_old = .4, target -1.1."""
    old, x0, noise = 0.4, 0.5, -0.6
    one = [tensor(np.array([[a]])) for a in (v, old, noise, x0)]
    rest = [tensor(np.array([a])) for a in (1.0, reward, 1.0)]
    value, gradient = program(beta=beta, advantage_clip=beta, adaptive=False)(*one, *rest, one[0])
    return float(value), float(gradient[0, 0])


def test_one_point() -> None:
    assert abs(one_point(0.9, 0.8)[0] - 2.5425) < 1e-6


@pytest.mark.parametrize("reward", [0.0, 0.3, 0.8, 1.0])
def test_one_point_is_a_parabola_in_the_distance_from_old(reward: float) -> None:
    for v in (-0.7, 0.9):
        d = v - 0.4
        value, gradient = one_point(v, reward)
        assert abs(value - (2.25 + 0.6 * (2 * reward - 1) * d * 1.5 + 0.09 * d**2)) < 2e-6
        assert abs(gradient - (0.6 * (2 * reward - 1) * 1.5 + 0.18 * d)) < 2e-6


def test_at_the_old_policy_the_value_does_not_depend_on_the_reward_but_the_gradient_does() -> None:
    at_old = [one_point(0.4, reward) for reward in (0.2, 0.5, 0.8)]
    assert {value for value, _ in at_old} == {at_old[0][0]}
    np.testing.assert_allclose([gradient for _, gradient in at_old], [-0.54, 0.0, 0.54], atol=1e-6)


def test_reward_of_one_half_only_pulls_to_the_old_policy() -> None:
    _, gradient = run(ROWS[0], np.full(5, 0.5), beta=0.4, adaptive=False)
    pull = 2 * 5.0 * 0.4 * TIME[:, None] ** 2 * (ROWS[0] - ROWS[1]) / 15
    np.testing.assert_allclose(gradient, pull, rtol=1e-4, atol=1e-6)


def test_equal_products_of_beta_and_clip_give_equal_gradients() -> None:
    advantages = np.array([-0.9, -0.2, 0.0, 0.4, 0.8])
    found = [
        run(ROWS[0], reward_weights(advantages, clip), beta=beta, advantage_clip=clip, adaptive=False)[1]
        for beta, clip in ((0.5, 2.0), (1.0, 1.0))
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    other = run(ROWS[0], reward_weights(advantages, 2.0), beta=1.0, advantage_clip=2.0, adaptive=False)[1]
    assert np.abs(other - found[0]).max() > 0.01


# ---- the optimum over a population -----------------------------------------------------------------------

MIXTURE = ((0.7, -2.0, 0.5, 0.0), (0.3, 2.0, 0.5, 1.0))  # share, mean, deviation, reward of a mode
NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(8)


def optimum(x: np.ndarray, s: float, beta: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Old velocity, and what minimises the loss at each x (N,): one Newton step from old, exact for a parabola."""
    draws, shares, rewards = [], [], []
    for share, mean, deviation, reward in MIXTURE:
        variance = (1 - s) ** 2 * deviation**2 + s**2
        residual = x - (1 - s) * mean
        x0_mean = mean + (1 - s) * deviation**2 / variance * residual
        x0_deviation = deviation * s / np.sqrt(variance)
        density = share * np.exp(-(residual**2) / (2 * variance)) / np.sqrt(variance)
        draws.append(x0_mean[:, None] + x0_deviation * NODES)
        shares.append(density[:, None] * NODE_WEIGHTS)
        rewards.append(np.full((len(x), len(NODES)), reward))
    x0, weight, reward = (np.concatenate(parts, axis=1) for parts in (draws, shares, rewards))
    weight = weight / weight.sum(1, keepdims=True)
    old = (weight * (x[:, None] - x0) / s).sum(1)  # E[e - x0 | x]: the target is (x - x0) / s
    rows = np.broadcast_to(x[:, None], x0.shape)
    arrays = [np.reshape(np.broadcast_to(a, x0.shape), (-1, 1)) for a in (old[:, None], old[:, None], rows, x0)]
    flat = [np.ravel(a) for a in (np.full(x0.shape, s), reward, weight)]
    program_ = program(beta=beta, advantage_clip=beta, adaptive=False)
    _, gradient = program_(*(tensor(a) for a in (*arrays, *flat, arrays[0])))
    slope = gradient.reshape(x0.shape).sum(1) * len(x)  # the mean is over x too
    return old, old - slope / (2 * beta**2 * s**2)


def test_optimum_over_a_population_is_old_plus_the_covariance_of_reward_and_target() -> None:
    old, best = optimum(np.array([-1.0, 0.0, 0.5, 1.0]), 0.7)
    np.testing.assert_allclose(old, [1.29589, 1.09268, 0.17180, -0.51077], atol=1e-5)
    np.testing.assert_allclose(best, [0.88042, -1.20195, -2.48969, -2.14651], atol=2e-5)


# ---- rows, metrics, refusals -----------------------------------------------------------------------------


def test_row_of_weight_zero_changes_nothing_by_a_bit_even_of_nan() -> None:
    weight = np.array([1.0, 0.0, 0.5, 2.0, 1.0])
    arrays = [ROWS[0], ROWS[1], ROWS[4], ROWS[2], TIME, REWARD, weight, ROWS[5]]
    spoiled = [np.array(a) for a in arrays]
    for a in (*spoiled[:6], spoiled[7]):
        a[1] = np.nan
    compute = program(beta=0.4, kl_weight=0.2, with_reference=True)
    clean, dirty = (compute(*(tensor(a) for a in given)) for given in (arrays, spoiled))
    assert clean[0] == dirty[0] and np.isfinite(clean[0])
    assert np.array_equal(clean[1], dirty[1]) and not dirty[1][1].any()


def test_metrics_are_sums_and_the_deviation_of_the_old_policy_from_itself_is_exactly_zero() -> None:
    weight = np.array([1.0, 0.0, 0.5, 2.0, 1.0])
    v, old, x0, x_s, reference = (tensor(ROWS[i]) for i in (0, 1, 2, 3, 5))
    rest = (x_s, x0, tensor(TIME), tensor(REWARD))
    options = {"beta": 0.4, "reference_velocity": reference, "sample_weight": tensor(weight), "adaptive": False}
    metrics = nft_loss(v, old, *rest, **options).metrics
    assert set(metrics) == {"nft/positive_loss", "nft/negative_loss", "nft/old_deviation", "nft/kl"}
    deviation = (weight * ((ROWS[0] - ROWS[1]) ** 2).mean(1)).sum()
    assert abs(float(metrics["nft/old_deviation"].total) - deviation) < 1e-5
    assert float(metrics["nft/old_deviation"].weight) == 4.5
    assert abs(float(metrics["nft/positive_loss"].weight) - (weight * REWARD).sum()) < 1e-6
    assert abs(float(metrics["nft/negative_loss"].weight) - (weight * (1 - REWARD)).sum()) < 1e-6
    assert float(nft_loss(old, old, *rest, **options).metrics["nft/old_deviation"].total) == 0.0


def test_float64_stays_and_low_precision_is_widened() -> None:
    with float64_scope():
        wide = [ops.convert_to_tensor(a.astype("float64")) for a in (*ROWS[:4], TIME, REWARD)]
        value = numpy(nft_loss(*wide, beta=0.4).primary.mean())
    assert value.dtype == np.float64
    half = [tensor(a, "bfloat16") for a in ROWS[:4]]
    assert numpy(nft_loss(*half, tensor(TIME), tensor(REWARD)).primary.total).dtype == np.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "`beta` must be above 0"),
        ({"advantage_clip": -1.0}, "`advantage_clip` must be above 0"),
        ({"kl_weight": 0.1}, "needs `reference_velocity`"),
        ({"kl_weight": -0.1}, "`kl_weight` must be at least 0"),
        ({"old_velocity": ROWS[0][:, :1]}, r"`old_velocity` must have the shape of `velocity`, \(5, 3\)"),
        ({"time": TIME + 0.5}, r"`time` must lie in \[0.0, 1.0\]. Received 1\.39\d* in row 2"),
        ({"time": TIME[:, None]}, r"`time` must have one value for each sample, shape \(5,\)"),
        ({"reward": REWARD - 0.25}, r"`reward` must lie in \[0.0, 1.0\]. Received -0.25 in row 0"),
        ({"reward": np.array([0, 0, np.nan, 0, 0.0])}, "Received nan in row 2"),
        ({"sample_weight": -np.ones(5)}, "`sample_weight` must be finite and at least 0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    names = ("velocity", "old_velocity", "x_s", "x0", "time", "reward")
    arguments = {**dict(zip(names, (*ROWS[:4], TIME, REWARD), strict=True)), **change}
    arguments = {k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        nft_loss(**arguments)
