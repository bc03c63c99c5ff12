"""Hidden states on disk."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from keras_diffusion_opd.data.arrays import shape_of
from keras_diffusion_opd.data.store.packing import (
    FLOATS,
    TargetPacking,
    check_choice,
    narrowed,
    read_array,
    targets_class,
)
from keras_diffusion_opd.data.targets import TeacherTargets
from keras_diffusion_opd.provenance import check_digest, digest
from keras_diffusion_opd.provenance.row_shard import StoreError
from keras_diffusion_opd.validation import finite_real, positive_int


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

    def __post_init__(self) -> None:
        positive_int("width", self.width)
        positive_int("vocabulary_size", self.vocabulary_size)
        check_choice("dtype", self.dtype, FLOATS)
        if (self.softcap is not None and finite_real("softcap", self.softcap) <= 0) or type(
            self.transposed
        ) is not bool:
            raise ValueError("`softcap` must be None or above 0, and `transposed` a bool.")
        object.__setattr__(
            self, "head", check_digest(self.head if isinstance(self.head, str) else digest(self.head), "head")
        )

    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """See `TargetPacking.forms`."""
        return {"hidden": (self.dtype, (self.width,))}

    def _settings(self) -> dict[str, Any]:
        return {"softcap": self.softcap, "transposed": self.transposed, "vocabulary": self.vocabulary_size}

    def encode(self, targets: TeacherTargets, active: np.ndarray) -> dict[str, np.ndarray]:
        """See `TargetPacking.encode`."""
        given = {**targets.settings(), "vocabulary": targets.vocabulary_size()}
        if given != self._settings() or shape_of(targets.arrays()["hidden"])[-1] != self.width:
            raise ValueError(
                f"hidden targets must have the settings {self._settings()}, width {self.width}. Received {given}."
            )
        shared: dict[str, Any] = getattr(targets, "shared")()  # noqa: B009 (of hidden targets alone)
        if _digest_once(shared) != self.head:
            raise ValueError(f"hidden targets must come with the head {self.head[:12]}. Received another one.")
        hidden = read_array("hidden", targets.arrays()["hidden"])
        return {"hidden": narrowed("hidden", np.where(active[..., None], hidden, 0).astype(hidden.dtype), self.dtype)}

    def decode(self, columns: dict[str, np.ndarray], shared: dict[str, Any] | None = None) -> TeacherTargets:
        """See `TargetPacking.decode`."""
        if not shared:
            raise StoreError(
                f"hidden states need their head, of digest {self.head[:12]}: TeacherStore.open(path, head=...)."
            )
        return targets_class(self.kind).from_arrays({"hidden": columns["hidden"], **shared}, self._settings())


# The head seen last, and its digest: every batch brings the same arrays.
_LAST: list[Any] = [None, ""]


def _digest_once(shared: dict[str, Any]) -> str:
    last = _LAST[0]
    if last is None or list(last) != list(shared) or any(last[name] is not shared[name] for name in shared):
        _LAST[:] = [dict(shared), digest(shared)]
    return str(_LAST[1])
