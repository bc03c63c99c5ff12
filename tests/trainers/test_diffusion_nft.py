"""DiffusionNFT as training: the closed-form optimum, exact windows, resuming, adapters, what is refused."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.data import RewardBatch
from keras_diffusion_opd.losses import NFTLoss
from keras_diffusion_opd.schedules import OldPolicyDecay
from keras_diffusion_opd.trainers import DiffusionNFTTrainer

ROWS = 8


def policy(seed=0):
    """A linear velocity in two dimensions: v = W [x, time] + b."""
    x, time = keras.Input((2,), name="x"), keras.Input((), name="time")
    joined = keras.layers.Concatenate()([x, keras.layers.Reshape((1,))(time)])
    initializer = keras.initializers.GlorotUniform(seed)
    return keras.Model({"x": x, "time": time}, keras.layers.Dense(2, kernel_initializer=initializer)(joined))


def batch(rows=slice(None), rewards=None, weights=None, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "samples": rng.normal(size=(ROWS, 2)),
        "noise": rng.normal(size=(ROWS, 2)),
        "times": rng.uniform(0.1, 0.9, ROWS),
        "rewards": rng.uniform(size=ROWS) if rewards is None else rewards,
        "loss_weights": np.ones(ROWS) if weights is None else weights,
    }
    return RewardBatch.create(**{name: np.asarray(changes.get(name, value))[rows] for name, value in arrays.items()})


def trained(batches, optimizer=None, *, epochs=1, model=None, accumulation_steps=1, **settings):
    trainer = DiffusionNFTTrainer(policy() if model is None else model, **settings)
    trainer.compile(optimizer or keras.optimizers.SGD(0.05), accumulation_steps=accumulation_steps)
    history = trainer.fit(batches, epochs=epochs, shuffle=False, verbose=0)
    return trainer, history.history


def weights_of(model):
    return [np.asarray(w) for w in model.get_weights()]


@pytest.fixture(scope="module")
def whole():
    return weights_of(trained([batch(weights=np.arange(ROWS) / 4)])[0].student)


def test_micro_batches_of_unequal_weight_equal_one_batch(whole):
    parts = [batch(slice(0, 4), weights=np.arange(ROWS) / 4), batch(slice(4, 8), weights=np.arange(ROWS) / 4)]
    found = weights_of(trained(parts, accumulation_steps=2)[0].student)
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # float32 sums in another order


def test_rows_of_weight_zero_may_hold_anything(whole):
    arrays = batch(weights=np.arange(ROWS) / 4)
    samples, rewards = np.array(arrays.samples), np.array(arrays.rewards)
    samples[0], rewards[0] = np.nan, np.inf
    found = weights_of(trained([batch(weights=np.arange(ROWS) / 4, samples=samples, rewards=rewards)])[0].student)
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_array_equal(a, b)


def test_first_update_is_the_closed_form():
    """At policy = old the gradient of a row is 2 clip (2 r - 1) s (v - v*) s dv / numel, without adaptive weights."""
    data = batch()
    model = policy()
    kernel, bias = (w.astype("float64") for w in weights_of(model))
    trainer, _ = trained([data], loss=NFTLoss(beta=0.5, adaptive=False, kl_weight=0.0, advantage_clip=2.0), model=model)
    x0, noise, s, r = (np.asarray(a, "float64") for a in (data.samples, data.noise, data.times, data.rewards))
    inputs = np.concatenate([(1 - s[:, None]) * x0 + s[:, None] * noise, s[:, None]], 1)
    error = inputs @ kernel + bias - (noise - x0)
    # err(+-) = -s (v - v* +- beta d): the branches' gradients are +-2 beta s^2 (v - v*), times clip / beta, over 2.
    per_row = 2.0 * (2 * r - 1)[:, None] * s[:, None] ** 2 * error * 2.0 / 2
    want = kernel - 0.05 * inputs.T @ per_row / ROWS, bias - 0.05 * per_row.mean(0)
    for a, b in zip(weights_of(trainer.student), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)  # float32


def test_reward_of_a_half_moves_nothing_from_the_old_policy():
    """The expected gradient is the pull to the old policy, which is 0 there: branches cancel."""
    model = policy()
    before = weights_of(model)
    _, logs = trained([batch(rewards=np.full(ROWS, 0.5))], loss=NFTLoss(kl_weight=0.0), model=model)
    for a, b in zip(weights_of(model), before, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # two branches of float32 cancel to rounding
    assert logs["nft/old_deviation"] == [0.0]


def test_training_reaches_the_population_optimum():
    """A free value at one point: v -> v_old + 2 / beta Cov(r, v*), with the reward-weighted mixture of two targets."""
    x, time = keras.Input((1,), name="x"), keras.Input((), name="time")
    constant = keras.layers.Dense(1, kernel_initializer="zeros", kernel_constraint=_Zero())(x)
    # `time` has to be read: times zero.
    model = keras.Model({"x": x, "time": time}, constant + 0.0 * keras.layers.Reshape((1,))(time))
    targets, rewards = np.array([[-1.0], [3.0], [-1.0], [3.0]]), np.array([0.1, 0.9, 0.3, 0.7])
    old = targets.mean()  # an old policy that fits its samples
    model.set_weights([np.zeros((1, 1)), np.array([old])])
    data = RewardBatch.create(samples=-targets, noise=0 * targets, times=np.ones(4), rewards=rewards)
    loss = NFTLoss(beta=2.0, adaptive=False, kl_weight=0.0, advantage_clip=1.0)
    # The old policy stays: it would follow at the end of the only epoch.
    trained([data] * 60, keras.optimizers.SGD(0.2), model=model, loss=loss)
    covariance = np.mean((rewards - rewards.mean()) * (targets[:, 0] - old))
    np.testing.assert_allclose(weights_of(model)[1], old + 2 / 2.0 * covariance, rtol=1e-4)  # SGD has converged


@keras.saving.register_keras_serializable(package="tests")
class _Zero(keras.constraints.Constraint):
    def __call__(self, w):
        return w * 0.0


def test_old_policy_follows_at_the_end_of_every_epoch():
    model = policy()
    start = weights_of(model)
    trainer, _ = trained([batch()], model=model, old_decay=OldPolicyDecay(slope=0.25, limit=0.9))
    for old, new, before in zip(weights_of(trainer.old), weights_of(model), start, strict=True):
        np.testing.assert_allclose(old, 0.25 * before + 0.75 * new, rtol=1e-6)
    for kept, before in zip(weights_of(trainer.reference), start, strict=True):
        np.testing.assert_array_equal(kept, before)
    assert not np.array_equal(start[0], weights_of(model)[0])


def test_resumed_run_equals_the_uninterrupted_one(tmp_path):
    data = kdo.data.PreparedDataset([batch(slice(0, 4)), batch(slice(4, 8))])

    def make():
        trainer = DiffusionNFTTrainer(policy(), old_decay="type1")
        trainer.compile(keras.optimizers.Adam(0.01))
        return trainer

    straight = make()
    straight.fit(data, epochs=4, verbose=0)
    first = make()
    first.fit(data, epochs=2, verbose=0, callbacks=[kdo.callbacks.ProvenanceCheckpoint(tmp_path)])
    second = make()
    state = kdo.callbacks.resume(second, tmp_path)
    second.fit(data, epochs=4, initial_epoch=state.epoch, verbose=0)
    for model in ("student", "old", "reference"):
        for a, b in zip(weights_of(getattr(second, model)), weights_of(getattr(straight, model)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_adapter_is_a_policy_whose_old_and_reference_share_the_base():
    base = policy()
    bank = kdo.adapters.AdapterBank(base, ".*", slots=2, max_rank=2)
    bank.add(kdo.adapters.Adapter.initial("mine", base, ".*", rank=2))
    before = kdo.provenance.digest(base)
    student = bank.trainable("mine")
    trainer, _ = trained([batch()], keras.optimizers.SGD(0.5), epochs=3, model=student, old_decay="on_policy")
    assert trainer.old.base is base and trainer.reference.base is base
    assert kdo.provenance.digest(base) == before
    old, new = trainer.old.adapter(), student.adapter()
    assert old.digest == new.digest  # decay 0: the old policy is the policy
    first, kept = trainer.reference.adapter().parts, new.parts
    assert all(np.any(kept[path].b != first[path].b) for path in first)


def test_diverged_policy_is_named_and_nothing_moves():
    model = policy()
    model.layers[-1].bias.assign([np.nan, 0.0])
    with pytest.raises(ValueError, match="the policy's velocity must be finite"):
        trained([batch()], model=model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": np.full(ROWS, 1.5)}, "`rewards` must lie in \\[0, 1\\]"),
        ({"times": np.full(ROWS, -0.1)}, "`times` must lie in \\[0, 1\\]"),
        ({"samples": np.full((ROWS, 2), np.inf)}, "`samples` must be finite"),
        ({"noise": np.zeros((ROWS, 3))}, "`noise` must have shape"),
    ],
)
def test_batches_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        batch(**changes)


def test_policy_without_anything_to_train_is_refused():
    model = policy()
    model.trainable = False
    with pytest.raises(ValueError, match="nothing could learn"):
        DiffusionNFTTrainer(model)


def test_model_that_does_not_come_back_from_its_config_is_refused():
    class Own(keras.Model):
        def __init__(self, width):
            super().__init__()
            self.dense = keras.layers.Dense(width)

        def call(self, inputs):
            return self.dense(inputs["x"])

    model = Own(2)
    model({"x": np.zeros((1, 2)), "time": np.zeros(1)})
    with pytest.raises(ValueError, match="cannot be copied"):
        DiffusionNFTTrainer(model)
