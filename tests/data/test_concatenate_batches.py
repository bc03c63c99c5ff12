"""Several batches as one: rows keep their order, structure and dtypes must agree."""

import re

import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, Stamp, concatenate_batches
from tests.batches import fields
from tests.oracles import BACKEND, tensor


def batch(**changes):
    return PreparedBatch.create(**fields(**changes))


def logits(seed, length=3):
    return DenseTargets(np.random.default_rng(seed).normal(size=(2, length, 5)).astype("float16"))


def test_rows_follow_one_another_in_every_array():
    first, second = batch(teacher=logits(1)), batch(teacher=logits(2), target_ids=fields()["target_ids"] % 2)
    whole = concatenate_batches([first, second])
    assert whole.validate().rows == 4
    np.testing.assert_array_equal(whole.target_ids, np.concatenate([first.target_ids, second.target_ids]))
    np.testing.assert_array_equal(whole.teacher.logits, np.concatenate([logits(1).logits, logits(2).logits]))
    np.testing.assert_array_equal(whole.model_inputs["noise_levels"], [0.25, 0.75] * 2)


def test_numpy_stays_numpy_with_its_dtype_and_tensors_stay_tensors():
    whole = concatenate_batches([batch(), batch()])
    assert isinstance(whole.target_ids, np.ndarray) and whole.target_ids.dtype == "int32"
    lifted = concatenate_batches([batch().map(lambda x: tensor(x, x.dtype.name))] * 2)
    assert type(lifted.loss_weights).__module__.startswith({"jax": "jax"}.get(BACKEND, BACKEND))


@pytest.mark.parametrize("versions, kept", [((5, 3, 9), 3), ((5, None), None), ((None, None), None)])
def test_stamp_is_the_oldest_and_none_where_one_is_missing(versions, kept):
    stamps = [None if v is None else Stamp(policy_version=v) for v in versions]
    stamp = concatenate_batches([batch(stamp=s) for s in stamps]).stamp
    assert (None if stamp is None else stamp.policy_version) == kept


@pytest.mark.parametrize(
    "change",
    [
        {"teacher": DenseTargets(np.zeros((2, 3, 5), "float32"))},
        {"model_inputs": {"input_tokens": np.zeros((2, 3), "int32")}},
        {"model_inputs": (np.zeros((2, 3), "int32"), np.zeros(2, "float32"))},
    ],
)
def test_batches_of_different_structure_are_refused(change):
    with pytest.raises(ValueError, match=r"same pytree structure.*Batch 0 has.*batch 1 has"):
        concatenate_batches([batch(), batch(**change)])


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"teacher": logits(0, length=3).map(lambda x: x[..., :4])},
            "float16 (2, 3, 5) in batch 0 and float16 (2, 3, 4) in batch 1",
        ),
        (
            {"teacher": logits(0).map(lambda x: x.astype("float32"))},
            "float16 (2, 3, 5) in batch 0 and float32 (2, 3, 5) in batch 1",
        ),
        (
            {"teacher": logits(0), "loss_weights": np.ones((2, 3), bool)},
            "float32 (2, 3) in batch 0 and bool (2, 3) in batch 1",
        ),
    ],
)
def test_rows_of_different_shape_or_dtype_are_refused(change, words):
    ids = {"target_ids": fields()["target_ids"] % 4}
    with pytest.raises(ValueError, match="same shape and dtype.*" + re.escape(words)):
        concatenate_batches([batch(teacher=logits(0), **ids), batch(**change, **ids)])


def test_nothing_to_concatenate_is_refused():
    with pytest.raises(ValueError, match="`batches` is empty"):
        concatenate_batches([])


def test_what_is_no_batch_is_refused():
    with pytest.raises(TypeError, match=r"`batches` must hold PreparedBatch objects. Received tuple at 1"):
        concatenate_batches([batch(), batch().as_fit()])


def test_parts_of_a_rollout_without_batches_give_none():
    assert concatenate_batches([None, None]) is None


def test_merged_rollouts_keep_their_ids_and_weights_in_order():
    def part(ids, weights):
        return PreparedBatch.create(
            model_inputs={"token_ids": np.zeros((1, 2), "int32")},
            target_ids=np.array([ids]),
            loss_weights=np.array([weights], "float32"),
        )

    whole = concatenate_batches([part([1, 2], [1, 0]), part([3, 4], [0.5, 2])], rows=[1, 1])
    assert whole.target_ids.tolist() == [[1, 2], [3, 4]]
    assert whole.loss_weights.tolist() == [[1, 0], [0.5, 2]]
    assert isinstance(whole.target_ids, np.ndarray) and isinstance(whole.model_inputs["token_ids"], np.ndarray)


def test_some_parts_with_a_batch_and_some_without_are_refused():
    with pytest.raises(ValueError, match=r"either all provide a prepared batch or none.*None at \[1\] of 3"):
        concatenate_batches([batch(), None, batch()])


@pytest.mark.parametrize("rows", [[2, 3], [2], [2, 2, 2]])
def test_another_number_of_completions_than_rows_is_refused(rows):
    with pytest.raises(ValueError, match=r"batch size must match.*Received batches of \[2, 2\] rows"):
        concatenate_batches([batch(), batch()], rows=rows)
