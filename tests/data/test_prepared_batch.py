"""What a prepared batch accepts, keeps and refuses."""

import collections
import dataclasses
import functools
import re

import numpy as np
import pytest

from keras_diffusion_opd import backend
from keras_diffusion_opd.data import DenseTargets, PreparedBatch, Stamp
from tests.batches import fields


def create(**changes):
    return PreparedBatch.create(**fields(**changes))


def refused(error, words, **changes):
    """`create` must raise `error` with all of these words, in this order."""
    with pytest.raises(error, match=".*".join(re.escape(word) for word in words)):
        create(**changes)


# ---- target ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (2, 3, 1)])
def test_target_ids_of_another_rank_are_refused(shape):
    refused(
        ValueError,
        ["`target_ids`", "shape [batch, length]", "received", str(shape)],
        target_ids=np.zeros(shape, "int32"),
    )


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64", "str"])
def test_target_ids_of_another_dtype_are_refused(dtype):
    ids = np.zeros((2, 3)).astype(dtype)
    refused(TypeError, ["`target_ids`", "integer dtype", "Received", str(ids.dtype)], target_ids=ids)


@pytest.mark.parametrize("ids", [[[1, 2, 3], [4, 0, 2]], 7, None])
def test_target_ids_that_are_no_array_are_refused(ids):
    refused(
        TypeError,
        ["`target_ids`", "must be a NumPy array or a tensor", "Received", type(ids).__name__, "numpy.asarray"],
        target_ids=ids,
    )


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_every_integer_dtype_of_ids_is_kept(dtype):
    ids = fields()["target_ids"].astype(dtype)
    assert create(target_ids=ids).target_ids is ids


# ---- weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 2), (2,), (2, 1), (3, 2), (2, 3, 1)])
def test_weights_of_another_shape_are_refused(shape):
    refused(
        ValueError,
        ["`loss_weights` must match target_ids shape (2, 3)", "Received", str(shape), "one weight per token"],
        loss_weights=np.ones(shape, "float32"),
    )


@pytest.mark.parametrize("dtype", ["complex64", "str"])
def test_weights_that_are_not_real_are_refused(dtype):
    weights = np.ones((2, 3)).astype(dtype)
    refused(
        TypeError,
        ["`loss_weights` must be real numeric or boolean", "Received", str(weights.dtype)],
        loss_weights=weights,
    )


def test_weights_given_as_a_list_are_refused():
    refused(TypeError, ["`loss_weights`", "must be a NumPy array", "Received list"], loss_weights=[[1.0] * 3] * 2)


@pytest.mark.parametrize("dtype", ["bool", "int32", "uint8", "float16", "float32", "float64"])
def test_bool_integer_and_float_weights_keep_their_dtype(dtype):
    weights = np.ones((2, 3), dtype)
    assert create(loss_weights=weights).loss_weights is weights


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(value):
    weights = np.ones((2, 3), "float32")
    weights[1, 2] = value
    refused(
        ValueError,
        ["`loss_weights` must contain only finite values", "Received", str(value), "row 1, position 2"],
        loss_weights=weights,
    )


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_negative_weights_are_refused(dtype):
    weights = np.ones((2, 3), dtype)
    weights[0, 1] = -1
    refused(
        ValueError,
        ["`loss_weights` must be nonnegative", "Received", "-1", "row 0, position 1"],
        loss_weights=weights,
    )


def test_active_target_below_zero_is_refused():
    ids = fields()["target_ids"]
    ids[1, 1] = -1
    refused(
        ValueError,
        ["active target_ids must be nonnegative", "Received -1", "row 1, position 1", "weight 0"],
        target_ids=ids,
    )


@pytest.mark.parametrize("sentinel", [-1, -100, 99, 2**31 - 1])
def test_inactive_target_may_be_any_sentinel_and_is_preserved(sentinel):
    ids = fields()["target_ids"]
    ids[0, 2] = ids[1, 0] = sentinel
    batch = create(target_ids=ids, teacher=DenseTargets(np.zeros((2, 3, 5), "float32")))
    assert batch.target_ids[0, 2] == sentinel and batch.target_ids[1, 0] == sentinel


# ---- model inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [{}, [], (), {"nested": {}}, None])
def test_model_inputs_without_an_array_are_refused(inputs):
    refused(ValueError, ["`model_inputs` must contain at least one array", "empty"], model_inputs=inputs)


def test_nested_list_of_numbers_is_refused_with_its_path():
    refused(
        TypeError,
        ["`model_inputs['tokens'][0][0]`", "must be a NumPy array", "Received int"],
        model_inputs={"tokens": [[1, 2, 3], [4, 5, 6]]},
    )


@pytest.mark.parametrize("scalar", [np.array(1.0), np.float32(1.0)])
def test_scalar_input_is_refused(scalar):
    refused(
        ValueError,
        ["`model_inputs['temperature']` must be batch-major, not scalar", "2 rows"],
        model_inputs={"temperature": scalar},
    )


def test_input_with_another_batch_size_is_refused():
    refused(
        ValueError,
        ["`model_inputs['a'][1]` has batch size 3; expected 2"],
        model_inputs={"a": (np.ones(2), np.ones(3))},
    )


