"""Hidden states with a head: how they travel, what they are checked for, and that they are the dense targets."""

import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, HiddenTargets, PreparedBatch, PreparedDataset, concatenate_batches
from keras_diffusion_opd.data.targets import TeacherTargets, attach_shared
from keras_diffusion_opd.losses import DistillationLoss
from tests.oracles import BACKEND, numpy, tensor

B, L, D, V = 2, 3, 4, 7
RNG = np.random.default_rng(0)
HIDDEN, HEAD, BIAS = (RNG.normal(size=shape).astype("float32") for shape in ((B, L, D), (D, V), (V,)))
IDS = np.zeros((B, L), "int32")
WEIGHTS = np.ones((B, L), "float32")


def targets(**changes):
    return HiddenTargets(**{"hidden": HIDDEN, "head": HEAD, "bias": BIAS, "softcap": 2.0, **changes})


def batch(**changes):
    fields = {"model_inputs": IDS, "target_ids": IDS, "loss_weights": WEIGHTS, "teacher": targets(**changes)}
    return PreparedBatch.create(**fields)


def test_dense_loss_takes_them_as_the_logits_they_stand_for():
    student = tensor(RNG.normal(size=(B, L, V)))
    logits = (2.0 * np.tanh((HIDDEN @ HEAD + BIAS) / 2.0)).astype("float32")
    dense = PreparedBatch(IDS, IDS, WEIGHTS, DenseTargets(logits))
    values = [float(numpy(DistillationLoss(temperature=2.0)(student, b).primary.mean())) for b in (batch(), dense)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_only_rows_travel_and_the_head_is_attached_at_the_last_moment():
    x, y, weights = batch().as_fit()
    ((tag, arrays),) = y["teacher"].items()
    assert list(arrays) == ["hidden"] and "shared" in tag
    assert TeacherTargets.from_tagged({tag: arrays}).softcap == 2.0
    attached = attach_shared((x, y, weights))
    found = attached[1]["teacher"][tag]
    np.testing.assert_array_equal(numpy(found["head"]), HEAD)
    again = attach_shared(batch().as_fit())[1]["teacher"][tag]
    assert again["head"] is found["head"]  # one tensor for every batch
    back = PreparedBatch.from_fit(*attached).teacher
    assert isinstance(back, HiddenTargets) and back.vocabulary_size() == V


def test_equal_heads_have_equal_names_and_others_others():
    name = targets().tag()
    assert targets(head=HEAD.copy()).tag() == name
    assert len({name, targets(head=HEAD + 1).tag(), targets(bias=None).tag(), targets(softcap=None).tag()}) == 4


def test_forgotten_heads_are_named_and_held_anew():
    y = batch().as_fit()[1]
    HiddenTargets.forget_heads()
    with pytest.raises(ValueError, match=r"is not held in this process.*in the process that trains"):
        TeacherTargets.from_tagged(y["teacher"])
    y = batch().as_fit()[1]
    assert TeacherTargets.from_tagged(y["teacher"]).vocabulary_size() == V


def test_rows_are_joined_cut_and_mapped_without_the_head():
    joined = concatenate_batches([batch(), batch()])
    assert joined.rows == 2 * B and tuple(joined.teacher.head.shape) == (D, V)
    assert tuple(PreparedDataset([batch(), batch()], batch_size=3).batch(1).teacher.hidden.shape) == (1, L, D)
    with pytest.raises(ValueError, match=r"same pytree structure"):
        concatenate_batches([batch(), batch(head=HEAD + 1)])


def test_padding_and_transposed_heads_count_their_ids():
    assert targets(vocabulary=5).vocabulary_size() == 5
    turned = targets(head=np.ascontiguousarray(HEAD.T), transposed=True)
    np.testing.assert_allclose(numpy(turned.logits()), numpy(targets().logits()), rtol=1e-5)
    assert tuple(targets(vocabulary=5).logits().shape) == (B, L, 5)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden": HIDDEN[:, :2]}, ValueError, r"`teacher hidden` must have shape \(2, 3, 4\)"),
        ({"hidden": HIDDEN[..., :2]}, ValueError, r"`teacher hidden` must have shape \(2, 3, 4\)"),
        ({"hidden": IDS[..., None].repeat(D, -1)}, TypeError, r"`teacher hidden` must have a floating-point dtype"),
        ({"head": HEAD[0]}, ValueError, r"`head` must have 2 axes"),
        ({"bias": BIAS[:2]}, ValueError, r"`bias` must have shape \(7,\)"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, words):
    with pytest.raises(error, match=words):
        batch(**changes)


def test_values_that_are_no_distribution_are_found():
    hidden, head, bias = HIDDEN.copy(), HEAD.copy(), BIAS.copy()
    hidden[1, 2, 0] = np.inf
    assert np.argwhere(numpy(targets(hidden=hidden).invalid())).tolist() == [[1, 2]]
    assert np.argwhere(numpy(targets(hidden=tensor(hidden)).invalid())).tolist() == [[1, 2]]
    bias[0] = -np.inf  # excludes an id
    assert not numpy(targets(bias=bias).invalid()).any()
    bias[0] = np.nan
    head[0, 0] = np.inf
    assert numpy(targets(bias=bias).invalid()).all() and numpy(targets(head=head).invalid()).all()


@pytest.mark.skipif(BACKEND != "jax", reason="only JAX compiles functions of whole batches")
def test_head_is_a_leaf_of_jax_trees():
    import jax

    whole = batch()
    found = jax.jit(lambda b: b.teacher.logits())(whole)
    np.testing.assert_allclose(numpy(found), numpy(whole.teacher.logits()), rtol=1e-5)
    assert len(jax.tree.leaves(whole.teacher)) == 3
    assert jax.tree.map(lambda _: None, whole.teacher).softcap == 2.0
