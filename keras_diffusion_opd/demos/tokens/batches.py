"""What each student trains on: an epoch of prepared batches at a time."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.corruption import MaskedCorruption
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.targets import DenseTargets
from keras_diffusion_opd.demos.tokens.digits import CLASSES, LEVELS, PIXELS, Scans
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.samplers import MaskedSampler

Rollout = Callable[[Any, int], list[PreparedBatch]]


class Teacher:
    """A trained denoiser as a source of targets.

    Args:
        model: the denoiser.
        rows: int, rows that are scored in one call; fewer are filled up, so that one program serves.
    """

    def __init__(self, model: keras.Model, rows: int) -> None:
        self.model, self.rows = model, rows
        self.digest = digest(model)
        self._score = backend.compiled(lambda inputs: model(inputs, training=False), [model])

    def __call__(self, inputs: dict[str, np.ndarray]) -> DenseTargets:
        """Dense targets for model inputs of any number of rows."""
        count = len(inputs["class_ids"])
        parts = []
        for start in range(0, count, self.rows):
            taken = np.minimum(np.arange(start, start + self.rows), count - 1)
            logits = self._score({name: value[taken] for name, value in inputs.items()})
            parts.append(keras.ops.convert_to_numpy(logits)[: count - start])
        return DenseTargets(np.concatenate(parts))


class Batches:
    """Prepares epochs of batches from scans, with the teacher's scores if there is a teacher.

    Args:
        corruption: masks the tokens.
        seed: int, of the corruption.
        count: int, batches of an epoch.
        size: int, rows of a batch.
        teacher: None, or what scores them.
    """

    def __init__(
        self, corruption: MaskedCorruption, *, seed: int, count: int, size: int, teacher: Teacher | None = None
    ) -> None:
        self.corruption, self.seed = corruption, seed
        self.count, self.size = count, size
        self.teacher = teacher

    def prepare(self, scans: Scans, stamp: Stamp) -> list[PreparedBatch]:
        """An epoch from `scans`, each taken equally often, corrupted anew each time."""
        # 1. Whole passes over the scans in random order. A row's id tells the pass apart.
        rng = np.random.Generator(np.random.Philox(key=[self.seed, stamp.policy_version]))
        passes = -(-self.count * self.size // len(scans))
        rows = np.concatenate([rng.permutation(len(scans)) for _ in range(passes)])[: self.count * self.size]
        ids = np.arange(len(rows))
        # 2. Corrupt and score them all at once.
        whole = self.corruption.prepare(
            self.seed,
            stamp.policy_version,
            ids,
            scans.token_ids[rows],
            conditions={"class_ids": scans.class_ids[rows]},
            teacher=self.teacher,
            stamp=stamp,
        )
        # 3. Deal them out by the number of masks, so that every batch holds all diffusion times.
        masks = np.sum(whole.loss_weights > 0, axis=1)
        dealt = np.argsort(masks + rng.random(len(rows)), kind="stable").reshape(self.size, self.count)
        for stratum in dealt:
            rng.shuffle(stratum)
        return [whole.map(lambda array, chosen=chosen: array[chosen]) for chosen in dealt.T]

    def of_data(self, scans: Scans) -> Rollout:
        """Corruptions of the scans themselves."""

        def rollout(model: Any, version: int) -> list[PreparedBatch]:
            return self.prepare(scans, self._stamp(version, {"name": "data"}))

        return rollout

    def of_samples(self, sampler: MaskedSampler, pool: int, steps: int, seen: list[Stamp]) -> Rollout:
        """Corruptions of what the student samples at that moment; the stamps are added to `seen`."""
        classes = (np.arange(pool) % CLASSES).astype("int32")

        def rollout(model: Any, version: int) -> list[PreparedBatch]:
            tokens = sampler.sample(
                model, shape=(pool, PIXELS), steps=steps, seed=self.seed + version, conditions={"class_ids": classes}
            )
            described = {"name": "MaskedSampler", "order": sampler.order, "steps": steps, "temperature": 1.0}
            stamp = self._stamp(version, described, digest(model))
            seen.append(stamp)
            return self.prepare(Scans(tokens, classes), stamp)

        return rollout

    def _stamp(self, version: int, sampler: dict[str, Any], student: str = "") -> Stamp:
        return Stamp(
            policy_version=version,
            policy_digest=student,
            teacher_digest="" if self.teacher is None else self.teacher.digest,
            sampler=sampler,
            seed=self.seed,
        )


def in_turn(first: Rollout, second: Rollout) -> Rollout:
    """Batches of both, one of the first, one of the second, and so on."""

    def rollout(model: Any, version: int) -> list[PreparedBatch]:
        pairs = itertools.zip_longest(first(model, version), second(model, version))
        return [batch for pair in pairs for batch in pair if batch is not None]

    return rollout


def digit_corruption() -> MaskedCorruption:
    """Masking of grey levels: the id after the last level, linear schedule."""
    return MaskedCorruption(mask_id=LEVELS)
