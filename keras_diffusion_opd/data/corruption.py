"""Masking of tokens as a pure function of (seed, step, sample id)."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.data.counter_random import split_words, threefry2x32, uniform64
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.targets import TeacherTargets
from keras_diffusion_opd.schedules import get_mask_schedule

_TIME_STREAM = 0x40000000
_TIMES = ("low_discrepancy", "independent")


@dataclass(frozen=True)
class CorruptedTokens:
    """What a corruption made of a batch.

    Args:
        token_ids: int (B, L), the mask id where masked.
        mask: bool (B, L), what was masked.
        times: float32 (B,), diffusion time of each row, in [eps, 1].
        weights: float32 (B, L), `mask * loss_weight(times)`: weights of the evidence lower bound.

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


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class MaskedCorruption:
    """Replaces tokens by the mask id: the forward process of masked diffusion.

    A row draws a time t and every token of it is masked with probability `1 - alpha(t)`. What happens to a
    sample depends on the seed, the step and its id (and, with low-discrepancy times, on which other ids
    belong to the step); never on its place in the batch, on the number of devices or on the backend. It runs
    on the host, in NumPy.

    Args:
        mask_id: int >= 0, id of the absorbing mask.
        schedule: a `MaskSchedule` or its name: "linear", "log_linear", "cosine", "geometric".
        times: "low_discrepancy" spreads the times of a step evenly over [0, 1]: one common offset, and the
            samples in random order a distance 1 / B apart. Each time is still uniform, and the variance of
            the loss is much smaller. "independent" draws them independently.

    Raises:
        ValueError, TypeError: an argument is out of its range.

    Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524;
    the times after Kingma et al., "Variational Diffusion Models", 2021, arXiv:2107.00630.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import MaskedCorruption

    corruption = MaskedCorruption(mask_id=9, schedule="linear")
    tokens = np.arange(8, dtype="int32").reshape(2, 4)
    out = corruption(0, 17, np.array([30, 31]), tokens)         # seed 0, step 17
    again = corruption(0, 17, np.array([31]), tokens[1:], batch_ids=np.array([30, 31]))
    assert np.array_equal(out.token_ids[1], again.token_ids[0])
    assert np.array_equal(out.token_ids == 9, out.mask)
    ```
    """

    def __init__(self, mask_id: int, schedule: Any = "linear", *, times: str = "low_discrepancy") -> None:
        self.mask_id = _whole_number("mask_id", mask_id)
        self.schedule = get_mask_schedule(schedule)
        if times not in _TIMES:
            raise ValueError(f"`times` must be one of {list(_TIMES)}. Received {times!r}.")
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
            step: int >= 0, counts the batches: the same sample is masked otherwise at another step.
            sample_ids: int (B,), what identifies each sample in the data set. Equal ids at one step are
                masked equally.
            tokens: int (B, L), without mask ids where not frozen.
            frozen: None, or bool (B, L): True where a token is never masked (padding, a prompt).
            batch_ids: None, or int (N,): the ids of the whole step where `sample_ids` is a part of it (one
                device's share, one micro-batch). Only low-discrepancy times need it.

        Returns:
            `CorruptedTokens`.

        Raises:
            TypeError, ValueError: shapes do not agree, or a token is the mask id already.
        """
        _whole_number("seed", seed, least=None)
        _whole_number("step", step)
        tokens, ids, frozen = self._checked(tokens, sample_ids, frozen)
        # 1. A key for the step, and from it one for every sample.
        step_key = threefry2x32(np, _words(seed), _words(step))
        keys = threefry2x32(np, step_key, split_words(ids))
        # 2. Draw t.
        t = self._draw_times(seed, step, ids, batch_ids)
        # 3. Mask each token with probability 1 - alpha(t).
        positions = np.arange(tokens.shape[1], dtype="int32")[None]
        uniform = uniform64(*threefry2x32(np, (keys[0][:, None], keys[1][:, None]), (positions, np.int32(0))))
        mask = (uniform < self.schedule.mask_probability(t)[:, None]) & ~frozen
        # 4. The weight of the bound where masked.
        weights = np.where(mask, self.schedule.loss_weight(t)[:, None], 0.0)
        corrupted = np.where(mask, np.asarray(self.mask_id, tokens.dtype), tokens)
        return CorruptedTokens(corrupted, mask, t.astype("float32"), weights.astype("float32"))

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
            `PreparedBatch` with inputs `{token_key: (B, L), **conditions}`, the clean tokens as targets and
            the bound's weights.
        """
        conditions = dict(conditions or {})
        if token_key in conditions:
            raise ValueError(f"`conditions` must not hold {token_key!r}: that is where the corrupted tokens go.")
        out = self(seed, step, sample_ids, tokens, frozen=frozen, batch_ids=batch_ids)
        inputs = {token_key: out.token_ids, **conditions}
        return PreparedBatch.create(
            model_inputs=inputs,
            target_ids=np.asarray(tokens),
            loss_weights=out.weights,
            teacher=None if teacher is None else teacher(inputs),
            stamp=stamp,
        )

    def _draw_times(self, seed: int, step: int, ids: np.ndarray, batch_ids: Any) -> np.ndarray:
        """float64 (B,) in [eps, 1]."""
        low, high = _words(step)
        key = threefry2x32(np, _words(seed), (low, high ^ np.int32(_TIME_STREAM)))
        if self.times == "independent":
            uniform = uniform64(*threefry2x32(np, key, split_words(ids)))
        else:
            group = np.unique(ids if batch_ids is None else np.asarray(batch_ids, "int64"))
            place = np.minimum(np.searchsorted(group, ids), len(group) - 1)
            if not np.array_equal(group[place], ids):
                raise ValueError("`batch_ids` must hold every one of `sample_ids`: it names the whole step's batch.")
            # A random order of the ids, so that none is tied to early or late times; then even steps.
            order = np.argsort(uniform64(*threefry2x32(np, key, split_words(group))), kind="stable")
            rank = np.empty(len(group), "int64")
            rank[order] = np.arange(len(group))
            offset = uniform64(*threefry2x32(np, (key[1], key[0]), _words(len(group))))[0]
            uniform = (offset + rank[place] / len(group)) % 1.0
        return self.schedule.eps + (1.0 - self.schedule.eps) * uniform

    def _checked(self, tokens: Any, sample_ids: Any, frozen: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens, ids = np.asarray(tokens), np.asarray(sample_ids)
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"`tokens` must be integers of shape [batch, length]. Received {tokens.dtype}, shape {tokens.shape}."
            )
        if ids.shape != tokens.shape[:1] or ids.dtype.kind not in "iu":
            raise ValueError(
                f"`sample_ids` must be integers of shape ({tokens.shape[0]},), one per row of `tokens`. "
                f"Received {ids.dtype}, shape {ids.shape}."
            )
        frozen = np.zeros(tokens.shape, bool) if frozen is None else np.asarray(frozen)
        if frozen.shape != tokens.shape or frozen.dtype != bool:
            raise ValueError(
                f"`frozen` must be bool of the shape of `tokens`, {tokens.shape}. "
                f"Received {frozen.dtype}, shape {frozen.shape}."
            )
        if np.any((tokens == self.mask_id) & ~frozen):
            raise ValueError(
                f"`tokens` must not hold the mask id {self.mask_id} where not frozen: a mask cannot be a target."
            )
        return tokens, ids.astype("int64"), frozen

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"mask_id": self.mask_id, "schedule": schedule, "times": self.times}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MaskedCorruption":
        """The inverse of `get_config`."""
        return cls(**config)


def _words(value: int) -> tuple[np.ndarray, np.ndarray]:
    """Low and high 32 bits of one integer, as int32 arrays of shape (1,)."""
    return split_words(np.array([value], "int64"))


def _whole_number(name: str, value: Any, least: int | None = 0) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be a whole number. Received {value!r} of type {type(value).__name__}.")
    if least is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}. Received {value!r}.")
    return int(value)
