"""The safetensors format, strictly: 8 bytes with the length of a JSON header, the header, the data.

The `safetensors` package writes and reads the same bytes; its functions for NumPy have no bfloat16.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


_BYTES = {code: int(digits[0]) // 8 for code in _CODES.values() if (digits := re.findall(r"\d+", code))} | {"BOOL": 1}


def packed(arrays: dict[str, np.ndarray]) -> bytes:
    """Arrays by name as the content of a safetensors file, in the order given."""
    little = (np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<"), copy=False) for a in arrays.values())
    return b"".join([tensor_header(_forms(arrays)), *(array.tobytes() for array in little)])


def tensor_header(forms: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """The length and the header of a file of tensors, which their dtypes and shapes decide to the last byte.

    Args:
        forms: name -> (dtype, shape), in the order of the data.

    Returns:
        The first bytes of the file; the data follow at once.
    """
    entries, offset = {}, 0
    for name, (dtype, shape) in forms.items():
        end = offset + item_bytes(dtype) * math.prod(shape)
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def item_bytes(dtype: str) -> int:
    """Bytes of one number of `dtype`; a KeyError for one that a file of tensors cannot hold."""
    return _BYTES[_CODES[dtype]]


def _forms(arrays: dict[str, np.ndarray]) -> dict[str, tuple[str, Sequence[int]]]:
    return {name: (array.dtype.name, array.shape) for name, array in arrays.items()}


def unpacked(path: Path, likes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a file, which has to hold exactly those that are expected.

    Args:
        path: the file.
        likes: arrays of the names, dtypes and shapes that are expected, in the order of the file. The
            file's whole form follows from them, so that nothing it says decides how much is read.

    Returns:
        The arrays by name.

    Raises:
        ValueError: any other form.
        OSError: it cannot be read.
    """
    header = tensor_header(_forms(likes))
    size, expected = path.stat().st_size, len(header) + sum(array.nbytes for array in likes.values())
    if size != expected:
        raise ValueError(f"it has {size} bytes, and {expected} are expected")
    data = path.read_bytes()
    if data[: len(header)] != header:
        raise ValueError(f"its header is not the one expected: {_difference(data[8 : len(header)], header[8:])}")
    result, offset = {}, len(header)
    for name, like in likes.items():
        count = math.prod(like.shape)
        little = like.dtype.newbyteorder("<")
        result[name] = np.frombuffer(data, little, count, offset).reshape(like.shape).astype(like.dtype, copy=False)
        offset += like.nbytes
    return result


def _difference(found: bytes, expected: bytes) -> str:
    def entries(text: bytes) -> dict[str, Any]:
        try:
            value = json.loads(text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    there, wanted = entries(found), entries(expected)
    for name in wanted:
        if there.get(name) != wanted[name]:
            return f"{name} is {there.get(name)}, not {wanted[name]}"
    return "it does not read as one"
