"""How a kind of teacher targets lies on disk: a small registry that another kind can join."""

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import dtype_of
from keras_diffusion_opd.data.targets import TeacherTargets
from keras_diffusion_opd.provenance.row_shard import StoreError

FLOATS = ("float16", "bfloat16", "float32")


class TargetPacking(abc.ABC):
    """How the targets of one teacher become columns of a store, and back.

    A subclass is a frozen dataclass of JSON values with a `kind`, that of its targets, by which the manifest
    names it. Every column has one item for each position.
    """

    kind: ClassVar[str] = ""
    registry: ClassVar[dict[str, type["TargetPacking"]]] = {}
    vocabulary_size: int

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            TargetPacking.registry[cls.kind] = cls

    @abc.abstractmethod
    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name of each column -> dtype and shape of what it holds for one position."""

    @abc.abstractmethod
    def encode(self, targets: TeacherTargets, active: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays (B, L, ...) in the forms of the columns.

        Args:
            targets: of this kind, valid.
            active: bool (B, L). Where False, the targets may hold anything.

        Raises:
            ValueError: the targets do not fit this packing.
        """

    @abc.abstractmethod
    def decode(self, columns: dict[str, np.ndarray], shared: dict[str, Any] | None = None) -> TeacherTargets:
        """The targets behind arrays (B, L, ...); `shared` is what all rows have in common, such as a head."""

    def from_logits(self, logits: Any) -> TeacherTargets:
        """Targets of this kind from a teacher's raw logits (B, L, V)."""
        raise StoreError(f"Targets of kind {self.kind!r} cannot be made from logits: let the teacher return them.")

    def fingerprints(self) -> dict[str, Any]:
        """What a store must agree on with whoever reads it. Logits and hidden states are those at temperature 1."""
        return {"vocabulary_size": self.vocabulary_size, "temperature": getattr(self, "temperature", 1.0)}

    def to_json(self) -> dict[str, Any]:
        """Kind and settings as JSON values."""
        return {"kind": self.kind, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    @staticmethod
    def from_json(value: Any) -> "TargetPacking":
        """The packing that `to_json` wrote. StoreError for anything else."""
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in TargetPacking.registry:
            known = sorted(TargetPacking.registry)
            raise StoreError(f"the targets of the store have kind {kind!r}. Known kinds: {known}.")
        try:
            return TargetPacking.registry[kind](**{key: item for key, item in value.items() if key != "kind"})
        except (TypeError, ValueError) as error:
            raise StoreError(f"the packing of the store's targets does not hold: {error}") from None


def read_array(name: str, x: Any) -> np.ndarray:
    """The values of `x` as NumPy in its own dtype, little-endian; ValueError where there are none to read."""
    values = backend.concrete(x)
    if values is None:
        raise ValueError(
            f"`{name}` must have values that can be read. Received a tracer, an abstract array or a shard."
        )
    # PyTorch's bfloat16 is read as float32. The name is known to NumPy: Keras imports ml_dtypes.
    values = np.asarray(values).astype(np.dtype(dtype_of(x)), copy=False)
    return values.astype(values.dtype.newbyteorder("<"), copy=False)


def targets_class(kind: str) -> type[TeacherTargets]:
    """The targets of a kind; StoreError where this release does not have them."""
    if kind not in TeacherTargets.registry:
        raise StoreError(f"targets of kind {kind!r} are not known here. Known: {sorted(TeacherTargets.registry)}.")
    return TeacherTargets.registry[kind]


def narrowed(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` in `dtype`; ValueError where a finite number overflows it."""
    with np.errstate(over="ignore"):
        result = values.astype(dtype)
    lost = np.isfinite(values.astype("float64")) & ~np.isfinite(result.astype("float64"))
    if np.any(lost):
        raise ValueError(f"`{name}` must fit in {dtype}. Received {values[lost][0]}. Choose bfloat16 or float32.")
    return result


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value`, if it is one of the choices."""
    if value not in choices or not isinstance(value, str):
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}. Received {value!r}.")
    return value
