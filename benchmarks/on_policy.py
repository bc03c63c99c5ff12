"""Distillation on a corpus, on the student's own samples, and on both, at equal budgets.

    python benchmarks/on_policy.py

The task of `kdo demo tokens`: one teacher of scans of handwritten digits, small students from a fresh start for
each seed. Two budgets are held equal, one at a time:

- teacher tokens: every way has as many updates of as many rows, each position scored once by the teacher;
- student tokens: rollouts cost the student forward passes. A trained token counts three (forward, and backward
  as two), a sampled one as many as the sampler has steps. The corpus gets more updates for what on-policy spent.

Each is done with the whole corpus, and with a hundred scans of it, where corruptions of data cover little.
"""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from _common import RESULTS, machine, table, versions, write_json

from keras_diffusion_opd.demos.tokens.batches import Rollouts, digit_corruption
from keras_diffusion_opd.demos.tokens.digits import PIXELS, Scans, load_scans
from keras_diffusion_opd.demos.tokens.evaluation import Examiner, sliced_wasserstein
from keras_diffusion_opd.demos.tokens.settings import Settings, quick
from keras_diffusion_opd.demos.tokens.training import Course, denoiser
from keras_diffusion_opd.losses import DistillationLoss, TokenCrossEntropyLoss
from keras_diffusion_opd.models import TeacherScorer
from keras_diffusion_opd.samplers import MaskedSampler

SCARCE = 100
TRAINED_TOKEN = 3  # forward passes that forward and backward of one token cost
NAMES = ("bits_per_pixel", "kl_held_out", "kl_own_samples", "sample_distance")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to make batches, and the updates it may make."""

    name: str
    corpus: str | None  # "all", "scarce", or none
    own_share: float
    updates: int


def ways(settings: Settings) -> list[Way]:
    """All ways; the longer corpus runs spend what rollouts cost the student of the on-policy run."""
    updates, rows = settings.student.updates, settings.student.updates * settings.batch_size
    sampled = settings.epochs * settings.pool * settings.rollout_steps
    longer = updates * (1 + sampled / (TRAINED_TOKEN * rows))
    longer = settings.epochs * round(longer / settings.epochs)
    found = [Way("on-policy", None, 1.0, updates)]
    for corpus in ("all", "scarce"):
        found += [
            Way(f"corpus ({corpus})", corpus, 0.0, updates),
            Way(f"corpus ({corpus}), equal student tokens", corpus, 0.0, longer),
            Way(f"mixture ({corpus})", corpus, 0.5, updates),
        ]
    return found


class Trial:
    """Teacher and judge, shared by all runs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.training, self.held_out = load_scans()
        self.scarce = Scans(self.training.token_ids[:SCARCE], self.training.class_ids[:SCARCE])
        keras.utils.set_random_seed(0)
        self.model = denoiser(settings.teacher, "teacher")
        course = Course(self.model, TokenCrossEntropyLoss(), settings.teacher, settings.epochs)
        rollouts = Rollouts(settings.seed_of("teacher masks"), course.updates_per_epoch, settings.batch_size)
        course.train("teacher", self.model.get_weights(), rollouts.mixing(self.training, 0.0))
        self.teacher = TeacherScorer(self.model, batch_size=settings.batch_size * 25)
        self.student = denoiser(settings.student, "student")
        self.examiner = Examiner(self.student, self.model, digit_corruption(), 1)
        self.sampler = MaskedSampler(digit_corruption().mask_id)
        self.courses: dict[int, Course] = {}

    def run(self, way: Way, seed: int) -> dict[str, float]:
        """Train a student in this way from the start of this seed, and examine it."""
        settings = self.settings
        network = dataclasses.replace(settings.student, updates=way.updates)
        if way.updates not in self.courses:
            self.courses[way.updates] = Course(self.student, DistillationLoss(), network, settings.epochs)
        course = self.courses[way.updates]
        keras.utils.set_random_seed(1000 + seed)
        start = denoiser(settings.student, "start").get_weights()
        rollouts = Rollouts(
            100 + seed, course.updates_per_epoch, settings.batch_size, settings.pool, settings.rollout_steps
        )
        corpus = {None: None, "all": self.training, "scarce": self.scarce}[way.corpus]
        course.train(f"seed {seed}, {way.name}", start, rollouts.mixing(corpus, way.own_share, self.teacher))
        scores = self.examiner(self.held_out, settings.draws)
        classes = self.training.class_ids
        drawn = self.sampler.sample(
            self.student,
            shape=(len(classes), PIXELS),
            steps=settings.sample_steps,
            seed=seed,
            conditions={"class_ids": classes},
        )
        own = Scans(drawn, classes)
        return {
            "bits_per_pixel": float(np.mean(self.examiner.bits(self.student, self.held_out, settings.draws))),
            "kl_held_out": scores.kl,
            "kl_own_samples": self.examiner(own, max(1, settings.draws // 16)).kl,
            "sample_distance": sliced_wasserstein(own, self.held_out),
        }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over seeds and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--quick", action="store_true", help="tiny networks: shows that it runs, results mean nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "on_policy.json")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("a standard error needs at least 2 seeds")
    settings = quick(Settings()) if options.quick else Settings()
    trial = Trial(settings)
    results: list[dict[str, Any]] = []
    for way in ways(settings):
        runs = [trial.run(way, seed) for seed in range(options.seeds)]
        results.append({**dataclasses.asdict(way), "runs": runs})
    plain = [r for r in results if r["own_share"] == 0.0 and r["updates"] == settings.student.updates]
    base = {result["corpus"]: result for result in plain}
    for result in results:
        paired = base["all"] if result["corpus"] is None else base[result["corpus"]]
        for name in NAMES:
            result[name] = mean_and_error([run[name] for run in result["runs"]])
            gains = [a[name] - b[name] for a, b in zip(paired["runs"], result["runs"], strict=True)]
            result[f"{name}_gain"] = mean_and_error(gains)
    print(table(["way", "updates", *NAMES], [_row(result) for result in results]))
    write_json(
        options.output,
        {
            "settings": {
                **settings.to_json(),
                "seeds": options.seeds,
                "scarce": SCARCE,
                "trained_token": TRAINED_TOKEN,
            },
            "machine": machine(),
            "versions": versions("keras", keras.backend.backend(), "numpy", "scikit-learn"),
            "results": results,
        },
    )


def _row(result: dict[str, Any]) -> list[str]:
    cells = (f"{result[name][0]:.4f} +- {result[name][1]:.4f}" for name in NAMES)
    return [result["name"], str(result["updates"]), *cells]


if __name__ == "__main__":
    main()
