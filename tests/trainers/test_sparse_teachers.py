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


def test_wrong_targets_move_nothing():
    (batch,) = [sparse(batch) for batch in make_batches([(2, 6)])]
    batch.teacher.ids[...] = 1
    trainer = make_trainer()
    before = weights_of(trainer.student)
    with pytest.raises(ValueError, match=r"active .*each at most once in a position|active top-k ids must differ"):
        fit(trainer, [batch])
    assert largest_difference(before, weights_of(trainer.student)) == 0.0


def test_metrics_of_dense_teachers_say_so():
    trainer = make_trainer(metrics=[kdo.metrics.TeacherKL()])
    with pytest.raises(ValueError, match=r"dense logits, and the batch has TopKTargets. Remove the metric"):
        fit(trainer, [sparse(batch) for batch in make_batches([(2, 6)])])
