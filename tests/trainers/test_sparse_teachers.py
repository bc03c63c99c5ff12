"""A student fitted to a teacher's k likeliest ids: the numbers of whole windows, compiled, and refusals."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import (
    fit,
    largest_difference,
    make_batches,
    make_student,
    make_trainer,
    train_reference,
    weights_of,
)


def sparse(batch, **settings):
    """The same batch with the teacher's three likeliest ids as NumPy arrays."""
    teacher = kdo.data.TopKTargets.from_logits(batch.teacher.logits, 3, temperature=2.0, **settings)
    teacher = teacher.map(lambda x: np.array(keras.ops.convert_to_numpy(x)))
    return kdo.data.PreparedBatch.create(
        model_inputs=batch.model_inputs,
        target_ids=batch.target_ids,
        loss_weights=batch.loss_weights,
        teacher=teacher,
    )


@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_compiled_windows_equal_whole_ones(tail):
    batches = [sparse(batch, tail=tail) for batch in make_batches([(2, 6)] * 4)]
    loss = kdo.losses.DistillationLoss(temperature=2.0, soft_weight=0.7, hard_weight=0.3)
    expected = make_student()
    train_reference(expected, loss, keras.optimizers.SGD(0.1), [batches[:2], batches[2:]])
    compile_arguments = {"jit_compile": True} if keras.backend.backend() != "torch" else {}
    trainer = make_trainer(loss=loss, accumulation_steps=2, **compile_arguments)
    fit(trainer, batches)
    assert trainer.policy_version == 2
    # Two updates in float32 from sums taken in another order.
    assert largest_difference(weights_of(trainer.student), weights_of(expected)) < 5e-6
    assert largest_difference(weights_of(trainer.student), weights_of(make_student())) > 1e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_targets_move_nothing_and_are_named_by_kind(compiled):
    (batch,) = [sparse(batch) for batch in make_batches([(2, 6)])]
    batch.teacher.ids[...] = 1
    trainer = make_trainer(**({"jit_compile": True} if compiled and keras.backend.backend() != "torch" else {}))
    before = weights_of(trainer.student)
    with pytest.raises(ValueError, match=r"active top-k ids must differ within a position.*the first at micro-batch 0"):
        fit(trainer, [batch])
    assert largest_difference(before, weights_of(trainer.student)) == 0.0


def drawn(batch, n=8, **settings):
    """The same batch with ids drawn from its teacher at temperature 2."""
    teacher = kdo.data.SampledTargets.from_logits(batch.teacher.logits, n, seed=0, temperature=2.0, **settings)
    return kdo.data.PreparedBatch.create(
        model_inputs=batch.model_inputs, target_ids=batch.target_ids, loss_weights=batch.loss_weights, teacher=teacher
    )


def test_compiled_windows_of_drawn_ids_equal_whole_ones_and_report_what_they_are():
    batches = [drawn(batch, proposal_temperature=1.5) for batch in make_batches([(2, 6)] * 4)]
    loss = kdo.losses.DistillationLoss(temperature=2.0, soft_weight=0.7, hard_weight=0.3)
    expected = make_student()
    train_reference(expected, loss, keras.optimizers.SGD(0.1), [batches[:2], batches[2:]])
    compile_arguments = {"jit_compile": True} if keras.backend.backend() != "torch" else {}
    metrics = [kdo.metrics.RetainedMass(), kdo.metrics.TeacherCrossEntropy()]
    trainer = make_trainer(loss=loss, accumulation_steps=2, metrics=metrics, **compile_arguments)
    history = fit(trainer, batches).history
    # Two updates in float32 from sums taken in another order.
    assert largest_difference(weights_of(trainer.student), weights_of(expected)) < 5e-6
    weights = np.concatenate([batch.loss_weights.ravel() for batch in batches])
    mass = np.concatenate([batch.teacher.retained_mass().ravel() for batch in batches])
    assert history["distill/retained_mass"][0] == pytest.approx(np.average(mass, weights=weights), rel=1e-5)
    assert history["distill/cross_entropy"][0] > history["distill/soft_loss"][0] / 4


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("counts", 0, "sampled counts must be finite"), ("ids", -1, r"sampled ids must be in \[0, V\)")],
)
def test_wrong_drawn_ids_move_nothing_and_are_named_by_kind(name, value, message):
    (batch,) = [drawn(batch) for batch in make_batches([(2, 6)])]
    getattr(batch.teacher, name)[...] = value
    trainer = make_trainer()
    before = weights_of(trainer.student)
    with pytest.raises(ValueError, match=f"active {message}.*the first at micro-batch 0"):
        fit(trainer, [batch])
    assert largest_difference(before, weights_of(trainer.student)) == 0.0


def test_teacher_that_says_nothing_is_refused_at_the_first_batch_unless_told_otherwise():
    (batch,) = make_batches([(8, 6)])
    batch.teacher.logits[...] = 0.0
    trainer = make_trainer()
    with pytest.raises(kdo.data.DegenerateTeacherError, match="prefers no id.*It also says the same"):
        trainer.fit(kdo.data.PreparedDataset(batch), verbose=0)
    assert trainer.policy_version == 0
    trainer.fit(kdo.data.PreparedDataset(batch, check_teacher=False), verbose=0)
    assert trainer.policy_version == 1


def test_metrics_of_dense_teachers_say_so():
    trainer = make_trainer(metrics=[kdo.metrics.TeacherKL()])
    with pytest.raises(ValueError, match=r"dense logits, and the batch has TopKTargets. Remove the metric"):
        fit(trainer, [sparse(batch) for batch in make_batches([(2, 6)])])
