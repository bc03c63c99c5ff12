"""`PreparedBatch`: what every token loss and trainer takes."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import (
    dtype_of,
    is_integer,
    is_real,
    leaves_with_paths,
    map_leaves,
    require_array,
    same_shape,
    shape_of,
)
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.targets import TeacherTargets, validate_logits_shape
from keras_diffusion_opd.data.training_batch import TrainingBatch

_LARGEST_ID = 2**31 - 1
LARGEST_WEIGHT = 1e30


@dataclass(frozen=True)
class PreparedBatch(TrainingBatch):
    """Corrupted inputs, the ids to predict, a weight per token, and what the teacher says.

    Whoever builds the batch owns corruption, mask ids, tokenizer, alignment and rollouts; from here on
    nothing is shifted, cast or re-weighted. The plain constructor does not validate (it is also how a
    tree is rebuilt under `jit`); `create` does.

    Args:
        model_inputs: any nest of dicts, lists and tuples of arrays, each (B, ...): what the student is
            called with.
        target_ids: int (B, L). Position i of the logits scores target i.
        loss_weights: bool, int or float (B, L), finite, >= 0. Where 0 a position is inactive: its ids,
            logits and teacher may hold anything, NaN included, and change nothing.
        teacher: `TeacherTargets` or None.
        stamp: `Stamp` or None: where the batch came from.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets, PreparedBatch

    batch = PreparedBatch.create(
        model_inputs={"token_ids": np.array([[4, 9, 9]])},          # 9 is the mask id
        target_ids=np.array([[4, 1, 2]]),
        loss_weights=np.array([[0.0, 1.0, 1.0]], "float32"),
        teacher=DenseTargets(np.zeros((1, 3, 10), "float32")),
    )
    x, y, sample_weight = batch.as_fit()
    ```
    """

    model_inputs: Any
    target_ids: Any
    loss_weights: Any
    teacher: TeacherTargets | None = None
    stamp: Stamp | None = None

    @classmethod
    def create(
        cls,
        *,
        model_inputs: Any,
        target_ids: Any,
        loss_weights: Any,
        teacher: TeacherTargets | None = None,
        stamp: Stamp | None = None,
    ) -> "PreparedBatch":
        """Build and validate; see the class for the arguments and `validate` for what is raised."""
        return cls(model_inputs, target_ids, loss_weights, teacher, stamp).validate()

    def validate(self) -> "PreparedBatch":
        """Check structure, shapes and dtypes, and values where they are there to be read.

        Values of tracers, abstract arrays and arrays spread over several processes are not read here;
        the trainers check them on the device (`keras_diffusion_opd.data.violations`).

        Returns:
            The batch itself.

        Raises:
            TypeError: something is not an array, or has the wrong dtype.
            ValueError: a shape does not fit; weights are negative or not finite; an active target id is
                negative or beyond the teacher's vocabulary.
        """
        self._validate_targets_and_weights()
        self._validate_values()
        self._validate_inputs()
        if self.stamp is not None and not isinstance(self.stamp, Stamp):
            raise TypeError(f"`stamp` must be a Stamp or None. Received {type(self.stamp).__name__}.")
        if self.teacher is not None:
            if not isinstance(self.teacher, TeacherTargets):
                raise TypeError(
                    "`teacher` must be a TeacherTargets (such as DenseTargets(logits)) or None. Received "
                    f"{type(self.teacher).__name__}."
                )
            self.teacher.validate(self.target_ids)
            vocabulary = self.teacher.vocabulary_size()
            if vocabulary is not None:
                self.validate_vocabulary("the teacher's targets", vocabulary)
        return self

    def _validate_targets_and_weights(self) -> None:
        require_array("target_ids", self.target_ids)
        shape = shape_of(self.target_ids)
        if len(shape) != 2:
            raise ValueError(f"`target_ids` must have shape [batch, length]; received shape {shape}.")
        if 0 in shape:
            raise ValueError(
                f"`target_ids` must have at least one row and one position. Received shape {shape}. Leave it out."
            )
        if not is_integer(self.target_ids):
            raise TypeError(f"`target_ids` must have an integer dtype. Received {dtype_of(self.target_ids)}.")
        require_array("loss_weights", self.loss_weights)
        if not same_shape(shape_of(self.loss_weights), shape):
            raise ValueError(
                f"`loss_weights` must match target_ids shape {shape}. Received {shape_of(self.loss_weights)}. "
                "Give one weight per token; broadcast a weight per row yourself."
            )
        if not is_real(self.loss_weights):
            raise TypeError(f"`loss_weights` must be real numeric or boolean. Received {dtype_of(self.loss_weights)}.")

    def _validate_values(self) -> None:
        weights = backend.concrete(self.loss_weights)
        if weights is None:
            return
        weights = weights.astype("float64")
        if not np.all(np.isfinite(weights)):
            where = _first(~np.isfinite(weights))
            raise ValueError(
                f"`loss_weights` must contain only finite values. Received {weights[where]} at {_position(where)}. "
                "An inactive position has weight 0."
            )
        if np.any(weights > LARGEST_WEIGHT):
            where = _first(weights > LARGEST_WEIGHT)
            raise ValueError(
                f"`loss_weights` must be at most {LARGEST_WEIGHT:g}: their sums are in float32 and would overflow. "
                f"Received {weights[where]} at {_position(where)}. Only ratios of weights matter: divide them all."
            )
        if np.any(weights < 0):
            where = _first(weights < 0)
            raise ValueError(f"`loss_weights` must be nonnegative. Received {weights[where]} at {_position(where)}.")
        ids = backend.concrete(self.target_ids)
        if ids is None:
            return
        large = (weights > 0) & (ids > _LARGEST_ID)
        if np.any(large):
            where = _first(large)
            raise ValueError(
                f"active target_ids must fit in int32. Received {ids[where]} at {_position(where)}: on the device it "
                "would wrap around and name another id."
            )
        if ids.dtype.kind == "u":
            return
        wrong = (weights > 0) & (ids < 0)
        if np.any(wrong):
            where = _first(wrong)
            raise ValueError(
                f"active target_ids must be nonnegative. Received {ids[where]} at {_position(where)}, where the "
                "weight is above 0. A position that is not to be learned has weight 0."
            )

    def _validate_inputs(self) -> None:
        leaves = list(leaves_with_paths(self.model_inputs, "model_inputs"))
        if not leaves:
            raise ValueError("`model_inputs` must contain at least one array. Received an empty structure.")
        rows = shape_of(self.target_ids)[0]
        for path, leaf in leaves:
            require_array(path, leaf)
            shape = shape_of(leaf)
            if len(shape) == 0:
                raise ValueError(
                    f"`{path}` must be batch-major, not scalar. Repeat it for each of the {rows} rows, or make it "
                    "an attribute of the model."
                )
            if shape[0] is not None and rows is not None and shape[0] != rows:
                raise ValueError(f"`{path}` has batch size {shape[0]}; expected {rows}, the rows of target_ids.")
            if not is_real(leaf):
                raise TypeError(f"`{path}` must be real numeric or boolean. Received dtype {dtype_of(leaf)}.")
            _refuse_wrapping(path, leaf)

    def validate_vocabulary(self, owner: str, vocabulary: int) -> None:
        """ValueError unless concrete active target ids are below `vocabulary`, the size of `owner`."""
        ids, weights = backend.concrete(self.target_ids), backend.concrete(self.loss_weights)
        if ids is None or weights is None:
            return
        wrong = (weights > 0) & (ids >= vocabulary)
        if np.any(wrong):
            where = _first(wrong)
            raise ValueError(
                f"active target_ids must be smaller than vocabulary size {vocabulary} of {owner}. Received "
                f"{ids[where]} at {_position(where)}."
            )

    def validate_logits(self, logits: Any) -> Any:
        """Check that `logits` score this batch and return them unchanged.

        Args:
            logits: float (B, L, V). Values are not read, except that concrete active target ids must be
                below V.

        Raises:
            TypeError, ValueError: wrong dtype or shape; an active target id is not in the vocabulary.
        """
        validate_logits_shape("logits", logits, self.target_ids)
        vocabulary = shape_of(logits)[2]
        if vocabulary is not None:
            self.validate_vocabulary("the logits", vocabulary)
        return logits

    def as_fit(self) -> tuple[Any, dict[str, Any], Any]:
        """`(x, y, sample_weight)` as `keras.Model.fit` takes them; `from_fit` is the inverse.

        `y` is `{"target_ids": (B, L)}` and, with a teacher, `"teacher": {kind: {name: array}}`. The stamp
        stays behind: it is checked where batches are drawn (`PreparedDataset`).
        """
        y: dict[str, Any] = {"target_ids": self.target_ids}
        if self.teacher is not None:
            y["teacher"] = {self.teacher.tag(): self.teacher.arrays()}
        return self.model_inputs, y, self.loss_weights

    @classmethod
    def from_fit(cls, x: Any, y: Any, sample_weight: Any, stamp: Stamp | None = None) -> "PreparedBatch":
        """The batch behind `(x, y, sample_weight)`. Does not validate values.

        Raises:
            ValueError: this is not what `as_fit` gives: target ids, weights or the teacher's kind are missing.
        """
        if not isinstance(y, dict) or "target_ids" not in y:
            keys = sorted(y) if isinstance(y, dict) else type(y).__name__
            raise ValueError(
                "`y` must be a dict with 'target_ids' (and 'teacher' to distil), as PreparedBatch.as_fit() gives "
                f"it. Received {keys}. Pass a PreparedBatch, a PreparedDataset, or batch.as_fit()."
            )
        if sample_weight is None:
            raise ValueError(
                "`sample_weight` must hold the weight of every token, shape [batch, length]. Received None. "
                "PreparedBatch.as_fit() gives (x, y, sample_weight)."
            )
        unknown = sorted(set(y) - {"target_ids", "teacher"})
        if unknown:
            raise ValueError(f"`y` has the keys 'target_ids' and 'teacher'. Received also {unknown}.")
        teacher = None
        if y.get("teacher") is not None:
            teacher = TeacherTargets.from_tagged(y["teacher"])
        return cls(x, y["target_ids"], sample_weight, teacher, stamp)

    def map(self, function: Any) -> "PreparedBatch":
        """The same batch with `function` applied to every array. Does not validate."""
        teacher = None if self.teacher is None else self.teacher.map(function)
        return PreparedBatch(
            map_leaves(function, self.model_inputs),
            function(self.target_ids),
            function(self.loss_weights),
            teacher,
            self.stamp,
        )

    @property
    def rows(self) -> int | None:
        """Number of rows B, None where it is not known statically."""
        return shape_of(self.target_ids)[0]


def _refuse_wrapping(path: str, leaf: Any) -> None:
    """ValueError where JAX would cut integers to 32 bits and change them, without a word."""
    if backend.float64_enabled() or dtype_of(leaf) not in ("int64", "uint32", "uint64"):
        return
    values = backend.concrete(leaf)
    bound = 2**32 - 1 if dtype_of(leaf).startswith("u") else _LARGEST_ID
    if values is not None and np.any((values > bound) | (values < -bound - 1)):
        raise ValueError(
            f"`{path}` must fit in 32 bits: JAX keeps no more (`jax_enable_x64` is off), and values would wrap around. "
            f"Received {values.min()} to {values.max()}."
        )


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(wrong)[0])


def _position(where: tuple[int, ...]) -> str:
    return f"row {where[0]}, position {where[1]}"


def _flatten(batch: PreparedBatch) -> tuple[list[tuple[str, Any]], Stamp | None]:
    names = ("model_inputs", "target_ids", "loss_weights", "teacher")
    return [(name, getattr(batch, name)) for name in names], batch.stamp


backend.register_pytree(PreparedBatch, _flatten, lambda stamp, children: PreparedBatch(*(*children, stamp)))
