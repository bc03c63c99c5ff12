"""A student trained from hidden states and head, chunk by chunk, has the weights that the dense loss gives it."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.data import DenseTargets, HiddenTargets, PreparedBatch, PreparedDataset
from tests.students import (
    V,
    fit,
    largest_difference,
    make_batches,
    make_student,
    make_trainer,
    same_bits,
    weights_of,
)

MIXED = {"temperature": 2.0, "soft_weight": 0.7, "hard_weight": 0.3}
TEACHER_HEAD = np.random.default_rng(7).normal(size=(5, V)).astype("float32")
TEACHER_BIAS = np.random.default_rng(8).normal(size=V).astype("float32")


def chunked(**settings):
    return kdo.losses.ChunkedDistillationLoss(chunk_size=7, **{**MIXED, **settings})


def hidden_batches(sizes, **arguments):
    """Prepared batches whose teacher gives hidden states; one head for all."""
    return [
        PreparedBatch.create(
            model_inputs=batch.model_inputs,
            target_ids=batch.target_ids,
            loss_weights=batch.loss_weights,
            teacher=HiddenTargets(
                np.random.default_rng(i).normal(size=(*batch.target_ids.shape, 5)).astype("float32"),
                TEACHER_HEAD,
                bias=TEACHER_BIAS,
            ),
        )
        for i, batch in enumerate(make_batches(sizes, teacher=False, **arguments))
    ]


def trained(loss, batches, student=None, **compile_arguments):
    compile_arguments = {**WAY, **compile_arguments}
    trainer = make_trainer(student, loss, keras.optimizers.Adam(0.01), **compile_arguments)
    history = fit(trainer, batches)
    return trainer, history.history


SIZES = [(2, 5), (2, 5), (2, 5), (1, 7)]
# Run eagerly, JAX compiles the loop over the chunks in every step: the step as a whole is faster.
WAY = {"jit_compile": True} if keras.backend.backend() == "jax" else {}
BACKEND = keras.backend.backend()


@pytest.mark.parametrize(("kind", "jit"), [("dense", False), ("hidden", True)])
def test_weights_and_reports_equal_those_of_the_dense_loss(kind, jit):
    batches = make_batches(SIZES) if kind == "dense" else hidden_batches(SIZES)
    compiled = {"jax": {"jit_compile": True}, "tensorflow": {"jit_compile": jit}, "torch": {}}[BACKEND]
    ours, history = trained(chunked(), batches, accumulation_steps=2, **compiled)
    theirs, expected = trained(kdo.losses.DistillationLoss(**MIXED), batches, accumulation_steps=2)
    # Adam divides small gradients by small roots; float32 sums are taken in another order.
    assert largest_difference(weights_of(ours.student), weights_of(theirs.student)) < 1e-5
    assert largest_difference(weights_of(ours.student), weights_of(make_student())) > 1e-2
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    if jit:
        return  # evaluation is the same but for one more program to compile
    mine, other = (t.evaluate(PreparedDataset(batches), verbose=0, return_dict=True) for t in (ours, theirs))
    for name, value in other.items():
        assert mine[name] == pytest.approx(value, rel=1e-5)


def test_rows_of_hidden_targets_are_cut_anew_and_share_their_head():
    batches = hidden_batches([(2, 5)] * 2)
    whole, _ = trained(chunked(), batches, accumulation_steps=2)
    trainer = make_trainer(None, chunked(), keras.optimizers.Adam(0.01), accumulation_steps=4, **WAY)
    trainer.fit(PreparedDataset(batches, batch_size=1), verbose=0)
    assert largest_difference(weights_of(trainer.student), weights_of(whole.student)) < 1e-5


def test_garbage_at_weight_zero_changes_no_bit():
    clean, dirty = make_batches(SIZES[:2]), make_batches(SIZES[:2], poison=True)
    found = [weights_of(trained(chunked(), batches)[0].student) for batches in (clean, dirty)]
    assert same_bits(*found)


def test_violations_name_the_place_and_nothing_moves():
    (batch,) = hidden_batches([(2, 5)])
    row, position = np.argwhere(batch.loss_weights > 0)[1]
    batch.teacher.hidden[row, position] = np.nan
    trainer = make_trainer(loss=chunked())
    before = weights_of(trainer.student)
    with pytest.raises(ValueError, match=rf"active teacher hidden must be finite.*row {row}, position {position}"):
        trainer.fit(iter([batch.as_fit()]), steps_per_epoch=1, verbose=0)
    assert same_bits(before, weights_of(trainer.student))


def test_frozen_head_stays_and_the_rest_moves_as_in_the_dense_loss():
    batches, students = make_batches(SIZES[:2]), []
    for loss in (chunked(), kdo.losses.DistillationLoss(**MIXED)):
        student = make_student()
        student.get_layer("head").trainable = False
        trained(loss, batches, student)
        students.append(student)
    ours, theirs = ([keras.ops.convert_to_numpy(v) for v in s.weights] for s in students)
    assert largest_difference(ours, theirs) < 1e-5
    start = [keras.ops.convert_to_numpy(v) for v in make_student().weights]
    assert same_bits(ours[-2:], start[-2:]) and not same_bits(ours, start)


def test_lora_of_the_head_is_trained_as_in_the_dense_loss():
    batches, students = make_batches(SIZES[:2]), []
    for loss in (chunked(), kdo.losses.DistillationLoss(**MIXED)):
        student = make_student()
        student.get_layer("head").enable_lora(2)
        trained(loss, batches, student)
        students.append(student)
    ours, theirs = (weights_of(s) for s in students)
    assert len(ours) == len(weights_of(make_student())) + 1  # A and B in place of the kernel
    assert largest_difference(ours, theirs) < 1e-5


def test_bfloat16_student_is_close_to_the_float32_one():
    batches = hidden_batches([(2, 5)])
    (low, wide) = (trained(chunked(), batches, make_student(dtype))[1]["loss"][0] for dtype in ("mixed_bfloat16", None))
    assert low == pytest.approx(wide, rel=1e-2)


def test_trainer_is_saved_and_loaded_and_still_predicts_logits(tmp_path):
    batches = hidden_batches(SIZES[:2])
    trainer, _ = trained(chunked(), batches)
    trainer.save(tmp_path / "trainer.keras")
    loaded = keras.models.load_model(tmp_path / "trainer.keras")
    assert loaded.loss.chunk_size == 7
    assert same_bits(weights_of(loaded.student), weights_of(trainer.student))
    logits = loaded.predict(batches[0].model_inputs, verbose=0)
    assert logits.shape == (2, 5, V)
    for one in (trainer, loaded):
        fit(one, batches)
    assert same_bits(weights_of(loaded.student), weights_of(trainer.student))


class OwnStudent(keras.Model):
    """Says itself what its head is: its embedding, tied, with a softcap."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(V, 8)
        self.embedding.build()

    def hidden_states(self, inputs, training=None):
        return keras.ops.tanh(self.embedding(inputs["token_ids"]))

    def output_head(self):
        return kdo.data.OutputHead(self.embedding.embeddings, transposed=True, softcap=4.0)

    def call(self, inputs):
        return self.output_head().logits(self.hidden_states(inputs))