@pytest.mark.parametrize("dtype", ["str", "bytes", "object", "complex64"])
def test_input_that_is_not_real_is_refused(dtype):
    leaf = np.array([["a"], ["b"]]).astype(dtype) if dtype != "complex64" else np.ones((2, 1), dtype)
    refused(
        TypeError,
        ["`model_inputs['text']` must be real numeric or boolean", "Received dtype", str(leaf.dtype)],
        model_inputs={"text": leaf},
    )


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "inputs",
    [
        np.ones((2, 4), "float32"),
        (np.ones(2), {"deep": [np.zeros((2, 1), bool)]}),
        {"a": {"b": np.ones((2, 1, 1), "int8")}, "c": (np.ones((2, 0)),)},
        Pair(np.ones(2), None),
    ],
)
def test_any_nest_of_inputs_is_taken_and_kept_as_it_is(inputs):
    batch = create(model_inputs=inputs)
    assert batch.model_inputs is inputs
    assert type(batch.as_fit()[0]) is type(inputs)


# ---- teacher and stamp ----------------------------------------------------------------------------------


@pytest.mark.parametrize("teacher", [np.zeros((2, 3, 5), "float32"), {"logits": 1}, "teacher"])
def test_teacher_that_is_no_teacher_targets_is_refused(teacher):
    refused(
        TypeError,
        ["`teacher` must be a TeacherTargets", "DenseTargets(logits)", "Received", type(teacher).__name__],
        teacher=teacher,
    )


@pytest.mark.parametrize("shape", [(2, 1, 5), (2, 2, 5), (1, 3, 5), (2, 4, 5)])
def test_misaligned_teacher_is_refused(shape):
    refused(
        ValueError,
        ["`teacher logits` must align with target_ids", "expected shape (2, 3, vocabulary)", "Received", str(shape)],
        teacher=DenseTargets(np.zeros(shape, "float32")),
    )


def test_active_target_at_or_above_vocabulary_of_the_teacher_is_refused_at_creation():
    ids = fields()["target_ids"]
    ids[1, 2] = 5
    refused(
        ValueError,
        [
            "active target_ids must be smaller than vocabulary size 5 of the teacher's targets",
            "Received",
            "5",
            "row 1, position 2",
        ],
        target_ids=ids,
        teacher=DenseTargets(np.zeros((2, 3, 5), "float32")),
    )


def test_ids_of_a_narrow_dtype_are_compared_without_wrapping():
    ids = fields()["target_ids"].astype("int8")
    assert create(target_ids=ids, teacher=DenseTargets(np.zeros((2, 3, 300), "float32"))).rows == 2


@pytest.mark.parametrize("stamp", [3, {"policy_version": 3}])
def test_stamp_that_is_no_stamp_is_refused(stamp):
    refused(TypeError, ["`stamp` must be a Stamp or None", "Received", type(stamp).__name__], stamp=stamp)


# ---- the object itself ----------------------------------------------------------------------------------


def test_constructor_does_not_validate_and_create_does():
    broken = PreparedBatch({}, "ids", None)
    assert broken.target_ids == "ids"
    with pytest.raises(TypeError, match="`target_ids`"):
        broken.validate()


def test_validate_returns_the_batch_itself_and_changes_nothing():
    arguments = fields()
    before = {name: np.array(arguments[name]) for name in ("target_ids", "loss_weights")}
    batch = PreparedBatch.create(**arguments)
    assert batch.validate() is batch
    for name, values in before.items():
        assert getattr(batch, name) is arguments[name]
        np.testing.assert_array_equal(arguments[name], values)


def test_creation_takes_keywords_only():
    with pytest.raises(TypeError):
        PreparedBatch.create(*fields().values())


def test_batch_cannot_be_reassigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        create().target_ids = None


def test_fields_are_the_same_objects_afterwards():
    teacher, stamp = DenseTargets(np.zeros((2, 3, 5), "float16")), Stamp(policy_version=2)
    batch = create(teacher=teacher, stamp=stamp)
    assert batch.teacher is teacher and batch.stamp is stamp
    assert batch.teacher.logits.dtype == "float16"


@pytest.mark.parametrize("weight", [1e31, 1e300])
def test_weight_whose_sum_would_overflow_float32_is_refused(weight):
    with pytest.raises(ValueError, match="`loss_weights` must be at most 1e.30"):
        PreparedBatch.create(
            model_inputs=np.zeros((1, 2)), target_ids=np.zeros((1, 2), "int32"), loss_weights=np.array([[1.0, weight]])
        )


@pytest.mark.parametrize("value, dtype", [(2**40, "int64"), (-(2**40), "int64"), (2**40, "uint64")])
def test_integer_inputs_are_kept_or_refused_but_never_wrap_around(value, dtype):
    inputs = {"features": np.array([[value]], dtype)}
    create = functools.partial(
        PreparedBatch.create, target_ids=np.zeros((1, 1), "int32"), loss_weights=np.ones((1, 1), "float32")
    )
    if backend.float64_enabled():
        assert create(model_inputs=inputs).model_inputs is inputs
        return
    with pytest.raises(ValueError, match="`model_inputs.*features.*` must fit in 32 bits"):
        create(model_inputs=inputs)
