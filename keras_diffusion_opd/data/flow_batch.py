"""`FlowBatch`: samples to train a flow model on."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import dtype_of, is_floating, is_integer, is_real, require_array, shape_of
from keras_diffusion_opd.data.prepared_batch import LARGEST_WEIGHT
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.training_batch import TrainingBatch

_RESERVED = ("x", "time")


@dataclass(frozen=True)
class FlowBatch(TrainingBatch):
    """Samples, what they are conditioned on, a weight and an identity for each.

    Noise and time of a row in training depend on its id, the seed and the update alone: they are the same in
    whatever batch the row comes. The plain constructor does not validate; `create` does, and fills in.

    Args:
        samples: float (B, ...), data x0: finite where the weight is above 0.
        conditions: arrays (B, ...) by name, as the denoiser takes them beside `x` and `time`: a class id, say.
        weights: bool, int or float (B,), finite, >= 0. A row of weight 0 may hold anything, and changes nothing.
        sample_ids: int32 (B, 2), two words that name the row.
        stamp: `Stamp` or None: where the samples came from.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import FlowBatch, PreparedDataset

    batch = FlowBatch.create(np.zeros((4, 8, 8, 1), "float32"), conditions={"label": np.arange(4)})
    x, y, sample_weight = PreparedDataset(batch, batch_size=2)[1]
    assert sorted(x) == ["label", "x"] and x["label"].tolist() == [2, 3]
    ```
    """

    samples: Any
    conditions: Mapping[str, Any]
    weights: Any
    sample_ids: Any
    stamp: Stamp | None = field(default=None)

    @classmethod
    def create(
        cls,
        samples: Any,
        *,
        conditions: Mapping[str, Any] | None = None,
        weights: Any = None,
        sample_ids: Any = None,
        stamp: Stamp | None = None,
    ) -> "FlowBatch":
        """Build and validate.

        Args:
            samples, conditions, stamp: see the class.
            weights: None for ones, else see the class.
            sample_ids: None: the digest of the row's content, so that equal rows share noise and time. Or int (B,),
                or int32 (B, 2).
        """
        require_array("samples", samples)
        conditions = dict(conditions or {})
        weights = np.ones(shape_of(samples)[:1], "float32") if weights is None else weights
        if sample_ids is None:
            sample_ids = _content_ids([samples, *(conditions[name] for name in sorted(conditions))])
        else:
            require_array("sample_ids", sample_ids)
            if len(shape_of(sample_ids)) == 1 and is_integer(sample_ids):
                wide = np.ascontiguousarray(keras.ops.convert_to_numpy(sample_ids), "<i8")
                sample_ids = wide.view("<i4").reshape(-1, 2).astype("int32")
        return cls(samples, conditions, weights, sample_ids, stamp).validate()

    def validate(self) -> "FlowBatch":
        """Check structure, shapes and dtypes, and values where they are there to be read.

        Raises:
            TypeError: something is not an array, or has the wrong dtype.
            ValueError: a shape does not fit; samples or weights are not finite; weights are negative.
        """
        require_array("samples", self.samples)
        shape = shape_of(self.samples)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"`samples` must have shape (batch, ...), no axis empty. Received {shape}.")
        if not is_floating(self.samples):
            raise TypeError(
                f"`samples` must be floating. Received {dtype_of(self.samples)}. Scale pixels to about [-1, 1]."
            )
        for name, array in self.conditions.items():
            if not isinstance(name, str) or name in _RESERVED:
                raise ValueError(f"`conditions` must have names other than {_RESERVED}. Received {name!r}.")
            self._rows_first(f"conditions[{name!r}]", array)
            if not is_real(array):
                raise TypeError(f"`conditions[{name!r}]` must be real or boolean. Received {dtype_of(array)}.")
        self._rows_first("weights", self.weights, ())
        if not is_real(self.weights):
            raise TypeError(f"`weights` must be real numeric or boolean. Received {dtype_of(self.weights)}.")
        self._rows_first("sample_ids", self.sample_ids, (2,))
        if dtype_of(self.sample_ids) != "int32":
            raise TypeError(f"`sample_ids` must be int32 (B, 2). Received {dtype_of(self.sample_ids)}: use create().")
        if self.stamp is not None and not isinstance(self.stamp, Stamp):
            raise TypeError(f"`stamp` must be a Stamp or None. Received {type(self.stamp).__name__}.")
        self._validate_values()
        return self

    def _rows_first(self, name: str, array: Any, rest: tuple[int, ...] | None = None) -> None:
        require_array(name, array)
        shape, rows = shape_of(array), self.rows
        fits = bool(shape) and (shape[0] is None or rows is None or shape[0] == rows)
        if not fits or (rest is not None and shape[1:] != rest):
            wanted = "..." if rest is None else ", ".join(map(str, rest))
            raise ValueError(f"`{name}` must have shape ({rows}, {wanted}): a row for each sample. Received {shape}.")

    def _validate_values(self) -> None:
        weights = backend.concrete(self.weights)
        if weights is None:
            return
        weights = weights.astype("float64")
        wrong = ~(np.isfinite(weights) & (weights >= 0) & (weights <= LARGEST_WEIGHT))
        if np.any(wrong):
            row = int(np.argmax(wrong))
            raise ValueError(
                f"`weights` must be finite, at least 0 and at most {LARGEST_WEIGHT:g}. Received {weights[row]} in row "
                f"{row}."
            )
        samples = backend.concrete(self.samples)
        if samples is None:
            return
        wrong = (weights > 0) & ~np.all(np.isfinite(samples.reshape(len(samples), -1).astype("float32")), axis=1)
        if np.any(wrong):
            raise ValueError(
                f"`samples` must be finite where the weight is above 0. Received NaN or infinity in row "
                f"{int(np.argmax(wrong))}. Give the row weight 0, or leave it out."
            )

    def as_fit(self) -> tuple[Any, dict[str, Any], Any]:
        """`({"x": samples, **conditions}, {"sample_ids": ...}, weights)`: what `keras.Model.fit` takes."""
        return {"x": self.samples, **self.conditions}, {"sample_ids": self.sample_ids}, self.weights

    @classmethod
    def from_fit(cls, x: Any, y: Any, sample_weight: Any, stamp: Stamp | None = None) -> "FlowBatch":
        """The batch behind `(x, y, sample_weight)`. Does not validate values.

        Raises:
            ValueError: this is not what `as_fit` gives.
        """
        if not (isinstance(x, dict) and "x" in x and isinstance(y, dict) and set(y) == {"sample_ids"}):
            raise ValueError(
                "A flow model is trained on FlowBatch.as_fit(): x with 'x' and the conditions, y with 'sample_ids'. "
                f"Received x of {_keys(x)} and y of {_keys(y)}. Pass FlowBatch.create(samples, conditions=...)."
            )
        if sample_weight is None:
            raise ValueError("`sample_weight` must hold a weight for each sample. Received None: use batch.as_fit().")
        conditions = {name: array for name, array in x.items() if name != "x"}
        return cls(x["x"], conditions, sample_weight, y["sample_ids"], stamp)

    def map(self, function: Any) -> "FlowBatch":
        """The same batch with `function` applied to every array. Does not validate."""
        conditions = {name: function(array) for name, array in self.conditions.items()}
        arrays = (function(self.samples), conditions, function(self.weights), function(self.sample_ids))
        return FlowBatch(*arrays, self.stamp)

    @property
    def rows(self) -> int | None:
        """Number of rows B, None where it is not known statically."""
        return shape_of(self.samples)[0]


def _keys(tree: Any) -> Any:
    return sorted(tree) if isinstance(tree, dict) else type(tree).__name__


def _content_ids(arrays: list[Any]) -> np.ndarray:
    """int32 (B, 2): 64 bits of the digest of every row of all arrays."""
    read = []
    for array in arrays:
        require_array("conditions", array)
        values = backend.concrete(array)
        if values is None:
            raise ValueError("`sample_ids` must be given where samples or conditions have no values to be read.")
        read.append(np.ascontiguousarray(values))
    rows = len(read[0])
    if any(values.ndim == 0 or len(values) != rows for values in read):
        return np.zeros((rows, 2), "int32")  # `validate` says what is wrong
    joined = (b"".join(values[row].tobytes() for values in read) for row in range(rows))
    digests = b"".join(hashlib.blake2b(content, digest_size=8).digest() for content in joined)
    return np.frombuffer(digests, "<i4").reshape(rows, 2).astype("int32")


def _flatten(batch: FlowBatch) -> tuple[list[tuple[str, Any]], Stamp | None]:
    names = ("samples", "conditions", "weights", "sample_ids")
    return [(name, getattr(batch, name)) for name in names], batch.stamp


backend.register_pytree(FlowBatch, _flatten, lambda stamp, children: FlowBatch(*(*children, stamp)))
