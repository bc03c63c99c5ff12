"""Dense logits, sampled ids and hidden states on disk."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from keras_diffusion_opd.data.arrays import shape_of
from keras_diffusion_opd.data.store.bits import id_bits, pack_ids, packed_bytes, unpack_ids
from keras_diffusion_opd.data.store.packing import TargetPacking, check_choice, narrowed, read_array, targets_class
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets
from keras_diffusion_opd.provenance import check_digest, digest
from keras_diffusion_opd.provenance.row_shard import StoreError
from keras_diffusion_opd.validation import finite_real, positive_int, positive_temperature

_FLOATS = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class PackedDense(TargetPacking):
    """`DenseTargets` on disk: for vocabularies of a few hundred ids.

    Args:
        vocabulary_size: int >= 1, columns of the logits.
        dtype: `"float16"`, `"bfloat16"` or `"float32"`. A logit that overflows it is refused.

    Raises:
        ValueError: an argument out of range.

    Example:

    ```python
    from keras_diffusion_opd.data import PackedDense

    assert PackedDense(18).forms() == {"logits": ("float16", (18,))}
    ```
    """

    vocabulary_size: int
    dtype: str = "float16"
    kind: ClassVar[str] = "dense"
    temperature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        positive_int("vocabulary_size", self.vocabulary_size)
        check_choice("dtype", self.dtype, _FLOATS)

    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """See `TargetPacking.forms`."""
        return {"logits": (self.dtype, (self.vocabulary_size,))}

    def from_logits(self, logits: Any) -> DenseTargets:
        """See `TargetPacking.from_logits`."""
        return DenseTargets(logits)

    def encode(self, targets: TeacherTargets, active: np.ndarray) -> dict[str, np.ndarray]:
        """See `TargetPacking.encode`."""
        if not isinstance(targets, DenseTargets):
            raise ValueError(f"`targets` must be DenseTargets. Received {type(targets).__name__}.")
        if shape_of(targets.logits)[-1] != self.vocabulary_size:
            raise ValueError(
                f"the teacher's logits must be over the vocabulary of {self.vocabulary_size} ids. Received "
                f"{shape_of(targets.logits)[-1]}."
            )
        logits = read_array("logits", targets.logits)
        return {"logits": narrowed("teacher logits", np.where(active[..., None], logits, 0).astype(logits.dtype), self.dtype)}

    def decode(self, columns: dict[str, np.ndarray], shared: dict[str, Any] | None = None) -> DenseTargets:
        """See `TargetPacking.decode`."""
        return DenseTargets(columns["logits"])


@dataclass(frozen=True)
class PackedSampled(TargetPacking):
    """Sampled targets on disk: ids in as few bits as the vocabulary needs, and how often each was drawn.

    Args:
        n: int >= 1, ids at a position.
        vocabulary_size: int >= 1, what decides the bits of an id.
        counts: `"uint8"` or `"uint16"` for counts of draws, `"float16"` or `"float32"` for weights.
        temperature: > 0, of the teacher when it was drawn from.
        entropy: bool, whether the teacher's entropy is kept at every position, 4 bytes.

    Raises:
        ValueError: an argument out of range.

    Example:

    ```python
    from keras_diffusion_opd.data import PackedSampled

    assert PackedSampled(8, 50257).forms()["ids"] == ("uint8", (16,))
    ```
    """

    n: int
    vocabulary_size: int
    counts: str = "uint8"
    temperature: float = field(default=1.0, kw_only=True)
    entropy: bool = field(default=False, kw_only=True)
    kind: ClassVar[str] = "sampled"

    def __post_init__(self) -> None:
        positive_int("n", self.n)
        positive_int("vocabulary_size", self.vocabulary_size)
        check_choice("counts", self.counts, ("uint8", "uint16", "float16", "float32"))
        if type(self.entropy) is not bool or self.vocabulary_size > 2**31:
            raise ValueError("`entropy` must be a bool, and `vocabulary_size` at most 2**31.")
        object.__setattr__(self, "temperature", positive_temperature(self.temperature))

    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """See `TargetPacking.forms`."""
        ids = packed_bytes(self.n, id_bits(self.vocabulary_size))
        forms = {"ids": ("uint8", (ids,)), "counts": (self.counts, (self.n,))}
        return {**forms, "entropy": ("float32", ())} if self.entropy else forms

    def encode(self, targets: TeacherTargets, active: np.ndarray) -> dict[str, np.ndarray]:
        """See `TargetPacking.encode`."""
        arrays = {name: read_array(name, x) for name, x in targets.arrays().items()}
        settings = targets.settings()
        present = "entropy" in arrays
        if arrays["ids"].shape[-1] != self.n or settings["temperature"] != self.temperature or present != self.entropy:
            raise ValueError(
                f"sampled targets must have n={self.n}, temperature={self.temperature}, entropy={self.entropy}. Received "
                f"n={arrays['ids'].shape[-1]}, temperature={settings['temperature']}, entropy={present}."
            )
        counts = np.where(active[..., None], arrays["counts"], 1).astype(arrays["counts"].dtype)
        if (counts.dtype.kind == "f") != self.counts.startswith("float"):
            raise ValueError(f"sampled counts are {counts.dtype}, to be kept as {self.counts}: choose `counts` to match.")
        if counts.dtype.kind in "iu" and counts.max() > np.iinfo(self.counts).max:
            raise ValueError(f"sampled counts must fit in {self.counts}. Received {counts.max()}: choose uint16.")
        kept = counts.astype(self.counts) if counts.dtype.kind in "iu" else narrowed("counts", counts, self.counts)
        ids = np.where(active[..., None] & (counts > 0), arrays["ids"], 0)
        columns = {"ids": pack_ids(ids, id_bits(self.vocabulary_size)), "counts": kept}
        if present:
            columns["entropy"] = np.where(active, arrays["entropy"], 0).astype("float32")
        return columns

    def decode(self, columns: dict[str, np.ndarray], shared: dict[str, Any] | None = None) -> TeacherTargets:
        """See `TargetPacking.decode`."""
        counts = columns["counts"]
        arrays = {
            "ids": unpack_ids(columns["ids"], self.n, id_bits(self.vocabulary_size)),
            "counts": counts.astype("int32" if counts.dtype.kind == "u" else "float32"),
        }
        if self.entropy:
            arrays["entropy"] = columns["entropy"]
        return targets_class(self.kind).from_arrays(arrays, {"temperature": self.temperature})


@dataclass(frozen=True)
class PackedHidden(TargetPacking):
    """Hidden states on disk; the teacher's head is known by its digest and given anew when the store is opened.

    Args:
        width: int >= 1, numbers at a position.
        vocabulary_size: int >= 1, ids that the head scores.
        head: digest of what all rows share, `digest({"head": ..., "bias": ...})` or without a bias
            `digest({"head": ...})`; or these arrays themselves, of which it is taken.
        dtype: `"float16"`, `"bfloat16"` or `"float32"`. A number that overflows it is refused.
        softcap: > 0 or None, of the logits.
        transposed: bool, whether the head is (V, D).

    Raises:
        ValueError: an argument out of range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import PackedHidden

    packing = PackedHidden(4, 9, {"head": np.ones((4, 9), "float32")})
    assert len(packing.head) == 64
    ```
    """

    width: int
    vocabulary_size: int
    head: Any
    dtype: str = "bfloat16"
    softcap: float | None = field(default=None, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    kind: ClassVar[str] = "hidden"
    temperature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        positive_int("width", self.width)
        positive_int("vocabulary_size", self.vocabulary_size)
        check_choice("dtype", self.dtype, _FLOATS)
        if self.softcap is not None and finite_real("softcap", self.softcap) <= 0 or type(self.transposed) is not bool:
            raise ValueError("`softcap` must be None or above 0, and `transposed` a bool.")
        object.__setattr__(self, "head", check_digest(self.head if isinstance(self.head, str) else digest(self.head), "head"))

    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """See `TargetPacking.forms`."""
        return {"hidden": (self.dtype, (self.width,))}

    def _settings(self) -> dict[str, Any]:
        return {"softcap": self.softcap, "transposed": self.transposed, "vocabulary": self.vocabulary_size}

    def encode(self, targets: TeacherTargets, active: np.ndarray) -> dict[str, np.ndarray]:
        """See `TargetPacking.encode`."""
        given = {**targets.settings(), "vocabulary": targets.vocabulary_size()}
        if given != self._settings() or shape_of(targets.arrays()["hidden"])[-1] != self.width:
            raise ValueError(f"hidden targets must have the settings {self._settings()}, width {self.width}. Received {given}.")
        shared: dict[str, Any] = getattr(targets, "shared")()  # noqa: B009 (of hidden targets alone)
        if _digest_once(shared) != self.head:
            raise ValueError(f"hidden targets must come with the head {self.head[:12]}. Received another one.")
        hidden = read_array("hidden", targets.arrays()["hidden"])
        return {"hidden": narrowed("hidden", np.where(active[..., None], hidden, 0).astype(hidden.dtype), self.dtype)}

    def decode(self, columns: dict[str, np.ndarray], shared: dict[str, Any] | None = None) -> TeacherTargets:
        """See `TargetPacking.decode`."""
        if not shared:
            raise StoreError(f"hidden states need their head, of digest {self.head[:12]}: TeacherStore.open(path, head=...).")
        return targets_class(self.kind).from_arrays({"hidden": columns["hidden"], **shared}, self._settings())


# The head seen last, and its digest: every batch brings the same arrays.
_LAST: list[Any] = [None, ""]


def _digest_once(shared: dict[str, Any]) -> str:
    last = _LAST[0]
    if last is None or list(last) != list(shared) or any(last[name] is not shared[name] for name in shared):
        _LAST[:] = [dict(shared), digest(shared)]
    return str(_LAST[1])
