"""Tensors of strangers: safetensors files that are read only as far as they are sound."""

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.provenance import write_bytes
from keras_diffusion_opd.provenance.tensor_file import chunks

_LARGEST_HEADER = 16 * 2**20
_MOST_TENSORS = 100_000
_MOST_AXES = 8
MOST_BYTES = 2 * 2**30
# What the factors of an adapter may be stored in.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_tensors(path: Path, max_bytes: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of a safetensors file and its metadata.

    Everything that the header says is held against the size of the file before any of it decides how much is read:
    names once, dtypes that are floating, offsets that cover the data without holes or overlaps, each range as long as
    its shape says.

    Args:
        path: the file.
        max_bytes: a larger file is refused; None for 2 GiB.

    Returns:
        Arrays by name, which share one buffer, and the strings of `__metadata__`.

    Raises:
        ValueError: the file is not sound; the message says why.
        OSError: it cannot be read.
    """
    limit = MOST_BYTES if max_bytes is None else max_bytes
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path.name} must be a regular file.")
        if found.st_size > limit:
            raise ValueError(f"{path.name} has {found.st_size} bytes, and `max_bytes` allows {limit}.")
        length = int.from_bytes(file.read(8), "little")
        if found.st_size < 8 or length > min(_LARGEST_HEADER, found.st_size - 8):
            raise ValueError(
                f"{path.name} is no safetensors file: it says that its header has {length} bytes, and the file has "
                f"{found.st_size}."
            )
        header = _strict_json(file.read(length), path.name)
        metadata = _metadata(header.pop("__metadata__", {}), path.name)
        forms = _forms(header, found.st_size - 8 - length, path.name)
        data = file.read(found.st_size - 8 - length)
    if len(data) != found.st_size - 8 - length:
        raise ValueError(f"{path.name} changed while it was read.")
    arrays = {}
    for name, (dtype, shape, start) in forms.items():
        kind = np.dtype(dtype).newbyteorder("<")
        flat = np.frombuffer(data, kind, int(np.prod(shape, dtype="int64")), start)
        arrays[name] = flat.reshape(shape).astype(np.dtype(dtype), copy=False)
    return arrays, metadata


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with metadata, in full or not at all.

    Args:
        path: the file; what is there is replaced.
        arrays: by name.
        metadata: strings by name.
    """
    body = b"".join(chunks({name: arrays[name] for name in sorted(arrays)}))
    length = int.from_bytes(body[:8], "little")
    header = {"__metadata__": dict(metadata), **json.loads(body[8 : 8 + length])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(path, len(text).to_bytes(8, "little") + text + body[8 + length :])


def file_inside(directory: Path, name: str) -> Path:
    """`directory / name`, if it is there and no link out of it, but for the blobs of a Hugging Face cache."""
    path = directory / name
    real, root = path.resolve(strict=True), directory.resolve()
    blob = re.fullmatch(r"[0-9a-f]{40,64}", real.name) and real.parent.name == "blobs"
    if not real.is_relative_to(root) and not (blob and real.parent.parent in root.parents):
        raise ValueError(f"{name} must lie in its directory. It is a link to a file outside of {directory}.")
    return path


def _strict_json(text: bytes, name: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name is given twice")
        return result

    def refuse(number: str) -> None:
        raise ValueError(f"{number} is no JSON")

    try:
        header = json.loads(text.decode(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no safetensors file: its header does not read, {error}.") from error
    if not isinstance(header, dict) or len(header) > _MOST_TENSORS:
        raise ValueError(f"{name} is no safetensors file: its header must name at most {_MOST_TENSORS} tensors.")
    return header


def _metadata(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise ValueError(f"{name}: `__metadata__` must hold strings.")
    return value


def _forms(header: dict[str, Any], size: int, file: str) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """name -> (dtype, shape, start), if the ranges tile the data."""
    forms, ranges = {}, []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{file}: {name!r} must have dtype, shape and data_offsets.")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"{file}: {name!r} has dtype {dtype!r:.40}. Adapters are {', '.join(_DTYPES)}.")
        if not _whole_numbers(shape) or len(shape) > _MOST_AXES:
            raise ValueError(f"{file}: {name!r} has no shape but {shape!r:.80}.")
        if not _whole_numbers(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
            raise ValueError(f"{file}: {name!r} has no range of the {size} bytes of data but {offsets!r:.80}.")
        needed = np.dtype(_DTYPES[dtype]).itemsize
        for axis in shape:
            needed *= axis
        if needed != offsets[1] - offsets[0]:
            raise ValueError(
                f"{file}: {name!r} of shape {shape} in {dtype} has {needed} bytes, and its range "
                f"{offsets[1] - offsets[0]}."
            )
        forms[name] = (_DTYPES[dtype], tuple(shape), offsets[0])
        ranges.append((offsets[0], offsets[1], name))
    end = 0
    for start, stop, name in sorted(ranges):
        if start != end:
            raise ValueError(f"{file}: the range of {name!r} overlaps another or leaves a hole before it.")
        end = stop
    if end != size:
        raise ValueError(f"{file}: {size - end} bytes of data belong to no tensor.")
    return forms


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value)
