"""A dense teacher: its shape, its dtype, and where it says nothing usable."""

import numpy as np
import pytest
from tests.oracles import numpy, tensor

from keras_diffusion_opd.data import DenseTargets

IDS = np.zeros((1, 6), "int32")
INF = np.inf


def test_vocabulary_is_the_last_axis():
    assert DenseTargets(np.zeros((2, 3, 7), "float32")).vocabulary_size() == 7


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_float_dtype_is_taken(dtype):
    DenseTargets(tensor(np.zeros((1, 6, 7)), dtype)).validate(IDS)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_logits_that_are_not_floating_are_refused(dtype):
    with pytest.raises(TypeError, match=f"`teacher logits` must have a floating-point dtype. Received {dtype}"):
        DenseTargets(np.zeros((1, 6, 7), dtype)).validate(IDS)


@pytest.mark.parametrize("shape", [(6, 7), (1, 6, 7, 1)])
def test_logits_of_another_rank_are_refused(shape):
    with pytest.raises(ValueError, match=r"`teacher logits` must have shape \[batch, length, vocab\]. Received shape"):
        DenseTargets(np.zeros(shape, "float32")).validate(IDS)


def test_empty_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"`teacher logits` must have a non-empty vocabulary.*\(1, 6, 0\)"):
        DenseTargets(np.zeros((1, 6, 0), "float32")).validate(IDS)


def test_logits_given_as_a_list_are_refused():
    with pytest.raises(TypeError, match="`teacher logits` must be a NumPy array.*Received list"):
        DenseTargets([[[0.0]]]).validate(IDS)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nan_and_plus_inf_and_no_finite_logit_are_invalid_and_single_exclusions_are_not(dtype):
    rows = [[0, 1], [np.nan, 1], [INF, 1], [-INF, 1], [-INF, -INF], [-INF, np.nan]]
    found = DenseTargets(tensor([rows], dtype)).invalid()
    assert numpy(found).tolist() == [[False, True, True, False, True, True]]
