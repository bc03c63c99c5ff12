"""The self-test: a student that is its own teacher is at 0, and a shift would be noticed."""

import numpy as np
import pytest

from keras_diffusion_opd.data import AlignmentError, DenseTargets, PreparedBatch, SampledTargets, TopKTargets
from keras_diffusion_opd.losses import alignment_self_test
from tests.oracles import reference, tensor

B, L, V = 2, 8, 7
RANDOM = np.random.default_rng(0)
LOGITS = (2 * RANDOM.normal(size=(B, L, V))).astype("float32")
WEIGHTS = np.ones((B, L), "float32")
WEIGHTS[0, :2] = WEIGHTS[1, 6:] = 0.0


def batch_of(teacher, weights=WEIGHTS):
    ids = np.where(weights > 0, 0, -1)
    return PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=weights, teacher=teacher)


def spoiled(logits):
    """NaN wherever the weight is 0."""
    return np.where(WEIGHTS[..., None] > 0, logits, np.nan).astype("float32")


def top_k(logits, **settings):
    return TopKTargets.from_logits(tensor(logits), 3, **settings)


@pytest.mark.parametrize(
    "teacher",
    [
        lambda x: DenseTargets(spoiled(x)),
        top_k,
        lambda x: top_k(x, temperature=2.0),
        lambda x: top_k(x, tail="renormalize"),
    ],
    ids=["dense", "top-k", "top-k at 2", "renormalised"],
)
def test_student_that_is_its_own_teacher_is_at_zero(teacher):
    report = alignment_self_test(tensor(spoiled(LOGITS)), batch_of(teacher(LOGITS)))
    assert report.largest < 1e-6 and report.positions == 12 and set(report.shifted) == {-1, 1}


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_shift_is_named(shift):
    with pytest.raises(AlignmentError, match=rf"shifted: its position i [+]?{shift} matches"):
        alignment_self_test(
            tensor(LOGITS), batch_of(DenseTargets(np.roll(LOGITS, shift, axis=1)), np.ones((B, L), "float32"))
        )


def test_shifted_divergence_is_what_it_says():
    report = alignment_self_test(tensor(LOGITS), batch_of(DenseTargets(LOGITS), np.ones((B, L), "float32")))
    want = reference("forward_kl", LOGITS[:, :-1], LOGITS[:, 1:]).mean()
    assert report.shifted[1] == pytest.approx(want, rel=1e-5)


def test_one_wrong_position_is_found_and_no_shift_is_blamed():
    teacher = LOGITS.copy()
    teacher[1, 3, 2] += 1.0
    with pytest.raises(AlignmentError, match=r"at row 1, position 3, and 0 more.*No shift of up to two"):
        alignment_self_test(tensor(LOGITS), batch_of(DenseTargets(teacher)))


def test_rows_in_another_order_are_found():
    with pytest.raises(AlignmentError, match="No shift.*compare inputs, rows"):
        alignment_self_test(tensor(LOGITS), batch_of(DenseTargets(LOGITS[::-1].copy())))


def test_logits_that_are_alike_everywhere_show_nothing():
    alike = np.tile(LOGITS[:1, :1], (B, L, 1))
    with pytest.raises(AlignmentError, match="hardly differ between neighbouring"):
        alignment_self_test(tensor(alike), batch_of(DenseTargets(alike)))
    alone = np.zeros((B, L), "float32")
    alone[0, 3] = 1.0
    with pytest.raises(AlignmentError, match="several active positions side by side"):
        alignment_self_test(tensor(LOGITS), batch_of(DenseTargets(LOGITS), alone))


def test_what_cannot_be_tested_is_refused():
    with pytest.raises(ValueError, match="Received SampledTargets"):
        alignment_self_test(tensor(LOGITS), batch_of(SampledTargets.from_logits(LOGITS, 2, seed=0)))
    with pytest.raises(ValueError, match="Received none"):
        alignment_self_test(tensor(LOGITS), batch_of(None))
    with pytest.raises(ValueError, match="must have active positions"):
        alignment_self_test(tensor(LOGITS), batch_of(DenseTargets(LOGITS), 0 * WEIGHTS))
    with pytest.raises(ValueError, match="`tolerance` must be positive"):
        alignment_self_test(tensor(LOGITS), batch_of(DenseTargets(LOGITS)), tolerance=0.0)
    broken = LOGITS.copy()
    broken[1, 2] = np.nan
    with pytest.raises(ValueError, match="active teacher_logits"):
        alignment_self_test(tensor(LOGITS), batch_of(DenseTargets(broken)))
    with pytest.raises(AlignmentError, match="Received nan at row 1, position 2"):
        alignment_self_test(tensor(broken), batch_of(DenseTargets(LOGITS)))
