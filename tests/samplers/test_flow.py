"""`FlowSampler`: closed forms of Gaussian data, orders of convergence, guidance, rows that keep to themselves."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.samplers import FlowSampler, flow_log_prob
from keras_diffusion_opd.schedules import timestep_grid
from tests.oracles import BACKEND

MEAN, WIDTH = 2.0, 0.5
SHAPE = (6, 3)


class Gaussian:
    """The exact velocity of data N(MEAN, WIDTH^2), and how often it was traced."""

    def __init__(self, width=WIDTH, mean=MEAN):
        self.width, self.mean, self.traces = width, mean, 0

    def __call__(self, inputs):
        self.traces += 1
        x, s = inputs["x"], ops.expand_dims(inputs["time"], 1)
        mean = self.mean + (ops.expand_dims(inputs["shift"], 1) if "shift" in inputs else 0.0)
        variance = (1 - s) ** 2 * self.width**2 + s**2
        return -mean + (s - (1 - s) * self.width**2) / variance * (x - (1 - s) * mean)


@pytest.fixture(scope="module")
def gaussian():
    return Gaussian()


@pytest.fixture(scope="module")
def euler():
    return FlowSampler()


def at(value):
    return np.full(SHAPE, value, "float32")


@pytest.mark.parametrize(("steps", "end"), [(1, 2.0), (4, 2.442703), (32, 2.620573), (256, 2.646249)])
def test_euler_from_one_point(steps, end, euler, gaussian):
    found = euler.sample(gaussian, shape=SHAPE, steps=steps, seed=0, noise=at(1.3))
    np.testing.assert_allclose(found, end, rtol=2e-6)  # float32 over up to 256 steps


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2), ("multistep", 2)])
def test_order_of_convergence(solver, order, euler, gaussian):
    """The exact end is m + c z: halving the step divides the error by 2^order."""
    sampler = euler if solver == "euler" else FlowSampler(solver=solver)
    errors = [
        abs(float(sampler.sample(gaussian, shape=SHAPE, steps=n, seed=0, noise=at(1.3))[0, 0]) - (MEAN + WIDTH * 1.3))
        for n in (16, 32)
    ]
    assert abs(np.log2(errors[0] / errors[1]) - order) < 0.3


@pytest.mark.parametrize("shift", [1.0, 5.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_point_mass_is_exact_in_any_number_of_steps(steps, shift, euler):
    point = Gaussian(width=0.0)
    found = euler.sample(point, shape=SHAPE, steps=steps, seed=1, shift=shift)
    np.testing.assert_allclose(found, MEAN, atol=2e-6)  # float32


def test_constant_field_is_exact(euler):
    found = euler.sample(lambda inputs: 0.0 * inputs["x"] + 3.0, shape=SHAPE, steps=7, seed=0, noise=at(1.0))
    np.testing.assert_allclose(found, -2.0, rtol=1e-6)


@pytest.mark.parametrize(("stochasticity", "steps"), [("sde", 64), ("renoise", 1)])
def test_noise_keeps_the_distribution(stochasticity, steps):
    """The SDE has the marginals of the ODE; a single renoising step of an exact x0 gives its mean."""
    rows = 4000
    found = FlowSampler(stochasticity=stochasticity).sample(
        Gaussian(), shape=(rows, 1), steps=steps, seed=0, batch_size=rows
    )
    error = WIDTH / np.sqrt(rows)
    if stochasticity == "sde":
        # Four standard errors, and the bias of 64 steps of first order.
        assert abs(found.mean() - MEAN) < 4 * error + 0.02
        assert abs(found.std() / WIDTH - 1) < 4 / np.sqrt(2 * rows) + 0.05
    else:
        np.testing.assert_allclose(found, MEAN, rtol=1e-6)  # E[x0 | pure noise]


def test_renoising_a_point_mass_is_exact_however_noisy():
    found = FlowSampler(stochasticity="renoise").sample(Gaussian(width=0.0), shape=SHAPE, steps=4, seed=0, shift=5.0)
    np.testing.assert_allclose(found, MEAN, atol=2e-6)


def test_step_without_noise_is_eulers(euler, gaussian):
    plain = euler.sample(gaussian, shape=SHAPE, steps=4, seed=0)
    found = FlowSampler(stochasticity="sde").sample(gaussian, shape=SHAPE, steps=4, seed=0, eta=0.0)
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_log_probabilities_of_a_rollout_are_found_again():
    gaussian = Gaussian()
    rollout = FlowSampler(stochasticity="sde").rollout(gaussian, shape=SHAPE, steps=4, seed=3)
    for k in range(4):
        line = {name: rollout.coefficients[name][:, k] for name in ("keep", "now", "spread")}
        x, time = (ops.convert_to_tensor(a[:, k]) for a in (rollout.states, rollout.times))
        velocity = gaussian({"x": x, "time": time})
        again = flow_log_prob(rollout.states[:, k], velocity, rollout.states[:, k + 1], **line)
        np.testing.assert_allclose(ops.convert_to_numpy(again), rollout.log_probs[:, k], atol=1e-6)
    assert np.all(rollout.log_probs[:, :3] != 0) and not rollout.log_probs[:, 3].any()  # the last step draws nothing
    np.testing.assert_array_equal(rollout.states[:, -1], rollout.samples)
    np.testing.assert_array_equal(rollout.states[:, 0], rollout.noise)


def test_guidance_is_the_formula_and_rows_of_one_are_conditional(euler):
    """The field is linear in its mean, so guidance moves the mean: m_u + w (m_c - m_u)."""
    conditions, free = {"shift": np.ones(6, "float32")}, {"shift": np.zeros(1, "float32")}
    point = Gaussian(width=0.0)
    w = np.array([1.0, 1.0, 2.0, 2.0, 0.0, 4.5], "float32")
    found = euler.sample(point, shape=SHAPE, steps=3, seed=0, conditions=conditions, guidance=w, unconditional=free)
    np.testing.assert_allclose(found[:, 0], MEAN + w, atol=5e-6)
    plain = euler.sample(point, shape=SHAPE, steps=3, seed=0, conditions=conditions)
    np.testing.assert_allclose(found[:2], plain[:2], rtol=1e-6)
    # Outside of the interval there is no guidance: the last step decides of a point mass.
    inside = euler.sample(
        point,
        shape=SHAPE,
        steps=3,
        seed=0,
        conditions=conditions,
        guidance=w,
        unconditional=free,
        guidance_interval=(0.5, 1.0),
    )
    np.testing.assert_allclose(inside, plain, atol=5e-6)


def test_guidance_of_one_makes_no_unconditional_call(euler):
    point = Gaussian(width=0.0)
    euler.sample(point, shape=SHAPE, steps=2, seed=0, guidance=1.0)
    assert point.traces == 1 if BACKEND != "torch" else point.traces == 2  # torch calls it once for each step


def test_image_to_image_starts_from_the_noised_image(euler, gaussian):
    image = np.random.default_rng(0).normal(size=SHAPE).astype("float32")
    rollout = euler.rollout(gaussian, shape=SHAPE, steps=4, seed=0, init_image=image, strength=0.5)
    np.testing.assert_allclose(rollout.times[:, 0], 0.5)
    np.testing.assert_allclose(rollout.states[:, 0], 0.5 * image + 0.5 * rollout.noise, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, {"solver": "multistep"}, {"stochasticity": "sde"}], ids=str)
def test_rows_keep_to_themselves(settings, gaussian):
    """The same compiled shape: other rows, other seeds beside it, chunks; the same bits."""
    sampler = FlowSampler(**settings)
    seeds = np.arange(12)
    whole = [sampler.sample(gaussian, shape=SHAPE, steps=3, seed=seeds[i : i + 6]) for i in (0, 6)]
    chunked = sampler.sample(gaussian, shape=(12, 3), steps=3, seed=seeds, batch_size=6)
    np.testing.assert_array_equal(chunked, np.concatenate(whole))
    shuffled = sampler.sample(gaussian, shape=SHAPE, steps=3, seed=seeds[[5, 9, 1, 0, 11, 3]])
    np.testing.assert_array_equal(shuffled[3], whole[0][0])
    assert len(np.unique(chunked[:, 0])) == 12


@pytest.mark.skipif(BACKEND == "torch", reason="torch runs eagerly: nothing is traced")
def test_twenty_settings_are_one_program():
    gaussian, sampler = Gaussian(), FlowSampler(stochasticity="sde")
    for i in range(20):
        sampler.sample(gaussian, shape=SHAPE, steps=1 + i % 5, seed=i, shift=1.0 + i / 3, eta=i / 20)
    assert gaussian.traces == 1


def test_callback_sees_every_step_and_a_preview(euler):
    seen = []
    euler.sample(
        Gaussian(width=0.0),
        shape=SHAPE,
        steps=3,
        seed=0,
        callback=lambda step, steps, preview: seen.append((step, steps, preview)),
    )
    assert [(step, steps) for step, steps, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    for _, _, preview in seen:
        np.testing.assert_allclose(preview, MEAN, atol=2e-6)  # of a point mass it is exact from the first step


def test_weights_are_read_at_every_call(euler):
    x, time = keras.Input((3,), name="x"), keras.Input((), name="time")
    model = keras.Model({"x": x, "time": time}, keras.layers.Dense(3)(x) + 0.0 * keras.layers.Reshape((1,))(time))
    first = euler.sample(model, shape=SHAPE, steps=2, seed=0)
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    found = euler.rollout(model, shape=SHAPE, steps=2, seed=0)
    np.testing.assert_array_equal(found.samples, found.noise)
    assert np.abs(first - found.samples).max() > 0


def test_four_steps_with_shift_five_visit_these_times(euler, gaussian):
    rollout = euler.rollout(gaussian, shape=SHAPE, steps=4, seed=0, shift=5.0)
    np.testing.assert_allclose(rollout.times[0], [1, 0.9375, 0.833333, 0.625, 0], atol=1e-6)
    np.testing.assert_array_equal(rollout.times[0], timestep_grid(4, shift=5.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"shape": (6,)}, "`shape` must be"),
        ({"guidance": 2.0}, "needs `unconditional`"),
        ({"eta": 0.5}, "`eta` must be"),
        ({"noise": np.zeros((6, 2))}, "`noise` must be real, of shape"),
        ({"strength": 0.5}, "needs an `init_image`"),
        ({"times": np.array([1.0, 0.5, 0.5])}, "must fall strictly"),
        ({"guidance_interval": (0.5, 0.5)}, "guidance_interval"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message, euler, gaussian):
    with pytest.raises(ValueError, match=message):
        euler.sample(gaussian, **{"shape": SHAPE, "steps": 2, "seed": 0, **arguments})


def test_unknown_argument_is_named(euler, gaussian):
    with pytest.raises(TypeError, match="step_count"):
        euler.sample(gaussian, shape=SHAPE, steps=2, seed=0, step_count=3)


def test_velocity_that_is_no_velocity_is_refused(euler):
    with pytest.raises(ValueError, match="shape of its input"):
        euler.sample(lambda inputs: inputs["x"][:, :1], shape=SHAPE, steps=1, seed=0)
    with pytest.raises(ValueError, match="not finite in 6 of 6 rows"):
        euler.sample(lambda inputs: inputs["x"] * float("nan"), shape=SHAPE, steps=1, seed=0)


@pytest.mark.parametrize(
    "arguments", [{"solver": "rk4"}, {"stochasticity": "some"}, {"solver": "heun", "stochasticity": "sde"}]
)
def test_samplers_that_do_not_exist_are_refused(arguments):
    with pytest.raises(ValueError, match=r"must be one of|goes with"):
        FlowSampler(**arguments)
