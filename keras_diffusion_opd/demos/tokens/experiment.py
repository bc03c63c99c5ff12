"""The order of events: teacher, students, examination, report."""

import dataclasses
import time
from typing import Any

import keras

from keras_diffusion_opd.backend import BACKEND
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.demos.tokens.batches import Rollouts, digit_corruption, noting
from keras_diffusion_opd.demos.tokens.checkpoints import checkpoint_of
from keras_diffusion_opd.demos.tokens.digits import Scans, load_scans
from keras_diffusion_opd.demos.tokens.evaluation import Examiner
from keras_diffusion_opd.demos.tokens.examination import Examination
from keras_diffusion_opd.demos.tokens.report import Results, reading, require_matplotlib, write_report
from keras_diffusion_opd.demos.tokens.settings import Settings
from keras_diffusion_opd.demos.tokens.training import Course, Trained, denoiser
from keras_diffusion_opd.losses import DistillationLoss, TokenCrossEntropyLoss
from keras_diffusion_opd.models.teacher_scorer import TeacherScorer
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser
from keras_diffusion_opd.provenance import Parent, RunRecord, digest

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
    teacher = TeacherScorer(teacher_model, batch_size=settings.batch_size * 25)
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
    rollouts = Rollouts(settings.seed_of("teacher masks"), course.updates_per_epoch, settings.batch_size)
    checkpoint = checkpoint_of(settings.out, "teacher")
    return course.train("teacher", model.get_weights(), rollouts.mixing(training, 0.0), checkpoint=checkpoint), model


def _train_students(
    settings: Settings,
    training: Scans,
    held_out: Scans,
    student: TokenDenoiser,
    teacher: TeacherScorer,
    examiner: Examiner,
    stamps: dict[str, list[Stamp]],
) -> dict[str, Trained]:
    """The four students: one model, one start, equal updates. Two programs: with and without teacher."""
    start = student.get_weights()
    hard = Course(student, TokenCrossEntropyLoss(), settings.student, settings.epochs)
    soft = Course(student, DistillationLoss(), settings.student, settings.epochs)
    rollouts = Rollouts(
        settings.seed_of("student masks"),
        soft.updates_per_epoch,
        settings.batch_size,
        settings.pool,
        settings.rollout_steps,
    )

    def own(name: str, scans: Scans | None, share: float) -> Any:
        stamps[name] = []
        return noting(rollouts.mixing(scans, share, teacher), stamps[name])

    def held_out_kl() -> float:
        return examiner(held_out, draws=min(4, settings.draws)).kl

    courses = {
        HARD: (hard, rollouts.mixing(training, 0.0)),
        DISTILLED: (soft, rollouts.mixing(training, 0.0, teacher)),
        ON_POLICY: (soft, own(ON_POLICY, None, 1.0)),
        MIXTURE: (soft, own(MIXTURE, training, 0.5)),
    }
    began = [Parent("student", "students at the start", digest(start))]
    taught = [*began, Parent("teacher", "teacher", digest(teacher.model))]
    return {
        name: course.train(
            f"student, {name}",
            start,
            rollout,
            watch=held_out_kl,
            checkpoint=checkpoint_of(settings.out, name, began if name == HARD else taught),
        )
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
