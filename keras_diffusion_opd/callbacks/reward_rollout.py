"""`RewardRollout`: groups of samples of a flow policy, scored and ranked: a round of reinforcement learning."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.data.reward_batch import RewardBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.losses.group_advantage import GroupAdvantages, group_advantages, reward_weights
from keras_diffusion_opd.provenance import digest, plain_json
from keras_diffusion_opd.schedules import grid_times, timestep_grid, uniform_times
from keras_diffusion_opd.validation import finite_real, positive_int

TIMES = ("grid", "uniform")
_NOISE, _DEAL, _PROMPTS = 1, 2, 3


class RewardRollout:
    """Draws K samples for each of some prompts, has a reward score them, and ranks every group.

    A call is an epoch of batches: `rollout(policy, policy_version) -> list[RewardBatch]`, a function of the policy's
    weights, the version and the seed. All initial noises of a round are distinct. Each sample is trained on `passes`
    times, with fresh noise and a fresh time.

    Args:
        sampler: a `FlowSampler`. Use a deterministic one: the method needs no likelihoods.
        reward: `(samples, conditions) -> values (N,)`, or a reward of `keras_diffusion_opd.rewards`. What is not
            finite is masked and counted; if every value is, the round raises.
        shape: of one sample, without rows.
        steps: int >= 1, of the sampler.
        conditions: None, or dict of arrays (P, ...): the prompts.
        prompts: None for all of them in every round, or how many are drawn (without a prompt: how many groups).
        group_size: K >= 2, samples per prompt. The paper uses 24.
        passes: int >= 1, how often every sample is trained on in a round. One update per round leaves nothing that
            holds the policy near the old one; several are usual.
        batch_size: None for all samples at once, or rows per batch.
        times: "grid", the times that the sampler visits, or "uniform", any in [.02, .98].
        shift: float > 0, of the sampler's grid.
        guidance: float, of the sampler. 1 calls the policy once per step.
        unconditional: None, or dict of arrays (1, ...): what stands for no condition, where guidance is not 1.
        advantage_clip: float > 0, as in the loss.
        advantage_std: "group" or "global".
        sample_batch_size: None, or rows per call of the policy while sampling.
        seed: int.

    Attributes:
        logs: dict of numbers of the last round: "reward", "reward_std", "reward_masked", "constant_groups".
        history: list of such dicts.

    Raises:
        ValueError: an argument out of range.

    Source: Zheng et al., "DiffusionNFT", 2025, arXiv:2509.16117.

    Example:

    ```python
    import keras, numpy as np
    import keras_diffusion_opd as kdo

    x, time = keras.Input((2,), name="x"), keras.Input((), name="time")
    joined = keras.layers.Concatenate()([x, keras.layers.Reshape((1,))(time)])
    policy = keras.Model({"x": x, "time": time}, keras.layers.Dense(2)(joined))
    rollout = kdo.callbacks.RewardRollout(
        kdo.samplers.FlowSampler(),
        lambda samples, conditions: samples[:, 0],
        shape=(2,),
        steps=2,
        prompts=2,
        group_size=4,
    )
    trainer = kdo.trainers.DiffusionNFTTrainer(policy)
    trainer.compile(keras.optimizers.Adam(1e-3))
    dataset = rollout.dataset(trainer.old)
    refresh = kdo.callbacks.RolloutRefresh(dataset, rollout)
    history = trainer.fit(dataset, epochs=2, callbacks=[refresh], verbose=0)
    assert len(history.history["reward"]) == 2
    ```
    """

    def __init__(
        self,
        sampler: Any,
        reward: Callable[[Any, Any], Any],
        *,
        shape: tuple[int, ...],
        steps: int,
        conditions: dict[str, Any] | None = None,
        prompts: int | None = None,
        group_size: int = 24,
        passes: int = 1,
        batch_size: int | None = None,
        times: str = "grid",
        shift: float = 1.0,
        guidance: float = 1.0,
        unconditional: dict[str, Any] | None = None,
        advantage_clip: float = 5.0,
        advantage_std: str = "group",
        sample_batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        if not callable(getattr(sampler, "sample", None)):
            raise TypeError(f"`sampler` must have a method `sample`. Received {type(sampler).__name__}.")
        if not callable(reward):
            raise TypeError(f"`reward` must be a function (samples, conditions) -> values. Received {reward!r}.")
        self.sampler, self.reward = sampler, reward
        self.shape = tuple(positive_int("shape", n) for n in shape)
        self.steps, self.passes = positive_int("steps", steps), positive_int("passes", passes)
        self.group_size = positive_int("group_size", group_size)
        if self.group_size < 2:
            raise ValueError(f"`group_size` must be at least 2: samples are ranked in groups. Received {group_size}.")
        if times not in TIMES:
            raise ValueError(f"`times` must be one of {TIMES}. Received {times!r}.")
        self.conditions = {name: np.asarray(value) for name, value in (conditions or {}).items()}
        counts = {name: len(value) for name, value in self.conditions.items()}
        if len(set(counts.values())) > 1 or 0 in counts.values():
            raise ValueError(f"`conditions` must hold arrays of one number of rows, at least 1. Received {counts}.")
        pool = next(iter(counts.values()), None)
        if prompts is None and pool is None:
            raise ValueError("`prompts` must say how many groups there are where there are no `conditions`.")
        self.prompts = positive_int("prompts", pool if prompts is None else prompts)
        self.rows = self.prompts * self.group_size
        self.batch_size = self.rows if batch_size is None else positive_int("batch_size", batch_size)
        if self.rows % self.batch_size:
            raise ValueError(f"`batch_size` must divide the {self.rows} samples of a round. Received {batch_size}.")
        self.times, self.shift, self.guidance = times, finite_real("shift", shift), finite_real("guidance", guidance)
        self.unconditional, self.sample_batch_size = unconditional, sample_batch_size
        self.advantage_clip, self.advantage_std = finite_real("advantage_clip", advantage_clip), advantage_std
        self.seed = int(seed)
        self.logs: dict[str, float] = {}
        self.history: list[dict[str, float]] = []

    def dataset(self, policy: Any, *, policy_version: int = 0, max_staleness: int | None = None) -> PreparedDataset:
        """A first round as what `fit` takes; `RolloutRefresh(dataset, rollout)` keeps it fresh.

        Args:
            policy: `trainer.old`.
            policy_version: of the trainer.
            max_staleness: as of `PreparedDataset`.
        """
        return PreparedDataset(self(policy, policy_version), max_staleness=max_staleness, seed=self.seed)

    def __call__(self, policy: Any, policy_version: int) -> list[RewardBatch]:
        """A round of batches from `policy` as it is now, each stamped with `policy_version`."""
        # 1. Draw K samples per prompt.
        chosen = np.repeat(self._chosen(policy_version), self.group_size)
        conditions = {name: value[chosen] for name, value in self.conditions.items()}
        samples = self._sample(policy, conditions, policy_version)
        # 2. Score, and rank within groups.
        ranked, values = self._ranked(samples, conditions)
        rewards = reward_weights(ranked.values, self.advantage_clip)
        self.logs = {
            "reward": float(np.mean(values[ranked.valid])),
            "reward_std": float(np.std(values[ranked.valid])),
            "reward_masked": float(ranked.masked),
            "constant_groups": float(ranked.constant_groups),
        }
        self.history.append(dict(self.logs))
        # 3. Passes over the samples, each in an order, with noise and times of its own.
        stamp, batches = self._stamp(policy, policy_version), []
        for index in range(self.passes):
            noise = self._generator(_NOISE, policy_version, index).standard_normal(samples.shape).astype("float32")
            times = self._times(policy_version * self.passes + index)
            order = self._generator(_DEAL, policy_version, index).permutation(self.rows)
            for rows in order.reshape(-1, self.batch_size):
                batches.append(
                    RewardBatch.create(
                        samples=samples[rows],
                        noise=noise[rows],
                        times=times[rows],
                        rewards=rewards[rows],
                        loss_weights=ranked.valid[rows],
                        conditions={name: value[rows] for name, value in conditions.items()},
                        stamp=stamp,
                    )
                )
        return batches

    def _chosen(self, version: int) -> np.ndarray:
        pool = next((len(value) for value in self.conditions.values()), self.prompts)
        if pool == self.prompts:
            return np.arange(pool)
        rng = self._generator(_PROMPTS, version)
        return np.concatenate([rng.permutation(pool) for _ in range(-(-self.prompts // pool))])[: self.prompts]

    def _sample(self, policy: Any, conditions: dict[str, np.ndarray], version: int) -> np.ndarray:
        more: dict[str, Any] = {}
        if self.guidance != 1.0:
            more = {"guidance": self.guidance, "unconditional": self.unconditional}
        samples = self.sampler.sample(
            policy,
            shape=(self.rows, *self.shape),
            steps=self.steps,
            seed=_mixed(self.seed, version),
            conditions=conditions or None,
            shift=self.shift,
            batch_size=self.sample_batch_size,
            **more,
        )
        return np.asarray(samples, "float32")

    def _ranked(self, samples: np.ndarray, conditions: dict[str, np.ndarray]) -> tuple[GroupAdvantages, np.ndarray]:
        scored = self.reward(samples, conditions)
        values, valid = getattr(scored, "values", scored), getattr(scored, "valid", None)
        values = np.asarray(values() if callable(values) else values, "float64")
        if values.shape != (self.rows,):
            raise ValueError(f"`reward` must return one number per sample, ({self.rows},). Received {values.shape}.")
        groups = np.repeat(np.arange(self.prompts), self.group_size)
        ranked = group_advantages(values, groups, size=self.group_size, std=self.advantage_std, valid=valid)
        if not np.any(ranked.valid):
            raise ValueError(f"`reward` gave no finite number for any of {self.rows} samples: nothing can be learned.")
        return ranked, values

    def _times(self, step: int) -> np.ndarray:
        ids = np.arange(self.rows)
        if self.times == "grid":
            return grid_times(self.seed, step, ids, timestep_grid(self.steps, shift=self.shift))
        return uniform_times(self.seed, step, ids, low=0.02, high=0.98)

    def _generator(self, stream: int, version: int, index: int = 0) -> np.random.Generator:
        return np.random.Generator(
            np.random.Philox(key=np.array([self.seed % 2**64, (stream << 48) + (version << 16) + index], "uint64"))
        )

    def _stamp(self, policy: Any, version: int) -> Stamp:
        config = self.sampler.get_config() if hasattr(self.sampler, "get_config") else {}
        return Stamp(
            policy_version=version,
            policy_digest=digest(policy),
            sampler={
                "name": type(self.sampler).__name__,
                "config": plain_json(config, name="sampler.get_config()"),
                "steps": self.steps,
                "shift": self.shift,
                "guidance": self.guidance,
                "group_size": self.group_size,
            },
            seed=self.seed,
        )


def _mixed(seed: int, version: int) -> int:
    """A seed of its own for every version: neighbours of (seed, version) do not share samples."""
    return int(np.random.SeedSequence([seed % 2**64, version]).generate_state(1, "uint32")[0] >> 1)
