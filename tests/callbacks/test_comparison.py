"""What a resumed run must share, what the user may allow to differ, and where that is written down."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.callbacks import ProvenanceCheckpoint, resume
from keras_diffusion_opd.provenance import Parent, Recipe
from keras_diffusion_opd.provenance.checkpoints import checkpoint_lineage, read_checkpoint_record
from tests.callbacks.small_run import make_dataset
from tests.students import D, V, make_batches, make_student, make_trainer, same_bits, weights_of

IDENTITY = {"tokenizer": "0" * 64, "mask_id": 9, "vocabulary_size": V}
PARENTS = [Parent("teacher", "large", "1" * 64)]


def trained(directory, *, trainer=None, epochs=1, epoch=0, dataset=None, **arguments):
    trainer = trainer or make_trainer(optimizer="adam", accumulation_steps=3)
    arguments = {"identity": IDENTITY, "parents": PARENTS, **arguments}
    checkpoint = ProvenanceCheckpoint(directory, **arguments)
    dataset = make_dataset() if dataset is None else dataset
    trainer.fit(dataset, epochs=epochs, initial_epoch=epoch, verbose=0, callbacks=[checkpoint])
    return trainer, checkpoint


def fresh(**arguments):
    return make_trainer(make_student(seed=4), optimizer="adam", accumulation_steps=3, **arguments)


def test_identities_that_differ_or_are_missing_are_listed_with_both_values(tmp_path):
    trained(tmp_path)
    trainer = fresh()
    before = weights_of(trainer)
    with pytest.raises(ValueError) as caught:
        resume(trainer, tmp_path, identity={"tokenizer": "2" * 64, "mask_id": 9, "language": "en"})
    for phrase in (
        f"`identity.tokenizer`: '{'0' * 64}' in the checkpoint, '{'2' * 64}' here.",
        f"`identity.vocabulary_size`: {V} in the checkpoint, nothing here.",
        "`identity.language`: nothing in the checkpoint, 'en' here.",
    ):
        assert phrase in str(caught.value)
    assert "mask_id" not in str(caught.value)
    assert same_bits(weights_of(trainer), before)


def test_identity_and_parents_that_resume_was_not_given_are_compared_when_fit_begins(tmp_path):
    trained(tmp_path)
    for changed in ({"identity": {**IDENTITY, "mask_id": 8}}, {"parents": [Parent("teacher", "large", "3" * 64)]}):
        trainer = fresh()
        state = resume(trainer, tmp_path)
        before = weights_of(trainer)
        with pytest.raises(ValueError, match="is not one of this ProvenanceCheckpoint.*\n.*in the checkpoint"):
            trained(tmp_path, trainer=trainer, epochs=2, epoch=state.epoch, **changed)
        assert same_bits(weights_of(trainer), before)


def test_allowed_differences_are_recorded_in_every_later_checkpoint_and_its_lineage(tmp_path):
    trained(tmp_path)
    optimizer = keras.optimizers.Adam(0.5)
    trainer = make_trainer(make_student(seed=4), optimizer=optimizer, accumulation_steps=3)
    changed = {**IDENTITY, "mask_id": 8}
    with pytest.raises(ValueError, match=r"`trainer.optimizer.config.learning_rate`: 0.001\d* in the checkpoint, 0.5"):
        resume(trainer, tmp_path, identity=changed, allow=["identity.mask_id"])
    state = resume(trainer, tmp_path, identity=changed, allow=["identity.mask_id", "trainer.optimizer"])
    assert {change["name"] for change in state.allowed} == {
        "identity.mask_id",
        "trainer.optimizer.config.learning_rate",
    }
    _, checkpoint = trained(tmp_path, trainer=trainer, epochs=3, epoch=1, identity=changed)
    for path in checkpoint.paths()[1:]:
        record = read_checkpoint_record(path)
        allowed = {c["name"]: (c["before"], c["after"], c["updates"]) for c in record["recipe"]["allowed"]}
        assert allowed["identity.mask_id"] == (9, 8, 3)
        assert checkpoint_lineage(record).links[-1].recipe.allowed == Recipe.from_json(record["recipe"]).allowed
    # They stay there when that run is resumed in turn.
    again = make_trainer(make_student(seed=5), optimizer=keras.optimizers.Adam(0.5), accumulation_steps=3)
    assert resume(again, tmp_path, identity=changed).allowed == state.allowed


@pytest.mark.parametrize(
    ("allow", "error", "phrase"),
    [
        ("versions.keras", TypeError, "`allow` must be a list"),
        (["dataset.seed"], ValueError, "`dataset` must be given"),
    ],
)
def test_wrong_allow_is_refused(allow, error, phrase, tmp_path):
    trained(tmp_path)
    with pytest.raises(error, match=phrase):
        resume(fresh(), tmp_path, allow=allow)


def test_another_dataset_is_known_by_its_content_and_may_be_allowed(tmp_path):
    trained(tmp_path)
    other = kdo.data.PreparedDataset(make_batches([(2, 6)] * 5 + [(1, 4)] * 2, seed=1), shuffle=True, seed=5)
    with pytest.raises(ValueError, match="`dataset.digest`"):
        resume(fresh(), tmp_path, dataset=other)
    trainer = fresh()
    epoch = resume(trainer, tmp_path).epoch
    with pytest.raises(ValueError, match="`x` must be the dataset of the run.*`dataset.digest`"):
        trained(tmp_path, trainer=trainer, dataset=other, epochs=2, epoch=epoch)
    trainer = fresh()
    state = resume(trainer, tmp_path, dataset=other, allow=["dataset.digest"])
    assert [change["name"] for change in state.allowed] == ["dataset.digest"]
    trained(tmp_path, trainer=trainer, dataset=other, epochs=2, epoch=state.epoch)


def test_content_digest_is_left_out_where_it_is_not_wanted_or_cannot_be_had():
    batches = make_batches([(2, 6)] * 3)
    assert kdo.data.PreparedDataset(batches).digest() == kdo.data.PreparedDataset(list(batches)).digest()
    assert kdo.data.PreparedDataset(batches, content_digest=False).digest() is None
    assert kdo.data.PreparedDataset(batches, adapter=lambda batch: batch).digest() is None
    dataset = kdo.data.PreparedDataset(batches)
    assert dataset.settings()["digest"] is not None
    dataset.replace(batches)
    assert dataset.digest() is None


def student_of(activation, dropout=0.0):
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    h = keras.layers.Embedding(V, D)(ids)
    h = keras.layers.Dropout(dropout)(keras.layers.Dense(D, activation)(h))
    return keras.Model({"token_ids": ids}, keras.layers.Dense(V)(h))


def test_architecture_is_known_by_more_than_shapes_and_not_by_the_names_of_layers(tmp_path):
    trained(tmp_path, trainer=make_trainer(student_of("tanh"), optimizer="adam"))
    _ = [keras.layers.Dense(2) for _ in range(3)]  # Keras counts on
    resume(make_trainer(student_of("tanh"), optimizer="adam"), tmp_path)
    for other in (student_of("relu"), student_of("tanh", dropout=0.5)):
        with pytest.raises(ValueError, match="`trainer.architecture`: '"):
            resume(make_trainer(other, optimizer="adam"), tmp_path)


def test_versions_of_keras_and_the_backend_are_compared_by_what_may_change_numbers(tmp_path, monkeypatch):
    trained(tmp_path)
    name = keras.backend.backend()
    real = kdo.provenance.installed_versions()
    name = name if name in real else "tensorflow-cpu"
    patched = {**real, "keras": "4.0.1", name: "99.1.2", "python": "3.99.0", "scikit-learn": "9.9"}
    monkeypatch.setattr("keras_diffusion_opd.callbacks.comparison.installed_versions", lambda: patched)
    with pytest.raises(ValueError) as caught:
        resume(fresh(), tmp_path)
    assert "`versions.keras`: '3." in str(caught.value) and "'4.0' here" in str(caught.value)
    assert f"`versions.{name}`: '" in str(caught.value) and "python" not in str(caught.value)
    resume(fresh(), tmp_path, allow=["versions"])


def adapted(seed, base=1):
    """A student of which only the head is trained."""
    student = make_student(seed=base, dropout=0.3)
    for name in ("embedding", "hidden"):
        student.get_layer(name).trainable = False
    rng = np.random.default_rng(seed)
    head = student.get_layer("head")
    head.set_weights([rng.normal(size=w.shape).astype("float32") for w in head.get_weights()])
    return make_trainer(student, optimizer="adam", accumulation_steps=3)


def test_checkpoint_of_trainable_weights_alone_names_its_base_and_refuses_another(tmp_path):
    whole, checkpoint = trained(tmp_path, trainer=adapted(0), epochs=2, trainable_only=True, every=1, keep=9)
    path = checkpoint.paths()[-1]
    record = read_checkpoint_record(path)
    assert [entry["path"].split("/")[0] for entry in record["layout"]["student"]] == ["head", "head"]
    assert record["student"] == kdo.provenance.digest(whole.student)
    size = sum(w.nbytes for w in whole.student.get_layer("head").get_weights())
    assert (path / "student.safetensors").stat().st_size < size + 400
    for other in checkpoint.paths()[3:]:
        kdo.provenance.verify_path(other)
        other.rename(tmp_path / f".{other.name}.tmp")
    trainer = adapted(5)
    state = resume(trainer, tmp_path)
    trained(tmp_path, trainer=trainer, epochs=2, epoch=state.epoch, trainable_only=True)
    assert same_bits(weights_of(trainer), weights_of(whole))
    with pytest.raises(ValueError, match=r"`base.digest`: '\w{64}' in the checkpoint, '\w{64}' here"):
        resume(adapted(5, base=2), tmp_path)
    with pytest.raises(ValueError, match=r"`base.digest`"):
        resume(adapted(5, base=2), tmp_path, allow=["base"])


def test_frozen_weights_that_change_are_noticed(tmp_path):
    class Meddle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            layer = self.model.student.get_layer("hidden")
            layer.set_weights([w + 1 for w in layer.get_weights()])

    trainer = adapted(0)
    checkpoint = ProvenanceCheckpoint(tmp_path, trainable_only=True)
    with pytest.raises(ValueError, match="`trainable_only` needs frozen weights that stay what they are"):
        trainer.fit(make_dataset(), verbose=0, callbacks=[Meddle(), checkpoint])
