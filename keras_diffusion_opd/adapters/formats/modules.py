"""Adapters as files have them: one pair of factors for each module, and modules of one layer put together.

What a file splits in three (`to_q`, `to_k`, `to_v`) may be one layer here. Side by side, the A of three modules and the
block diagonal of their B are the same change exactly. The other way round the modules share A, and each has its columns
of B; rows of B that are zero there go, which gives back what was put together.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from keras_diffusion_opd.adapters.adapter_part import AdapterPart


@dataclasses.dataclass
class Module:
    """The factors of one module of a file.

    Args:
        a: float (r, in), or (r, channels, taps...) for a convolution; as files have it.
        b: float (out, r), or (out, r, 1, ...).
        alpha: None for the rank.
        rslora: bool.
        magnitude: None or float (out,).
        lookup: whether it is an embedding, whose A is (r, ids) too.
    """

    a: Any = None
    b: Any = None
    alpha: float | None = None
    rslora: bool = False
    magnitude: Any = None
    lookup: bool = False

    def part(self, name: str, form: str) -> AdapterPart:
        """It as an `AdapterPart`; a ValueError names the module."""
        if self.a is None or self.b is None:
            raise ValueError(f"The module {name!r} has no {'A' if self.a is None else 'B'}.")
        a, b = self.a, self.b
        if a.ndim < 2 or b.ndim != a.ndim or math.prod(b.shape[2:]) != 1 or a.shape[0] != b.shape[1]:
            raise ValueError(
                f"The factors of {name!r} do not go together: A {a.shape} must be (r, in) and B {b.shape} (out, r)."
            )
        if self.lookup != (form == "embedding"):
            raise ValueError(f"{name!r} is {'an' if self.lookup else 'no'} embedding in the file, and a {form} here.")
        if form == "grouped":
            raise ValueError(f"{name!r} is a grouped convolution, whose adapters files have in no form that is known.")
        rank = a.shape[0]
        # (r, channels, taps...) -> (taps..., channels, r)
        a = np.moveaxis(a, (0, 1), (-1, -2)).reshape(-1, rank)
        magnitude = None if self.magnitude is None else np.asarray(self.magnitude).reshape(-1)
        try:
            alpha = float(rank) if self.alpha is None else self.alpha
            return AdapterPart(a, b.reshape(b.shape[0], rank).T, alpha, self.rslora, magnitude, form)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from error

    @classmethod
    def of(cls, part: AdapterPart, name: str) -> "Module":
        """The inverse of `part`."""
        if part.form == "grouped":
            raise ValueError(f"{name!r} is a grouped convolution, whose adapters no file format has.")
        a, b = part.a.T, part.b.T
        if part.form.startswith("conv:"):
            taps = tuple(int(size) for size in part.form.removeprefix("conv:").split("x"))
            a = np.moveaxis(part.a.reshape(*taps, -1, part.rank), (-1, -2), (0, 1))
            b = b.reshape(*b.shape, *(1 for _ in taps))
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        return cls(a, b, part.alpha, part.rslora, part.magnitude, part.form == "embedding")


def joined(parts: list[AdapterPart | None], widths: list[int]) -> AdapterPart:
    """One part of several that share their inputs and follow one another in the outputs.

    Args:
        parts: one for each module; None where the file has none.
        widths: outputs of each module.

    Raises:
        ValueError: they are of different kinds.
    """
    there = [part for part in parts if part is not None]
    if len({part.a.shape[0] for part in there}) > 1:
        raise ValueError("Modules of one layer must have one number of inputs.")
    if len({part.magnitude is None for part in there}) > 1 or (there[0].magnitude is not None and None in parts):
        raise ValueError("DoRA of one layer must be that of all of its modules.")
    rank = sum(part.rank for part in there)
    scales = [part.scale for part in there]
    same = len(set(scales)) == 1
    dtype = (
        np.result_type(*(part.b.dtype for part in there)) if len({p.b.dtype for p in there}) > 1 else there[0].b.dtype
    )
    b, row, column = np.zeros((rank, sum(widths)), dtype), 0, 0
    for part, width in zip(parts, widths, strict=True):
        if part is not None:
            if part.b.shape[1] != width:
                raise ValueError(f"A module must have {width} outputs. Received B {part.b.shape[::-1]}.")
            scaled = part.b if same else (part.b.astype("float64") * part.scale).astype(dtype)
            b[row : row + part.rank, column : column + width] = scaled
            row += part.rank
        column += width
    a = np.concatenate([part.a for part in there], axis=1)
    lengths = [part.magnitude for part in there if part.magnitude is not None]
    magnitude = np.concatenate(lengths) if lengths else None
    return AdapterPart(a, b, (scales[0] if same else 1.0) * rank, False, magnitude, there[0].form)


def split(part: AdapterPart, widths: list[int]) -> list[AdapterPart]:
    """The inverse of `joined`: one part for each module, exact for any B."""
    result, column = [], 0
    for width in widths:
        b = part.b[:, column : column + width]
        kept = np.flatnonzero(np.any(b != 0, axis=1))
        kept = kept if len(kept) else np.arange(part.rank)
        length = None if part.magnitude is None else part.magnitude[column : column + width]
        result.append(AdapterPart(part.a[:, kept], b[kept], part.scale * len(kept), False, length, part.form))
        column += width
    return result


def trained_rank(part_b: np.ndarray, widths: list[int]) -> int:
    """The rank of each block, where B (r, out) is the block diagonal of equal ranks; else r itself."""
    rank, count = part_b.shape[0], len(widths)
    if count < 2 or rank % count or not np.any(part_b):
        return rank
    each, column = rank // count, 0
    for block, width in enumerate(widths):
        rows = slice(block * each, (block + 1) * each)
        outside = part_b[rows].copy()
        outside[:, column : column + width] = 0
        if np.any(outside):
            return rank
        column += width
    return each
