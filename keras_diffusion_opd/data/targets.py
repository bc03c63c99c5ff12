"""What a teacher says about a batch, in the forms a teacher can say it."""

import abc
import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data import shared_arrays
from keras_diffusion_opd.data.arrays import (
    dtype_of,
    is_floating,
    map_leaves,
    require_array,
    same_shape,
    shape_of,
)
from keras_diffusion_opd.data.log_space import gather_ids, log_probabilities


class TeacherTargets(abc.ABC):
    """The teacher's opinion on every position of a batch.

    A subclass is a frozen dataclass whose array fields are batch-major; what is not an array (a
    temperature, the treatment of a tail) are its settings. `kind` names it inside the `y` that `fit`
    receives; subclasses register themselves by that name.
    """

    kind: ClassVar[str] = ""
    registry: ClassVar[dict[str, type["TeacherTargets"]]] = {}
    # What can be wrong at a position: a name for each kind of fault, and what must hold, in words.
    # "{vocabulary}" stands for the student's vocabulary size.
    FAULTS: ClassVar[dict[str, str]] = {
        "teacher_finite": (
            "teacher_logits must contain only finite values (-inf may exclude single ids). Look for padding rows "
            "that were scored, or a half-precision teacher that overflowed. Found NaN, +inf or no finite logit"
        )
    }

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            TeacherTargets.registry[cls.kind] = cls

    @abc.abstractmethod
    def arrays(self) -> dict[str, Any]:
        """The batch-major arrays by name: what travels through `fit`."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """The plain values by name; empty where there are none."""

    @abc.abstractmethod
    def validate(self, target_ids: Any) -> None:
        """Raise unless the targets belong to a batch with these target ids."""

    @abc.abstractmethod
    def vocabulary_size(self) -> int | None:
        """V, or None where it is not known statically."""

    @abc.abstractmethod
    def invalid(self) -> Any:
        """bool (B, L): positions where the teacher says nothing usable (NaN, +inf, no finite logit)."""

    def faults(self, vocabulary: int | None = None) -> dict[str, Any]:
        """For every name in `FAULTS` a bool (B, L) that says where it is.

        Args:
            vocabulary: V of the student, where it is known.
        """
        return {"teacher_finite": self.invalid()}

    @property
    def bound(self) -> str:
        """What a divergence from these targets says of that from the whole distribution.

        `"exact"`: it is that. `"lower"`: at least 0 and at most that. `"unbiased"`: that in expectation over
        the sampling. `"none"`: nothing.
        """
        return "exact"

    def refusal(self, divergence: str, temperature: float) -> str | None:
        """Why these targets cannot give a divergence at a temperature, and the mend; None where they can.

        Args:
            divergence: a name from `losses.token_divergence`.
            temperature: > 0, of the loss.
        """
        return None

    def retained_mass(self) -> Any:
        """float (B, L): how much of the teacher's probability is known id by id; 1 where all of it is."""
        first = next(iter(self.arrays().values()))
        return ops.ones_like(ops.convert_to_tensor(first)[:, :, 0], dtype="float32")

    def scores(self) -> Any:
        """float (B, L, n) by which the teacher ranks ids, up to a constant; None where these targets have none."""
        return None

    def target_log_probs(self, ids: Any) -> Any:
        """float (B, L): the teacher's log-probability of int (B, L) `ids`, at the targets' own temperature.

        Raises:
            TypeError: these targets do not know it.
        """
        raise TypeError(
            f"{type(self).__name__} do not give the probability of a single id. Give DenseTargets, or TopKTargets of "
            "many ids."
        )

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any], settings: dict[str, Any]) -> "TeacherTargets":
        """The inverse of `arrays` and `settings`. Does not validate."""
        return cls(**arrays, **settings)

    def map(self, function: Any) -> "TeacherTargets":
        """The same targets with `function` applied to every array."""
        return self.from_arrays(map_leaves(function, self.arrays()), self.settings())

    def concrete(self) -> "TeacherTargets | None":
        """The same targets in NumPy; None where a value cannot be read now."""
        arrays = {name: backend.concrete(x) for name, x in self.arrays().items()}
        return None if any(x is None for x in arrays.values()) else self.from_arrays(arrays, self.settings())

    def tag(self) -> str:
        """Kind and settings in one string: a key of `y`, static under `jit`."""
        return self.tag_of(self.settings())

    @classmethod
    def tag_of(cls, settings: dict[str, Any]) -> str:
        """The tag of these settings."""
        return cls.kind + (" " + json.dumps(settings, sort_keys=True) if settings else "")

    @staticmethod
    def from_tagged(tagged: Any) -> "TeacherTargets":
        """The targets behind `{tag: arrays}`; ValueError for an unknown kind or several."""
        if not isinstance(tagged, dict) or len(tagged) != 1:
            raise ValueError(
                "`y['teacher']` must hold the targets of exactly one teacher, as PreparedBatch.as_fit() gives them. "
                f"Received {sorted(tagged) if isinstance(tagged, dict) else type(tagged).__name__}."
            )
        ((tag, arrays),) = tagged.items()
        kind, _, settings = tag.partition(" ")
        if kind not in TeacherTargets.registry:
            raise ValueError(f"`y['teacher']` has kind {kind!r}. Known kinds: {sorted(TeacherTargets.registry)}.")
        return TeacherTargets.registry[kind].from_arrays(arrays, json.loads(settings) if settings else {})


