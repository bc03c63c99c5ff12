"""A small run with everything that has a state, in this process or as a program: `small_run.py DIRECTORY SECONDS`.

The program resumes where there is something to resume, sleeps so many seconds in every window, and prints the
digest of the final state.
"""

import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_diffusion_opd as kdo
from tests.students import make_batches, make_student, optimizer_state, weights_of
from tests.students import make_trainer as plain_trainer

SIZES = [(2, 6)] * 5 + [(1, 4)] * 2  # 7 batches: windows of 3, 3 and 1, in another order every epoch
EPOCHS, WINDOWS = 2, 6


class Slow(keras.callbacks.Callback):
    """Sleeps in every window."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.seconds)


def make_trainer(seed: int = 1, **arguments: Any) -> Any:
    """A new trainer with dropout, moments, EMA, a schedule and accumulation."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 10)
    optimizer = keras.optimizers.AdamW(schedule, use_ema=True, ema_momentum=0.8)
    student = make_student(dropout=0.3, seed=seed)
    return plain_trainer(student, optimizer=optimizer, accumulation_steps=3, metrics=["accuracy"], **arguments)


def make_dataset() -> kdo.data.PreparedDataset:
    return kdo.data.PreparedDataset(make_batches(SIZES), shuffle=True, seed=5)


def train(
    directory: Path, trainer: Any, *callbacks: Any, epoch: int = 0, checkpoint: Any = None, validate: bool = False
) -> tuple[Any, Any]:
    """`fit` with checkpoints after every window; gives trainer and history."""
    checkpoint = checkpoint or kdo.callbacks.ProvenanceCheckpoint(directory, every=1)
    arguments: dict[str, Any] = {"epochs": EPOCHS, "initial_epoch": epoch, "verbose": 0}
    if validate:
        arguments["validation_data"] = kdo.data.PreparedDataset(make_batches([(2, 6)], seed=8))
    return trainer, trainer.fit(make_dataset(), callbacks=[*callbacks, checkpoint], **arguments)


def state_of(trainer: Any) -> list[np.ndarray]:
    """Weights, moments and random states."""
    seeds = [np.array(keras.ops.convert_to_numpy(v.value)) for v in trainer.variables if "seed" in v.path]
    return [*weights_of(trainer), *optimizer_state(trainer), *seeds]


def digest_of(trainer: Any) -> str:
    return kdo.provenance.digest(state_of(trainer))


def main(directory: Path, seconds: float) -> str:
    """Train to the end, from wherever an earlier process came to."""
    trainer, epoch = make_trainer(), 0
    if directory.is_dir() and list(directory.glob("step-*")):
        epoch = kdo.callbacks.resume(trainer, directory).epoch
    train(directory, trainer, Slow(seconds), epoch=epoch)
    return digest_of(trainer)


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), float(sys.argv[2])))
