"""`TokenCrossEntropyLoss`: supervised fine-tuning of a diffusion language model."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, PreparedBatch
from keras_diffusion_opd.losses import TokenCrossEntropyLoss
from tests.batches import prepared
from tests.oracles import compiled_value_and_grad, cross_entropy, numpy, tensor

LOSS = TokenCrossEntropyLoss()


def numbers(output):
    return [float(numpy(x)) for x in (*output.primary, output.primary.mean())]


def test_position_i_scores_target_i_without_a_shift():
    output = LOSS(tensor(8.0 * np.eye(3)[None]), prepared([[1.0, 0.5, 0.0]], ids=[[0, 1, 2]]))
    assert numbers(output) == pytest.approx([0.00100605043, 1.5, 0.000670700286], rel=1e-4)
    assert output.metrics == {} and LOSS.metric_names == ()


def test_bfloat16_logits_and_integer_weights_give_float32_sums():
    logits = tensor([[[2.0, -1.0], [-2.0, 3.0]]], "bfloat16")
    output = LOSS(logits, prepared(np.array([[1, 2]]), ids=[[0, 1]]))
    assert {numpy(x).dtype for x in (*output.primary, output.primary.mean())} == {np.dtype("float32")}
    assert numbers(output) == pytest.approx([0.0620180486, 3.0, 0.0206726827], rel=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int32"])
def test_bool_and_integer_weights_count_as_numbers(dtype):
    output = LOSS(tensor(np.zeros((1, 2, 4))), prepared(np.array([[1, 0]], dtype)))
    assert numbers(output) == pytest.approx([np.log(4), 1.0, np.log(4)], rel=1e-6)


def micro_batches():
    draw = np.random.default_rng(0)
    return (
        draw.normal(size=(4, 3, 5)),
        draw.integers(5, size=(4, 3)),
        draw.uniform(size=(4, 3)) * (draw.uniform(size=(4, 3)) > 0.3),
    )


def total(logits, ids, weights):
    return LOSS(logits, PreparedBatch(ids, ids, weights)).primary.total


def mean(logits, ids, weights):
    return LOSS(logits, PreparedBatch(ids, ids, weights)).primary.mean()


def test_value_and_gradient_of_two_tokens():
    logits, ids = tensor([[[1.0, -1.0], [-0.5, 0.5]]]), tensor([[1, 0]], "int32")
    value, gradient = compiled_value_and_grad(mean)(logits, ids, tensor([[1.0, 1.0]]))
    assert value == pytest.approx(1.72009485, rel=1e-6)
    assert np.isfinite(gradient).all() and gradient.all()


def test_sums_and_gradients_of_two_micro_batches_divided_once_are_those_of_the_batch():
    logits, ids, weights = micro_batches()
    of_total, of_mean = compiled_value_and_grad(total), compiled_value_and_grad(mean)
    whole, whole_gradient = of_mean(tensor(logits), tensor(ids, "int32"), tensor(weights))
    halves = [
        of_total(tensor(logits[rows]), tensor(ids[rows], "int32"), tensor(weights[rows]))
        for rows in (slice(0, 2), slice(2, 4))
    ]
    want = (weights * cross_entropy(logits, ids)).sum()
    assert halves[0][0] + halves[1][0] == pytest.approx(want, rel=1e-5)
    assert whole == pytest.approx(want / weights.sum(), rel=1e-5)
    gradient = np.concatenate([halves[0][1], halves[1][1]]) / weights.sum()
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-5, atol=1e-8)


def test_weights_of_masked_diffusion_make_the_bound_of_a_constant_cross_entropy():
    # Weight 1/t on the masked positions of a constant h: the sum of weights cancels in the mean, whatever t is.
    for t in (0.1, 0.5, 0.9):
        masked = np.array([[1.0, 0.0, 1.0]]) / t
        assert numbers(LOSS(tensor(np.zeros((1, 3, 2))), prepared(masked)))[2] == pytest.approx(np.log(2), rel=1e-6)


def test_teacher_of_the_batch_is_not_looked_at():
    nan = np.full((1, 2, 4), np.nan, "float32")
    with_teacher = prepared([[1.0, 1.0]], teacher=nan)
    assert isinstance(with_teacher.teacher, DenseTargets)
    assert numbers(LOSS(tensor(np.zeros((1, 2, 4))), with_teacher))[2] == pytest.approx(np.log(4), rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 3, 4), (2, 2, 4), (1, 1, 4)])
def test_misaligned_logits_are_refused(shape):
    with pytest.raises(
        ValueError, match=r"`logits` must align with target_ids: expected shape \(1, 2, vocabulary\). Received"
    ):
        LOSS(tensor(np.zeros(shape)), prepared([[1.0, 1.0]]))


def test_active_target_beyond_the_students_vocabulary_is_refused():
    with pytest.raises(
        ValueError, match=r"active target_ids must be smaller than vocabulary size 4 of the logits. Received 4"
    ):
        LOSS(tensor(np.zeros((1, 2, 4))), prepared([[1.0, 1.0]], ids=[[0, 4]]))


def test_batch_that_is_no_prepared_batch_is_refused():
    with pytest.raises(TypeError, match=r"`batch` must be a PreparedBatch. Received tuple.*PreparedBatch.create"):
        LOSS(tensor(np.zeros((1, 2, 4))), prepared([[1.0, 1.0]]).as_fit())


def test_serialisation_round_trip():
    back = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(LOSS))
    assert isinstance(back, TokenCrossEntropyLoss)
    assert TokenCrossEntropyLoss.from_config(LOSS.get_config()).get_config() == {"normalization": "weights"}
