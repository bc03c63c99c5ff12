"""Everything that is found out about one trained model: a row of the table, and its picture."""

from typing import Any

import numpy as np

from keras_diffusion_opd.demos.tokens.digits import CLASSES, LEVELS, PIXELS, Scans
from keras_diffusion_opd.demos.tokens.evaluation import (
    Examiner,
    Reader,
    Scores,
    mean_and_error,
    sliced_wasserstein,
)
from keras_diffusion_opd.demos.tokens.progress import Progress
from keras_diffusion_opd.demos.tokens.settings import Settings
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser
from keras_diffusion_opd.samplers import MaskedSampler


class Examination:
    """The same scans, masks, seeds and judge for every model.

    Args:
        settings: of the run.
        training, held_out: the scans.
        examiner: scores the present student on masked scans.
    """

    def __init__(self, settings: Settings, training: Scans, held_out: Scans, examiner: Examiner) -> None:
        self.settings, self.training, self.held_out = settings, training, held_out
        self.examiner = examiner
        self.reader = Reader(training)
        self.sampler = MaskedSampler(LEVELS)

    def real_scans(self) -> dict[str, Any]:
        """The first row: what real scans reach, the floor of the sample distance."""
        distance = sliced_wasserstein(self.training, self.held_out)
        return {"model": "real scans", "sample_distance": distance, "read": self.reader(self.held_out)}

    def score(self, name: str) -> Scores:
        """The present student on the held-out scans."""
        with Progress(f"examination, {name}", self.settings.draws) as bar:
            return self.examiner(self.held_out, self.settings.draws, progress=bar.to)

    def bits(self, model: TokenDenoiser, name: str) -> np.ndarray:
        """Bound on the held-out scans, bits per pixel of each."""
        with Progress(f"bound, {name}", self.settings.draws) as bar:
            return self.examiner.bits(
                model, self.held_out, self.settings.draws, progress=lambda done, total: bar.to(done)
            )

    def teacher(self, model: TokenDenoiser, seconds: float) -> tuple[Scans, dict[str, Any]]:
        """`(picture, row)` of the teacher."""
        picture, drawn = self._samples(model, "teacher")
        return picture, self._row(model, seconds, self.bits(model, "teacher"), drawn)

    def student(
        self, model: TokenDenoiser, name: str, seconds: float, bits: np.ndarray, scores: Scores
    ) -> tuple[Scans, dict[str, Any], Scores]:
        """`(picture, row, scores on its own samples)` of the present student."""
        picture, drawn = self._samples(model, name)
        row = self._row(model, seconds, bits, drawn)
        own = self.examiner(drawn, max(1, self.settings.draws // 16))
        row |= {"kl_held_out": scores.kl, "kl_held_out_error": scores.kl_error}
        row |= {"kl_own_samples": own.kl, "kl_own_samples_error": own.kl_error}
        return picture, row | {"agreement": scores.agreement}, own

    def _row(self, model: TokenDenoiser, seconds: float, bits: np.ndarray, drawn: Scans) -> dict[str, Any]:
        mean, error = mean_and_error(bits)
        return {
            "parameters": model.count_params(),
            "seconds": round(seconds, 1),
            "bits_per_pixel": mean,
            "bits_error": error,
            "sample_distance": sliced_wasserstein(drawn, self.held_out),
            "read": self.reader(drawn),
        }

    def _samples(self, model: TokenDenoiser, name: str) -> tuple[Scans, Scans]:
        """`(to be shown, to be measured)`, in one go: the temperature is the row's own."""
        settings = self.settings
        shown = settings.rows * CLASSES
        classes = np.concatenate([np.arange(shown, dtype="int32") % CLASSES, self.training.class_ids])
        with Progress(f"samples, {name}", settings.sample_steps) as bar:
            tokens = self.sampler.sample(
                model,
                shape=(len(classes), PIXELS),
                steps=settings.sample_steps,
                seed=settings.seed_of("samples"),
                conditions={"class_ids": classes},
                temperature=np.where(np.arange(len(classes)) < shown, settings.picture_temperature, 1.0),
                callback=lambda step, steps, now: bar.to(step),
            )
        return Scans(tokens[:shown], classes[:shown]), Scans(tokens[shown:], classes[shown:])
