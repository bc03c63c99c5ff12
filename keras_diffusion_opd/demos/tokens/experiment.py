"""The order of events: teacher, students, examination, report."""

import dataclasses
import time
from typing import Any

import keras

from keras_diffusion_opd.backend import BACKEND
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.demos.tokens.batches import Batches, Teacher, digit_corruption, in_turn
from keras_diffusion_opd.demos.tokens.digits import LEVELS, Scans, load_scans
from keras_diffusion_opd.demos.tokens.evaluation import Examiner
from keras_diffusion_opd.demos.tokens.examination import Examination
from keras_diffusion_opd.demos.tokens.report import Results, reading, require_matplotlib, write_report
from keras_diffusion_opd.demos.tokens.settings import Settings
from keras_diffusion_opd.demos.tokens.training import Course, Trained, denoiser
from keras_diffusion_opd.losses import DistillationLoss, TokenCrossEntropyLoss
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser
from keras_diffusion_opd.provenance import RunRecord, digest
from keras_diffusion_opd.samplers import MaskedSampler

HARD, DISTILLED, ON_POLICY, MIXTURE = "hard labels", "distilled", "on-policy", "mixture"
STUDENTS = (HARD, DISTILLED, ON_POLICY, MIXTURE)


def run(settings: Settings) -> dict[str, Any]:
    """Train, compare, and write the report.

    Args:
        settings: of the run. The directory `settings.out` is made first, so that a wrong name costs no time.

    Returns:
        dict: `rows` (a dict of numbers for each model), `reading` (the result in words), `record`
        (`RunRecord`).

    Raises:
        ModuleNotFoundError: scikit-learn or matplotlib is not installed.
        OSError: `settings.out` cannot be made or written.
    """
    require_matplotlib()
    settings.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    keras.utils.set_random_seed(settings.seed)
    record = RunRecord("tokens", seed=settings.seed, hyperparameters=settings.to_json())
    training, held_out = load_scans()

    taught, teacher_model = _teach(settings, training)
    teacher = Teacher(teacher_model, rows=settings.batch_size * 25)
    student = denoiser(settings.student, "student")
    start = student.get_weights()
    examiner = Examiner(student, teacher_model, digit_corruption(), settings.seed_of("examination masks"))
    stamps: dict[str, list[Stamp]] = {}
    trained = _train_students(settings, training, held_out, student, teacher, examiner, stamps)

    results = _examine(Examination(settings, training, held_out, examiner), student, teacher_model, taught, trained)
    models = {"teacher": taught.weights, "students at the start": start}
    models |= {name: trained[name].weights for name in STUDENTS}
    data = {"training scans": dataclasses.asdict(training), "held-out scans": dataclasses.asdict(held_out)}
    record = record.finish(
        metrics={row["model"]: {k: v for k, v in row.items() if k != "model"} for row in results.rows},
        digests={name: digest(value) for name, value in {**models, **data}.items()},
    )
    notes = {
        "backend": BACKEND,
        "seconds": round(time.monotonic() - started, 1),
        "reading": reading(results),
        "rollouts": {name: [stamp.to_json() for stamp in found] for name, found in stamps.items()},
        "curves": {name: [list(point) for point in curve] for name, curve in results.curves.items()},
    }
    record = dataclasses.replace(record, metadata=notes)
    student.set_weights(trained[DISTILLED].weights)
    write_report(settings, record, results, {"teacher": teacher_model, "distilled": student})
    return {"rows": results.rows, "reading": notes["reading"], "record": record}


def _teach(settings: Settings, training: Scans) -> tuple[Trained, TokenDenoiser]:
    model = denoiser(settings.teacher, "teacher")
    course = Course(model, TokenCrossEntropyLoss(), settings.teacher, settings.epochs)
    batches = Batches(
        digit_corruption(),
        seed=settings.seed_of("teacher masks"),
        count=course.updates_per_epoch,
        size=settings.batch_size,
    )
    return course.train("teacher", model.get_weights(), batches.of_data(training)), model


def _train_students(
    settings: Settings,
    training: Scans,
    held_out: Scans,
    student: TokenDenoiser,
    teacher: Teacher,
    examiner: Examiner,
    stamps: dict[str, list[Stamp]],
) -> dict[str, Trained]:
    """The four students: one model, one start, equal updates. Two programs: with and without teacher."""
    start = student.get_weights()
    hard = Course(student, TokenCrossEntropyLoss(), settings.student, settings.epochs)
    soft = Course(student, DistillationLoss(), settings.student, settings.epochs)
    sampler = MaskedSampler(LEVELS)

    def batches(count: int, scored: bool = True) -> Batches:
        return Batches(
            digit_corruption(),
            seed=settings.seed_of("student masks"),
            count=count,
            size=settings.batch_size,
            teacher=teacher if scored else None,
        )

    def own(name: str, count: int) -> Any:
        stamps[name] = []
        return batches(count).of_samples(sampler, settings.pool, settings.rollout_steps, stamps[name])

    def held_out_kl() -> float:
        return examiner(held_out, draws=min(4, settings.draws)).kl

    count = soft.updates_per_epoch
    half = count // 2
    courses = {
        HARD: (hard, batches(count, scored=False).of_data(training)),
        DISTILLED: (soft, batches(count).of_data(training)),
        ON_POLICY: (soft, own(ON_POLICY, count)),
        MIXTURE: (soft, in_turn(batches(count - half).of_data(training), own(MIXTURE, half))),
    }
    return {
        name: course.train(f"student, {name}", start, rollout, watch=held_out_kl)
        for name, (course, rollout) in courses.items()
    }


def _examine(
    examination: Examination,
    student: TokenDenoiser,
    teacher: TokenDenoiser,
    taught: Trained,
    trained: dict[str, Trained],
) -> Results:
    """Teacher and students in the order of the table; every student is compared with the first."""
    results = Results(rows=[examination.real_scans()], pictures={"held-out scans": examination.held_out})
    for name in STUDENTS:
        student.set_weights(trained[name].weights)
        scores = examination.score(name)
        bits = results.bits[name] = examination.bits(student, name)
        if name == HARD:
            results.add("teacher", *examination.teacher(teacher, taught.seconds))
        picture, row, results.own[name] = examination.student(student, name, trained[name].seconds, bits, scores)
        row["gain_over_hard"], row["gain_error"] = results.gain(name, HARD)
        results.add(name, picture, row)
        results.curves[name] = trained[name].curve
    return results
