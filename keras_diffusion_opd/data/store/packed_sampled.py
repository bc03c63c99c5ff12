"""Sampled ids on disk."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from keras_diffusion_opd.data.store.bits import id_bits, pack_ids, packed_bytes, unpack_ids
from keras_diffusion_opd.data.store.packing import TargetPacking, check_choice, narrowed, read_array, targets_class
from keras_diffusion_opd.data.targets import TeacherTargets
from keras_diffusion_opd.validation import positive_int, positive_temperature


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
        forms: dict[str, tuple[str, tuple[int, ...]]] = {"ids": ("uint8", (ids,)), "counts": (self.counts, (self.n,))}
        return {**forms, "entropy": ("float32", ())} if self.entropy else forms

    def encode(self, targets: TeacherTargets, active: np.ndarray) -> dict[str, np.ndarray]:
        """See `TargetPacking.encode`."""
        arrays = {name: read_array(name, x) for name, x in targets.arrays().items()}
        settings = targets.settings()
        present = "entropy" in arrays
        if arrays["ids"].shape[-1] != self.n or settings["temperature"] != self.temperature or present != self.entropy:
            raise ValueError(
                f"sampled targets must have n={self.n}, temperature={self.temperature}, entropy={self.entropy}. "
                f"Received n={arrays['ids'].shape[-1]}, temperature={settings['temperature']}, entropy={present}."
            )
        counts = np.where(active[..., None], arrays["counts"], 1).astype(arrays["counts"].dtype)
        if (counts.dtype.kind == "f") != self.counts.startswith("float"):
            raise ValueError(
                f"sampled counts are {counts.dtype}, to be kept as {self.counts}: choose `counts` to match."
            )
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
