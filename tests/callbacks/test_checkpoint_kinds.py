"""What is kept, exported and written beside the training."""

import threading

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.callbacks import ProvenanceCheckpoint, resume
from keras_diffusion_opd.callbacks.background import Background
from keras_diffusion_opd.provenance.checkpoints import read_checkpoint_record
from tests.callbacks.small_run import WINDOWS, make_dataset, make_trainer, state_of, train
from tests.students import make_batches, same_bits


class Scores(keras.callbacks.Callback):
    """Logs a score of every epoch."""

    def __init__(self, *scores):
        super().__init__()
        self.scores = scores

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = self.scores[epoch]


def names(paths):
    return [int(path.name.split("-")[1]) for path in paths]


@pytest.mark.parametrize(("mode", "best"), [("min", [3, 12]), ("max", [6, 9])])
def test_best_epochs_are_kept_beside_the_newest_and_still_after_a_resume(mode, best, tmp_path):
    def fit(epoch, epochs):
        trainer = kdo_trainer()
        if epoch:
            assert resume(trainer, tmp_path).epoch == epoch
        checkpoint = ProvenanceCheckpoint(tmp_path, keep=1, keep_best=2, monitor="score", mode=mode)
        scores = Scores(0.1, 0.9, 0.8, 0.2, float("nan"))
        arguments = {"epochs": epochs, "initial_epoch": epoch, "verbose": 0}
        trainer.fit(make_dataset(), callbacks=[scores, checkpoint], **arguments)
        return checkpoint

    fit(0, 2)
    checkpoint = fit(2, 5)
    assert names(checkpoint.paths()) == [*best, 15]
    assert names([checkpoint.best()]) == [{"min": 3, "max": 6}[mode]]
    assert read_checkpoint_record(checkpoint.paths()[-1])["monitor"] == {"name": "score", "value": None}


def kdo_trainer():
    from tests.students import make_student
    from tests.students import make_trainer as plain

    return plain(make_student(), accumulation_steps=3)


def test_monitor_that_is_not_logged_is_refused_with_what_is(tmp_path):
    checkpoint = ProvenanceCheckpoint(tmp_path, keep_best=1)
    with pytest.raises(ValueError, match="`monitor` must be one of the epoch's logs, .*loss.*Give fit validation_data"):
        kdo_trainer().fit(make_dataset(), verbose=0, callbacks=[checkpoint])


def test_student_is_exported_as_a_keras_file_that_plain_keras_loads_in_safe_mode(tmp_path):
    trainer = kdo_trainer()
    checkpoint = ProvenanceCheckpoint(tmp_path, every=1, keep=9, export_keras=True)
    trainer.fit(make_dataset(), verbose=0, callbacks=[checkpoint])
    exported = [path for path in checkpoint.paths() if (path / "student.keras").is_file()]
    assert names(exported) == [3]
    assert "student.keras" in read_checkpoint_record(exported[0])["files"]
    loaded = keras.saving.load_model(exported[0] / "student.keras", safe_mode=True)
    assert same_bits(loaded.get_weights(), trainer.student.get_weights())
    assert resume(kdo_trainer(), tmp_path).updates == 3


def test_saving_beside_the_training_stores_what_the_window_left_however_long_it_takes(tmp_path, monkeypatch):
    """Writing is held up until two more windows have been trained."""
    at_once = train(tmp_path / "a", make_trainer(), checkpoint=ProvenanceCheckpoint(tmp_path / "a", overlap=False))[0]
    trainer, opened, waiting = make_trainer(), threading.Event(), []
    from keras_diffusion_opd.callbacks import checkpoint_writer

    real = checkpoint_writer.write_checkpoint

    def late(directory, content, *rest):
        waiting.append((threading.current_thread().name, content["updates"]))
        assert opened.wait(30)
        return real(directory, content, *rest)

    class Open(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.policy_version >= 2:
                opened.set()

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", late)
    train(tmp_path / "b", trainer, Open(), checkpoint=ProvenanceCheckpoint(tmp_path / "b", every=1, keep=9))
    assert ("checkpoint", 1) in waiting
    assert same_bits(state_of(trainer), state_of(at_once))
    first = make_trainer(seed=5)
    for path in sorted((tmp_path / "b").iterdir())[1:]:
        path.rename(tmp_path / path.name)
    assert resume(first, tmp_path / "b").updates == 1
    once = make_trainer()
    checkpoint = ProvenanceCheckpoint(tmp_path / "c", every=1, overlap=False, keep=9)
    train(tmp_path / "c", once, checkpoint=checkpoint)
    for name in ("student", "optimizer", "random", "metrics"):
        stored = [(tmp_path / run / "step-00000001" / f"{name}.safetensors").read_bytes() for run in "bc"]
        assert stored[0] == stored[1]
    assert once.policy_version == WINDOWS


def test_background_does_one_thing_at_a_time_and_tells_what_failed_once():
    background, done = Background(), []
    background.submit(lambda: done.append(1))
    background.submit(lambda: done.append(2))
    background.join()
    assert done == [1, 2]

    def fail():
        raise OSError("full")

    background.submit(fail)
    with pytest.raises(OSError, match="full"):
        background.submit(lambda: done.append(3))
    background.poll()
    background.join()
    assert done == [1, 2]


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="there it is allowed")
def test_orbax_needs_jax(tmp_path):
    with pytest.raises(ValueError, match="`format='orbax'` needs the JAX backend"):
        ProvenanceCheckpoint(tmp_path, format="orbax")


@pytest.mark.parametrize(
    ("arguments", "error", "phrase"),
    [
        ({"mode": "best"}, ValueError, r"`mode` must be one of \('min', 'max'\)"),
        ({"format": "pickle"}, ValueError, "`format` must be one of"),
        ({"keep_best": -1}, ValueError, "`keep_best` must be a whole number"),
        ({"identity": {"mask": np.zeros(2)}}, TypeError, r"`identity\['mask'\]` must be a JSON value"),
        ({"lineage": "base"}, TypeError, "`lineage` must be None or a Lineage"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, phrase, tmp_path):
    with pytest.raises(error, match=phrase):
        ProvenanceCheckpoint(tmp_path, **arguments)


def test_lineage_whose_last_model_is_no_parent_is_refused(tmp_path):
    lineage = kdo.provenance.Lineage().append("base", "1" * 64, kdo.provenance.Recipe("pretraining"))
    with pytest.raises(ValueError, match="none of the parents in its recipe has the weights of `base`"):
        ProvenanceCheckpoint(tmp_path, lineage=lineage)


def test_batches_of_every_kind_come_back_as_they_were():
    from keras_diffusion_opd.callbacks.batch_arrays import from_arrays, to_arrays

    top = [
        kdo.data.PreparedBatch.create(
            model_inputs=({"token_ids": b.model_inputs["token_ids"]}, [b.loss_weights]),
            target_ids=b.target_ids,
            loss_weights=b.loss_weights,
            teacher=kdo.data.TopKTargets.from_logits(b.teacher.logits, 3),
            stamp=kdo.data.Stamp(policy_version=i, sampler={"steps": 3}),
        )
        for i, b in enumerate(make_batches([(2, 6), (1, 4)]))
    ]
    described, arrays = to_arrays([*top, *make_batches([(2, 6)], teacher=False)])
    back = from_arrays(described, arrays)
    assert [batch.stamp for batch in back] == [top[0].stamp, top[1].stamp, None]
    assert to_arrays(back)[0] == described
    assert same_bits(to_arrays(back)[1], arrays)
    assert back[0].teacher.settings() == top[0].teacher.settings()
