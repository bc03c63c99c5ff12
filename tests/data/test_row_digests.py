"""Digests of rows: stable over processes and dtypes, different for different rows."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data.row_digests import row_digests

IDS = np.array([[5, 0, 7], [7, 0, 5], [-1, 2**40, 3]])


def test_definition():
    for row, digest in zip(IDS.tolist(), row_digests(IDS), strict=True):
        message = b"".join(int(x).to_bytes(8, "little", signed=True) for x in [len(row), *row])
        assert digest.tobytes() == hashlib.blake2b(message, digest_size=16).digest()


def test_two_processes_agree_whatever_the_salt_of_hash():
    code = (
        "import numpy as np; from keras_diffusion_opd.data.row_digests import row_digests; "
        f"print(row_digests(np.array({IDS.tolist()})).tobytes().hex())"
    )
    for salt in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": salt}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert result.stdout.strip() == row_digests(IDS).tobytes().hex()


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
