"""`RewardRollout`: rounds of DiffusionNFT with a real sampler, on a problem whose answer is known."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.callbacks import ProvenanceCheckpoint, RewardRollout, RolloutRefresh, resume
from keras_diffusion_opd.losses import NFTLoss
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.samplers import FlowSampler
from keras_diffusion_opd.trainers import DiffusionNFTTrainer

LEFT, RIGHT = -2.0, 2.0


def policy(seed=0):
    """A velocity in one dimension: a small network of x and time."""
    x, time = keras.Input((1,), name="x"), keras.Input((), name="time")
    hidden = keras.layers.Concatenate()([x, keras.layers.Reshape((1,))(time)])
    for index in range(2):
        hidden = keras.layers.Dense(16, "silu", kernel_initializer=keras.initializers.GlorotUniform(seed + index))(
            hidden
        )
    last = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed + 2))
    return keras.Model({"x": x, "time": time}, last(hidden))


def right(samples, conditions):
    return (samples[:, 0] > 0).astype("float64")


def rollout(reward=right, **changes):
    settings = {"shape": (1,), "steps": 4, "prompts": 2, "group_size": 8, "batch_size": 8, "passes": 2, **changes}
    return RewardRollout(FlowSampler(), reward, **settings)


@pytest.fixture(scope="module")
def model():
    return policy()


def test_round_is_a_function_of_weights_version_and_seed(model):
    first, again, other = rollout()(model, 3), rollout()(model, 3), rollout()(model, 4)
    assert len(first) == 2 * 16 // 8
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.samples, b.samples)
        np.testing.assert_array_equal(a.noise, b.noise)
    samples = np.concatenate([b.samples for b in first[:2]])
    assert len(np.unique(samples)) == 16  # all initial noises are distinct
    assert not np.isin(np.concatenate([b.samples for b in other[:2]]), samples).any()
    assert first[0].stamp.policy_digest == digest(model) and first[0].stamp.policy_version == 3


def test_every_pass_holds_every_sample_once_with_noise_of_its_own(model):
    batches = rollout()(model, 0)
    passes = [np.concatenate([b.samples[:, 0] for b in batches[i : i + 2]]) for i in (0, 2)]
    np.testing.assert_array_equal(np.sort(passes[0]), np.sort(passes[1]))
    noise = np.concatenate([b.noise for b in batches])
    assert len(np.unique(noise)) == 32
    times = np.concatenate([b.times for b in batches[:2]])
    assert sorted(set(times.tolist())) == [0.25, 0.5, 0.75, 1.0]  # the sampler's own times, all of them


def test_rewards_are_ranked_within_groups_and_nan_is_masked(model):
    values = np.concatenate([np.arange(8.0), np.full(8, 5.0)])
    values[3] = np.nan
    drawn = rollout(lambda samples, conditions: values, batch_size=16, passes=1)
    (batch,) = drawn(model, 0)
    assert drawn.logs["reward_masked"] == 1 and drawn.logs["constant_groups"] == 1
    assert sorted(np.asarray(batch.loss_weights).tolist()) == [0.0] + [1.0] * 15
    assert (np.asarray(batch.rewards) == 0.5).sum() >= 8  # a constant group teaches nothing


def test_prompts_are_repeated_in_groups(model):
    x, time, label = keras.Input((1,), name="x"), keras.Input((), name="time"), keras.Input((1,), name="label")
    of_label = keras.Model({"x": x, "time": time, "label": label}, keras.layers.Dense(1)(x) + 0.0 * label)
    seen = []
    drawn = rollout(
        lambda samples, conditions: seen.append(conditions["label"]) or samples[:, 0],
        conditions={"label": np.arange(5.0)[:, None]},
        prompts=3,
        batch_size=None,
    )
    drawn(of_label, 0)
    groups = seen[0].reshape(3, 8)
    assert np.all(groups == groups[:, :1]) and len(np.unique(groups)) == 3


def test_reward_that_never_counts_is_refused(model):
    with pytest.raises(ValueError, match="no finite number for any of 16 samples"):
        rollout(lambda samples, conditions: samples[:, 0] * np.nan)(model, 0)


def trainer_of(model, **settings):
    trainer = DiffusionNFTTrainer(model, NFTLoss(kl_weight=0.0), old_decay="on_policy", **settings)
    trainer.compile(keras.optimizers.Adam(5e-3))
    return trainer


def fit(trainer, epochs, *, initial_epoch=0, callbacks=(), **changes):
    drawn = rollout(**changes)
    dataset = drawn.dataset(trainer.old)
    history = trainer.fit(
        dataset,
        epochs=epochs,
        initial_epoch=initial_epoch,
        callbacks=[RolloutRefresh(dataset, drawn), *callbacks],
        verbose=0,
    )
    return history.history


def test_reward_of_the_right_half_moves_the_samples_there():
    model = policy()
    history = fit(trainer_of(model), 20, group_size=64, prompts=2, batch_size=128, passes=4)
    assert history["reward"][0] < 0.7
    # 1 is the optimum; a small network after 80 updates is well past what an untrained one gives by chance.
    assert np.mean(history["reward"][-3:]) > 0.9


def test_run_that_is_resumed_between_rounds_equals_one_that_was_not(tmp_path):
    straight = policy()
    fit(trainer_of(straight), 4)
    fit(trainer_of(policy()), 2, callbacks=[ProvenanceCheckpoint(tmp_path)])
    second = policy()
    second.set_weights([w + 1.0 for w in second.get_weights()])
    trainer = trainer_of(second)
    state = resume(trainer, tmp_path)
    fit(trainer, 4, initial_epoch=state.epoch)
    for a, b in zip(second.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, "`group_size` must be at least 2"),
        ({"batch_size": 5}, "`batch_size` must divide the 16"),
        ({"times": "some"}, "`times` must be one of"),
        ({"prompts": None}, "`prompts` must say"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rollout(**changes)
