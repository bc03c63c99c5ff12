"""Saving, cloning, and the traps of the frameworks below that a trainer must step around."""

import itertools

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import V, fit, largest_difference, make_batches, make_student, make_trainer, same_bits, weights_of

BACKEND = keras.backend.backend()
BATCHES = make_batches([(2, 6)] * 4)


@keras.saving.register_keras_serializable("tests")
def second_output(student, inputs):
    return student(inputs)[1]


def test_saved_trainer_continues_as_the_original_with_its_optimizer(tmp_path):
    trainer = make_trainer(
        optimizer=keras.optimizers.AdamW(1e-2), accumulation_steps=2, metrics=[kdo.metrics.TeacherKL()]
    )
    fit(trainer, BATCHES)
    trainer.save(tmp_path / "trainer.keras")
    loaded = keras.models.load_model(tmp_path / "trainer.keras")
    assert loaded.accumulation_steps == 2 and loaded.on_empty == "skip"
    assert loaded.loss.get_config() == trainer.loss.get_config()
    assert [m.name for m in loaded.metrics] == [m.name for m in trainer.metrics]
    assert same_bits(weights_of(trainer.student), weights_of(loaded.student))
    assert loaded.policy_version == trainer.policy_version == 2
    histories = [fit(t, BATCHES).history for t in (trainer, loaded)]
    assert loaded.policy_version == 4
    # The loaded trainer compiles where the original was eager on request: run_eagerly is saved too.
    assert same_bits(weights_of(trainer.student), weights_of(loaded.student))
    assert histories[0] == histories[1]


def test_weight_file_of_the_student_holds_the_student_only(tmp_path):
    trainer = make_trainer(accumulation_steps=2)
    fit(trainer, BATCHES)
    trainer.student.save_weights(tmp_path / "student.weights.h5")
    plain = make_student(seed=7)
    plain.load_weights(tmp_path / "student.weights.h5")
    assert same_bits(weights_of(plain), weights_of(trainer.student))
    assert trainer.count_params() == plain.count_params()
    assert len(trainer.weights) == len(plain.weights)


def test_clone_has_its_own_student_of_the_same_configuration():
    trainer = make_trainer()
    clone = type(trainer).from_config(trainer.get_config())
    assert clone.student is not trainer.student
    assert clone.loss.get_config() == trainer.loss.get_config()
    clone.student.set_weights(trainer.student.get_weights())
    clone.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    fit(clone, BATCHES)
    fit(trainer, BATCHES)
    assert same_bits(weights_of(clone.student), weights_of(trainer.student))


def test_logits_fn_chooses_what_the_student_says_and_is_saved(tmp_path):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    base = make_student()
    student = keras.Model({"token_ids": ids}, [ids, base({"token_ids": ids})])
    trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.DistillationLoss(), logits_fn=second_output)
    trainer.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    fit(trainer, BATCHES)
    expected = make_trainer(loss=kdo.losses.DistillationLoss())
    fit(expected, BATCHES)
    assert largest_difference(weights_of(base), weights_of(expected.student)) < 1e-6
    trainer.save(tmp_path / "t.keras")
    assert keras.models.load_model(tmp_path / "t.keras").logits_fn is second_output


def test_loss_may_read_variables_of_the_student():
    student = make_student()

    class WithHead:
        metric_names = ()

        def __call__(self, logits, batch):
            kernel = student.get_layer("head").kernel
            primary = kdo.losses.TokenCrossEntropyLoss()(logits, batch).primary
            penalty = 0.1 * keras.ops.sum(keras.ops.square(kernel))
            return kdo.losses.LossOutput(
                kdo.losses.WeightedSum(primary.total + primary.weight * penalty, primary.weight), {}
            )

    trainer = make_trainer(student, loss=WithHead(), jit_compile=BACKEND != "torch")
    fit(trainer, BATCHES)
    regular = make_student()
    head = regular.get_layer("head")
    head.kernel_regularizer = keras.regularizers.L2(0.1)
    head._kernel.regularizer = head.kernel_regularizer
    other = make_trainer(regular, loss=kdo.losses.TokenCrossEntropyLoss())
    fit(other, BATCHES)
    # The penalty acts through its gradient: both ways of writing it train the same student.
    assert largest_difference(weights_of(student), weights_of(regular)) < 1e-5


