"""`DiffusionNFTTrainer`: reinforcement learning of a flow model by its own forward process."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.reward_batch import RewardBatch
from keras_diffusion_opd.losses.nft import NFTLoss
from keras_diffusion_opd.losses.sample_rows import column
from keras_diffusion_opd.losses.weighted_sum import WeightedSum
from keras_diffusion_opd.schedules.old_policy_decay import get_old_policy_decay
from keras_diffusion_opd.trainers.policy_versions import PolicyVersions
from keras_diffusion_opd.trainers.window import WindowTrainer

_MESSAGES = {
    "samples_finite": "`samples` and `noise` must be finite in rows of positive weight",
    "rewards_in_range": "`rewards` and `times` must lie in [0, 1] in rows of positive weight",
    "velocity_finite": (
        "the policy's velocity must be finite. Training has diverged or half precision overflowed: lower the learning "
        "rate, clip gradients, or use mixed_bfloat16"
    ),
}


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class DiffusionNFTTrainer(WindowTrainer):
    """Aligns a flow model with a reward, without likelihoods: any sampler may draw, and no chain is kept.

    Rounds: the old policy draws groups of samples, a reward ranks each group (`losses.group_advantages`,
    `losses.reward_weights`), `fit` makes a few updates of the policy on noised versions of them, then the old policy
    follows the policy. One epoch is one round: `callbacks.RolloutRefresh` asks `old` for samples at its beginning, and
    the trainer blends at its end.

    The policy is trained in full; or, where it is an `AdaptedModel` (`AdapterBank.trainable`), as an adapter: then
    the old policy and the reference are adapters of the same base too, and no copies of the model are made.

    Args:
        policy: a built flow model, `{x_key: float (B, ...), time_key: float (B,), **conditions}` -> velocity.
        loss: `losses.NFTLoss`, or None for one with the paper's settings.
        old_decay: how slowly the old policy follows, `schedules.get_old_policy_decay`: "type1", "type2", "on_policy"
            or an `OldPolicyDecay`.
        x_key, time_key: names of the policy's inputs.
        name, dtype: as for any Keras model.

    Attributes:
        student: the policy, trained in place.
        old: the frozen policy that draws the samples.
        reference: the frozen policy that training started from.

    Raises:
        TypeError, ValueError: the policy is not built, cannot be copied, or has nothing to train.

    Source: Zheng et al., "DiffusionNFT: Online Diffusion Reinforcement with Forward Process", 2025,
    arXiv:2509.16117.

    Example:

    ```python
    import keras, numpy as np
    import keras_diffusion_opd as kdo

    x, time = keras.Input((2,), name="x"), keras.Input((), name="time")
    hidden = keras.layers.Concatenate()([x, keras.layers.Reshape((1,))(time)])
    policy = keras.Model({"x": x, "time": time}, keras.layers.Dense(2)(hidden))
    trainer = kdo.trainers.DiffusionNFTTrainer(policy)
    trainer.compile(keras.optimizers.SGD(0.01))
    batch = kdo.data.RewardBatch.create(
        samples=np.zeros((4, 2)), noise=np.ones((4, 2)), times=np.full(4, 0.5), rewards=np.array([0.0, 0.0, 1.0, 1.0])
    )
    history = trainer.fit(batch, epochs=1, verbose=0)
    assert "nft/old_deviation" in history.history
    ```
    """

    batch_type = RewardBatch

    def __init__(
        self,
        policy: Any,
        loss: NFTLoss | None = None,
        *,
        old_decay: Any = "type1",
        x_key: str = "x",
        time_key: str = "time",
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        loss = NFTLoss() if loss is None else loss
        if not isinstance(loss, NFTLoss):
            raise TypeError(f"`loss` must be an NFTLoss or None. Received {type(loss).__name__}.")
        if not isinstance(policy, keras.Model):
            raise TypeError(f"`policy` must be a built keras.Model. Received {type(policy).__name__}.")
        super().__init__(name=name, dtype=dtype)
        self._versions = _Hidden(PolicyVersions(policy))
        self.student, self.old = policy, self._versions.value.old
        self.reference = self._versions.value.reference
        self.loss = loss
        self.old_decay = get_old_policy_decay(old_decay)
        self.x_key, self.time_key = x_key, time_key
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The policy's velocity."""
        return self.student(inputs, training=training) if self.student._call_has_training_arg else self.student(inputs)

    @property
    def rollout_policy(self) -> Any:
        """Who draws samples: the old policy."""
        return self.old

    def own_settings(self) -> dict[str, Any]:
        """What else two runs must have in common."""
        return {"old_decay": self.old_decay.get_config(), "x_key": self.x_key, "time_key": self.time_key}

    def violation_messages(self) -> Mapping[str, str]:
        """What each check means."""
        return _MESSAGES

    def micro_batch(self, x: Any, y: Any, sample_weight: Any, training: bool) -> tuple[WeightedSum, dict[str, Any]]:
        """The unreduced loss of one micro-batch."""
        with backend.values_hidden():
            batch = RewardBatch.from_fit(x, y, sample_weight).validate()
            active = ops.greater(ops.convert_to_tensor(batch.loss_weights), 0)
            # 1. Silence rows of weight 0 before they meet the network; what is wrong elsewhere is reported.
            x0, noise, time, reward, found = _checked(batch, active)
            # 2. Noise the samples.
            s = column(time, x0)
            x_s = (1.0 - s) * x0 + s * noise
            conditions = {name: _silenced_condition(value, active) for name, value in batch.conditions.items()}
            inputs = {self.x_key: x_s, self.time_key: time, **conditions}
            # 3. What the three policies say. Only one of them learns.
            velocity = self(inputs, training=training)
            old = ops.stop_gradient(_inference(self.old, inputs))
            reference = ops.stop_gradient(_inference(self.reference, inputs))
            output = self.loss(velocity, old, x_s, x0, time, reward, reference, batch.loss_weights)
        # 4. Where it broke.
        found["velocity_finite"] = ops.logical_and(active, _not_finite(velocity))
        primary = self.with_losses(output.primary)
        self.metric_set.add(primary, output.metrics)
        return primary, found

    def _adopt(self, fed: Any, arguments: dict[str, Any]) -> None:
        super()._adopt(fed, arguments)
        callbacks = arguments.get("callbacks") or []
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = [
                _OldFollows(),
                *(callbacks if isinstance(callbacks, list | tuple) else [callbacks]),
            ]

    def old_follows(self) -> None:
        """Let the old policy follow: `old <- d old + (1 - d) policy`, d by the number of updates."""
        self._versions.value.blend(self.old_decay(self.policy_version))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serialised."""
        serialize = keras.saving.serialize_keras_object
        return {
            "policy": serialize(self.student),
            "loss": serialize(self.loss),
            "old_decay": serialize(self.old_decay),
            "x_key": self.x_key,
            "time_key": self.time_key,
            "name": self.name,
            "dtype": serialize(self.dtype_policy),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "DiffusionNFTTrainer":
        """The inverse of `get_config`."""
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("policy", "loss", "old_decay", "dtype")
        }
        return cls(**{**config, **parts})


class _Hidden:
    """Holds what Keras should not track a second time."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _OldFollows(keras.callbacks.Callback):
    """Blends at the end of every epoch, before checkpoints are written."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Blend."""
        self.model.old_follows()  # `self.model` brings the variables up to date on JAX


