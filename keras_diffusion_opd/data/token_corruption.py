"""What the corruptions of tokens share: randomness from (seed, step, sample id), checks, batches."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.counter_random import split_words, threefry2x32, uniform64
from keras_diffusion_opd.data.inference import batch_conditions
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.targets import TeacherTargets
from keras_diffusion_opd.schedules import get_mask_schedule
from keras_diffusion_opd.schedules.diffusion_times import TIMES, drawn_step, mirror, spread_times, words
from keras_diffusion_opd.validation import whole_number


@dataclass(frozen=True)
class CorruptedTokens:
    """What a corruption made of a batch.

    Args:
        token_ids: int (B, L), the mask id (or another token) where corrupted.
        mask: bool (B, L), what was masked or replaced.
        times: float32 (B,), diffusion time of each row, in [eps, 1]; (B, blocks) where blocks have their own.
        weights: float32 (B, L), what the loss of each position counts; 0 where it does not.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import MaskedCorruption

    out = MaskedCorruption(mask_id=9)(0, 0, np.array([4]), np.array([[1, 2, 3]]))
    assert np.array_equal(out.weights > 0, out.mask)
    assert np.array_equal(out.token_ids == 9, out.mask)
    ```
    """

    token_ids: np.ndarray
    mask: np.ndarray
    times: np.ndarray
    weights: np.ndarray


class TokenCorruption(abc.ABC):
    """Base class: corrupts tokens independently at a schedule's rate, and knows what each loss counts.

    What happens to a sample depends on the seed, the step and its id (and, unless times are independent, on
    which other ids belong to the step); never on its place in the batch, on the number of devices or on the
    backend. It runs on the host, in NumPy.

    Args:
        schedule: a `MaskSchedule` or its name: "linear", "log_linear", "cosine", "geometric".
        times: "low_discrepancy", "antithetic" or "independent".

    Raises:
        ValueError: `times` is none of these, or the schedule is not known.
    """

    def __init__(self, schedule: Any, times: str) -> None:
        self.schedule = get_mask_schedule(schedule)
        if times not in TIMES:
            raise ValueError(f"`times` must be one of {list(TIMES)}. Received {times!r}.")
        self.times = times

    def __call__(
        self,
        seed: int,
        step: int,
        sample_ids: Any,
        tokens: Any,
        *,
        frozen: Any = None,
        batch_ids: Any = None,
    ) -> CorruptedTokens:
        """Corrupt a batch.

        Args:
            seed: int, of the run.
            step: int >= 0, counts the batches: the same sample is corrupted otherwise at another step.
            sample_ids: int (B,), what identifies each sample in the data set; no id twice.
            tokens: int (B, L), without mask ids where not frozen.
            frozen: None, or bool (B, L): True where a token is never corrupted (padding, a prompt).
            batch_ids: None, or int (N,): the ids of the whole step where `sample_ids` is a part of it (one
                device's share, one micro-batch). Not needed where times are independent.

        Returns:
            `CorruptedTokens`.

        Raises:
            ValueError: shapes or dtypes do not agree, an id comes twice, or a token is the mask id already.
        """
        whole_number("seed", seed, least=None)
        whole_number("step", step)
        tokens, ids, frozen = self._checked(tokens, sample_ids, frozen)
        if batch_ids is not None:
            batch_ids = distinct_ids("batch_ids", batch_ids)
        block = self.block_of(tokens.shape[1])
        # 1. A key for the step, and from it one for every sample.
        drawn, mirrored = drawn_step(self.times, step)
        keys = threefry2x32(np, threefry2x32(np, words(seed), words(drawn)), split_words(ids))
        # 2. Draw t, for each block of each row.
        uniform = spread_times(self.times, seed, step, ids, batch_ids, parts=int(block[-1]) + 1)
        t = self.schedule.eps + (1.0 - self.schedule.eps) * uniform
        # 3. Corrupt each token with probability 1 - alpha(t).
        rate = self.schedule.mask_probability(t)[:, block]
        mask = (mirror(_position_uniform(keys, tokens.shape[1], 0), mirrored) < rate) & ~frozen
        # 4. What each position counts.
        weights = self._weights(mask, t, block, frozen)
        corrupted = np.where(mask, self._replacement(tokens, keys), tokens).astype(tokens.dtype)
        times = t if self._times_per_block else t[:, 0]
        return CorruptedTokens(corrupted, mask, times.astype("float32"), weights.astype("float32"))

    def prepare(
        self,
        seed: int,
        step: int,
        sample_ids: Any,
        tokens: Any,
        *,
        conditions: dict[str, Any] | None = None,
        teacher: Callable[[dict[str, Any]], TeacherTargets] | None = None,
        stamp: Stamp | None = None,
        frozen: Any = None,
        batch_ids: Any = None,
        token_key: str = "token_ids",
    ) -> PreparedBatch:
        """Corrupt a batch, let the teacher score it, and wrap it up for `fit`.

        Args:
            seed, step, sample_ids, tokens, frozen, batch_ids: see `__call__`.
            conditions: other inputs of the model by name, each (B, ...).
            teacher: None, or a function from the model's inputs to teacher targets, such as
                `lambda inputs: DenseTargets(teacher(inputs))`.
            stamp: None, or where the tokens came from.
            token_key: str, name of the corrupted tokens among the model's inputs.

        Returns:
            `PreparedBatch` with the inputs of `model_inputs`, the clean tokens as targets and the weights.
        """
        if teacher is not None and not callable(teacher):
            raise TypeError(
                "`teacher` must be None or a function from the model's inputs to teacher targets, such as lambda "
                f"inputs: DenseTargets(model(inputs)). Received {teacher!r} of type {type(teacher).__name__}."
            )
        conditions = batch_conditions(conditions, len(np.asarray(tokens)), self.input_keys(token_key))
        out = self(seed, step, sample_ids, tokens, frozen=frozen, batch_ids=batch_ids)
        inputs = self.model_inputs(out.token_ids, tokens, conditions=conditions, token_key=token_key)
        return PreparedBatch.create(
            model_inputs=inputs,
            target_ids=np.asarray(tokens),
            loss_weights=out.weights,
            teacher=None if teacher is None else teacher(inputs),
            stamp=stamp,
        )

    def model_inputs(
        self, corrupted: Any, tokens: Any, *, conditions: dict[str, Any] | None = None, token_key: str = "token_ids"
    ) -> dict[str, Any]:
        """What a model is called with, so that position i of its logits scores token i.

        Args:
            corrupted: int (B, L), the corrupted tokens.
            tokens: int (B, L), the clean ones.
            conditions: other inputs by name, each (B, ...).
            token_key: str, name of the tokens.

        Returns:
            dict of arrays with B rows each.
        """
        return {token_key: np.asarray(corrupted), **(conditions or {})}

    def block_of(self, length: int) -> np.ndarray:
        """Which positions share a time: the block of each, int (length,); all in block 0 here."""
        return np.zeros(length, "int32")

    _times_per_block = False

    @abc.abstractmethod
    def _replacement(self, tokens: np.ndarray, keys: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """What comes in place of corrupted tokens; broadcasts to (B, L)."""

    def _weights(self, mask: np.ndarray, t: np.ndarray, block: np.ndarray, frozen: np.ndarray) -> np.ndarray:
        """float64 (B, L): the weight of the evidence lower bound where corrupted."""
        return np.where(mask, self.schedule.loss_weight(t)[:, block], 0.0)

    def input_keys(self, token_key: str) -> tuple[str, ...]:
        """Names of the inputs that `model_inputs` gives beside the conditions."""
        return (token_key,)

    @property
    def gives_bound(self) -> bool:
        """Whether the expected weighted cross-entropy bounds the negative log-likelihood from above."""
        return True

    def _checked(self, tokens: Any, sample_ids: Any, frozen: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = np.asarray(tokens)
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or 0 in tokens.shape:
            raise ValueError(
                f"`tokens` must be integers of shape [batch, length]. Received {tokens.dtype}, shape {tokens.shape}."
            )
        ids = distinct_ids("sample_ids", sample_ids)
        if ids.shape != tokens.shape[:1]:
            raise ValueError(
                f"`sample_ids` must be integers of shape ({tokens.shape[0]},), one per row of `tokens`. "
                f"Received shape {ids.shape}."
            )
        frozen = np.zeros(tokens.shape, bool) if frozen is None else np.asarray(frozen)
        if frozen.shape != tokens.shape or frozen.dtype != bool:
            raise ValueError(
                f"`frozen` must be bool of the shape of `tokens`, {tokens.shape}. "
                f"Received {frozen.dtype}, shape {frozen.shape}."
            )
        self._check_tokens(tokens, frozen)
        return tokens, ids, frozen

    @abc.abstractmethod
    def _check_tokens(self, tokens: np.ndarray, frozen: np.ndarray) -> None:
        """ValueError where tokens (B, L) cannot be corrupted."""

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"schedule": keras.saving.serialize_keras_object(self.schedule), "times": self.times}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TokenCorruption":
        """The inverse of `get_config`."""
        return cls(**config)


def distinct_ids(name: str, ids: Any) -> np.ndarray:
    """`ids` as int64 (N,); ValueError unless they are integers, none of them twice."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"`{name}` must be integers of shape [rows]. Received {ids.dtype}, shape {ids.shape}.")
    values, counts = np.unique(ids, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(
            f"`{name}` must not hold an id twice: both rows would be corrupted the same. Received "
            f"{values[counts > 1][0]} {counts.max()} times. A sample that comes again in one step needs an id of its "
            "own, such as a running number."
        )
    return ids.astype("int64")


def _position_uniform(keys: tuple[np.ndarray, np.ndarray], length: int, stream: int) -> np.ndarray:
    """float64 (B, length) in [0, 1), from the samples' keys and the position."""
    positions = np.arange(length, dtype="int32")[None]
    return uniform64(*threefry2x32(np, (keys[0][:, None], keys[1][:, None]), (positions, np.int32(stream))))


def uniform_tokens(keys: tuple[np.ndarray, np.ndarray], length: int, vocabulary_size: int) -> np.ndarray:
    """int64 (B, length), tokens drawn uniformly, with numbers of their own."""
    return np.minimum((_position_uniform(keys, length, 1) * vocabulary_size).astype("int64"), vocabulary_size - 1)
