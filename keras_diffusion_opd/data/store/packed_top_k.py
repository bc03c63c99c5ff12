"""Top-k targets on disk: about 210 bytes a token at k = 64."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from keras_diffusion_opd.data.store.bits import id_bits, pack_ids, packed_bytes, unpack_ids
from keras_diffusion_opd.data.store.packing import TargetPacking, check_choice, read_array
from keras_diffusion_opd.data.store.quantized import dequantize, normalized, quantize
from keras_diffusion_opd.data.targets import TeacherTargets
from keras_diffusion_opd.data.top_k_targets import TopKTargets
from keras_diffusion_opd.validation import positive_int, positive_temperature

_PRECISIONS = ("int8", "float16", "float32")
_LOWEST_HALF = -65504.0


@dataclass(frozen=True)
class PackedTopK(TargetPacking):
    """`TopKTargets` on disk: ids in as few bits as the vocabulary needs, log-probabilities in one or two bytes.

    The mass of all other ids is kept in float32. After rounding, the k probabilities and the rest are normalised
    anew, so that what is read is a distribution. The log-probabilities come back in float32.

    Args:
        k: int >= 1, ids at a position.
        vocabulary_size: int >= k: what decides the bits of an id (16 up to 65,536 ids, 17 up to 131,072).
        log_probs: `"int8"`, one byte, in unequal steps between the smallest and the largest of a position: a KL
            of at most 7e-4 nats from what was written, usually below 1e-4. `"float16"`: two bytes, below 1e-6.
            `"float32"`: four bytes, as they were.
        temperature: > 0, at which the teacher's log-probabilities are taken.
        tail: as in `TopKTargets`.

    Raises:
        ValueError: an argument out of range.

    Example:

    ```python
    from keras_diffusion_opd.data import PackedTopK

    packing = PackedTopK(64, vocabulary_size=128256)
    assert packing.token_bytes() == 64 * 17 // 8 + 64 + 4 + 4 + 4      # ids, codes, largest, range, tail
    ```
    """

    k: int
    vocabulary_size: int
    log_probs: str = "int8"
    temperature: float = field(default=1.0, kw_only=True)
    tail: str = field(default="bucket", kw_only=True)
    kind: ClassVar[str] = "top_k"

    def __post_init__(self) -> None:
        positive_int("k", self.k)
        positive_int("vocabulary_size", self.vocabulary_size)
        if not self.k <= self.vocabulary_size <= 2**31:
            raise ValueError(f"`vocabulary_size` must be k={self.k} to 2**31. Received {self.vocabulary_size}.")
        check_choice("log_probs", self.log_probs, _PRECISIONS)
        check_choice("tail", self.tail, ("bucket", "renormalize"))
        object.__setattr__(self, "temperature", positive_temperature(self.temperature))

    @property
    def _bits(self) -> int:
        return id_bits(self.vocabulary_size)

    def token_bytes(self) -> int:
        """Bytes of the targets of one position."""
        return sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in self.forms().values())

    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """See `TargetPacking.forms`."""
        ids = {"ids": ("uint8", (packed_bytes(self.k, self._bits),)), "log_tail": ("float32", ())}
        if self.log_probs == "int8":
            return {**ids, "codes": ("uint8", (self.k,)), "largest": ("float32", ()), "range": ("float32", ())}
        return {**ids, "log_probs": (self.log_probs, (self.k,))}

    def from_logits(self, logits: Any) -> TopKTargets:
        """See `TargetPacking.from_logits`."""
        if logits.shape[-1] != self.vocabulary_size:
            raise ValueError(
                f"the teacher's logits must be over the vocabulary of {self.vocabulary_size} ids. Received "
                f"{logits.shape[-1]}. Cut off the padding."
            )
        return TopKTargets.from_logits(logits, self.k, temperature=self.temperature, tail=self.tail)

    def encode(self, targets: TeacherTargets, active: np.ndarray) -> dict[str, np.ndarray]:
        """See `TargetPacking.encode`."""
        if not isinstance(targets, TopKTargets):
            raise ValueError(f"`targets` must be TopKTargets. Received {type(targets).__name__}.")
        ids = read_array("ids", targets.ids)
        if ids.shape[-1] != self.k or (targets.temperature, targets.tail) != (self.temperature, self.tail):
            raise ValueError(
                f"the teacher's targets must have k={self.k}, temperature={self.temperature}, tail={self.tail!r}. "
                f"Received k={ids.shape[-1]}, temperature={targets.temperature}, tail={targets.tail!r}."
            )
        # What is inactive may be anything; a distribution is written, and the same one always.
        blank = np.full((), -np.log(self.k), "float32")
        ids = np.where(active[..., None], ids, np.arange(self.k)).astype("int64")
        log_probs = np.where(active[..., None], read_array("log_probs", targets.log_probs).astype("float32"), blank)
        log_tail = np.where(active, read_array("log_tail", targets.tail_log_mass()).astype("float32"), -np.inf)
        log_probs = np.minimum(log_probs, 0.0)
        columns = {"ids": pack_ids(ids, self._bits), "log_tail": log_tail.astype("float32")}
        if self.log_probs == "int8":
            codes, largest, width = quantize(log_probs)
            return {**columns, "codes": codes, "largest": largest, "range": width}
        if self.log_probs == "float16":
            log_probs = np.where(np.isneginf(log_probs), log_probs, np.maximum(log_probs, _LOWEST_HALF))
        return {**columns, "log_probs": log_probs.astype(self.log_probs)}

    def decode(self, columns: dict[str, np.ndarray], shared: dict[str, Any] | None = None) -> TopKTargets:
        """See `TargetPacking.decode`."""
        log_tail = columns["log_tail"]
        if self.log_probs == "int8":
            found = dequantize(columns["codes"], columns["largest"], columns["range"])
        else:
            found = columns["log_probs"].astype("float32")
        if self.log_probs != "float32":
            found, log_tail = normalized(found, log_tail)
        ids = unpack_ids(columns["ids"], self.k, self._bits)
        return TopKTargets(ids, found, temperature=self.temperature, log_tail=log_tail, tail=self.tail)