def _inference(model: Any, inputs: Any) -> Any:
    return model(inputs, training=False) if model._call_has_training_arg else model(inputs)


def _not_finite(values: Any) -> Any:
    """bool (B,): rows of (B, ...) that hold NaN or infinity."""
    return ops.logical_not(ops.all(ops.isfinite(ops.reshape(values, (ops.shape(values)[0], -1))), axis=1))


def _silenced_condition(value: Any, active: Any) -> Any:
    value = ops.convert_to_tensor(value)
    if "float" not in keras.backend.standardize_dtype(value.dtype):
        return value
    return ops.where(column(active, value), value, ops.zeros_like(value))


def _checked(batch: RewardBatch, active: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Samples, noise, times and rewards with rows of weight 0 replaced, and bool (B,) of what breaks the contract."""

    def silenced(value: Any, fill: float) -> Any:
        value = ops.cast(ops.convert_to_tensor(value), "float32")
        return ops.where(column(active, value), value, ops.full_like(value, fill))

    x0, noise = silenced(batch.samples, 0.0), silenced(batch.noise, 0.0)
    time, reward = silenced(batch.times, 0.5), silenced(batch.rewards, 0.5)

    def outside(value: Any) -> Any:
        return ops.logical_not(ops.logical_and(value >= 0, value <= 1))

    found = {
        "samples_finite": ops.logical_or(_not_finite(x0), _not_finite(noise)),
        "rewards_in_range": ops.logical_or(outside(time), outside(reward)),
    }
    return x0, noise, time, reward, found
