"""What an adapter holds for one layer."""

import dataclasses
import math
from typing import Any

import numpy as np

from keras_diffusion_opd.validation import finite_real

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class AdapterPart:
    """The factors of one layer, read-only: `scale * A B` is added to its matrix.

    Args:
        a: float (in, r). For a convolution `in` runs over the kernel's taps and channels, for an embedding over ids.
        b: float (r, out).
        alpha: float; the scale is alpha / r, or alpha / sqrt(r) with `rslora`.
        rslora: bool, see Kalajdzievski, "A Rank Stabilization Scaling Factor", 2023, arXiv:2312.03732.
        magnitude: None, or float (out,): DoRA's length of each column.
        form: of the layer, for files: "linear", "embedding", "conv:3x3" (the kernel's taps) or "grouped". Not part
            of the identity.

    Raises:
        ValueError: shapes that do not go together, a dtype that is not floating, or a number that is not finite.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.adapters import AdapterPart

    part = AdapterPart(np.ones((3, 4), "float32"), np.ones((4, 2), "float32"), alpha=9.0, rslora=True)
    assert part.rank == 4 and part.scale == 4.5
    ```
    """

    a: np.ndarray
    b: np.ndarray
    alpha: float
    rslora: bool = False
    magnitude: np.ndarray | None = None
    form: str = "linear"

    def __post_init__(self) -> None:
        for field in ("a", "b", "magnitude"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, _frozen(field, value))
        if self.a.ndim != 2 or self.b.ndim != 2 or self.a.shape[1] != self.b.shape[0] or not self.a.shape[1]:
            raise ValueError(
                f"A must be (in, r) and B (r, out) of one rank r >= 1. Received A {self.a.shape} and B {self.b.shape}."
                f"{' They look transposed.' if self.a.shape[:1] == self.b.shape[-1:] and self.a.ndim == 2 else ''}"
            )
        if self.magnitude is not None and self.magnitude.shape != self.b.shape[1:]:
            raise ValueError(
                f"`magnitude` must have one number for each of the {self.b.shape[1]} outputs. Received shape "
                f"{self.magnitude.shape}."
            )
        object.__setattr__(self, "alpha", finite_real("alpha", self.alpha))
        object.__setattr__(self, "rslora", bool(self.rslora))

    @property
    def rank(self) -> int:
        """The number of columns of A."""
        return int(self.a.shape[1])

    @property
    def scale(self) -> float:
        """What `A B` is multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.a.nbytes + self.b.nbytes + (0 if self.magnitude is None else self.magnitude.nbytes))

    def delta(self) -> np.ndarray:
        """`scale * A B` in float64, (in, out)."""
        return self.scale * (self.a.astype("float64") @ self.b.astype("float64"))

    def column_factor(self, matrix: np.ndarray) -> np.ndarray | None:
        """DoRA's `magnitude / |W + scale A B|` in float64, (out,); None for plain LoRA.

        Args:
            matrix: float (in, out), the layer's own matrix.
        """
        if self.magnitude is None:
            return None
        norm = np.linalg.norm(matrix.astype("float64") + self.delta(), axis=0)
        if not norm.all():
            raise ValueError("DoRA divides by the length of a column, and a column of the adapted matrix is zero.")
        return self.magnitude.astype("float64") / norm

    def content(self) -> dict[str, Any]:
        """What the digest of an adapter is taken of."""
        arrays = {"a": self.a, "b": self.b, "alpha": self.alpha, "rslora": self.rslora}
        return arrays if self.magnitude is None else {**arrays, "magnitude": self.magnitude}


def _frozen(field: str, value: Any) -> np.ndarray:
    array = np.array(value)  # a copy of its own
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"`{field}` must be one of {', '.join(_DTYPES)}. Received {array.dtype.name}.")
    if not np.isfinite(array.astype("float32") if array.dtype.name == "bfloat16" else array).all():
        count = int(np.size(array) - np.isfinite(array.astype("float32")).sum())
        raise ValueError(f"`{field}` must be finite. Received {count} numbers that are NaN or infinite.")
    array.setflags(write=False)
    return array
