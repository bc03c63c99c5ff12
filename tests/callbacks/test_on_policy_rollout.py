"""Rollouts of the present student: what is in them, how they are dealt, and what they are stamped with."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.callbacks import OnPolicyRollout, RolloutRefresh
from keras_diffusion_opd.data import MaskedCorruption
from keras_diffusion_opd.models import TeacherScorer
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.samplers import MaskedSampler

V, L, MASK = 6, 8, 6


def denoiser(seed):
    """Scores V ids of canvases that may hold V + 1."""
    keras.utils.set_random_seed(seed)
    ids, kinds = keras.Input((L,), dtype="int32", name="token_ids"), keras.Input((), dtype="int32", name="kinds")
    x = keras.layers.Embedding(V + 1, 6)(ids) + keras.layers.Embedding(3, 6)(kinds)[:, None]
    return keras.Model({"token_ids": ids, "kinds": kinds}, keras.layers.Dense(V)(keras.layers.Dense(8, "gelu")(x)))


STUDENT, TEACHER = denoiser(0), TeacherScorer(denoiser(1))
KINDS = {"kinds": (np.arange(12) % 3).astype("int32")}
CORPUS = {
    "token_ids": np.random.default_rng(0).integers(0, V, (40, L)).astype("int32"),
    "kinds": np.zeros(40, "int32"),
}


def rollout(**changes):
    arguments = {"shape": (24, L), "steps": 3, "batch_size": 4, "conditions": KINDS, **changes}
    sampler = arguments.pop("sampler", MaskedSampler(MASK))
    teacher = arguments.pop("teacher", TEACHER)
    return OnPolicyRollout(sampler, MaskedCorruption(MASK), teacher, **arguments)


def joined(batches):
    return kdo.data.concatenate_batches(batches)


def test_batches_hold_samples_of_the_student_under_its_conditions_scored_by_the_teacher():
    batches = rollout(samples=12)(STUDENT, 5)
    assert [batch.rows for batch in batches] == [4] * 6
    whole = joined(batches)
    # Twelve samples, each under a condition of the pool and each corrupted twice.
    rows = np.concatenate([whole.target_ids, whole.model_inputs["kinds"][:, None]], axis=1)
    _, counts = np.unique(rows, axis=0, return_counts=True)
    assert np.all(counts % 2 == 0) and counts.sum() == 24
    assert np.bincount(whole.model_inputs["kinds"]).tolist() == [8, 8, 8]
    for batch in batches:
        expected = keras.ops.convert_to_numpy(TEACHER.model(batch.model_inputs))
        np.testing.assert_allclose(batch.teacher.logits, expected, rtol=1e-4, atol=1e-5)  # another batch size


def test_every_batch_is_stamped_with_policy_teacher_sampler_and_seed():
    for batch in rollout(seed=9, temperature=0.5)(STUDENT, 5):
        assert batch.stamp.policy_version == 5
        assert batch.stamp.policy_digest == digest(STUDENT)
        assert batch.stamp.teacher_digest == TEACHER.digest
        assert batch.stamp.sampler["name"] == "MaskedSampler"
        assert batch.stamp.sampler["config"]["mask_id"] == MASK
        assert (batch.stamp.sampler["steps"], batch.stamp.sampler["temperature"]) == (3, 0.5)
        assert batch.stamp.seed == 9


def test_rollout_is_a_function_of_weights_version_and_seed():
    first, again, later, other = (
        joined(rollout(seed=seed)(STUDENT, version)) for version, seed in ((5, 0), (5, 0), (6, 0), (5, 1))
    )
    assert np.array_equal(first.target_ids, again.target_ids)
    assert np.array_equal(first.loss_weights, again.loss_weights)
    for changed in (later, other):
        assert not np.array_equal(first.target_ids, changed.target_ids)
        assert not np.array_equal(first.loss_weights, changed.loss_weights)
    moved = joined(rollout()(denoiser(2), 5))
    assert not np.array_equal(first.target_ids, moved.target_ids)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_own_share_is_exact(share):
    corpus = {name: value[:7] for name, value in CORPUS.items()}
    corpus["kinds"] = np.full(7, 2, "int32")
    pool = {"kinds": np.zeros(6, "int32")}
    source = rollout(own_share=share, corpus=corpus if share < 1 else None, conditions=pool)
    kinds = joined(source(STUDENT, 0)).model_inputs["kinds"]
    assert np.sum(kinds == 0) == 24 * share and np.sum(kinds == 2) == 24 * (1 - share)


def test_corpus_alone_needs_no_sampler_and_takes_every_row_equally_often():
    source = rollout(sampler=None, own_share=0.0, corpus=CORPUS, shape=(80, L), conditions=None)
    whole = joined(source(STUDENT, 0))
    rows, counts = np.unique(whole.target_ids, axis=0, return_counts=True)
    assert counts.tolist() == [2] * 40
    assert np.array_equal(rows, np.unique(CORPUS["token_ids"], axis=0))


def test_every_batch_holds_all_diffusion_times():
    batches = rollout(sampler=None, own_share=0.0, corpus=CORPUS, shape=(160, L), batch_size=8)(STUDENT, 0)
    masked = np.array([np.sort((batch.loss_weights > 0).sum(axis=1)) for batch in batches])
    # One row of each eighth of the times: their mean is near L / 2 in every batch, not only on average.
    assert np.all(np.abs(masked.mean(axis=1) - L / 2) < 1.0)
    assert np.all(masked[:, 0] <= 2) and np.all(masked[:, -1] >= L - 2)


def test_prompts_stay_and_are_neither_masked_nor_learned():
    prompts = np.full((12, L), MASK, "int32")
    prompts[:, :3] = np.arange(36).reshape(12, 3) % V
    whole = joined(rollout(tokens=prompts)(STUDENT, 0))
    known = {row.tobytes() for row in prompts[:, :3]}
    assert all(row.tobytes() in known for row in whole.target_ids[:, :3].astype("int32"))
    assert np.array_equal(whole.model_inputs["token_ids"][:, :3], whole.target_ids[:, :3])
    assert np.all(whole.loss_weights[:, :3] == 0) and np.any(whole.loss_weights[:, 3:] > 0)


def test_training_refreshes_the_rollouts_and_logs_their_staleness():
    student = denoiser(4)
    trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.DistillationLoss())
    trainer.compile(keras.optimizers.SGD(0.1), accumulation_steps=2)
    source = rollout()
    dataset = source.dataset(student, max_staleness=6)
    history = trainer.fit(dataset, epochs=4, verbose=0, callbacks=[RolloutRefresh(dataset, source, every=2)]).history
    # Three windows of two batches an epoch. Batches are drawn 0, 1, 2 updates after the rollout, or 3, 4, 5.
    fresh, old = history["staleness"][::2], history["staleness"][1::2]
    assert fresh[0] == fresh[1] and old[0] == old[1]
    assert old[0] - fresh[0] == 3.0
    assert 0.0 <= fresh[0] <= 1.0  # a backend may draw a batch ahead of its window
    assert dataset.replacements == 1


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"sampler": None}, TypeError, "`sampler` must have a method `sample`"),
        ({"teacher": "t"}, TypeError, "`teacher` must be None or a function"),
        ({"shape": 5}, ValueError, r"`shape` must be \(rows, length\)"),
        ({"batch_size": 5}, ValueError, "multiple of batch_size=5"),
        ({"own_share": 1.5}, ValueError, "`own_share` must be between 0 and 1"),
        ({"own_share": 0.5}, ValueError, "`corpus` and `own_share` must go together"),
        ({"corpus": CORPUS}, ValueError, "`corpus` and `own_share` must go together"),
        ({"own_share": 0.5, "corpus": {"token_ids": CORPUS["token_ids"]}}, ValueError, "with the names"),
        (
            {"own_share": 0.5, "corpus": {**CORPUS, "token_ids": CORPUS["token_ids"][:, :4]}},
            ValueError,
            r"must have shape \(rows, 8\)",
        ),
        ({"tokens": np.zeros((3, L), "int32")}, ValueError, "one number of rows"),
    ],
)
def test_arguments_are_checked(changes, error, message):
    with pytest.raises(error, match=message):
        rollout(**changes)
