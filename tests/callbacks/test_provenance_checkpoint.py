"""`ProvenanceCheckpoint`: when it saves, what is in it, and what it refuses."""

import json
import os

import keras
import numpy as np
import pytest
import safetensors.numpy

import keras_diffusion_opd as kdo
from tests.students import make_batches, make_student, make_trainer, optimizer_state, same_bits, weights_of

SIZES = [(2, 6)] * 7  # 7 batches: windows of 3, 3 and 1
METADATA = {"corpus": "digits", "tags": ["a", 1, None]}


def run(directory, *, epochs=2, trainer=None, callbacks=(), fit=None, **arguments):
    """`fit` holds arguments of `fit`, the rest goes to the checkpoints."""
    trainer = trainer or make_trainer(make_student(dropout=0.3), accumulation_steps=3)
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(directory, **{"keep": 99, "metadata": METADATA, **arguments})
    dataset = kdo.data.PreparedDataset(make_batches(SIZES), shuffle=True, seed=5)
    trainer.fit(dataset, epochs=epochs, verbose=0, callbacks=[*callbacks, checkpoint], **(fit or {}))
    return trainer, checkpoint


def record(path):
    return json.loads((path / "checkpoint.json").read_text())


def arrays(path, section):
    stored = safetensors.numpy.load_file(path / f"{section}.safetensors")
    return [stored[name] for name in sorted(stored)]


def names(checkpoint):
    return [path.name for path in checkpoint.paths()]


def test_saves_every_n_updates_every_epoch_and_at_the_end(tmp_path):
    _, every_two = run(tmp_path / "a", every=2)
    assert names(every_two) == ["step-00000002", "step-00000003", "step-00000004", "step-00000006"]
    positions = [(record(p)["epoch"], record(p)["batch"]) for p in every_two.paths()]
    assert positions == [(0, 6), (1, 0), (1, 3), (2, 0)]
    _, epochs_only = run(tmp_path / "b")
    assert names(epochs_only) == ["step-00000003", "step-00000006"]


def test_users_metadata_are_in_every_checkpoint_the_final_one_too(tmp_path):
    # EMA changes the weights after the last epoch, so that the final checkpoint is one of its own.
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    trainer = make_trainer(optimizer=optimizer, accumulation_steps=3)
    trainer, checkpoint = run(tmp_path, every=1, trainer=trainer)
    *_, last_epoch, final = checkpoint.paths()
    assert [last_epoch.name, final.name] == ["step-00000006", "step-00000006.1"]
    assert same_bits(arrays(final, "student"), trainer.student.get_weights())
    assert not same_bits(arrays(last_epoch, "student"), trainer.student.get_weights())
    assert all(record(path)["recipe"]["metadata"] == METADATA for path in checkpoint.paths())


def test_metadata_after_the_last_step_equal_those_of_the_periodic_checkpoints(tmp_path):
    _, periodic = run(tmp_path / "a", every=1, epochs=1)
    _, final = run(tmp_path / "b", epochs=1)
    metadata = [record(path)["recipe"]["metadata"] for path in (*periodic.paths(), *final.paths())]
    assert len(metadata) == 4 and all(found == METADATA for found in metadata)


def test_checkpoint_holds_the_whole_state_and_says_what_it_is(tmp_path):
    teacher = kdo.provenance.Parent("teacher", "large", kdo.provenance.digest(make_student(seed=8)))
    trainer = make_trainer(make_student(dropout=0.3), optimizer="adamw")
    trainer, checkpoint = run(tmp_path, trainer=trainer, parents=[teacher])
    path = checkpoint.paths()[-1]
    said = record(path)
    assert same_bits(arrays(path, "student"), trainer.student.get_weights())
    assert len(arrays(path, "optimizer")) == len(optimizer_state(trainer))
    (seed,) = arrays(path, "random")
    assert seed.shape == (2,)
    loss_total, loss_weight = arrays(path, "metrics")[:2]
    assert np.all(np.isfinite([loss_total, loss_weight])) and loss_weight > 0
    assert said["student"] == kdo.provenance.digest(trainer.student)
    assert (said["epoch"], said["batch"], said["updates"]) == (2, 0, 14)
    recipe = kdo.provenance.Recipe.from_json(said["recipe"])
    assert recipe.parents == (teacher,)
    assert recipe.hyperparameters["loss"]["config"]["temperature"] == 2.0
    assert recipe.hyperparameters["optimizer"]["name"].endswith("AdamW")
    assert recipe.hyperparameters["accumulation_steps"] == 1
    assert recipe.data["seed"] == recipe.seed == 5 and recipe.data["shuffle"] is True
    assert recipe.versions["keras"] == keras.__version__


def test_saving_changes_nothing_of_the_training(tmp_path):
    saved, _ = run(tmp_path, every=1)
    plain = make_trainer(make_student(dropout=0.3), accumulation_steps=3)
    dataset = kdo.data.PreparedDataset(make_batches(SIZES), shuffle=True, seed=5)
    plain.fit(dataset, epochs=2, verbose=0)
    assert same_bits(weights_of(saved), weights_of(plain))


