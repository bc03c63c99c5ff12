"""A teacher that gives a few ids drawn from its distribution, each with how often it was drawn."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import dtype_of, is_floating, is_integer, require_array, same_shape, shape_of
from keras_diffusion_opd.data.sampling import DRAWS, draw_ids
from keras_diffusion_opd.data.targets import TeacherTargets, register_targets
from keras_diffusion_opd.validation import positive_int, positive_temperature

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class SampledTargets(TeacherTargets):
    """Ids drawn from the teacher, with weights that equal its probabilities in expectation.

    The student's gradient is `q sum(w) - w` with the weights w of the ids; in expectation over the draws it is
    `q - p`, that of the whole forward KL. Nothing is cut off: an id of probability 1e-4 is seen once in ten
    thousand draws. What it costs is variance, which averages out over positions and steps; the bias of a top-k
    teacher does not. One draw a position (n = 1) is the teacher's sampled token.

    Args:
        ids: int (B, L, N), in [0, V) where the count is above 0. An id may be there several times.
        counts: int or float (B, L, N), at least 0, not all 0 at a position. Integers say how often an id was
            drawn: the weight is the count divided by the sum of the counts at its position. Floats are the
            weights themselves, and taken as they are: importance weights `count / n * p / proposal`, whose sum
            is 1 in expectation and not at every position. Normalised floats (`counts / counts.sum(-1)`) are
            right for draws from the teacher itself, and biased for draws from another proposal.
        temperature: > 0, of the teacher when it was drawn from. A loss has to use the same.
        entropy: float (B, L), at least 0, in nats, or None: the teacher's at `temperature`. With it a loss's
            value is an unbiased estimate of the KL, which can be negative at one position. Without, it is the
            cross-entropy, the KL plus that entropy, which no student can bring to 0. Gradients are the same.

    Inactive positions may hold anything. Wrong values at active ones raise where loss and trainer see them.

    Raises:
        ValueError: temperature out of range; in `validate`, for shapes that do not fit.
        TypeError: in `validate`, for a wrong dtype.

    Source: Random Sampling KD, Anshumann et al., "Sparse Logit Sampling: Accelerating Knowledge Distillation in
    LLMs", 2025, arXiv:2503.16870.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import SampledTargets

    logits = np.log([[[0.5, 0.3, 0.15, 0.05]]]).astype("float32")
    targets = SampledTargets.from_logits(logits, 8, seed=0)
    targets.validate(np.zeros((1, 1), "int32"))
    assert targets.counts.sum() == 8
    ```
    """

    ids: Any
    counts: Any
    temperature: float = field(default=1.0, kw_only=True)
    entropy: Any = field(default=None, kw_only=True)
    kind: ClassVar[str] = "sampled"
    FAULTS: ClassVar[dict[str, str]] = {
        "sampled_counts": (
            "sampled counts must be finite and at least 0, and one above 0. Found NaN, an infinity, a negative one or "
            "none above 0"
        ),
        "sampled_vocabulary": (
            "sampled ids must be in [0, {vocabulary}), the student's vocabulary, where drawn. Found another"
        ),
        "sampled_entropy": "sampled entropy must be finite and at least 0. Found NaN, an infinity or a negative one",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", positive_temperature(self.temperature))

    @classmethod
    def from_logits(
        cls,
        logits: Any,
        n: int,
        *,
        seed: int,
        sample_ids: Any = None,
        temperature: float = 1.0,
        proposal_temperature: float = 1.0,
        draws: str = "independent",
    ) -> "SampledTargets":
        """Draw n ids with replacement at every position, from a teacher's logits; equal ids are merged.

        The draws are a function of (seed, sample id, position) and of the logits there: of no batch, device or
        backend. They are made on the host in float64.

        Args:
            logits: float (B, L, V), raw: no temperature applied. -inf excludes an id.
            n: at least 1.
            seed: int. With another for every pass, a sample is drawn anew in each.
            sample_ids: int (B,), what identifies each row in the data set; None: its place in this batch.
            temperature: > 0, of the teacher.
            proposal_temperature: > 0. Ids are drawn from `softmax(logits / (temperature *
                proposal_temperature))`; at 1, from the teacher itself. Above 1 the tail is drawn more often, at
                weights that make up for it.
            draws: `"independent"`, or `"systematic"`: n evenly spaced points at one random offset, which draw an
                id of probability p either the whole number below n p times, or the one above. As unbiased, with
                less variance.

        Returns:
            `SampledTargets` of NumPy arrays: int32 ids in ascending order, then zeros for what was merged; int32
            counts with the sum n (float32 weights where `proposal_temperature` is not 1); float32 entropy.
            Positions whose logits hold no distribution have counts of 0.

        Raises:
            TypeError, ValueError: logits that are no float (B, L, V) with values, an argument out of range.
        """
        require_array("logits", logits)
        if not is_floating(logits) or len(shape_of(logits)) != 3:
            raise TypeError(
                f"`logits` must be floating, of shape (batch, length, vocabulary). Received {dtype_of(logits)} "
                f"{shape_of(logits)}."
            )
        if draws not in DRAWS:
            raise ValueError(f"`draws` must be one of {', '.join(map(repr, DRAWS))}. Received {draws!r}.")
        values = backend.concrete(logits)
        if values is None:
            raise ValueError(
                "`logits` must have values that can be read: ids are drawn on the host. Received a tracer, an abstract "
                "array or a shard. Draw outside of the compiled function."
            )
        temperature = positive_temperature(temperature)
        sharpness = positive_temperature(proposal_temperature)
        rows = np.arange(len(values)) if sample_ids is None else np.asarray(sample_ids)
        if rows.shape != (len(values),) or rows.dtype.kind not in "iu":
            raise ValueError(
                f"`sample_ids` must be integers of shape ({len(values)},), one for each row. Received {rows.dtype}, "
                f"shape {rows.shape}."
            )
        drawn = draw_ids(values, positive_int("n", n), seed, rows, temperature, sharpness, draws == "systematic")
        return cls(drawn.ids, drawn.counts, temperature=temperature, entropy=drawn.entropy)

    def arrays(self) -> dict[str, Any]:
        """`{"ids": (B, L, N), "counts": (B, L, N)}` and, where it is given, `"entropy": (B, L)`."""
        arrays = {"ids": self.ids, "counts": self.counts}
        return arrays if self.entropy is None else {**arrays, "entropy": self.entropy}

    def settings(self) -> dict[str, Any]:
        """Temperature."""
        return {"temperature": self.temperature}

    def vocabulary_size(self) -> None:
        """None: a few ids do not say how many there are."""
        return None

    def validate(self, target_ids: Any) -> None:
        """Shapes (B, L, N) with N >= 1 and the batch's B and L; ids integer, counts integer or floating."""
        for name, array in self.arrays().items():
            require_array(f"sampled {name}", array)
        shape, expected = shape_of(self.ids), shape_of(target_ids)
        if len(shape) != 3 or not same_shape(shape[:2], expected) or shape[2] == 0:
            raise ValueError(
                f"`sampled ids` must have shape ({expected[0]}, {expected[1]}, n), n at least 1, to align with "
                f"target_ids. Received {shape}. Position i scores target i, nothing is shifted."
            )
        if not same_shape(shape_of(self.counts), shape):
            raise ValueError(
                f"`sampled counts` must have the shape {shape} of the ids. Received {shape_of(self.counts)}."
            )
        if self.entropy is not None and not same_shape(shape_of(self.entropy), shape[:2]):
            raise ValueError(
                f"`sampled entropy` must hold one number a position, shape {shape[:2]}. Received "
                f"{shape_of(self.entropy)}."
            )
        if not is_integer(self.ids):
            raise TypeError(f"`sampled ids` must have an integer dtype. Received {dtype_of(self.ids)}.")
        if not is_integer(self.counts) and not is_floating(self.counts):
            raise TypeError(
                f"`sampled counts` must be integers, or floats that are weights. Received {dtype_of(self.counts)}."
            )
        if self.entropy is not None and not is_floating(self.entropy):
            raise TypeError(f"`sampled entropy` must have a floating-point dtype. Received {dtype_of(self.entropy)}.")
        values = backend.concrete(self.ids)
        if values is not None and values.size and max(abs(int(values.max())), abs(int(values.min()))) > _LARGEST_ID:
            raise ValueError(
                f"`sampled ids` must fit in int32. Received {values.min()} to {values.max()}: on the device they would "
                "wrap around and name other ids."
            )

    def weights(self) -> Any:
        """float32 or float64 (B, L, N): counts divided by their sum, or float counts as they are; see the class."""
        xp = np if isinstance(self.counts, np.ndarray) else ops
        dtype = "float64" if dtype_of(self.counts) == "float64" else "float32"
        counts = self.counts.astype(dtype) if xp is np else ops.cast(self.counts, dtype)
        if is_floating(self.counts):
            return counts
        total = xp.sum(counts, axis=-1, keepdims=True)
        return counts / xp.where(total > 0, total, xp.ones_like(total))

    @property
    def bound(self) -> str:
        """`"unbiased"`; see `TeacherTargets.bound`."""
        return "unbiased"

    def refusal(self, divergence: str, temperature: float) -> str | None:
        """See `TeacherTargets.refusal`: all but forward KL, and another temperature."""
        if divergence != "forward_kl":
            return (
                f"`divergence` must be 'forward_kl' for SampledTargets. Received {divergence!r}, which is no "
                "expectation under the teacher: it needs the teacher's probability of ids that were not drawn. Use "
                "TopKTargets or DenseTargets."
            )
        if temperature != self.temperature:
            return (
                f"`temperature` must be {self.temperature}, at which the ids were drawn. Received {temperature}. Draw "
                "them anew with SampledTargets.from_logits(logits, n, seed=..., temperature=...)."
            )
        return None

    def retained_mass(self) -> Any:
        """float (B, L): the sum of the weights, 1 in expectation; exactly 1 for integer counts."""
        weights = self.weights()
        return np.sum(weights, axis=-1) if isinstance(weights, np.ndarray) else ops.sum(weights, axis=-1)

    def faults(self, vocabulary: int | None = None) -> dict[str, Any]:
        """See `TeacherTargets.faults`; ids are compared with `vocabulary` where it is given."""
        weights = self.weights()
        xp: Any = np if isinstance(weights, np.ndarray) else ops
        ids = np.asarray(self.ids, "int64") if xp is np else ops.cast(self.ids, "int32")
        # Comparisons with NaN are false. Integer counts that are negative give negative weights, or none.
        proper = xp.all((weights >= 0) & (weights < float("inf")), axis=-1) & xp.any(weights > 0, axis=-1)
        outside = (ids < 0) if vocabulary is None else (ids < 0) | (ids >= vocabulary)
        found = {
            "sampled_counts": xp.logical_not(proper),
            "sampled_vocabulary": xp.any(outside & (weights != 0), axis=-1),
        }
        if self.entropy is not None:
            entropy = self.entropy if xp is np else ops.convert_to_tensor(self.entropy)
            found["sampled_entropy"] = xp.logical_not((entropy >= 0) & (entropy < float("inf")))
        return found

    def invalid(self) -> Any:
        """bool (B, L): any of `faults`."""
        found = list(self.faults().values())
        stack: Any = np if isinstance(found[0], np.ndarray) else ops
        return stack.any(stack.stack(found), axis=0)


register_targets(SampledTargets)
