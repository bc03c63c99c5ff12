"""A digest of every row of token ids: what a stored teacher's row is matched by."""

import hashlib
from typing import Any

import numpy as np

from keras_diffusion_opd.data.arrays import dtype_of, is_integer, require_array, shape_of

DIGEST_BYTES = 16


def row_digests(ids: Any) -> np.ndarray:
    """BLAKE2b-128 of every row of ids: the same in every process, on every machine, for every integer dtype.

    What is hashed is the length of the row and then its ids, all as little-endian int64. Python's `hash` is
    salted anew in every process and will not do.

    Args:
        ids: int (B, L), NumPy or a backend's tensor with values.

    Returns:
        uint8 (B, 16).

    Raises:
        TypeError: no array, or no integer dtype.
        ValueError: not of two axes, or an id that int64 cannot hold.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data.row_digests import row_digests

    digests = row_digests(np.array([[1, 2], [2, 1]]))
    assert digests.shape == (2, 16) and (digests[0] != digests[1]).any()
    assert bytes(digests[0]).hex() == "db18e9c1f9f6ff05865a3152b6a72598"
    ```
    """
    require_array("ids", ids)
    if not is_integer(ids):
        raise TypeError(f"`ids` must have an integer dtype. Received {dtype_of(ids)}.")
    if len(shape_of(ids)) != 2:
        raise ValueError(f"`ids` must have shape (batch, length). Received {shape_of(ids)}.")
    values = np.asarray(ids)
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"`ids` must fit in int64. Received up to {values.max()}.")
    rows = np.ascontiguousarray(values, "<i8")
    length = np.int64(rows.shape[1]).astype("<i8").tobytes()
    digests = [hashlib.blake2b(length + row.tobytes(), digest_size=DIGEST_BYTES).digest() for row in rows]
    return np.frombuffer(b"".join(digests), "uint8").reshape(len(rows), DIGEST_BYTES)
