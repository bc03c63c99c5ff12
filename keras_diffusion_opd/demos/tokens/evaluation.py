"""How good a model is: bound, distance from the teacher, quality of its samples."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.corruption import MaskedCorruption
from keras_diffusion_opd.demos.tokens.digits import CLASSES, PIXELS, Scans
from keras_diffusion_opd.losses import token_divergence
from keras_diffusion_opd.metrics import masked_likelihood_bound

_PROJECTIONS = 128
_QUANTILES = np.linspace(0.01, 0.99, 99)


@dataclasses.dataclass(frozen=True)
class Scores:
    """How far a student is from the teacher: sums over tokens and masks, per scan.

    Args:
        kl_sums: float64 (N,), KL of the student from the teacher in nats, summed over masked tokens.
        agreements: float64 (N,), number of masked tokens at which both put the same level first.
        masks: float64 (N,), number of masked tokens.
    """

    kl_sums: np.ndarray
    agreements: np.ndarray
    masks: np.ndarray

    @property
    def kl(self) -> float:
        """Nats per masked token."""
        return float(np.sum(self.kl_sums) / np.sum(self.masks))

    @property
    def kl_error(self) -> float:
        """Standard error of `kl` over scans: that of a ratio of sums."""
        residual = self.kl_sums - self.kl * self.masks
        return float(np.std(residual, ddof=1) / (np.mean(self.masks) * math.sqrt(len(residual))))

    @property
    def agreement(self) -> float:
        """Share of masked tokens."""
        return float(np.sum(self.agreements) / np.sum(self.masks))


class Examiner:
    """Scores student and teacher on the same masks: one compiled program for all students.

    Args:
        student: the model whose weights change from student to student.
        teacher: the model they are compared with.
        corruption: masks the tokens.
        seed: int, of the masks: the same for everyone, so that differences are paired.
    """

    def __init__(self, student: keras.Model, teacher: keras.Model, corruption: MaskedCorruption, seed: int) -> None:
        self.student, self.teacher = student, teacher
        self.corruption, self.seed = corruption, seed

        def score(inputs: Any) -> Any:
            ours, theirs = student(inputs, training=False), teacher(inputs, training=False)
            same = keras.ops.equal(keras.ops.argmax(ours, axis=-1), keras.ops.argmax(theirs, axis=-1))
            return token_divergence(ours, theirs), keras.ops.cast(same, "float32")

        self._score = backend.compiled(score, [student, teacher])

    def __call__(
        self, scans: Scans, draws: int, rows: int = 360, progress: Callable[[int], None] | None = None
    ) -> Scores:
        """Average over `draws` masks of each scan, `rows` scans at a time."""
        kl, agreements, masks = np.zeros((3, len(scans)))
        for draw in range(draws):
            out = self.corruption(self.seed, draw, np.arange(len(scans)), scans.token_ids)
            for start in range(0, len(scans), rows):
                taken = np.minimum(np.arange(start, start + rows), len(scans) - 1)
                inputs = {"token_ids": out.token_ids[taken], "class_ids": scans.class_ids[taken]}
                parts = self._score(inputs)
                chosen = taken[: len(scans) - start]
                divergence, same = (keras.ops.convert_to_numpy(part)[: len(chosen)].astype("float64") for part in parts)
                mask = out.mask[chosen]
                kl[chosen] += np.sum(divergence * mask, axis=1)
                agreements[chosen] += np.sum(same * mask, axis=1)
                masks[chosen] += np.sum(mask, axis=1)
            if progress is not None:
                progress(draw + 1)
        return Scores(kl, agreements, masks)

    def bits(
        self,
        model: keras.Model,
        scans: Scans,
        draws: int,
        rows: int = 360,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Upper bound on the negative log-likelihood of each scan, bits per pixel, on the same masks; (N,)."""
        bound = masked_likelihood_bound(
            model,
            scans.token_ids,
            self.corruption,
            samples=draws,
            seed=self.seed,
            batch_size=rows,
            conditions={"class_ids": scans.class_ids},
            progress=progress,
        )
        return bound.nats / (PIXELS * math.log(2))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Mean over scans, and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def sliced_wasserstein(first: Scans, second: Scans) -> float:
    """Distance between two sets of scans within each class, in grey levels.

    The root mean square, over random directions, classes and quantiles, of the difference between the
    quantiles of the projected scans. Not 0 between two samples of the same size from one distribution: it
    has to be read beside the distance between two sets of real scans.

    Source: Bonneel et al., "Sliced and Radon Wasserstein Barycenters of Measures", 2015.
    """
    directions = np.random.Generator(np.random.Philox(0)).normal(size=(PIXELS, _PROJECTIONS))
    directions /= np.linalg.norm(directions, axis=0)
    squares = []
    for c in range(CLASSES):
        a, b = (np.quantile(s.token_ids[s.class_ids == c] @ directions, _QUANTILES, axis=0) for s in (first, second))
        squares.append(np.mean((a - b) ** 2))
    return float(np.sqrt(np.mean(squares)))


class Reader:
    """A support vector machine that has learned to read the training scans: an independent judge."""

    def __init__(self, training: Scans) -> None:
        from sklearn.svm import SVC

        self._machine = SVC(gamma=0.001, C=10.0).fit(training.token_ids, training.class_ids)

    def __call__(self, scans: Scans) -> float:
        """Share of the scans that are read as the class they should show."""
        return float(np.mean(self._machine.predict(scans.token_ids) == scans.class_ids))
