"""In what two checkpoints differ: settings of their recipes, and weights, by how much."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.provenance.checkpoints import read_checkpoint_record, section_tensors
from keras_diffusion_opd.provenance.differences import Difference, find_differences

_COMPARED = ("epoch", "batch", "updates", "name", "student", "base", "identity", "ancestors", "recipe")


@dataclasses.dataclass(frozen=True)
class WeightDifference:
    """How far one tensor of two checkpoints is apart.

    Args:
        section: such as "student".
        path: of the variable, as the first checkpoint names it.
        largest: largest absolute difference; None where shapes or dtypes differ, or the bits of numbers that
            NumPy does not know.
        relative: norm of the difference over the norm of the first; None as before, or where that is 0.
        note: what else is to say.
    """

    section: str
    path: str
    largest: float | None
    relative: float | None
    note: str = ""


def diff_checkpoints(a: Path, b: Path) -> tuple[list[Difference], list[WeightDifference]]:
    """What differs between two checkpoints.

    Args:
        a, b: directories of checkpoints with safetensors files.

    Returns:
        Settings that differ, and tensors that differ, those furthest apart first.

    Raises:
        ValueError: one of them is no checkpoint, or is damaged.
    """
    one, two = read_checkpoint_record(a), read_checkpoint_record(b)
    old, new = ({key: record[key] for key in _COMPARED} for record in (one, two))
    settings = find_differences(old, new, "checkpoint")
    tensors: list[WeightDifference] = []
    for section in [*one["layout"], *(name for name in two["layout"] if name not in one["layout"])]:
        pair = [record["layout"].get(section) for record in (one, two)]
        if None in pair or len(pair[0]) != len(pair[1]):
            counts = [0 if entries is None else len(entries) for entries in pair]
            tensors.append(WeightDifference(section, "", None, None, f"{counts[0]} tensors and {counts[1]}"))
        elif one["storage"] == two["storage"] == "safetensors":
            tensors += _section_differences(section, a, b, *pair)
    return settings, sorted(tensors, key=_furthest_first)


def _furthest_first(found: WeightDifference) -> tuple[bool, float, float]:
    known = found.largest is not None
    return known, -(found.relative or 0.0), -(found.largest or 0.0)


def _section_differences(section: str, a: Path, b: Path, old: Any, new: Any) -> list[WeightDifference]:
    files = [path / f"{section}.safetensors" for path in (a, b)]
    tensors = [section_tensors(file, entries) for file, entries in zip(files, (old, new), strict=True)]
    found = []
    with open(files[0], "rb") as first, open(files[1], "rb") as second:
        for one, two in zip(*tensors, strict=True):
            path = one.entry["path"]
            forms = [(tensor.entry["dtype"], tensor.entry["shape"]) for tensor in (one, two)]
            if forms[0] != forms[1]:
                said = " and ".join(f"{dtype} {tuple(shape)}" for dtype, shape in forms)
                found.append(WeightDifference(section, path, None, None, said))
                continue
            bits = []
            for stream, tensor in ((first, one), (second, two)):
                stream.seek(tensor.offset)
                bits.append(stream.read(tensor.bytes))
            if bits[0] != bits[1]:
                found.append(_apart(section, path, forms[0][0], *bits))
    return found


def _apart(section: str, path: str, dtype: str, old: bytes, new: bytes) -> WeightDifference:
    values = [_numbers(dtype, data) for data in (old, new)]
    if values[0] is None or values[1] is None:
        return WeightDifference(section, path, None, None, f"the bits of {dtype} differ")
    difference = values[1] - values[0]
    norm = float(np.linalg.norm(values[0]))
    relative = float(np.linalg.norm(difference)) / norm if norm else None
    note = "" if np.any(difference) else "the bits differ, and not the numbers"
    return WeightDifference(section, path, float(np.max(np.abs(difference))), relative, note)


def _numbers(dtype: str, data: bytes) -> np.ndarray | None:
    """float64 values of little-endian bits; None for a dtype that NumPy does not know."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("uint32") << 16).view("float32").astype("float64")
    try:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype("float64")
    except TypeError:
        return None
