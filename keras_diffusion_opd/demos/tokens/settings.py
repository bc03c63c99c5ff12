"""What the demo can be told."""

import dataclasses
from pathlib import Path
from typing import Any

from keras_diffusion_opd.validation import finite_real, positive_int


@dataclasses.dataclass(frozen=True)
class Network:
    """Size and training of one denoiser; see `TokenDenoiser` for the sizes.

    Args:
        width, depth, channels, dropout: of the denoiser.
        updates: int, a multiple of the number of epochs.
        learning_rate: float > 0, after the warm-up; a cosine leads down from it.
        weight_decay: float >= 0.
    """

    width: int
    depth: int
    channels: int
    dropout: float
    updates: int
    learning_rate: float
    weight_decay: float


TEACHER = Network(128, 5, 6, dropout=0.2, updates=4800, learning_rate=3e-3, weight_decay=0.05)
STUDENT = Network(32, 3, 4, dropout=0.0, updates=2000, learning_rate=6e-3, weight_decay=0.01)


_USES = ("teacher masks", "student masks", "examination masks", "samples")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a run.

    Args:
        out: directory for the results; made if it is not there.
        seed: int, of everything: split excepted, which is always the same.
        teacher, student: the networks.
        batch_size: int, scans per update.
        epochs: int, how often batches are prepared anew (and rollouts made) while a network trains.
        pool: int, samples that a student draws for an epoch of training on its own samples.
        rollout_steps: int, sampling steps of those.
        sample_steps: int, sampling steps of pictures and of the samples that are measured; 64 samples the
            model exactly.
        picture_temperature: float >= 0, of the samples in the picture. Those that are measured have 1.
        draws: int, masks drawn of every held-out scan for the bound.
        rows: int, rows of ten digits in a picture.
        quick: bool, whether this is the small size that only shows that everything runs.

    Raises:
        ValueError: a number out of its range.
    """

    out: Path = Path("runs/tokens")
    seed: int = 0
    teacher: Network = TEACHER
    student: Network = STUDENT
    batch_size: int = 64
    epochs: int = 8
    pool: int = 640
    rollout_steps: int = 32
    sample_steps: int = 64
    picture_temperature: float = 0.8
    draws: int = 64
    rows: int = 4
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "pool", "rollout_steps", "sample_steps", "draws", "rows"):
            positive_int(name, getattr(self, name))
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ValueError(f"`seed` must be a whole number >= 0. Received {self.seed!r}.")
        for name in ("teacher", "student"):
            network = getattr(self, name)
            finite_real(f"{name}.learning_rate", network.learning_rate)
            if network.updates < 1 or network.updates % self.epochs:
                raise ValueError(
                    f"`{name}.updates` must be a multiple of the {self.epochs} epochs. Received {network.updates}."
                )

    def seed_of(self, use: str) -> int:
        """The seed of one use of randomness: none of them shares its numbers with another."""
        return len(_USES) * self.seed + _USES.index(use)

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {**dataclasses.asdict(self), "out": str(self.out)}


def quick(settings: Settings) -> Settings:
    """The same with everything small: seconds instead of minutes, and results that mean nothing."""
    small = {"width": 16, "depth": 1, "channels": 2, "updates": 20}
    return dataclasses.replace(
        settings,
        teacher=dataclasses.replace(settings.teacher, **small),
        student=dataclasses.replace(settings.student, **small),
        epochs=2,
        pool=40,
        rollout_steps=4,
        sample_steps=8,
        draws=2,
        rows=1,
        quick=True,
    )
