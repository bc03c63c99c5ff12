"""Attention of block diffusion, against its definition place by place."""

import numpy as np
import pytest

from keras_diffusion_opd.models import block_causal_mask, block_diffusion_mask


@pytest.mark.parametrize("length, size", [(6, 1), (6, 2), (7, 3), (6, 6), (5, 9)])
def test_noised_blocks_see_themselves_and_clean_blocks_before_clean_ones_up_to_themselves(length, size):
    mask = block_diffusion_mask(length, size)
    assert mask.shape == (2 * length, 2 * length)
    for row in range(2 * length):
        for column in range(2 * length):
            ours, theirs = (row % length) // size, (column % length) // size
            if row < length and column < length:
                sees = ours == theirs
            elif row < length:
                sees = theirs < ours
            elif column < length:
                sees = False
            else:
                sees = theirs <= ours
            assert mask[row, column] == sees, (row, column)


def test_the_masks_of_one_sequence_go_from_causal_to_full():
    assert np.array_equal(block_causal_mask(5, 1), np.tril(np.ones((5, 5), bool)))
    assert block_causal_mask(5, 5).all()
    assert np.array_equal(block_causal_mask(6, 2), block_diffusion_mask(6, 2)[6:, 6:])


@pytest.mark.parametrize("arguments", [(0, 1), (4, 0), (4, 2.0)])
def test_sizes_are_checked(arguments):
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        block_diffusion_mask(*arguments)
