"""Dense logits on disk."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from keras_diffusion_opd.data.arrays import shape_of
from keras_diffusion_opd.data.store.packing import FLOATS, TargetPacking, check_choice, narrowed, read_array
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets
from keras_diffusion_opd.validation import positive_int


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

    def __post_init__(self) -> None:
        positive_int("vocabulary_size", self.vocabulary_size)
        check_choice("dtype", self.dtype, FLOATS)

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
        return {
            "logits": narrowed(
                "teacher logits", np.where(active[..., None], logits, 0).astype(logits.dtype), self.dtype
            )
        }

    def decode(self, columns: dict[str, np.ndarray], shared: dict[str, Any] | None = None) -> DenseTargets:
        """See `TargetPacking.decode`."""
        return DenseTargets(columns["logits"])
