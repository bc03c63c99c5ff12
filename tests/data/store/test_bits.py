"""Ids in as few bits as a vocabulary needs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_diffusion_opd.data.store.bits import id_bits, pack_ids, packed_bytes, unpack_ids


@pytest.mark.parametrize(
    ("vocabulary", "bits"), [(1, 1), (2, 1), (3, 2), (65536, 16), (65537, 17), (128256, 17), (262144, 18), (2**31, 31)]
)
def test_bits_hold_the_largest_id_and_no_more(vocabulary, bits):
    assert id_bits(vocabulary) == bits


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 2**31), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_ids_come_back(vocabulary, count, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (2, 3, count))
    ids[0, 0] = vocabulary - 1
    bits = id_bits(vocabulary)
    packed = pack_ids(ids, bits)
    assert packed.shape == (2, 3, packed_bytes(count, bits)) and packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack_ids(packed, count, bits), ids)


def test_first_id_has_the_lowest_bits():
    # 17 bits: 1 and then 2 are 1 + 2 * 2**17, little-endian.
    assert pack_ids(np.array([1, 2]), 17).tolist() == list((1 + 2 * 2**17).to_bytes(5, "little"))
    assert pack_ids(np.array([1, 2]), 16).tolist() == [1, 0, 2, 0]