def test_student_of_ones_own_with_a_tied_head():
    batches, found = hidden_batches(SIZES[:2]), []
    for loss in (chunked(), kdo.losses.DistillationLoss(**MIXED)):
        keras.utils.set_random_seed(3)
        found.append(weights_of(trained(loss, batches, OwnStudent())[0].student))
    assert largest_difference(*found) < 1e-5


def test_backbone_of_kerashub_with_a_tied_embedding():
    hub = pytest.importorskip("keras_hub").models
    batches, found = hidden_batches([(2, 5)]), []
    for loss in (chunked(), kdo.losses.DistillationLoss(**MIXED)):
        keras.utils.set_random_seed(3)
        backbone = hub.Llama3Backbone(
            vocabulary_size=V, num_layers=1, hidden_dim=8, intermediate_dim=8, num_query_heads=2, num_key_value_heads=1
        )
        scorer = kdo.models.token_scorer(backbone, bidirectional=True)
        inputs = [{**b.model_inputs, "padding_mask": np.ones_like(b.target_ids)} for b in batches]
        prepared = [
            PreparedBatch(x, b.target_ids, b.loss_weights, b.teacher) for x, b in zip(inputs, batches, strict=True)
        ]
        found.append(weights_of(trained(loss, prepared, scorer)[0].student))
    assert largest_difference(*found) < 1e-5


# ---- what is refused --------------------------------------------------------------------------------------


def test_metrics_of_logits_are_refused_with_the_mend():
    with pytest.raises(ValueError, match=r"do not exist in a ChunkedDistillationLoss.*DistillationLoss"):
        make_trainer(loss=chunked(), metrics=[kdo.metrics.StudentEntropy()])


def test_students_without_a_head_to_be_found_are_refused():
    ids = keras.Input((4,), dtype="int32")
    hidden = keras.layers.Embedding(V, 8)(ids)
    bent = keras.Model(ids, keras.layers.Dense(V, activation="relu")(hidden))
    with pytest.raises(ValueError, match=r"head must be linear"):
        make_trainer(bent, chunked())
    normed = keras.Model(ids, keras.layers.LayerNormalization()(keras.layers.Dense(V)(hidden)))
    with pytest.raises(ValueError, match=r"ends in LayerNormalization.*hidden_states.*or use DistillationLoss"):
        make_trainer(normed, chunked())
    with pytest.raises(ValueError, match=r"`logits_fn` makes logits"):
        kdo.trainers.PreparedTrainer(make_student(), chunked(), logits_fn=lambda student, x: student(x))
    assert isinstance(make_trainer(loss=chunked()), kdo.trainers.PreparedTrainer)


def test_teacher_of_another_vocabulary_is_refused():
    (batch,) = make_batches([(2, 5)])
    other = PreparedBatch(
        batch.model_inputs, batch.target_ids % 5, batch.loss_weights, DenseTargets(batch.teacher.logits[..., :5])
    )
    with pytest.raises(ValueError, match=rf"head of {V} ids and a teacher of 5"):
        fit(make_trainer(loss=chunked()), [other])