def attach_shared(data: Any) -> Any:
    """`(x, y, sample_weight)` with the arrays beside the teacher's rows that its tag names, such as a head.

    For the last moment before a compiled step: there they are arguments, the same tensors for every batch, and
    no constants of the program. Up to there only rows travel. Anything else is returned as it is.
    """
    if not (isinstance(data, tuple) and len(data) == 3 and isinstance(data[1], dict)):
        return data
    x, y, sample_weight = data
    teacher = y.get("teacher")
    if not isinstance(teacher, dict):
        return data
    attached = {}
    for tag, arrays in teacher.items():
        settings = tag.partition(" ")[2]
        key = json.loads(settings).get("shared") if settings else None
        attached[tag] = arrays if key is None else {**shared_arrays.held(key), **arrays}
    return x, {**y, "teacher": attached}, sample_weight


def register_targets(cls: type[TeacherTargets]) -> None:
    """Make a kind of targets a node of the backend's trees: its arrays are leaves, its settings static."""

    def flatten(targets: TeacherTargets) -> tuple[list[tuple[str, Any]], Any]:
        arrays = targets.arrays()
        return list(arrays.items()), (tuple(arrays), json.dumps(targets.settings(), sort_keys=True))

    def unflatten(static: Any, children: Any) -> TeacherTargets:
        names, settings = static
        return cls.from_arrays(dict(zip(names, children, strict=True)), json.loads(settings))

    backend.register_pytree(cls, flatten, unflatten)


@dataclass(frozen=True)
class DenseTargets(TeacherTargets):
    """The teacher's logits over the whole vocabulary.

    Args:
        logits: float (B, L, V), any float dtype, raw: no temperature applied. Position i scores target i.
            -inf excludes an id (the mask token of a masked model). Inactive positions may hold anything.

    Raises:
        TypeError, ValueError: in `validate`, for a wrong dtype or shape.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets

    targets = DenseTargets(np.zeros((2, 3, 5), "float32"))
    targets.validate(np.zeros((2, 3), "int32"))
    ```
    """

    logits: Any
    kind: ClassVar[str] = "dense"

    def arrays(self) -> dict[str, Any]:
        """`{"logits": (B, L, V)}`."""
        return {"logits": self.logits}

    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    def vocabulary_size(self) -> int | None:
        """The last axis of the logits."""
        return shape_of(self.logits)[-1]

    def validate(self, target_ids: Any) -> None:
        """Shape (B, L, V) with V >= 1 and the batch's B and L; a floating dtype; ids below V where known."""
        validate_logits_shape("teacher logits", self.logits, target_ids)

    def invalid(self) -> Any:
        """bool (B, L), see `TeacherTargets.invalid`."""
        return no_distribution(self.logits)

    def scores(self) -> Any:
        """The logits."""
        return self.logits

    def target_log_probs(self, ids: Any) -> Any:
        """See `TeacherTargets.target_log_probs`."""
        return gather_ids(log_probabilities(ops.convert_to_tensor(self.logits)), ids)


def fault_messages() -> dict[str, str]:
    """What must hold of a teacher, by name, over all kinds of targets that are known by now."""
    messages = dict(TeacherTargets.FAULTS)
    for cls in TeacherTargets.registry.values():
        messages.update(cls.FAULTS)
    return messages


def fault_message(name: str, vocabulary: int | None = None) -> str:
    """What must hold where a teacher has this fault, in words; `vocabulary` is V of the student, where it is known."""
    return fault_messages().get(name, name).replace("{vocabulary}", "V" if vocabulary is None else str(vocabulary))


def no_distribution(logits: Any) -> Any:
    """bool (...): rows of float (..., V) logits that hold NaN or +inf, or nothing but -inf."""
    # NumPy for NumPy: under `jit` any operation of the backend would be traced, though the values are there.
    xp = np if isinstance(logits, np.ndarray) else ops
    # Comparisons with NaN are false, so the first catches NaN as well as +inf.
    proper = xp.all(logits < float("inf"), axis=-1)
    return xp.logical_not(xp.logical_and(proper, xp.any(logits > -float("inf"), axis=-1)))


def validate_logits_shape(name: str, logits: Any, target_ids: Any) -> None:
    """Raise unless `logits` is float (B, L, V), V >= 1, for `target_ids` (B, L)."""
    require_array(name, logits)
    shape, expected = shape_of(logits), shape_of(target_ids)
    if len(shape) != 3:
        raise ValueError(f"`{name}` must have shape [batch, length, vocab]. Received shape {shape}.")
    if not same_shape(shape[:2], expected):
        raise ValueError(
            f"`{name}` must align with target_ids: expected shape ({expected[0]}, {expected[1]}, vocabulary). "
            f"Received {shape}. Score every position: position i of the logits scores target i, nothing is shifted."
        )
    if shape[2] is not None and shape[2] < 1:
        raise ValueError(f"`{name}` must have a non-empty vocabulary. Received shape {shape}.")
    if not is_floating(logits):
        raise TypeError(f"`{name}` must have a floating-point dtype. Received {dtype_of(logits)}.")


register_targets(DenseTargets)
