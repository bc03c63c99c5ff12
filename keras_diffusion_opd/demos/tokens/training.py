"""Training of one denoiser through `PreparedTrainer.fit`."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.callbacks import ProvenanceCheckpoint, RolloutRefresh
from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.demos.tokens.batches import Rollout
from keras_diffusion_opd.demos.tokens.digits import CLASSES, LEVELS, PIXELS
from keras_diffusion_opd.demos.tokens.progress import FitProgress, Progress
from keras_diffusion_opd.demos.tokens.settings import Network
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser
from keras_diffusion_opd.trainers import PreparedTrainer

_WARM_UP = 0.05
_FINAL_SHARE = 0.02  # of the learning rate that is left at the end


def denoiser(network: Network, name: str) -> TokenDenoiser:
    """A new denoiser of digits, with weights."""
    model = TokenDenoiser(
        LEVELS,
        PIXELS,
        CLASSES,
        width=network.width,
        depth=network.depth,
        channels=network.channels,
        dropout=network.dropout,
        name=name,
    )
    model.build()
    return model


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of one training.

    Args:
        weights: of the model.
        seconds: of the wall clock, for training, rollouts and the teacher's scores included.
        curve: `(updates, value)` at the end of every epoch.
    """

    weights: list[np.ndarray]
    seconds: float
    curve: list[tuple[int, float]]


class Course:
    """One trainer, compiled once, that trains the same model from the same start again and again.

    Args:
        model: the denoiser.
        loss: of `keras_diffusion_opd.losses`.
        network: its settings.
        epochs: int, how often batches are replaced.
    """

    def __init__(self, model: TokenDenoiser, loss: Any, network: Network, epochs: int) -> None:
        self.model, self.network, self.epochs = model, network, epochs
        self.trainer = PreparedTrainer(model, loss)
        self.trainer.compile(_optimizer(network))
        self.trainer.optimizer.build(self.trainer.trainable_variables)
        self._fresh = [v.numpy() for v in self.trainer.optimizer.variables]

    @property
    def updates_per_epoch(self) -> int:
        """Batches of an epoch: one update each."""
        return self.network.updates // self.epochs

    def train(
        self,
        title: str,
        start: list[np.ndarray],
        rollout: Rollout,
        watch: Callable[[], float] | None = None,
        checkpoint: ProvenanceCheckpoint | None = None,
    ) -> Trained:
        """Train from `start`.

        Args:
            title: shown beside the progress bar.
            start: weights to begin with.
            rollout: gives the batches of each epoch.
            watch: None, or a number to note at the end of every epoch.
            checkpoint: None, or what saves the run.
        """
        self.model.set_weights(start)
        for variable, value in zip(self.trainer.optimizer.variables, self._fresh, strict=True):
            variable.assign(value)
        before = time.monotonic()
        # A batch is at most as old as the epoch that it serves.
        dataset = PreparedDataset(rollout(self.model, 0), max_staleness=self.updates_per_epoch - 1)
        curve = _Curve(watch)
        with Progress(title, self.network.updates) as bar:
            self.trainer.fit(
                dataset,
                epochs=self.epochs,
                verbose=0,
                callbacks=[
                    RolloutRefresh(dataset, rollout),
                    curve,
                    FitProgress(bar),
                    *([] if checkpoint is None else [checkpoint]),
                ],
            )
        seconds = time.monotonic() - before - curve.seconds
        return Trained(self.model.get_weights(), seconds, curve.points)


class _Curve(keras.callbacks.Callback):
    """Notes a number at the end of every epoch, and the time that this took."""

    def __init__(self, watch: Callable[[], float] | None) -> None:
        super().__init__()
        self.watch = watch
        self.points: list[tuple[int, float]] = []
        self.seconds = 0.0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.watch is None:
            return
        before = time.monotonic()
        self.points.append((self.model.policy_version, float(self.watch())))
        self.seconds += time.monotonic() - before


def _optimizer(network: Network) -> keras.optimizers.Optimizer:
    warm_up = max(1, round(_WARM_UP * network.updates))
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, network.updates - warm_up),
        alpha=_FINAL_SHARE,
        warmup_target=network.learning_rate,
        warmup_steps=warm_up,
    )
    return keras.optimizers.AdamW(
        schedule,
        weight_decay=network.weight_decay,
        beta_2=0.99,
        global_clipnorm=1.0,
        use_ema=True,
        ema_momentum=0.99,
    )
