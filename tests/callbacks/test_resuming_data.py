"""Resuming within an epoch where the data have a state of their own: rollouts of the student, grain, iterators."""

import shutil

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.callbacks import OnPolicyRollout, ProvenanceCheckpoint, RolloutRefresh, resume
from tests.callbacks.small_run import make_trainer as trainer_of_everything
from tests.callbacks.small_run import state_of
from tests.students import V, make_batches, same_bits
from tests.students import make_trainer as plain_trainer

LENGTH, EPOCHS = 6, 3
MASK = V - 1


def denoiser(seed, dropout=0.0):
    keras.utils.set_random_seed(seed)
    ids = keras.Input((LENGTH,), dtype="int32", name="token_ids")
    h = keras.layers.Dense(8, "tanh")(keras.layers.Embedding(V, 8)(ids))
    h = keras.layers.Dropout(dropout, seed=4)(h) if dropout else h
    return keras.Model({"token_ids": ids}, keras.layers.Dense(V)(h))


TEACHER = kdo.models.TeacherScorer(denoiser(7))
CORPUS = {"token_ids": (np.arange(30 * LENGTH).reshape(30, LENGTH) % (V - 1)).astype("int32")}


def on_policy_trainer(seed):
    optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.05, 10), use_ema=True)
    return plain_trainer(denoiser(seed, dropout=0.3), optimizer=optimizer, accumulation_steps=3)


ROLLOUT = OnPolicyRollout(
    kdo.samplers.MaskedSampler(MASK),
    kdo.data.MaskedCorruption(MASK),
    TEACHER,
    shape=(8, LENGTH),
    steps=2,
    batch_size=2,
    corpus=CORPUS,
    own_share=0.5,
    seed=3,
)


def train_on_policy(directory, trainer, epoch=0, every=1):
    """Half of the rows from the student, half from a corpus; 4 batches: windows of 3 and 1."""
    dataset = ROLLOUT.dataset(trainer.student, shuffle=True, max_staleness=6)
    callbacks = [RolloutRefresh(dataset, ROLLOUT, every=every), ProvenanceCheckpoint(directory, every=1, keep=99)]
    return trainer.fit(dataset, epochs=EPOCHS, initial_epoch=epoch, verbose=0, callbacks=callbacks).history


def left_after(whole, directory, updates):
    for path in whole.iterdir():
        if int(path.name.split("-")[1].split(".")[0]) <= updates:
            shutil.copytree(path, directory / path.name)


@pytest.fixture(scope="module", params=[1, 2], ids=["every_epoch", "every_other_epoch"])
def on_policy(request, tmp_path_factory):
    directory, trainer = tmp_path_factory.mktemp("on_policy"), on_policy_trainer(1)
    history = train_on_policy(directory, trainer, every=request.param)
    return request.param, directory, state_of(trainer), history


@pytest.mark.parametrize("windows", range(1, 2 * EPOCHS))
def test_on_policy_run_resumed_after_any_window_is_exact_with_its_staleness(windows, on_policy, tmp_path):
    every, whole, expected, history = on_policy
    left_after(whole, tmp_path, windows)
    trainer = on_policy_trainer(9)
    state = resume(trainer, tmp_path)
    assert (state.epoch, state.batch) == (windows // 2, windows % 2 * 3)
    resumed = train_on_policy(tmp_path, trainer, state.epoch, every)
    assert same_bits(state_of(trainer), expected)
    assert resumed == {name: values[state.epoch :] for name, values in history.items()}
    assert "staleness" in resumed


def test_rollouts_are_kept_only_where_they_are_needed_again(on_policy):
    every, whole, _, _ = on_policy
    kept = [(path / "batches.safetensors").is_file() for path in sorted(whole.iterdir())]
    # Within epochs always; at the end of one where the next trains on the same.
    ends = {1: (False, False, False), 2: (True, False, True)}[every]
    assert kept == [True, ends[0], True, ends[1], True, ends[2], ends[2]]


def test_dataset_without_its_rollouts_is_refused(tmp_path):
    trainer = on_policy_trainer(1)
    train_on_policy(tmp_path, trainer)
    for path in sorted(tmp_path.glob("step-*"))[2:]:
        if path.name > "step-00000004":
            shutil.rmtree(path)
    state = resume(trainer, tmp_path)
    assert (state.epoch, state.batch) == (2, 0)
    other = ROLLOUT.dataset(trainer.student, policy_version=4, shuffle=True, max_staleness=6)
    with pytest.raises(ValueError, match="Give fit the RolloutRefresh of the earlier run"):
        trainer.fit(other, epochs=3, initial_epoch=2, verbose=0)


class Numbered:
    """An iterator without end that knows its place, as those of grain do; `as_bytes` as its DataLoader's."""

    def __init__(self, as_bytes=False):
        self.next, self.as_bytes, self.given = 0, as_bytes, []

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        self.given.append(self.next)
        return make_batches([(2, 6)], seed=self.next)[0]

    def get_state(self):
        return str(self.next).encode() if self.as_bytes else {"next": self.next}

    def set_state(self, state):
        self.next = int(state) if self.as_bytes else state["next"]


def grain_iterator():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(make_batches([(2, 6)] * 10)).shuffle(seed=2).repeat()
    return iter(source.to_iter_dataset())


def train_on_iterator(directory, trainer, iterator, epoch=0):
    checkpoint = ProvenanceCheckpoint(directory, every=1, keep=99)
    return trainer.fit(
        iterator, epochs=2, steps_per_epoch=6, initial_epoch=epoch, verbose=0, callbacks=[checkpoint]
    ).history


@pytest.mark.parametrize("make", [grain_iterator, Numbered, lambda: Numbered(True)], ids=["grain", "own", "bytes"])
def test_iterator_with_a_state_goes_on_where_training_was_and_not_where_it_was_drawn_to(make, tmp_path):
    whole = trainer_of_everything()
    history = train_on_iterator(tmp_path / "whole", whole, make())
    for windows in (1, 2, 3) if make is grain_iterator else (1, 2):
        directory, trainer, iterator = tmp_path / str(windows), trainer_of_everything(seed=9), make()
        left_after(tmp_path / "whole", directory, windows)
        state = resume(trainer, directory)
        assert (state.epoch, state.batch) == (windows // 2, windows % 2 * 3)
        resumed = train_on_iterator(directory, trainer, iterator, state.epoch)
        assert same_bits(state_of(trainer), state_of(whole))
        assert resumed == {name: values[state.epoch :] for name, values in history.items()}
        if isinstance(iterator, Numbered):
            assert iterator.given[0] == 3 * windows + 1 and iterator.given == sorted(set(iterator.given))


def test_iterator_with_other_steps_or_without_its_state_is_refused(tmp_path):
    train_on_iterator(tmp_path, trainer_of_everything(), Numbered())
    trainer = trainer_of_everything()
    epoch = resume(trainer, tmp_path).epoch
    with pytest.raises(ValueError, match="`steps_per_epoch` must be 6, as in the run that is resumed. Received 3"):
        trainer.fit(Numbered(), epochs=3, initial_epoch=epoch, steps_per_epoch=3, verbose=0)
    with pytest.raises(ValueError, match="An iterator with get_state\\(\\) and set_state"):
        trainer.fit(iter(make_batches([(2, 6)] * 6)), epochs=3, initial_epoch=epoch, steps_per_epoch=6, verbose=0)
