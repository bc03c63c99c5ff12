"""`resume`: an interrupted run equals the uninterrupted one bit for bit; what differs is named."""

import json
import shutil

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from tests.students import make_batches, make_student, make_trainer, optimizer_state, same_bits, weights_of

SIZES = [(2, 6)] * 5 + [(1, 4)] * 2  # 7 batches: windows of 3, 3 and 1, in another order every epoch
EPOCHS, WINDOWS = 2, 6


class KilledError(Exception):
    pass


class KillAfter(keras.callbacks.Callback):
    """Dies after so many windows, as a process would: before anybody can say the training has ended."""

    def __init__(self, windows):
        super().__init__()
        self.windows = windows

    def on_train_batch_end(self, batch, logs=None):
        self.windows -= 1
        if not self.windows:
            raise KilledError


class DieAtOnce(keras.callbacks.Callback):
    """Dies before the first window."""

    def on_train_begin(self, logs=None):
        raise KilledError


class Heard(keras.callbacks.Callback):
    """What a callback hears of the windows."""

    def __init__(self):
        super().__init__()
        self.windows = []

    def on_train_batch_begin(self, batch, logs=None):
        self.windows.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.windows.append((batch, logs["loss"]))


def make_all(**arguments):
    """A new trainer with everything that has a state: dropout, moments, EMA, a schedule, accumulation."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 10)
    optimizer = keras.optimizers.AdamW(schedule, use_ema=True, ema_momentum=0.8)
    student = make_student(dropout=0.3, seed=arguments.pop("seed", 1))
    return make_trainer(student, optimizer=optimizer, accumulation_steps=3, metrics=["accuracy"], **arguments)


class Source:
    """Batches by index; keeps which were drawn."""

    def __init__(self):
        self.batches, self.drawn = make_batches(SIZES), []

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        self.drawn.append(index)
        return self.batches[index]


def make_dataset(**arguments):
    return kdo.data.PreparedDataset(Source(), **{"shuffle": True, "seed": 5, **arguments})


def fit(trainer, directory, *callbacks, dataset=None, **arguments):
    """`fit` with checkpoints after every window; gives the history."""
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(directory, every=1, keep=9)
    dataset = make_dataset() if dataset is None else dataset
    arguments = {"epochs": EPOCHS, "verbose": 0, **arguments}
    return trainer.fit(dataset, callbacks=[checkpoint, *callbacks], **arguments).history


def state_of(trainer):
    seeds = [np.array(keras.ops.convert_to_numpy(v.value)) for v in trainer.variables if "seed" in v.path]
    return [*weights_of(trainer), *optimizer_state(trainer), *seeds]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """State, losses of the epochs, what callbacks heard, batches drawn, and checkpoints of the run in one piece."""
    trainer, dataset, heard, directory = make_all(), make_dataset(), Heard(), tmp_path_factory.mktemp("whole")
    history = fit(trainer, directory, heard, dataset=dataset)
    return state_of(trainer), history, heard.windows, dataset._source.drawn, directory


def as_left_by_a_kill(whole, directory, updates):
    """The checkpoints of the first `updates` windows of a run."""
    for path in whole.iterdir():
        if int(path.name.split("-")[1].split(".")[0]) <= updates:
            shutil.copytree(path, directory / path.name)


@pytest.mark.parametrize("windows", range(1, WINDOWS))
def test_run_that_is_resumed_after_any_window_equals_the_uninterrupted_one(windows, uninterrupted, tmp_path):
    expected, history, heard_by_all, drawn, whole = uninterrupted
    as_left_by_a_kill(whole, tmp_path, windows)
    trainer, dataset, heard = make_all(seed=99), make_dataset(), Heard()
    state = kdo.callbacks.resume(trainer, tmp_path, dataset=dataset)
    assert state.updates == trainer.policy_version == windows
    assert (state.epoch, state.batch) == (windows // 3, windows % 3 * 3)
    resumed = fit(trainer, tmp_path, heard, dataset=dataset, initial_epoch=state.epoch)
    assert same_bits(state_of(trainer), expected)
    assert resumed == {name: values[state.epoch :] for name, values in history.items()}
    assert heard.windows == heard_by_all[2 * windows :]
    # In the same order; TensorFlow looks at one batch more to learn the form of the data.
    wanted = drawn[-(len(SIZES) * (EPOCHS - state.epoch) - state.batch) :]
    assert dataset._source.drawn[-len(wanted) :] == wanted
    assert len(dataset._source.drawn) <= len(wanted) + 1


def test_run_that_is_killed_after_every_window_equals_the_uninterrupted_one(uninterrupted, tmp_path):
    for attempt in range(99):
        trainer = make_all(seed=attempt + 1)
        epoch = kdo.callbacks.resume(trainer, tmp_path).epoch if attempt else 0
        # Two windows an attempt: the last of an epoch counts only when the epoch has ended.
        try:
            fit(trainer, tmp_path, KillAfter(2), initial_epoch=epoch)
        except KilledError:
            continue
        break
    assert attempt == 3
    assert same_bits(state_of(trainer), uninterrupted[0])


def test_compiled_run_is_resumed_within_an_epoch_too(tmp_path):
    trainer = make_all(run_eagerly=False)
    fit(trainer, tmp_path / "whole")
    expected = state_of(trainer)
    as_left_by_a_kill(tmp_path / "whole", tmp_path / "killed", 5)
    state = kdo.callbacks.resume(trainer, tmp_path / "killed")  # compiling another one is what would take time
    assert (state.epoch, state.batch) == (1, 6)
    fit(trainer, tmp_path / "killed", initial_epoch=1)
    assert same_bits(state_of(trainer), expected)


def test_finished_run_may_be_continued_as_by_a_second_fit(tmp_path):
    def make(seed=1):
        return make_trainer(make_student(dropout=0.3, seed=seed), optimizer="adam", accumulation_steps=3)

    dataset = kdo.data.PreparedDataset(make_batches(SIZES[:3]))
    once, second = make(), make(seed=4)
    fit(once, tmp_path / "a", dataset=dataset, epochs=2)
    fit(make(), tmp_path / "b", dataset=dataset, epochs=1)
    state = kdo.callbacks.resume(second, tmp_path / "b")
    assert (state.epoch, state.batch) == (1, 0)
    fit(second, tmp_path / "b", dataset=dataset, epochs=2, initial_epoch=1)
    assert same_bits(state_of(second), state_of(once))


def test_validation_on_the_same_dataset_sees_all_of_it_in_a_resumed_epoch(tmp_path):
    def history(directory, trainer):
        dataset = kdo.data.PreparedDataset(make_batches(SIZES[:4]))
        return fit(trainer, directory, dataset=dataset, validation_data=dataset, epochs=1)

    whole = history(tmp_path / "a", make_all())
    as_left_by_a_kill(tmp_path / "a", tmp_path / "b", 1)
    trainer = make_all(seed=99)
    assert kdo.callbacks.resume(trainer, tmp_path / "b").batch == 3
    assert history(tmp_path / "b", trainer) == whole


def interrupted(directory, windows=1, **arguments):
    with pytest.raises(KilledError):
        fit(make_all(), directory, KillAfter(windows), **arguments)


def test_every_difference_is_listed_with_both_values_and_nothing_is_changed(tmp_path):
    interrupted(tmp_path)
    student = make_student()
    loss = kdo.losses.DistillationLoss(temperature=3.0, soft_weight=0.7, hard_weight=0.3)
    trainer = make_trainer(student, loss, keras.optimizers.Adam(0.5), accumulation_steps=2)
    before = [*weights_of(trainer), *trainer.student.get_weights()]
    with pytest.raises(ValueError, match="is not one of this run") as caught:
        kdo.callbacks.resume(trainer, tmp_path, dataset=make_dataset(seed=6))
    said = str(caught.value)
    for phrase in (
        "`trainer.loss.config.temperature`: 2.0 in the checkpoint, 3.0 here.",
        "`trainer.accumulation_steps`: 3 in the checkpoint, 2 here.",
        "`trainer.optimizer.config.use_ema`: True in the checkpoint, False here.",
        "`dataset.seed`: 5 in the checkpoint, 6 here.",
        "`random`: 1 variables in the checkpoint, 0 here.",
        "AdamW",
    ):
        assert phrase in said
    assert not trainer.optimizer.built
    assert same_bits([*weights_of(trainer), *trainer.student.get_weights()], before)


def test_student_of_other_shapes_or_frozen_parts_is_refused(tmp_path):
    interrupted(tmp_path)
    trainer = make_all()
    trainer.student.get_layer("embedding").trainable = False
    with pytest.raises(ValueError, match=r"`student`: .*float32 \(13, 16\) in the checkpoint, .*, not trainable here"):
        kdo.callbacks.resume(trainer, tmp_path)


def test_other_parents_other_keras_and_other_backend_are_refused(tmp_path):
    interrupted(tmp_path)
    (path,) = tmp_path.glob("step-*1")
    record = read(path)
    record["recipe"]["versions"]["keras"] = "3.1.4"
    record["recipe"]["hyperparameters"]["backend"] = "paper"
    rewrite(path, record)
    parent = kdo.provenance.Parent("teacher", "large", "0" * 64)
    with pytest.raises(ValueError) as caught:
        kdo.callbacks.resume(make_all(), tmp_path, parents=[parent])
    assert "`versions.keras`: '3.1' in the checkpoint" in str(caught.value)
    assert "`trainer.backend`: 'paper' in the checkpoint" in str(caught.value)
    assert "`parents.teacher/large`: nothing in the checkpoint, '000" in str(caught.value)


def read(path):
    return json.loads((path / "checkpoint.json").read_text())


def rewrite(path, record):
    """As somebody who knows how records are digested."""
    content = {name: value for name, value in record.items() if name != "digest"}
    digest = kdo.provenance.text_digest(kdo.provenance.canonical_json(content))
    kdo.provenance.write_json(path / "checkpoint.json", {**content, "digest": digest})


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def swap(path):
    student, optimizer = path / "metrics.safetensors", path / "random.safetensors"
    data = student.read_bytes()
    student.write_bytes(optimizer.read_bytes())
    optimizer.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "phrase"),
    [
        (lambda path: flip(path / "student.safetensors"), "student.safetensors: its content is not the one recorded"),
        (lambda path: flip(path / "random.safetensors"), "random.safetensors: its content is not the one recorded"),
        (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors: .*No such file"),
        (lambda path: (path / "student.safetensors").write_bytes(b"\xff" * 64), "student.safetensors: it has 64 bytes"),
        (swap, "random.safetensors: it has"),
        (lambda path: (path / "checkpoint.json").unlink(), "has no checkpoint.json"),
        (
            lambda path: (path / "checkpoint.json").write_text(
                (path / "checkpoint.json").read_text().replace('"batch": 3', '"batch": 0')
            ),
            "was changed after it was written",
        ),
        (lambda path: rewrite(path, {**read(path), "student": "0" * 64}), "another student than the record says"),
        (lambda path: rewrite(path, {**read(path), "surprise": 1}), r"is damaged: .*unknown: \['surprise'\]"),
        (lambda path: (path / "checkpoint.json").write_text("{}"), "`format` must be"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name_and_nothing_is_changed(damage, phrase, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "step-00000001")
    trainer = make_all(seed=99)
    before = weights_of(trainer)
    with pytest.raises(ValueError, match=phrase):
        kdo.callbacks.resume(trainer, tmp_path)
    assert same_bits(weights_of(trainer), before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory with the checkpoint of a run that was killed after its first window."""
    directory = tmp_path_factory.mktemp("first_window")
    interrupted(directory)
    return directory


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"initial_epoch": 1}, "`initial_epoch` must be 0, where the resumed run stopped. Received 1"),
        ({"steps_per_epoch": 3}, "`steps_per_epoch` must be None in a run that is resumed"),
        ({"dataset": "reseeded"}, "`x` must be the dataset .* `dataset.seed`: 5 in the checkpoint, 6 here"),
        ({"dataset": "generator", "epochs": 1}, "`x` must be the PreparedDataset"),
    ],
)
def test_fit_that_would_not_go_on_is_refused_and_may_be_called_again(arguments, phrase, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    datasets = {"reseeded": lambda: make_dataset(seed=6), "generator": lambda: iter(make_batches(SIZES))}
    trainer = make_all()
    kdo.callbacks.resume(trainer, tmp_path)
    before = weights_of(trainer)
    dataset = datasets.get(arguments.get("dataset"), make_dataset)()
    with pytest.raises(ValueError, match=phrase):
        fit(trainer, tmp_path, **{**arguments, "dataset": dataset})
    with pytest.raises(KilledError):
        fit(trainer, tmp_path, DieAtOnce())
    assert same_bits(weights_of(trainer), before)
    fit(trainer, tmp_path, epochs=1)
    assert trainer.policy_version == 3


def test_resume_needs_a_checkpoint_and_a_trainer_that_is_ready(tmp_path):
    with pytest.raises(FileNotFoundError, match="`directory` must hold a checkpoint"):
        kdo.callbacks.resume(make_all(), tmp_path)
    with pytest.raises(TypeError, match="`trainer` must be a trainer"):
        kdo.callbacks.resume(make_student(), tmp_path)
    with pytest.raises(ValueError, match="call compile"):
        kdo.callbacks.resume(kdo.trainers.PreparedTrainer(make_student(), kdo.losses.DistillationLoss()), tmp_path)
