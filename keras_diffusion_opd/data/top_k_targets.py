"""A teacher that gives the log-probabilities of a few ids at every position, and the mass of all the others."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import dtype_of, is_floating, is_integer, require_array, same_shape, shape_of
from keras_diffusion_opd.data.log_space import EXCLUDED, chosen_and_rest, log_probabilities
from keras_diffusion_opd.data.targets import TeacherTargets, register_targets
from keras_diffusion_opd.validation import positive_int, positive_temperature

TAILS = ("bucket", "renormalize")
# By the dtype of the log-probabilities: its rounding at 1, and how far the probabilities may be from summing to
# 1. A log-probability of -10 in bfloat16 is off by up to 0.02, and its probability by as much of itself.
_LARGEST_ID = 2**31 - 1
_ROUNDING = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
_TOLERANCE = {"bfloat16": 5e-2, "float16": 1e-2}


@dataclass(frozen=True)
class TopKTargets(TeacherTargets):
    """The teacher's log-probabilities of k ids at every position: 8 bytes for each in place of the vocabulary.

    What the teacher says of the other ids is one number, their mass together. With `tail="bucket"` they are
    one event beside the k ids, for teacher and student alike: a divergence of these k + 1 events is at least
    0 and at most that of the whole distributions. With `tail="renormalize"` both are normalised over the k
    ids: blind to how much mass either has elsewhere. Both have a bias: below them the student is free.

    Args:
        ids: int (B, L, K), in [0, V), no id twice at a position. Usually the teacher's K likeliest, but any
            will do, such as the student's likeliest for reverse KL.
        log_probs: float (B, L, K), at most 0: the teacher's log-probabilities of these ids at `temperature`,
            normalised over the whole vocabulary. -inf for probability 0.
        temperature: > 0, at which the log-probabilities were taken. A loss has to use the same.
        log_tail: float (B, L), at most 0, or None: the log of the mass of all other ids, -inf for nothing.
            None: computed from `log_probs`, with the digits that those leave: a mass below their rounding is
            taken for nothing. `from_logits` knows it exactly.
        tail: `"bucket"` or `"renormalize"`.

    Inactive positions may hold anything. Wrong values at active ones raise where loss and trainer see them.

    Raises:
        ValueError: temperature out of range or unknown tail; in `validate`, for shapes that do not fit.
        TypeError: in `validate`, for a wrong dtype.

    Source: the bias of each choice is that of Anshumann et al., "Sparse Logit Sampling: Accelerating Knowledge
    Distillation in LLMs", 2025, arXiv:2503.16870.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import TopKTargets

    targets = TopKTargets(np.array([[[3, 0]]]), np.log([[[0.5, 0.3]]]).astype("float32"))
    targets.validate(np.zeros((1, 1), "int32"))
    assert abs(float(np.exp(targets.tail_log_mass())[0, 0]) - 0.2) < 1e-6
    ```
    """

    ids: Any
    log_probs: Any
    temperature: float = field(default=1.0, kw_only=True)
    log_tail: Any = field(default=None, kw_only=True)
    tail: str = field(default="bucket", kw_only=True)
    kind: ClassVar[str] = "top_k"
    FAULTS: ClassVar[dict[str, str]] = {
        "top_k_numbers": (
            "top-k log_probs must be numbers (-inf may exclude single ids) with a log_tail to match. Found NaN, +inf "
            "or no finite one"
        ),
        "top_k_log_probs": (
            "top-k log_probs must be at most 0: TopKTargets.from_logits takes logits. Found a positive one"
        ),
        "top_k_sum": (
            "top-k probabilities must sum with their tail to 1: normalise over the whole vocabulary at the targets' "
            "own temperature. Found another sum"
        ),
        "top_k_vocabulary": "top-k ids must be in [0, {vocabulary}), the student's vocabulary. Found another",
        "top_k_repeated": "top-k ids must differ within a position. Found one twice",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", positive_temperature(self.temperature))
        if self.tail not in TAILS:
            raise ValueError(
                f"`tail` must be 'bucket' (all other ids are one event) or 'renormalize' (over the k ids alone). "
                f"Received {self.tail!r}."
            )

    @classmethod
    def from_logits(cls, logits: Any, k: int, *, temperature: float = 1.0, tail: str = "bucket") -> "TopKTargets":
        """The k likeliest ids of a teacher's logits; the others' mass is summed itself, down to 1e-30 and below.

        Args:
            logits: float (B, L, V), raw: no temperature applied. -inf excludes an id.
            k: in [1, V].
            temperature: > 0.
            tail: see the class.

        Returns:
            `TopKTargets` of the backend's tensors: int32 ids, likeliest first, and log-probabilities and tail in
            float32 (float64 for float64 logits).

        Raises:
            TypeError, ValueError: logits that are no float array, k or temperature out of range.
        """
        require_array("logits", logits)
        if not is_floating(logits):
            raise TypeError(f"`logits` must have a floating-point dtype. Received {dtype_of(logits)}.")
        k, vocabulary = positive_int("k", k), logits.shape[-1]
        if k > vocabulary:
            raise ValueError(f"`k` must be at most the vocabulary size {vocabulary}. Received {k}.")
        logits = ops.stop_gradient(ops.convert_to_tensor(logits))
        log_p = log_probabilities(logits, positive_temperature(temperature))
        ids = ops.cast(ops.top_k(log_p, k)[1], "int32")
        parts = [
            ops.where(part <= EXCLUDED, ops.full_like(part, -float("inf")), part)
            for part in chosen_and_rest(log_p, ids)
        ]
        return cls(ids, parts[0], temperature=temperature, log_tail=parts[1], tail=tail)

    def arrays(self) -> dict[str, Any]:
        """`{"ids": (B, L, K), "log_probs": (B, L, K)}` and, where it is given, `"log_tail": (B, L)`."""
        arrays = {"ids": self.ids, "log_probs": self.log_probs}
        return arrays if self.log_tail is None else {**arrays, "log_tail": self.log_tail}

    def settings(self) -> dict[str, Any]:
        """Temperature and tail."""
        return {"temperature": self.temperature, "tail": self.tail}

    def vocabulary_size(self) -> None:
        """None: a few ids do not say how many there are."""
        return None

    def validate(self, target_ids: Any) -> None:
        """Shapes (B, L, K) with K >= 1 and the batch's B and L; ids integer, log-probabilities floating."""
        for name, array in self.arrays().items():
            require_array(f"top-k {name}", array)
        shape, expected = shape_of(self.ids), shape_of(target_ids)
        if len(shape) != 3 or not same_shape(shape[:2], expected):
            raise ValueError(
                f"`top-k ids` must have shape ({expected[0]}, {expected[1]}, k) to align with target_ids. Received "
                f"{shape}. Score every position: position i scores target i, nothing is shifted."
            )
        if shape[2] is not None and shape[2] < 1:
            raise ValueError(f"`top-k ids` must hold at least one id at a position. Received shape {shape}.")
        if not same_shape(shape_of(self.log_probs), shape):
            raise ValueError(
                f"`top-k log_probs` must have the shape {shape} of the ids. Received {shape_of(self.log_probs)}."
            )
        if self.log_tail is not None and not same_shape(shape_of(self.log_tail), shape[:2]):
            raise ValueError(
                f"`top-k log_tail` must hold one number a position, shape {shape[:2]}. Received "
                f"{shape_of(self.log_tail)}."
            )
        if not is_integer(self.ids):
            raise TypeError(f"`top-k ids` must have an integer dtype. Received {dtype_of(self.ids)}.")
        values = backend.concrete(self.ids)
        if values is not None and np.any((values > _LARGEST_ID) | (values < -_LARGEST_ID)):
            raise ValueError(
                f"`top-k ids` must fit in int32. Received {values.min()} to {values.max()}: on the device they would "
                "wrap around and name other ids."
            )
        for name in ("log_probs", "log_tail"):
            array = self.arrays().get(name)
            if array is not None and not is_floating(array):
                raise TypeError(f"`top-k {name}` must have a floating-point dtype. Received {dtype_of(array)}.")

    @property
    def bound(self) -> str:
        """`"lower"` with the tail as one event, `"none"` renormalised; see `TeacherTargets.bound`."""
        return "lower" if self.tail == "bucket" else "none"

    def refusal(self, divergence: str, temperature: float) -> str | None:
        """See `TeacherTargets.refusal`: another temperature, and all but forward KL renormalised."""
        if temperature != self.temperature:
            return (
                f"`temperature` must be {self.temperature}, at which these targets were taken. Received {temperature}. "
                "Another temperature changes the normaliser over the whole vocabulary, which k log-probabilities do "
                "not give: make the targets anew with TopKTargets.from_logits(logits, k, temperature=...)."
            )
        if self.tail == "renormalize" and divergence != "forward_kl":
            return (
                f"`divergence` must be 'forward_kl' for targets with tail='renormalize'. Received {divergence!r}, "
                "which also weighs ids by the student's probability: it needs the teacher at the student's ids, or "
                "their mass together. Use tail='bucket', or DenseTargets."
            )
        return None

    def scores(self) -> Any:
        """The log-probabilities of the k ids."""
        return self.log_probs

    def target_log_probs(self, ids: Any) -> Any:
        """See `TeacherTargets.target_log_probs`; an id that is not among the k gets the most that it can have."""
        log_probs = ops.cast(ops.convert_to_tensor(self.log_probs), "float32")
        same = ops.equal(ops.cast(self.ids, "int32"), ops.expand_dims(ops.cast(ids, "int32"), -1))
        lowest = ops.full_like(log_probs, EXCLUDED)
        known = ops.max(ops.where(same, log_probs, lowest), axis=-1)
        other = ops.minimum(ops.cast(self.tail_log_mass(), "float32"), ops.min(log_probs, axis=-1))
        return ops.where(ops.any(same, axis=-1), known, other)

    def retained_mass(self) -> Any:
        """float (B, L): the teacher's probability of the k ids together."""
        log_probs, xp = _widened(self.log_probs)
        return xp.sum(xp.exp(log_probs), axis=-1)

    def tail_log_mass(self) -> Any:
        """float (B, L): the log of the mass of all other ids, -inf for nothing; see `log_tail`."""
        if self.log_tail is not None:
            return _widened(self.log_tail)[0]
        log_probs, xp = _widened(self.log_probs)
        # 1 - p of the likeliest has all its digits, however near to 1 p is; only the others are taken from it.
        first = xp.max(log_probs, axis=-1)
        probs = xp.exp(log_probs)
        beside = xp.sum(probs, axis=-1) - xp.exp(first) if log_probs.shape[-1] > 1 else 0.0 * first
        others = -xp.expm1(first)
        rest = others - beside
        lost = xp.where(log_probs > EXCLUDED, -log_probs, xp.zeros_like(log_probs))
        doubt = _ROUNDING.get(dtype_of(self.log_probs), 2.0**-23) * (xp.sum(probs * lost, axis=-1) + others)
        known = rest > doubt
        return xp.where(known, xp.log(xp.where(known, rest, xp.ones_like(rest))), xp.full_like(rest, -float("inf")))

    def faults(self, vocabulary: int | None = None) -> dict[str, Any]:
        """See `TeacherTargets.faults`; ids are compared with `vocabulary` where it is given."""
        log_probs, xp = _widened(self.log_probs)
        ids = np.asarray(self.ids, "int64") if xp is np else ops.cast(self.ids, "int32")
        proper = xp.all(log_probs < float("inf"), axis=-1) & xp.any(log_probs > EXCLUDED, axis=-1)
        slack = max(_TOLERANCE.get(dtype_of(x), 1e-3) for x in (self.log_probs, self.log_tail) if x is not None)
        positive = log_probs > slack
        total = self.retained_mass()
        wrong_sum = total > 1.0 + slack
        if self.log_tail is not None:
            log_tail = _widened(self.log_tail)[0]
            proper = proper & (log_tail < float("inf"))
            wrong_sum = abs(total + xp.exp(log_tail) - 1.0) > slack
        outside = ids < 0 if vocabulary is None else (ids < 0) | (ids >= vocabulary)
        ordered = xp.sort(ids, axis=-1)
        return {
            "top_k_numbers": xp.logical_not(proper),
            "top_k_log_probs": xp.any(positive, axis=-1),
            "top_k_sum": wrong_sum,
            "top_k_vocabulary": xp.any(outside, axis=-1),
            "top_k_repeated": xp.any(ordered[..., 1:] == ordered[..., :-1], axis=-1),
        }

    def invalid(self) -> Any:
        """bool (B, L): any of `faults`."""
        found = list(self.faults().values())
        return (
            np.any(np.stack(found), axis=0) if isinstance(found[0], np.ndarray) else ops.any(ops.stack(found), axis=0)
        )


def _widened(x: Any) -> tuple[Any, Any]:
    """`x` in float32 (float64 stays) and the functions for it: NumPy's for NumPy, else the backend's.

    Under `jit` any operation of the backend would be traced, though the values are there.
    """
    dtype = "float64" if dtype_of(x) == "float64" else "float32"
    return (x.astype(dtype), np) if isinstance(x, np.ndarray) else (ops.cast(x, dtype), ops)


register_targets(TopKTargets)
