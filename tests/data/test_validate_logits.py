"""Logits that score a batch: aligned, floating, over a vocabulary that holds the active ids."""

import re

import keras
import numpy as np
import pytest
from tests.batches import fields
from tests.oracles import tensor

from keras_diffusion_opd.data import PreparedBatch


def batch(**changes):
    return PreparedBatch.create(**fields(**changes))


def refused(error, words, logits, **changes):
    with pytest.raises(error, match=".*".join(re.escape(word) for word in words)):
        batch(**changes).validate_logits(logits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_fitting_logits_come_back_as_the_same_object(dtype):
    logits = tensor(np.zeros((2, 3, 8)), dtype)
    assert batch().validate_logits(logits) is logits


@pytest.mark.parametrize("shape", [(2, 3), (6, 8), (2, 3, 8, 1)])
def test_logits_of_another_rank_are_refused(shape):
    refused(
        ValueError,
        ["`logits` must have shape [batch, length, vocab]", "Received shape", str(shape)],
        np.zeros(shape, "float32"),
    )


@pytest.mark.parametrize("shape", [(2, 2, 8), (2, 1, 8), (3, 3, 8)])
def test_logits_that_do_not_align_are_refused_and_nothing_broadcasts(shape):
    refused(
        ValueError,
        ["`logits` must align with target_ids", "expected shape (2, 3, vocabulary)", "Received", str(shape), "nothing is shifted"],
        np.zeros(shape, "float32"),
    )


def test_empty_vocabulary_is_refused():
    refused(ValueError, ["`logits`", "non-empty vocabulary", "Received", "(2, 3, 0)"], np.zeros((2, 3, 0), "float32"))


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_logits_that_are_not_floating_are_refused(dtype):
    refused(TypeError, ["`logits`", "floating-point dtype", "Received", dtype], np.zeros((2, 3, 8), dtype))


def test_logits_given_as_a_list_are_refused():
    refused(TypeError, ["`logits` must be a NumPy array", "Received list"], [[[0.0]]])


def test_active_target_at_or_above_vocabulary_is_refused():
    ids = fields()["target_ids"]
    ids[0, 0] = 8
    refused(
        ValueError,
        ["active target_ids must be smaller than vocabulary size 8 of the logits", "Received 8", "row 0, position 0"],
        np.zeros((2, 3, 8), "float32"),
        target_ids=ids,
    )


def test_inactive_target_at_or_above_vocabulary_is_accepted():
    ids = fields()["target_ids"]
    ids[0, 2] = 8
    batch(target_ids=ids).validate_logits(np.zeros((2, 3, 8), "float32"))


def test_values_of_logits_are_not_read():
    batch().validate_logits(np.full((2, 3, 8), np.nan, "float32"))


def test_abstract_logits_come_back_as_the_same_object():
    logits = keras.KerasTensor((2, 3, 8), "float32")
    assert batch().validate_logits(logits) is logits