def test_layers_of_equal_name_do_not_double_gradients():
    def build():
        keras.utils.set_random_seed(3)
        ids = keras.Input((None,), dtype="int32", name="token_ids")
        inner = keras.Sequential([keras.layers.Dense(8, name="same")], name="block")
        outer = keras.Sequential([keras.layers.Dense(8, name="same")], name="block")
        h = keras.layers.Embedding(V, 8)(ids)

        class Twice(keras.layers.Layer):
            def __init__(self):
                super().__init__(name="twice")
                self.parts = [inner, outer]

            def call(self, x):
                return self.parts[1](self.parts[0](x))

        return keras.Model({"token_ids": ids}, keras.layers.Dense(V)(Twice()(h)))

    one = make_trainer(build())
    fit(one, [kdo.data.concatenate_batches(BATCHES[:2])])
    two = make_trainer(build(), accumulation_steps=2)
    fit(two, BATCHES[:2])
    assert largest_difference(weights_of(one.student), weights_of(two.student)) < 1e-6


def test_callback_that_reads_weights_in_the_middle_of_an_epoch_sees_the_newest():
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(weights_of(self.model.student))

    trainer = make_trainer()
    trainer.fit(kdo.data.PreparedDataset(BATCHES), verbose=0, callbacks=[Reader()])
    assert len(seen) == 4
    assert all(not same_bits(a, b) for a, b in itertools.pairwise(seen))
    assert same_bits(seen[-1], weights_of(trainer.student))


def test_early_stopping_and_terminate_leave_the_student_usable():
    trainer = make_trainer()
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: setattr(trainer, "stop_training", True)
    )
    trainer.fit(kdo.data.PreparedDataset(BATCHES), epochs=3, verbose=0, callbacks=[stop])
    assert trainer.policy_version == 1
    fit(trainer, BATCHES)
    assert trainer.policy_version == 5


def test_keyboard_interrupt_leaves_the_newest_weights():
    trainer = make_trainer()

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(kdo.data.PreparedDataset(BATCHES), verbose=0, callbacks=[Interrupt()])
    expected = make_trainer()
    fit(expected, BATCHES[:2])
    assert same_bits(weights_of(trainer.student), weights_of(expected.student))


def test_student_that_is_not_built_is_built_by_the_first_batch():
    @keras.saving.register_keras_serializable("tests")
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed, self.head = keras.layers.Embedding(V, 8), keras.layers.Dense(V)

        def call(self, inputs):
            return self.head(self.embed(inputs["token_ids"]))

    trainer = make_trainer(Subclassed(), jit_compile=BACKEND != "torch")
    losses = fit(trainer, BATCHES, epochs=3).history["loss"]
    assert losses[-1] < losses[0]


def test_sum_of_float64_variables_stays_float64():
    if BACKEND == "jax":
        pytest.skip("JAX keeps float64 only with jax_enable_x64, a setting of the process")
    student = make_student(dtype="float64")
    trainer = make_trainer(student)
    assert {trainer.sum_dtype(v) for v in student.trainable_variables} == {"float64"}
    start = [np.array(keras.ops.convert_to_numpy(v.value)) for v in student.trainable_variables]
    fit(trainer, BATCHES)
    ends = [np.array(keras.ops.convert_to_numpy(v.value)) for v in student.trainable_variables]
    assert all(e.dtype == np.float64 for e in ends)
    assert max(np.abs(a - b).max() for a, b in zip(start, ends, strict=True)) > 0