def test_the_newest_are_kept(tmp_path):
    _, checkpoint = run(tmp_path, every=1, keep=2)
    assert sorted(os.listdir(tmp_path)) == names(checkpoint) == ["step-00000005", "step-00000006"]


def test_windows_without_weight_make_no_checkpoint_and_no_clash(tmp_path):
    trainer = make_trainer()
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(tmp_path, every=1)
    dataset = kdo.data.PreparedDataset(make_batches([(2, 6)] * 3, zero=(1, 2)))
    trainer.fit(dataset, verbose=0, callbacks=[checkpoint])
    assert names(checkpoint) == ["step-00000001", "step-00000001.1"]
    assert [record(path)["batch"] for path in checkpoint.paths()] == [1, 0]


def test_epoch_that_was_cut_short_keeps_its_position_and_its_sums_in_spite_of_validation(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    _, plain = run(tmp_path / "a", callbacks=[Stop()])
    batches = make_batches([(2, 6)], seed=9)
    fit = {"validation_data": kdo.data.PreparedDataset(batches)}
    _, validated = run(tmp_path / "b", callbacks=[Stop()], fit=fit)
    for checkpoint in (plain, validated):
        (path,) = checkpoint.paths()
        assert (record(path)["epoch"], record(path)["batch"]) == (0, 3)
    assert same_bits(arrays(plain.paths()[0], "metrics"), arrays(validated.paths()[0], "metrics"))


def test_directory_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="`directory` must hold nothing but checkpoints.*thesis.tex"):
        kdo.callbacks.ProvenanceCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="`directory` must be a directory"):
        kdo.callbacks.ProvenanceCheckpoint(tmp_path / "thesis.tex")
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_directory_of_another_run_is_refused(tmp_path):
    run(tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"holds a checkpoint of 3 updates, and this trainer has made 0.*resume"):
        run(tmp_path)
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_directory_that_cannot_be_written_is_refused_before_the_first_window(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make_trainer()
    before = weights_of(trainer)
    with pytest.raises(OSError, match="`directory` must be a directory that can be written"):
        run(tmp_path / "file" / "below", trainer=trainer)
    assert same_bits(before, weights_of(trainer))


@pytest.mark.parametrize("overlap", [False, True])
def test_failed_checkpoint_leaves_the_previous_one_and_the_trainer_whole(overlap, tmp_path, monkeypatch):
    trainer = make_trainer(accumulation_steps=3)
    real = os.fsync

    def full_disk(descriptor):
        if any(path.name.startswith(".step-00000002") for path in tmp_path.iterdir()):
            raise OSError(28, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="of 2 updates could not be written.*No space left.*before are untouched"):
        run(tmp_path, every=1, trainer=trainer, overlap=overlap)
    assert os.listdir(tmp_path) == ["step-00000001"]
    # Beside the training it surfaces when a later window has ended.
    assert 2 <= trainer.policy_version <= 2 + overlap and all(np.all(np.isfinite(w)) for w in weights_of(trainer))


def test_left_over_of_a_killed_process_is_removed(tmp_path):
    (tmp_path / ".step-00000002.123-abcd.tmp").mkdir(parents=True)
    _, checkpoint = run(tmp_path, epochs=1)
    assert os.listdir(tmp_path) == names(checkpoint)


@pytest.mark.parametrize(
    ("arguments", "error", "phrase"),
    [
        ({"directory": 3}, TypeError, "`directory` must be a path"),
        ({"every": 0}, ValueError, "`every` must be a whole number"),
        ({"keep": 0}, ValueError, "`keep` must be a whole number"),
        ({"parents": ["large"]}, TypeError, "`parents` must be a list of `Parent`"),
        ({"metadata": [1]}, TypeError, "`metadata` must be None or a mapping"),
        ({"metadata": {"epoch": 3}}, ValueError, "must not use the reserved key 'epoch'"),
        ({"metadata": {"x": {"y": float("nan")}}}, ValueError, r"`metadata\['x'\]\['y'\]` must be finite"),
        ({"metadata": {"x": np.zeros(2)}}, TypeError, r"`metadata\['x'\]` must be a JSON value"),
        ({"metadata": {3: 1}}, TypeError, "must have strings as keys"),
    ],
)
def test_wrong_arguments_are_refused_by_name(tmp_path, arguments, error, phrase):
    with pytest.raises(error, match=phrase):
        kdo.callbacks.ProvenanceCheckpoint(**{"directory": tmp_path / "new", **arguments})
    assert not (tmp_path / "new").exists()


def test_model_that_is_no_trainer_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(TypeError, match="saves trainers of keras_diffusion_opd. Received a Sequential"):
        checkpoint = kdo.callbacks.ProvenanceCheckpoint(tmp_path)
        model.fit(np.ones((2, 2)), np.ones(2), verbose=0, callbacks=[checkpoint])
