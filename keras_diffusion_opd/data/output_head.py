"""What turns hidden states into logits: a matrix, and what may come after it."""

from dataclasses import dataclass, field
from typing import Any

from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import dtype_of, is_floating, require_array, shape_of
from keras_diffusion_opd.validation import finite_real, positive_int


@dataclass(frozen=True)
class OutputHead:
    """`logits = softcap * tanh((hidden @ weight + (hidden @ A) @ B + bias) / softcap)`, over a vocabulary.

    Products are summed in float32 (float64 where an array has it) also for bfloat16 arrays: a product that is
    rounded to bfloat16 first has lost what the softmax needs.

    Args:
        weight: float (D, V), or (V, D) with `transposed`. Any tensor; gradients flow into it.
        bias: float (V,) or None. -inf excludes an id.
        softcap: > 0 or None: logits are bent into (-softcap, softcap).
        transposed: whether `weight` is (V, D), as an embedding is that also reads out: never transposed in memory.
        vocabulary_size: None, or how many of the V columns are ids; the others are padding, and take no part.
        low_rank: None or (A, B), float (D, r) and (r, V): an adapter beside the weight. `weight + A @ B` is
            never formed. A scale of the adapter belongs into A.
        trainable: False where weight and bias need no gradient: it is not computed then. A and B get theirs.

    Raises:
        TypeError, ValueError: an array that is none, or of a shape that does not fit; a number out of range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import OutputHead

    head = OutputHead(np.ones((4, 6), "float32"), softcap=2.0, vocabulary_size=5)
    assert tuple(head.logits(np.ones((2, 3, 4), "float32")).shape) == (2, 3, 5)
    ```
    """

    weight: Any
    bias: Any = field(default=None, kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    vocabulary_size: int | None = field(default=None, kw_only=True)
    low_rank: tuple[Any, Any] | None = field(default=None, kw_only=True)
    trainable: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.softcap is not None and finite_real("softcap", self.softcap) <= 0:
            raise ValueError(f"`softcap` must be above 0, or None for none. Received {self.softcap}.")
        for name, array, rank in self._named():
            require_array(name, array)
            if len(shape_of(array)) != rank:
                raise ValueError(f"`{name}` must have {rank} axes. Received shape {shape_of(array)}.")
            if not is_floating(array):
                raise TypeError(f"`{name}` must have a floating-point dtype. Received {dtype_of(array)}.")
        self._validate_shapes()

    def _named(self) -> list[tuple[str, Any, int]]:
        named = [("head", self.weight, 2)]
        if self.bias is not None:
            named.append(("bias", self.bias, 1))
        if self.low_rank is not None:
            if not isinstance(self.low_rank, list | tuple) or len(self.low_rank) != 2:
                raise TypeError(f"`low_rank` must be None or a pair (A, B). Received {type(self.low_rank).__name__}.")
            named += [(f"low_rank[{i}]", x, 2) for i, x in enumerate(self.low_rank)]
        return named

    def _validate_shapes(self) -> None:
        columns = self.columns
        if self.bias is not None and shape_of(self.bias) != (columns,):
            raise ValueError(f"`bias` must have shape ({columns},), a number for each id. Received {self.bias.shape}.")
        if self.low_rank is not None:
            a, b = (shape_of(x) for x in self.low_rank)
            if (a[0], b[1]) != (self.width, columns) or a[1] != b[0]:
                raise ValueError(
                    f"`low_rank` must be (A, B) of shapes ({self.width}, r) and (r, {columns}). Received {a} and {b}."
                )
        if self.vocabulary_size is not None and positive_int("vocabulary_size", self.vocabulary_size) > columns:
            raise ValueError(
                f"`vocabulary_size` must be at most the {columns} columns of the head. Received "
                f"{self.vocabulary_size}. A head of shape (V, D), as an embedding, needs transposed=True."
            )

    @property
    def columns(self) -> int:
        """Columns of the weight, padding included."""
        return int(self.weight.shape[0 if self.transposed else 1])

    @property
    def width(self) -> int:
        """D, the size of a hidden state."""
        return int(self.weight.shape[1 if self.transposed else 0])

    @property
    def ids(self) -> int:
        """V, the number of ids that are scored."""
        return self.columns if self.vocabulary_size is None else int(self.vocabulary_size)

    def tensors(self) -> dict[str, Any]:
        """The arrays by name, as tensors: `"weight"` and, where there are any, `"bias"`, `"low_a"`, `"low_b"`."""
        arrays = {"weight": self.weight, "bias": self.bias}
        if self.low_rank is not None:
            arrays["low_a"], arrays["low_b"] = self.low_rank
        # A Keras variable as such would break custom gradients on TensorFlow.
        return {name: ops.convert_to_tensor(x) for name, x in arrays.items() if x is not None}

    def products(self, hidden: Any, tensors: dict[str, Any]) -> Any:
        """float (N, D) -> float32 or float64 (N, columns): everything before `finish`.

        Args:
            hidden: float (N, D).
            tensors: as `tensors()` gives them.
        """
        raw = backend.wide_product(hidden, tensors["weight"], transpose_b=self.transposed)
        if "low_a" in tensors:
            inner = backend.wide_product(hidden, tensors["low_a"])
            raw = raw + backend.wide_product(inner, tensors["low_b"])
        if "bias" in tensors:
            raw = raw + ops.cast(tensors["bias"], raw.dtype)
        return raw

    def finish(self, raw: Any) -> Any:
        """Products (..., columns) -> logits (..., V)."""
        if self.vocabulary_size is not None and self.vocabulary_size < self.columns:
            raw = raw[..., : self.vocabulary_size]
        return raw if self.softcap is None else self.softcap * ops.tanh(raw / self.softcap)

    def logits(self, hidden: Any) -> Any:
        """float (..., D) -> float32 or float64 (..., V), all at once."""
        hidden = ops.convert_to_tensor(hidden)
        raw = self.products(ops.reshape(hidden, (-1, self.width)), self.tensors())
        return ops.reshape(self.finish(raw), (*ops.shape(hidden)[:-1], self.ids))
