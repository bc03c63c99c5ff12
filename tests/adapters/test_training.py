"""One adapter in training: its variables alone move, and the result is an adapter with a history."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_diffusion_opd as kdo
from keras_diffusion_opd.adapters import Adapter, AdapterBank, Stack
from tests.adapters.tools import merged, mlp, plain, random_adapter, run, same_bits, values

X = np.random.default_rng(1).normal(size=(4, 5, 6)).astype("float32")
Y = np.random.default_rng(2).normal(size=(4, 5, 4)).astype("float32")


def tokens(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    ids = keras.Input((5,), dtype="int32")
    h = keras.layers.Embedding(7, 6, name="embedding")(ids)
    h = keras.layers.Dense(8, activation="gelu", name="hidden")(h)
    h = keras.layers.Dropout(0.5, seed=1)(keras.layers.BatchNormalization()(h))
    return keras.Model(ids, keras.layers.Dense(7, name="head")(h))


def batch(seed: int = 0) -> kdo.data.PreparedBatch:
    rng = np.random.default_rng(seed)
    return kdo.data.PreparedBatch.create(
        model_inputs=rng.integers(0, 7, (4, 5)).astype("int32"),
        target_ids=rng.integers(0, 7, (4, 5)).astype("int32"),
        loss_weights=rng.random((4, 5)).astype("float32"),
        teacher=kdo.data.DenseTargets(rng.normal(size=(4, 5, 7)).astype("float32")),
    )


def bank_of(model: Any, **arguments: Any) -> AdapterBank:
    bank = AdapterBank(model, ".*", slots=4, max_rank=3, max_stack=2, **arguments)
    bank.add(Adapter.initial("student", model, ".*", rank=2, alpha=4.0))
    bank.add(random_adapter("teacher", model, seed=5))
    return bank


def test_plain_fit_moves_the_adapter_and_nothing_else() -> None:
    model = mlp()
    bank = bank_of(model)
    student = bank.trainable("student")
    flags = [v.trainable for v in model.variables]
    before, in_slots = values(model), values(bank)
    student.compile(keras.optimizers.Adam(0.05), "mse")
    losses = student.fit(X, Y, epochs=3, batch_size=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert same_bits(values(model), before) and same_bits(values(bank), in_slots)
    assert [v.trainable for v in model.variables] == flags
    assert len(student.trainable_variables) == 2 * len(bank.paths)
    recipe = kdo.provenance.Recipe("test", seed=0)
    trained = student.adapter(recipe=recipe)
    assert trained.digest != bank.get("student").digest and trained.recipe == recipe
    assert trained.base_digest == kdo.provenance.digest(model)
    wanted = ops.convert_to_numpy(student(X))
    bank.add(trained, replace=True)
    np.testing.assert_allclose(run(bank, X, ["student"] * 4), wanted, atol=2e-6)  # the scale folded at another place
    np.testing.assert_allclose(wanted, merged(model, {"student": trained}, Stack("student"), X), atol=5e-6)


def test_prepared_trainer_moves_the_adapter_and_nothing_else() -> None:
    model = tokens()
    bank = bank_of(model)
    student = bank.trainable("student")
    before, in_slots = values(model), values(bank)
    trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.DistillationLoss(temperature=2.0))
    trainer.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), accumulation_steps=2)
    history = trainer.fit(kdo.data.PreparedDataset([batch(0), batch(1)]), epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert same_bits(values(model), before) and same_bits(values(bank), in_slots)
    assert {id(v) for v in trainer.trainable_variables} == {id(v) for v in student.trainable_variables}
    assert len(trainer.variables) == len(trainer.trainable_variables) + len(trainer.non_trainable_variables)
    assert any(np.any(part.b) for part in student.adapter().parts.values())


def test_teacher_and_student_adapters_share_one_base_in_one_batch() -> None:
    model = tokens()
    bank = bank_of(model)
    student = bank.trainable("student")
    ids = batch().model_inputs
    selection = bank.select(["student", "teacher", None, Stack("teacher", student=0.5)])
    inputs = {"inputs": ids, "slots": selection.slots, "weights": selection.weights}
    student.compile(keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = {"teacher": run(bank, ids, ["teacher"] * 4)[1], "base": plain(model, ids)[2]}
    student.fit(inputs, np.zeros((4, 5), "int32"), batch_size=4, epochs=2, verbose=0)
    y = ops.convert_to_numpy(student({key: ops.convert_to_tensor(value) for key, value in inputs.items()}))
    assert same_bits([y[1], y[2]], [rows["teacher"], rows["base"]])
    assert np.abs(y[0] - rows["base"]).max() > 0 and np.abs(y[0] - plain(model, ids)[0]).max() > 1e-3
    scorer = kdo.models.TeacherScorer(bank.adapted("teacher"))
    assert scorer is not None
    np.testing.assert_allclose(ops.convert_to_numpy(bank.adapted("teacher")(ids))[1], rows["teacher"], atol=1e-6)


def test_gradient_reaches_the_student_and_not_the_rows_of_others() -> None:
    """Targets of the teacher's rows move nothing: only the student's rows depend on what is trained."""
    model = mlp()
    results = []
    for other in (0.0, 100.0):
        bank = bank_of(model)
        student = bank.trainable("student")
        student.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction="sum"), run_eagerly=True)
        chosen = bank.select(["student", "teacher", None, "student"])
        y = Y.copy()
        y[1:3] += other
        inputs = {"inputs": X, "slots": chosen.slots, "weights": chosen.weights}
        student.fit(inputs, y, batch_size=4, verbose=0, shuffle=False)
        results.append([part.b for part in student.adapter().parts.values()])
        bank.detach()
    assert same_bits(*results) and any(np.any(b) for b in results[0])


def test_dora_trains_its_magnitudes() -> None:
    model = mlp()
    bank = AdapterBank(model, ".*", slots=1, max_rank=2, max_stack=1, dora=True)
    bank.add(Adapter.initial("d", model, ".*", rank=2, dora=True))
    np.testing.assert_allclose(run(bank, X, ["d"] * 4), plain(model, X), atol=2e-6)  # |W| / |W|, in float32
    student = bank.trainable("d")
    student.compile(keras.optimizers.Adam(0.05), "mse")
    student.fit(X, Y, epochs=2, batch_size=4, verbose=0)
    trained = student.adapter()
    for path, part in trained.parts.items():
        assert np.abs(part.magnitude - bank.get("d").parts[path].magnitude).max() > 1e-3
    expected = merged(model, {"d": trained}, Stack("d"), X)
    np.testing.assert_allclose(ops.convert_to_numpy(student(X)), expected, atol=5e-6)
    with pytest.raises(ValueError, match="not defined for DoRA"):
        bank.trainable("d", dropout=0.1)


def test_dropout_is_of_training_alone_and_the_base_runs_as_in_inference() -> None:
    model = tokens()
    bank = bank_of(model)
    bank.add(random_adapter("student", model), replace=True)
    student = bank.trainable("student", dropout=0.5)
    ids = batch().model_inputs
    still, again = (ops.convert_to_numpy(student(ids, training=False)) for _ in range(2))
    moved = ops.convert_to_numpy(student(ids, training=True))
    assert same_bits([still], [again]) and not same_bits([still], [moved])
    quiet = bank.trainable("student")
    assert same_bits([ops.convert_to_numpy(quiet(ids, training=True))], [ops.convert_to_numpy(quiet(ids))])
    with pytest.raises(ValueError, match="dropout"):
        bank.trainable("student", dropout=1.0)


def test_view_of_a_stack_keeps_it_while_the_bank_moves_on() -> None:
    model = mlp()
    bank = bank_of(model)
    view = bank.adapted(Stack(teacher=0.5))
    y = view.predict(X, verbose=0, batch_size=4)
    np.testing.assert_allclose(y, run(bank, X, [Stack(teacher=0.5)] * 4), atol=1e-6)
    bank.add(random_adapter("teacher", model, seed=8), replace=True)
    assert same_bits([view.predict(X, verbose=0, batch_size=4)], [y])
    view.close()
    with pytest.raises(ValueError, match="Nothing is trained"):
        view.adapter()
    with pytest.raises(NotImplementedError, match="Adapter.save"):
        view.get_config()


def test_interrupted_training_of_an_adapter_resumes_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        student = bank_of(tokens()).trainable("student", dropout=0.3)
        trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.DistillationLoss())
        trainer.compile(keras.optimizers.Adam(0.05), run_eagerly=True)
        return student, trainer

    dataset = kdo.data.PreparedDataset([batch(0), batch(1)])
    uninterrupted, trainer = make()
    trainer.fit(dataset, epochs=2, verbose=0)
    _, trainer = make()
    trainer.fit(dataset, epochs=1, verbose=0, callbacks=[kdo.callbacks.ProvenanceCheckpoint(tmp_path, every=1)])
    resumed, trainer = make()
    state = kdo.callbacks.resume(trainer, tmp_path)
    trainer.fit(dataset, initial_epoch=state.epoch, epochs=2, verbose=0)
    assert resumed.adapter().digest == uninterrupted.adapter().digest
