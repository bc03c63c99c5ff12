"""What compiling must not change, and how often it happens."""

import functools

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import fit, largest_difference, make_batches, make_student, make_trainer, weights_of

BACKEND = keras.backend.backend()
JIT = BACKEND != "torch"


class Counted:
    """A loss that counts how often Python runs it: once per trace where the step is compiled."""

    def __init__(self):
        self.inner = kdo.losses.DistillationLoss()
        self.metric_names = self.inner.metric_names
        self.calls = 0

    def __call__(self, logits, batch):
        self.calls += 1
        return self.inner(logits, batch)


@pytest.mark.parametrize("k", [1, 2])
def test_compiled_equals_eager(k):
    batches = make_batches([(2, 6)] * 3)
    trainers = [
        make_trainer(optimizer=keras.optimizers.Adam(1e-2), accumulation_steps=k, **how)
        for how in ({"run_eagerly": True}, {"jit_compile": JIT})
    ]
    losses = [fit(t, batches, epochs=2).history["loss"] for t in trainers]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    # Adam's first steps are sign-like: gradients near 0 may differ by their last bit.
    assert largest_difference(*(weights_of(t.student) for t in trainers)) < 1e-5


@pytest.mark.skipif(BACKEND == "torch", reason="torch runs eagerly by default: nothing is traced")
@pytest.mark.parametrize("k", [1, 2])
def test_step_is_traced_once_for_equal_shapes_and_once_more_for_a_short_batch(k):
    loss = Counted()
    trainer = make_trainer(loss=loss, accumulation_steps=k, jit_compile=JIT)
    fit(trainer, make_batches([(2, 6)] * 4), epochs=3)
    assert loss.calls == 1
    fit(trainer, make_batches([(2, 6)] * 3 + [(1, 6)]), epochs=2)
    assert loss.calls == 2


@pytest.mark.skipif(BACKEND != "jax", reason="reads the jaxpr")
def test_window_of_one_micro_batch_has_no_condition_and_keeps_no_sums():
    import jax

    trainer = make_trainer(jit_compile=True)
    trainer.optimizer.build(trainer.trainable_variables)
    state = trainer._get_jax_state(True, True, True, True)
    program = jax.make_jaxpr(trainer._single)(state, make_batches([(2, 6)])[0].as_fit())
    primitives = {str(equation.primitive) for equation in program.eqns}
    assert "cond" not in primitives
    # Outputs: logs, moved, table, and the state; no gradient sums beside them.
    logs = len(trainer.metrics)
    assert len(program.out_avals) == logs + 2 + sum(len(part) for part in state)


@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile is torch's own")
def test_torch_compile_gives_the_same_update(monkeypatch):
    import torch

    # The graph is captured and differentiated as usual; only the C++ code generation, minutes here, is left out.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    batches = make_batches([(2, 6)] * 2)
    trainers = [make_trainer(accumulation_steps=2, **how) for how in ({"run_eagerly": True}, {"jit_compile": True})]
    for trainer in trainers:
        fit(trainer, batches)
    assert largest_difference(*(weights_of(t.student) for t in trainers)) < 1e-5


def test_student_and_trainable_flags_are_left_alone():
    student = make_student()
    student.get_layer("embedding").trainable = False
    flags = [layer.trainable for layer in student.layers]
    frozen = student.get_layer("embedding").get_weights()[0]
    trainer = make_trainer(student)
    fit(trainer, make_batches([(2, 6)] * 2))
    assert trainer.student is student
    assert [layer.trainable for layer in student.layers] == flags
    np.testing.assert_array_equal(student.get_layer("embedding").get_weights()[0], frozen)
    assert not student.compiled


def test_teacher_receives_no_gradient_and_student_does():
    student, teacher = make_student(seed=1), make_student(seed=2)
    before = weights_of(teacher)
    batch = make_batches([(2, 6)])[0]
    scored = kdo.data.PreparedBatch.create(
        model_inputs=batch.model_inputs,
        target_ids=batch.target_ids,
        loss_weights=batch.loss_weights,
        teacher=kdo.data.DenseTargets(keras.ops.convert_to_numpy(teacher(batch.model_inputs))),
    )
    trainer = make_trainer(student)
    start = weights_of(student)
    fit(trainer, [scored])
    assert largest_difference(start, weights_of(student)) > 0
    assert largest_difference(before, weights_of(teacher)) == 0
