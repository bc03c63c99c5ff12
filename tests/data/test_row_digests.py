"""Digests of rows: stable over processes and dtypes, different for different rows."""

import hashlib

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data.row_digests import require_rows, row_digests

IDS = np.array([[5, 0, 7], [7, 0, 5], [-1, 2**40, 3]])


def test_definition():
    for row, digest in zip(IDS.tolist(), row_digests(IDS), strict=True):
        message = b"".join(int(x).to_bytes(8, "little", signed=True) for x in [len(row), *row])
        assert digest.tobytes() == hashlib.blake2b(message, digest_size=16).digest()


def test_every_process_gives_what_another_one_gave():
    # Python's hash is salted by process: these were noted in one, and are asked for in every one since.
    known = "db18e9c1f9f6ff05865a3152b6a72598"
    assert row_digests(np.array([[1, 2]])).tobytes().hex() == known


def test_dtype_layout_and_backend_change_nothing():
    small = IDS[:2]
    expected = row_digests(small)
    for other in (small.astype("int8"), small.astype("uint64"), small.astype(">i4"), np.asfortranarray(small)):
        np.testing.assert_array_equal(row_digests(other), expected)
    np.testing.assert_array_equal(row_digests(ops.convert_to_tensor(small.astype("int32"))), expected)


def test_order_of_rows_and_length_of_a_row_are_seen():
    np.testing.assert_array_equal(row_digests(IDS[::-1]), row_digests(IDS)[::-1])
    rows = [row_digests(np.array([row])).tobytes() for row in ([1, 0], [0, 1], [1], [1, 0, 0])]
    assert len(set(rows)) == 4


def test_no_rows_give_no_digests():
    assert row_digests(np.zeros((0, 4), "int32")).shape == (0, 16)


def test_rows_in_another_order_or_of_other_ids_are_refused_by_name():
    digests = row_digests(IDS)
    require_rows(IDS, digests)
    with pytest.raises(ValueError, match=r"rows \[0, 1\] of 3.*same rows in another order"):
        require_rows(IDS[[1, 0, 2]], digests)
    other = IDS.copy()
    other[2, 1] += 1
    with pytest.raises(ValueError, match=r"rows \[2\] of 3.*other ids"):
        require_rows(other, digests)
    with pytest.raises(ValueError, match=r"uint8 of shape \(2, 16\)"):
        require_rows(IDS[:2], digests)


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([[1, 2]], TypeError, "NumPy array"),
        (np.ones((1, 2), "float32"), TypeError, "integer dtype"),
        (np.ones((2,), "int32"), ValueError, "shape"),
        (np.full((1, 1), 2**63, "uint64"), ValueError, "int64"),
    ],
)
def test_what_is_no_batch_of_ids_is_refused(ids, error, text):
    with pytest.raises(error, match=text):
        row_digests(ids)
