"""Bad input raises with what was expected, what was received and the mend, before anything has moved."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import (
    V,
    fit,
    make_batches,
    make_student,
    make_trainer,
    optimizer_state,
    same_bits,
    weights_of,
)


def spoil(field, value, where=(1, 2)):
    """Batches of which the third has one bad value at an active position, built without validation."""
    batches = make_batches([(2, 6)] * 4)
    bad = batches[2].map(np.copy)
    bad.loss_weights[where] = 1.0
    if field == "teacher":
        bad.teacher.logits[where][3] = value
    elif field == "teacher_row":
        bad.teacher.logits[where] = value
    else:
        getattr(bad, field)[where] = value
    batches[2] = bad
    return batches


SPOILED = {
    "nan_weight": ("loss_weights", np.nan, "`loss_weights` must contain only finite"),
    "enormous_weight": ("loss_weights", 3e38, "`loss_weights` must contain only finite values, at most"),
    "inf_weight": ("loss_weights", np.inf, "`loss_weights` must contain only finite"),
    "negative_weight": ("loss_weights", -1.0, "`loss_weights` must be nonnegative"),
    "negative_target": ("target_ids", -1, "active target_ids must be nonnegative"),
    "target_too_large": ("target_ids", V, "smaller than the vocabulary size"),
    "nan_teacher": ("teacher", np.nan, "active teacher_logits"),
    "inf_teacher": ("teacher", np.inf, "active teacher_logits"),
    "empty_teacher": ("teacher_row", -np.inf, "active teacher_logits"),
}


def tuples(batches):
    return (b.as_fit() for b in batches)


@pytest.mark.parametrize("name", SPOILED)
def test_value_that_breaks_the_contract_inside_the_step_is_named_and_placed_and_moves_nothing(name):
    field, value, message = SPOILED[name]
    trainer = make_trainer(optimizer=keras.optimizers.AdamW(1e-2), accumulation_steps=2)
    good = make_batches([(2, 6)] * 2)
    fit(trainer, good)
    before, state = weights_of(trainer.student), optimizer_state(trainer)
    with pytest.raises(ValueError, match=message) as raised:
        trainer.fit(tuples(spoil(field, value)[2:]), steps_per_epoch=2, verbose=0)
    assert "micro-batch 0, row 1, position 2" in str(raised.value)
    assert "not applied" in str(raised.value)
    assert same_bits(before, weights_of(trainer.student))
    assert same_bits(state, optimizer_state(trainer))
    fit(trainer, good)  # and training goes on


@pytest.mark.parametrize("name", ["nan_teacher", "negative_weight"])
def test_compiled_step_names_it_too(name):
    field, value, message = SPOILED[name]
    trainer = make_trainer(jit_compile=keras.backend.backend() != "torch")
    before = weights_of(trainer.student)
    with pytest.raises(ValueError, match=message):
        trainer.fit(tuples(spoil(field, value)[2:3]), steps_per_epoch=1, verbose=0)
    assert same_bits(before, weights_of(trainer.student))


def test_student_probability_zero_where_the_teacher_has_mass_is_reported_never_nan():
    @keras.saving.register_keras_serializable("tests")
    class Excluding(keras.layers.Layer):
        def call(self, logits):
            ids = keras.ops.arange(V)
            return keras.ops.where(ids == 3, -float("inf"), logits)

    ids = keras.Input((None,), dtype="int32", name="token_ids")
    logits = Excluding()(make_student()({"token_ids": ids}))
    trainer = make_trainer(keras.Model({"token_ids": ids}, logits), loss=kdo.losses.DistillationLoss())
    before = weights_of(trainer.student)
    with pytest.raises(ValueError, match="the loss must be finite.*probability 0"):
        fit(trainer, make_batches([(2, 6)]))
    assert same_bits(before, weights_of(trainer.student))
    # The same id excluded by the teacher is fine.
    batch = make_batches([(2, 6)])[0].map(np.copy)
    batch.teacher.logits[..., 3] = -np.inf
    history = fit(trainer, [batch])
    assert np.isfinite(history.history["loss"][0])
    assert all(np.all(np.isfinite(w)) for w in weights_of(trainer.student))


def test_diverged_student_is_reported():
    trainer = make_trainer()
    trainer.student.get_layer("head").bias.assign(np.full((V,), np.nan, "float32"))
    with pytest.raises(ValueError, match="active student logits must be finite.*learning rate"):
        fit(trainer, make_batches([(2, 6)]))


def test_evaluate_reports_as_well():
    trainer = make_trainer()
    bad = spoil("teacher", np.nan)[2]
    with pytest.raises(ValueError, match="active teacher_logits"):
        trainer.evaluate(tuples([bad]), steps=1, verbose=0)
    trainer.evaluate(make_batches([(2, 6)]), verbose=0)


def test_exception_in_the_data_leaves_the_student_whole():
    trainer = make_trainer()
    before = weights_of(trainer.student)

    class Broken(keras.utils.PyDataset):
        def __init__(self, good):
            super().__init__()
            self.good = good

        def __len__(self):
            return 3

        def __getitem__(self, index):
            if index >= self.good:
                raise OSError("disk gone")
            return make_batches([(2, 6)])[0]

    for good in (0, 1, 2):
        with pytest.raises(Exception, match="disk gone"):
            trainer.fit(Broken(good), verbose=0)
        assert all(w.size for w in weights_of(trainer.student))
    assert [w.shape for w in weights_of(trainer.student)] == [w.shape for w in before]


COMPILE = {
    "loss": ({"loss": "mse"}, ValueError, "argument of the trainer"),
    "loss_weights": ({"loss_weights": [1.0]}, ValueError, "per token"),
    "steps_per_execution": ({"steps_per_execution": 2}, ValueError, "accumulation_steps"),
    "unknown": ({"learning_rate": 1.0}, TypeError, "unexpected argument `learning_rate`"),
    "accumulation_zero": ({"accumulation_steps": 0}, ValueError, "`accumulation_steps` must be a whole number"),
    "accumulation_bool": ({"accumulation_steps": True}, ValueError, "`accumulation_steps` must be a whole number"),
    "on_empty": ({"on_empty": "ignore"}, ValueError, "`on_empty` must be one of"),
    "metric": ({"metrics": [3]}, TypeError, "`metrics` must hold"),
    "same_names": ({"metrics": [kdo.metrics.WeightedRatio(name="loss")]}, ValueError, "different names"),
    "own_accumulation": (
        {"optimizer": keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
        ValueError,
        "gradient_accumulation_steps=2.*compile",
    ),
}


@pytest.mark.parametrize("name", COMPILE)
def test_compile_refuses(name):
    arguments, kind, message = COMPILE[name]
    trainer = kdo.trainers.PreparedTrainer(make_student(), kdo.losses.DistillationLoss())
    with pytest.raises(kind, match=message):
        trainer.compile(**{"optimizer": "sgd", **arguments})
    assert not trainer.compiled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("student", kdo.losses.DistillationLoss()), "`student` must be a Keras model"),
        ((None, kdo.losses.DistillationLoss()), "`student` must be a Keras model"),
        ((make_student, "kl"), "`student` must be a Keras model"),
    ],
)
def test_constructor_refuses_what_is_not_a_model(arguments, message):
    with pytest.raises(TypeError, match=message):
        kdo.trainers.PreparedTrainer(*arguments)


def test_constructor_refuses_losses_and_logits_fn_that_cannot_be_called():
    with pytest.raises(TypeError, match="`loss` must be a callable"):
        kdo.trainers.PreparedTrainer(make_student(), "kl")
    with pytest.raises(TypeError, match="`loss` must be a callable"):
        kdo.trainers.PreparedTrainer(make_student(), kdo.losses.DistillationLoss)
    with pytest.raises(TypeError, match="`logits_fn` must be None or a callable"):
        kdo.trainers.PreparedTrainer(make_student(), kdo.losses.DistillationLoss(), logits_fn=3)


def test_fit_refuses_before_compile_and_odd_data():
    trainer = kdo.trainers.PreparedTrainer(make_student(), kdo.losses.DistillationLoss())
    batch = make_batches([(2, 6)])[0]
    with pytest.raises(ValueError, match="compile"):
        trainer.fit(batch)
    trainer.compile("sgd", run_eagerly=True)
    x, y, weights = batch.as_fit()
    for arguments, message in (
        ((np.ones((2, 3)),), "`x` must be a PreparedDataset"),
        (("data",), "`x` must be a PreparedDataset"),
        ((batch, y), "must be None when `x` is a PreparedBatch"),
        ((x, np.ones((2, 6))), "`y` must be a dict with 'target_ids'"),
        ((x, y), "`sample_weight` must hold the weight of every token"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.fit(*arguments, verbose=0)
    with pytest.raises(ValueError, match="`class_weight` has no meaning"):
        trainer.fit(batch, class_weight={0: 1.0})
    with pytest.raises(ValueError, match="unknown.*|also \\['labels'\\]"):
        trainer.fit(x, {**y, "labels": y["target_ids"]}, sample_weight=weights, verbose=0)


def test_steps_per_epoch_that_the_window_does_not_divide_is_refused():
    trainer = make_trainer(accumulation_steps=2)
    with pytest.raises(ValueError, match=r"`steps_per_epoch` \(3\) must be a multiple of `accumulation_steps` \(2\)"):
        trainer.fit(tuples(make_batches([(2, 6)] * 4)), steps_per_epoch=3, verbose=0)


def test_lora_enabled_after_the_optimizer_was_built_is_refused():
    trainer = make_trainer()
    fit(trainer, make_batches([(2, 6)]))
    trainer.student.get_layer("hidden").enable_lora(2)
    with pytest.raises(ValueError, match="call compile\\(\\) again"):
        fit(trainer, make_batches([(2, 6)]))
    trainer.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    kernel = np.array(keras.ops.convert_to_numpy(trainer.student.get_layer("hidden")._kernel))
    fit(trainer, make_batches([(2, 6)]))
    np.testing.assert_array_equal(kernel, keras.ops.convert_to_numpy(trainer.student.get_layer("hidden")._kernel))


def test_student_without_trainable_variables_is_refused():
    student = make_student()
    student.trainable = False
    with pytest.raises(ValueError, match="no trainable variables"):
        fit(make_trainer(student), make_batches([(2, 6)]))


def test_logits_that_do_not_align_are_refused():
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    pooled = keras.layers.GlobalAveragePooling1D(keepdims=True)(make_student()({"token_ids": ids}))
    with pytest.raises(ValueError, match="must align with target_ids"):
        fit(make_trainer(keras.Model({"token_ids": ids}, pooled)), make_batches([(2, 6)]))


def test_teacher_of_another_vocabulary_is_refused():
    batch = make_batches([(2, 6)])[0]
    wide = np.concatenate([batch.teacher.logits, batch.teacher.logits[..., :2]], axis=-1)
    batch = kdo.data.PreparedBatch.create(
        model_inputs=batch.model_inputs,
        target_ids=batch.target_ids,
        loss_weights=batch.loss_weights,
        teacher=kdo.data.DenseTargets(wide),
    )
    with pytest.raises(ValueError, match="identical shapes"):
        fit(make_trainer(), [batch])


def test_distilling_without_a_teacher_is_refused_and_changing_the_teacher_changes_the_loss():
    with pytest.raises(ValueError, match="Distillation needs a teacher"):
        fit(make_trainer(), make_batches([(2, 6)], teacher=False))
    batch = make_batches([(2, 6)])[0]
    other = batch.map(np.copy)
    other.teacher.logits[...] = np.roll(other.teacher.logits, 1, axis=-1)
    losses = [make_trainer().test_on_batch(b, return_dict=True)["loss"] for b in (batch, other)]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_stale_batches_are_refused_while_training():
    batches = [
        kdo.data.PreparedBatch(
            *[getattr(b, n) for n in ("model_inputs", "target_ids", "loss_weights", "teacher")],
            stamp=kdo.data.Stamp(policy_version=0),
        )
        for b in make_batches([(2, 6)] * 4)
    ]
    trainer = make_trainer()
    with pytest.raises(Exception, match="updates ago.*max_staleness is 1"):
        trainer.fit(kdo.data.PreparedDataset(batches, max_staleness=1), verbose=0)
    assert all(w.size for w in weights_of(trainer.student))
    fresh = make_trainer()
    fresh.fit(kdo.data.PreparedDataset(batches, max_staleness=3), verbose=0)
    assert fresh.policy_version == 4


def test_arguments_of_fit_that_would_be_ignored_are_refused():
    trainer = make_trainer()
    batches = make_batches([(2, 6)] * 2)
    before = weights_of(trainer.student)
    for data in (batches, kdo.data.PreparedDataset(batches), iter(batches)):
        with pytest.raises(ValueError, match="`batch_size` must be None for a"):
            trainer.fit(data, batch_size=4, verbose=0)
    with pytest.raises(ValueError, match="`validation_split` must be 0"):
        trainer.fit(batches[0], validation_split=0.5, verbose=0)
    assert same_bits(weights_of(trainer.student), before)


def test_generator_that_would_have_to_be_walked_twice_is_refused():
    trainer = make_trainer(accumulation_steps=3)
    with pytest.raises(ValueError, match="A generator can be walked only once, and epochs=2"):
        trainer.fit(tuples(make_batches([(2, 6)] * 6)), epochs=2, verbose=0)
    trainer.fit(tuples(make_batches([(2, 6)] * 6)), epochs=2, steps_per_epoch=3, verbose=0)
    assert trainer.policy_version == 2


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"metrics": [keras.metrics.SparseCategoricalAccuracy]}, TypeError, "not their classes"),
        ({"metrics": keras.metrics.SparseCategoricalAccuracy()}, TypeError, "`metrics` must be a list"),
        ({"weighted_metrics": {"logits": "accuracy"}}, TypeError, "`weighted_metrics` must be a list"),
        ({"metrics": "mse"}, TypeError, "`metrics` must be a list"),
        ({"optimizer": {}}, TypeError, "`optimizer` must be a Keras optimizer"),
        ({"optimizer": None}, TypeError, "`optimizer` must be a Keras optimizer"),
        ({"optimizer": "adamm"}, ValueError, "`optimizer` must be a Keras optimizer"),
    ],
)
def test_metrics_and_optimizers_of_the_wrong_kind_are_refused(arguments, error, message):
    trainer = kdo.trainers.PreparedTrainer(make_student(), kdo.losses.DistillationLoss())
    with pytest.raises(error, match=message):
        trainer.compile(**{"optimizer": "sgd", **arguments})


def test_metric_that_cannot_compare_ids_with_logits_says_what_it_is_called_with():
    trainer = kdo.trainers.PreparedTrainer(make_student(), kdo.losses.DistillationLoss())
    trainer.compile("sgd", metrics=["mse"])
    before = weights_of(trainer.student)
    with pytest.raises(Exception, match="The metric '.*' cannot compare ids with logits"):
        trainer.fit(make_batches([(2, 6)]), verbose=0)
    assert same_bits(weights_of(trainer.student), before)
