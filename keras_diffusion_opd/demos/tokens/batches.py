"""What each model of the demo trains on: rollouts of scans, of the student's own samples, or of both."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_diffusion_opd.callbacks import OnPolicyRollout
from keras_diffusion_opd.data.corruption import MaskedCorruption
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.demos.tokens.digits import CLASSES, LEVELS, PIXELS, Scans
from keras_diffusion_opd.samplers import MaskedSampler

Rollout = Callable[[Any, int], list[PreparedBatch]]


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The settings that all rollouts of a training share.

    Args:
        seed: int, of samples and corruptions.
        count: int, batches of an epoch.
        size: int, rows of a batch.
        pool: int, samples drawn from a student for an epoch.
        steps: int, of the sampler.
    """

    seed: int
    count: int
    size: int
    pool: int = 1
    steps: int = 1

    def mixing(self, scans: Scans | None, own_share: float, teacher: Any = None) -> OnPolicyRollout:
        """Epochs with this share of the student's own samples, the rest corruptions of `scans`."""
        return OnPolicyRollout(
            MaskedSampler(LEVELS) if own_share else None,
            digit_corruption(),
            teacher,
            shape=(self.count * self.size, PIXELS),
            steps=self.steps,
            batch_size=self.size,
            samples=self.pool,
            conditions={"class_ids": (np.arange(self.pool) % CLASSES).astype("int32")} if own_share else None,
            corpus=None if scans is None else {"token_ids": scans.token_ids, "class_ids": scans.class_ids},
            own_share=own_share,
            seed=self.seed,
        )


def noting(rollout: Rollout, seen: list[Stamp]) -> Rollout:
    """`rollout`, which adds the stamp of every epoch to `seen`."""

    def noted(model: Any, version: int) -> list[PreparedBatch]:
        batches = rollout(model, version)
        seen.extend(batch.stamp for batch in batches[:1] if batch.stamp is not None)
        return batches

    return noted


def digit_corruption() -> MaskedCorruption:
    """Masking of grey levels: the id after the last level, linear schedule."""
    return MaskedCorruption(mask_id=LEVELS)
