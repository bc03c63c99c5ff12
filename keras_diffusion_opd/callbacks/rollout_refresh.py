"""`RolloutRefresh`: on-policy batches that stay on-policy while the student learns."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.data.training_batch import TrainingBatch
from keras_diffusion_opd.validation import positive_int


class RolloutRefresh(keras.callbacks.Callback):
    """Rolls out the current student at the beginning of every `every`-th epoch and trains on that.

    Nothing overlaps: the rollout ends before the epoch's first window begins. Every batch has to carry a
    stamp with the student's present version, so that a rollout function that hands out old batches is
    noticed, and `PreparedDataset(max_staleness=...)` can refuse what an epoch makes too old.

    Args:
        dataset: the `PreparedDataset` that `fit` trains on. Its batches are replaced by as many others.
        rollout: `(student, policy_version) -> list[PreparedBatch]` (`list[RewardBatch]`), each with
            `stamp=Stamp(policy_version=policy_version, ...)`: samples from the student, corrupts them and
            has the teacher score them.
        every: whole number >= 1, epochs between two rollouts.

    Raises:
        TypeError, ValueError: wrong arguments; while training, batches that are not stamped with the
            student's present version.

    Source: Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated
    Mistakes", 2023, arXiv:2306.13649.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.callbacks import RolloutRefresh
    from keras_diffusion_opd.data import PreparedBatch, PreparedDataset, Stamp

    def rollout(student, policy_version):
        ids = np.zeros((2, 4), "int32")  # samples of the student
        return [
            PreparedBatch.create(
                model_inputs=ids,
                target_ids=ids,
                loss_weights=np.ones(ids.shape, "float32"),
                stamp=Stamp(policy_version=policy_version),
            )
        ]

    dataset = PreparedDataset(rollout(None, 0), max_staleness=50)
    refresh = RolloutRefresh(dataset, rollout, every=2)   # trainer.fit(dataset, callbacks=[refresh])
    ```
    """

    def __init__(
        self,
        dataset: PreparedDataset,
        rollout: Callable[[Any, int], Sequence[TrainingBatch]],
        *,
        every: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(dataset, PreparedDataset):
            raise TypeError(f"`dataset` must be the PreparedDataset given to fit. Received {type(dataset).__name__}.")
        if not callable(rollout):
            raise TypeError(f"`rollout` must be a function (student, policy_version) -> batches. Received {rollout!r}.")
        self.dataset = dataset
        self.rollout = rollout
        self.every = positive_int("every", every)

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse to refresh a dataset that is not the one trained on."""
        if self.model.dataset is not self.dataset:
            raise ValueError(
                "`dataset` must be the PreparedDataset given to fit: another one would be refreshed, and the student "
                "trained on batches that grow old. Pass the same object to RolloutRefresh and to fit."
            )
        self.dataset.on_policy, self.dataset.refresh_every = True, self.every

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Roll out, unless the dataset is fresh already or it is not yet time."""
        version = self.model.policy_version
        self.dataset.policy_version = version
        if self.dataset.resumed_at or epoch % self.every or self.dataset.staleness() == 0:
            return  # an epoch that is resumed in its middle goes on with the batches of its beginning
        batches = self.rollout(getattr(self.model, "rollout_policy", self.model.student), version)
        if not isinstance(batches, list | tuple) or not batches:
            received = "an empty one" if isinstance(batches, list | tuple) else type(batches).__name__
            raise TypeError(f"`rollout` must return a list of PreparedBatch objects. Received {received}.")
        for index, batch in enumerate(batches):
            if not isinstance(batch, TrainingBatch):
                raise TypeError(
                    f"`rollout` must return PreparedBatch objects. Received {type(batch).__name__} at index {index}."
                )
            if batch.stamp is None or batch.stamp.policy_version != version:
                stamped = "no stamp" if batch.stamp is None else f"policy version {batch.stamp.policy_version}"
                raise ValueError(
                    f"`rollout` must stamp every batch with the student's present version, {version}. Received "
                    f"{stamped} in batch {index}. Pass stamp=Stamp(policy_version=policy_version) to "
                    "PreparedBatch.create."
                )
        self.dataset.replace(batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log what the rollout has to say of itself (`rollout.logs`), such as the mean reward."""
        if logs is not None:
            logs.update(getattr(self.rollout, "logs", None) or {})
