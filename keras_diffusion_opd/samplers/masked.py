"""`MaskedSampler`: fills masked canvases token by token."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.targets import no_distribution
from keras_diffusion_opd.samplers.arguments import batch_conditions, canvas, canvas_shape, not_negative
from keras_diffusion_opd.samplers.row_noise import gumbel, row_keys
from keras_diffusion_opd.schedules import get_mask_schedule
from keras_diffusion_opd.validation import positive_int

_ORDERS = ("random", "confidence", "margin")
# Below this length comparing all pairs is several times faster than sorting twice.
_PAIRWISE_LENGTH = 256


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class MaskedSampler:
    """Samples from a masked diffusion model: draws every masked token, reveals some, and asks again.

    A step is `inputs -> denoiser -> advance`; `sample` is the loop around it. All that varies is an argument
    of the compiled step: seed, step count, schedule, temperature. A program is compiled once per denoiser
    and canvas shape, and a row's result depends on the row's seed and canvas alone: with the same compiled
    shape it is the same to the last bit whatever stands in the other rows.

    Args:
        mask_id: int >= 0. Never drawn, also where the denoiser scores it.
        schedule: `MaskSchedule` or name: how many tokens are still masked after each step. "linear" reveals
            equally many at every step, "cosine" few at first.
        order: which of the masked tokens are revealed first.
            "random": any; with as many steps as tokens this samples the model exactly.
            "confidence": those whose drawn token is the most probable (MaskGIT).
            "margin": those where the best token leads the second by most.
            The last two give sharper, less varied samples.
        order_noise: float >= 0, for "confidence" and "margin": Gumbel noise on the log of the score, fading
            to 0 at the last step. More noise, more variety.
        token_key: str, name of the tokens among the denoiser's inputs; None where they are its only input.

    Raises:
        ValueError: an argument is out of its range.

    Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524;
    Chang et al., "MaskGIT: Masked Generative Image Transformer", 2022, arXiv:2202.04200; Kim et al., "Train
    for the Worst, Plan for the Best", 2025, arXiv:2502.06768 (margin).

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.samplers import MaskedSampler

    def denoiser(inputs):                                      # any Keras model, or a function like this
        return np.tile(np.array([0.0, 3.0, 0.0], "float32"), (*inputs["token_ids"].shape, 1))

    sampler = MaskedSampler(mask_id=3)
    tokens = sampler.sample(denoiser, shape=(2, 8), steps=4, seed=0, temperature=0.0)
    assert tokens.tolist() == [[1] * 8] * 2
    ```
    """

    def __init__(
        self,
        mask_id: int,
        *,
        schedule: Any = "linear",
        order: str = "random",
        order_noise: float = 1.0,
        token_key: str | None = "token_ids",
    ) -> None:
        self.mask_id = positive_int("mask_id + 1", mask_id + 1) - 1
        self.schedule = get_mask_schedule(schedule)
        if order not in _ORDERS:
            raise ValueError(f"`order` must be one of {list(_ORDERS)}. Received {order!r}.")
        self.order = order
        self.order_noise = not_negative("order_noise", order_noise)
        self.token_key = token_key
        self._programs: dict[int, tuple[Any, Any]] = {}

    # ---- the process: one step ------------------------------------------------------------------------

    def init(self, tokens: Any, keys: Any) -> dict[str, Any]:
        """The state before the first step.

        Args:
            tokens: int (B, L), the mask id where something is to be filled in.
            keys: int32 (B, 2), from `row_noise.row_keys`.

        Returns:
            dict of arrays: `tokens` int32 (B, L), `keys` int32 (B, 2), `step` int32 (B,), `sound` bool (B,).
        """
        rows = np.shape(tokens)[0]
        return {
            "tokens": np.asarray(tokens, "int32"),
            "keys": np.asarray(keys, "int32"),
            "step": np.zeros(rows, "int32"),
            "sound": np.ones(rows, bool),
        }

    def plan(self, masked: Any, steps: int, schedule: Any = None) -> np.ndarray:
        """How many tokens each row has left masked after each step, int32 (steps, B).

        Args:
            masked: int (B,), tokens masked at the beginning.
            steps: int >= 1.
            schedule: None for the sampler's own.
        """
        schedule = self.schedule if schedule is None else get_mask_schedule(schedule)
        left = [schedule.masked_left(masked, (k + 1) / steps) for k in range(steps)]
        return np.stack(left).astype("int32")

    def inputs(self, state: dict[str, Any], conditions: dict[str, Any] | None = None) -> Any:
        """What the denoiser is called with at this state."""
        if self.token_key is None:
            return state["tokens"]
        return {self.token_key: state["tokens"], **(conditions or {})}

    def advance(
        self, state: dict[str, Any], logits: Any, left: Any, temperature: Any, order_noise: Any
    ) -> dict[str, Any]:
        """One step, pure: usable inside any compiled function.

        Args:
            state: from `init` or `advance`.
            logits: float (B, L, V), the denoiser's, at this state.
            left: int32 (B,), how many tokens stay masked after this step.
            temperature: float32 (B,), >= 0; 0 takes the most probable token.
            order_noise: float32 (B,), >= 0, noise on the order at this step; not used for "random".

        Returns:
            The next state.
        """
        tokens = state["tokens"]
        masked = ops.equal(tokens, self.mask_id)
        logits = ops.cast(logits, "float32")
        vocabulary = logits.shape[-1]
        if self.mask_id < vocabulary:
            is_mask = ops.equal(ops.arange(vocabulary), self.mask_id)
            logits = ops.where(is_mask, ops.full_like(logits, -float("inf")), logits)
        broken = ops.logical_and(masked, no_distribution(logits))
        # 1. Draw a token everywhere, with this row's noise. The last column of the noise is for the order.
        noise = gumbel(state["keys"], state["step"], tokens.shape[1], vocabulary + 1)
        warm = ops.reshape(temperature, (-1, 1, 1))
        drawn = ops.argmax(logits + warm * noise[..., :vocabulary], axis=-1)
        # 2. Order the masked positions.
        score = self._score(logits, drawn, noise[..., vocabulary], ops.expand_dims(order_noise, -1))
        score = ops.where(masked, score, ops.full_like(score, -float("inf")))
        # 3. Reveal the first of them, until `left` stay masked.
        count = ops.sum(ops.cast(masked, "int32"), axis=-1, keepdims=True)
        revealed = ops.logical_and(masked, _ranks(score) < count - ops.expand_dims(left, -1))
        return {
            "tokens": ops.where(revealed, ops.cast(drawn, "int32"), tokens),
            "keys": state["keys"],
            "step": state["step"] + 1,
            "sound": ops.logical_and(state["sound"], ops.logical_not(ops.any(broken, axis=-1))),
        }

    def finalize(self, state: dict[str, Any]) -> np.ndarray:
        """The tokens, int32 (B, L).

        Raises:
            ValueError: the denoiser gave no distribution for some row (NaN, +inf, or nothing but -inf).
        """
        sound = ops.convert_to_numpy(state["sound"])
        if not np.all(sound):
            rows = np.flatnonzero(~sound)
            raise ValueError(
                f"The denoiser's logits are not a distribution (NaN, +inf, or all -inf) in {len(rows)} of "
                f"{len(sound)} rows, first in row {rows[0]}. Has its training diverged?"
            )
        return np.asarray(ops.convert_to_numpy(state["tokens"]))

    def _score(self, logits: Any, drawn: Any, noise: Any, amount: Any) -> Any:
        if self.order == "random":
            return noise
        if self.order == "confidence":
            chosen = ops.take_along_axis(logits, ops.expand_dims(drawn, -1), axis=-1)
            return ops.squeeze(chosen, -1) - ops.logsumexp(logits, axis=-1) + amount * noise
        best = ops.top_k(ops.softmax(logits, axis=-1), 2)[0]
        margin = best[..., 0] - best[..., 1]
        return ops.log(ops.maximum(margin, 1e-30)) + amount * noise

    # ---- the loop -------------------------------------------------------------------------------------

    def sample(
        self,
        denoiser: Any,
        *,
        shape: tuple[int, int],
        steps: int,
        seed: Any,
        conditions: dict[str, Any] | None = None,
        tokens: Any = None,
        temperature: Any = 1.0,
        schedule: Any = None,
        batch_size: int | None = None,
        callback: Callable[[int, int, np.ndarray], None] | None = None,
    ) -> np.ndarray:
        """Fill canvases.

        Args:
            denoiser: Keras model or layer, called with `training=False`, or a function of the inputs that
                holds no variables: inputs -> float (B, L, V).
            shape: (B, L).
            steps: int >= 1. More steps than masked tokens cost time and change nothing.
            seed: int, and row i is the i-th sample of that seed; or int (B,), a seed of its own per row.
            conditions: other inputs of the denoiser by name, each (B, ...).
            tokens: None for all masked, or int (B, L): what is there already, the mask id elsewhere.
            temperature: float >= 0 or float (B,).
            schedule: None for the sampler's own.
            batch_size: None for one batch, or rows per call of the denoiser. The last batch is filled up, so
                that one program serves.
            callback: None, or a function (step, steps, tokens) called after every step of every batch.

        Returns:
            int32 (B, L), without mask ids.

        Raises:
            TypeError, ValueError: an argument is out of its range or does not fit `shape`; the denoiser gave
                no distribution.
        """
        rows, length = canvas_shape(shape)
        steps = positive_int("steps", steps)
        keys = row_keys(seed, rows)
        temperature = np.broadcast_to(not_negative("temperature", temperature), (rows,)).astype("float32")
        tokens = canvas(tokens, rows, length, self.mask_id)
        conditions = batch_conditions(conditions, rows)
        if conditions and self.token_key is None:
            raise ValueError("`conditions` need a `token_key`: without one the denoiser gets tokens only.")
        size = rows if batch_size is None else min(positive_int("batch_size", batch_size), rows)
        result = np.empty((rows, length), "int32")
        for start in range(0, rows, size):
            taken = np.minimum(np.arange(start, start + size), rows - 1)  # the last row fills up the batch
            part = {name: value[taken] for name, value in conditions.items()}
            state = self.init(tokens[taken], keys[taken])
            state = self._loop(denoiser, state, part, temperature[taken], steps, schedule, callback)
            kept = min(size, rows - start)
            result[start : start + kept] = self.finalize(state)[:kept]
        return result

    def _loop(
        self,
        denoiser: Any,
        state: dict[str, Any],
        conditions: dict[str, Any],
        temperature: np.ndarray,
        steps: int,
        schedule: Any,
        callback: Callable[[int, int, np.ndarray], None] | None,
    ) -> dict[str, Any]:
        step = self._program(denoiser, state, conditions)
        plan = self.plan(np.sum(state["tokens"] == self.mask_id, axis=1), steps, schedule)
        for k in range(steps):
            noise = np.full(len(temperature), self.order_noise * (1 - (k + 1) / steps), "float32")
            state = step(state, conditions, plan[k], temperature, noise)
            if callback is not None:
                callback(k + 1, steps, np.asarray(ops.convert_to_numpy(state["tokens"])))
        return state

    def _program(self, denoiser: Any, state: dict[str, Any], conditions: dict[str, Any]) -> Callable[..., Any]:
        """The compiled step of this denoiser."""
        known = self._programs.get(id(denoiser))
        if known is not None and known[0] is denoiser:
            return known[1]
        is_layer = isinstance(denoiser, keras.layers.Layer)
        if not is_layer and not callable(denoiser):
            raise TypeError(f"`denoiser` must be a model or a function. Received {type(denoiser).__name__}.")
        if is_layer and not denoiser.built:
            denoiser(self.inputs(state, conditions))
        keywords = {"training": False} if is_layer and denoiser._call_has_training_arg else {}

        def step(state: Any, conditions: Any, left: Any, temperature: Any, order_noise: Any) -> Any:
            logits = denoiser(self.inputs(state, conditions), **keywords)
            return self.advance(state, logits, left, temperature, order_noise)

        program = backend.compiled(step, [denoiser] if is_layer else [])
        self._programs = {**dict(list(self._programs.items())[-7:]), id(denoiser): (denoiser, program)}
        return program

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "mask_id": self.mask_id,
            "schedule": keras.saving.serialize_keras_object(self.schedule),
            "order": self.order,
            "order_noise": self.order_noise,
            "token_key": self.token_key,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MaskedSampler":
        """The inverse of `get_config`."""
        return cls(**config)


def _ranks(score: Any) -> Any:
    """int32 (B, L): 0 for the highest score of its row; equal scores in order of position."""
    length = score.shape[1]
    if length > _PAIRWISE_LENGTH:
        return ops.argsort(ops.argsort(-score, axis=-1), axis=-1)
    ours, other = ops.expand_dims(score, 2), ops.expand_dims(score, 1)
    place = ops.arange(length)
    earlier = ops.expand_dims(place, 0) < ops.expand_dims(place, 1)
    ahead = ops.logical_or(other > ours, ops.logical_and(ops.equal(other, ours), earlier))
    return ops.sum(ops.cast(ahead, "int32"), axis=2)
