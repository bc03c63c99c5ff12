"""`MaskedSampler`: fills masked canvases token by token."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import shape_of
from keras_diffusion_opd.data.corruption import MaskedCorruption
from keras_diffusion_opd.data.inference import batch_conditions, build_for, for_inference, require_logits
from keras_diffusion_opd.samplers.arguments import (
    canvas,
    canvas_shape,
    not_negative,
    row_temperatures,
    step_callback,
)
from keras_diffusion_opd.samplers.revealing import ORDERS, reveal
from keras_diffusion_opd.samplers.rollout import TokenRollout
from keras_diffusion_opd.samplers.row_noise import row_keys
from keras_diffusion_opd.schedules import get_mask_schedule
from keras_diffusion_opd.validation import positive_int, whole_number

Callback = Callable[[int, int, np.ndarray], None]


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
            "margin": those where the best token leads the second by most (top-k margin).
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
        self.mask_id = whole_number("mask_id", mask_id)
        self.schedule = get_mask_schedule(schedule)
        if order not in ORDERS:
            raise ValueError(f"`order` must be one of {list(ORDERS)}. Received {order!r}.")
        self.order = order
        self.order_noise = not_negative("order_noise", order_noise)
        self.token_key = token_key
        self._programs: dict[int, tuple[Any, Any]] = {}

    # ---- the process: one step ------------------------------------------------------------------------

    def init(self, tokens: Any, keys: Any, *, log_probs: bool = False) -> dict[str, Any]:
        """The state before the first step.

        Args:
            tokens: int (B, L), the mask id where something is to be filled in.
            keys: int32 (B, 2), from `row_noise.row_keys`.
            log_probs: whether the state is to note the log-probability and the step of every token.

        Returns:
            dict of arrays: `tokens` int32 (B, L), `keys` int32 (B, 2), `step` int32 (B,), `sound` bool (B,);
            `log_probs` float32 (B, L) and `revealed_at` int32 (B, L) where they are to be noted.
        """
        tokens = np.asarray(tokens, "int32")
        state = {
            "tokens": tokens,
            "keys": np.asarray(keys, "int32"),
            "step": np.zeros(len(tokens), "int32"),
            "sound": np.ones(len(tokens), bool),
        }
        if log_probs:
            state |= {"log_probs": np.zeros(tokens.shape, "float32"), "revealed_at": np.full(tokens.shape, -1, "int32")}
        return state

    def plan(self, tokens: Any, steps: int, schedule: Any = None) -> np.ndarray:
        """How many tokens each row has left masked after each step, int32 (steps, B).

        Args:
            tokens: int (B, L), before the first step.
            steps: int >= 1.
            schedule: None for the sampler's own.
        """
        schedule = self.schedule if schedule is None else get_mask_schedule(schedule)
        masked = np.sum(np.asarray(tokens) == self.mask_id, axis=1)
        return np.stack([schedule.masked_left(masked, (k + 1) / steps) for k in range(steps)]).astype("int32")

    def inputs(self, state: dict[str, Any], conditions: dict[str, Any] | None = None) -> Any:
        """What the denoiser is called with at this state."""
        if self.token_key is None:
            return state["tokens"]
        return {self.token_key: state["tokens"], **(conditions or {})}

    def open_positions(self, tokens: Any) -> Any:
        """bool (B, L): the positions that may be revealed now; here all that are masked."""
        return ops.equal(tokens, self.mask_id)

    def advance(
        self, state: dict[str, Any], logits: Any, left: Any, temperature: Any, order_noise: Any
    ) -> dict[str, Any]:
        """One step, pure: usable inside any compiled function.

        Args:
            state: from `init` or `advance`.
            logits: float (B, L, V), the denoiser's, at this state.
            left: int32 (B,), how many tokens of the row stay masked after this step.
            temperature: float32 (B,), >= 0; 0 takes the most probable token.
            order_noise: float32 (B,), >= 0, noise on the order at this step; not used for "random".

        Returns:
            The next state.
        """
        return reveal(
            state,
            logits,
            self.open_positions(state["tokens"]),
            left,
            temperature,
            order_noise,
            mask_id=self.mask_id,
            order=self.order,
        )

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
        callback: Callback | None = None,
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
                no logits for every position, or no distribution.
        """
        arguments = (conditions, tokens, temperature, schedule, batch_size, callback)
        return self._run(denoiser, shape, steps, seed, *arguments, log_probs=False)["tokens"]

    def rollout(
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
        callback: Callback | None = None,
    ) -> TokenRollout:
        """Fill canvases as `sample` does, and keep what is needed to score the samples again.

        Args:
            denoiser, shape, steps, seed, conditions, tokens, schedule, batch_size, callback: see `sample`.
            temperature: float > 0 or float (B,).

        Returns:
            `TokenRollout`: the tokens of `sample`, each with its log-probability when it was revealed.
        """
        arguments = (conditions, tokens, temperature, schedule, batch_size, callback)
        parts = self._run(denoiser, shape, steps, seed, *arguments, log_probs=True)
        return TokenRollout(
            parts["tokens"],
            parts["log_probs"],
            np.where(parts["revealed_at"] < 0, -1, parts["revealed_at"] % steps).astype("int32"),
            steps,
            row_temperatures(temperature, len(parts["tokens"]), positive=True),
            self.layout(),
            {name: np.asarray(value) for name, value in (conditions or {}).items()},
            self.token_key,
        )

    def layout(self) -> MaskedCorruption:
        """The corruption that a denoiser for this sampler is trained with: it knows the inputs of a state."""
        return MaskedCorruption(self.mask_id, self.schedule)

    def _run(
        self,
        denoiser: Any,
        shape: Any,
        steps: Any,
        seed: Any,
        conditions: Any,
        tokens: Any,
        temperature: Any,
        schedule: Any,
        batch_size: Any,
        callback: Any,
        *,
        log_probs: bool,
    ) -> dict[str, np.ndarray]:
        # 1. Check everything before anything runs.
        rows, length = canvas_shape(shape)
        steps = positive_int("steps", steps)
        keys = row_keys(seed, rows)
        temperature = row_temperatures(temperature, rows, positive=log_probs)
        tokens = canvas(tokens, rows, length, self.mask_id)
        conditions = batch_conditions(conditions, rows, self._reserved_keys())
        if conditions and self.token_key is None:
            raise ValueError("`conditions` need a `token_key`: without one the denoiser gets tokens only.")
        size = rows if batch_size is None else min(positive_int("batch_size", batch_size), rows)
        callback = step_callback(callback)
        for_inference("denoiser", denoiser)
        # 2. One batch after the other.
        results: list[dict[str, np.ndarray]] = []
        for start in range(0, rows, size):
            taken = np.minimum(np.arange(start, start + size), rows - 1)  # the last row fills up the batch
            part = {name: value[taken] for name, value in conditions.items()}
            state = self.init(tokens[taken], keys[taken], log_probs=log_probs)
            state = self._loop(denoiser, state, part, temperature[taken], steps, schedule, callback)
            found = {"tokens": self.finalize(state)}
            found |= {n: np.asarray(ops.convert_to_numpy(state[n])) for n in ("log_probs", "revealed_at") if n in state}
            results.append({name: value[: rows - start] for name, value in found.items()})
        return {name: np.concatenate([result[name] for result in results]) for name in results[0]}

    def _reserved_keys(self) -> tuple[str | None, ...]:
        return (self.token_key,)

    def _loop(
        self,
        denoiser: Any,
        state: dict[str, Any],
        conditions: dict[str, Any],
        temperature: np.ndarray,
        steps: int,
        schedule: Any,
        callback: Callback | None,
    ) -> dict[str, Any]:
        step = self._program(denoiser, state, conditions)
        plan = self.plan(state["tokens"], steps, schedule)
        for k in range(len(plan)):
            noise = np.full(len(temperature), self.order_noise * (1 - (k % steps + 1) / steps), "float32")
            state = step(state, conditions, plan[k], temperature, noise)
            if callback is not None:
                callback(k + 1, len(plan), np.asarray(ops.convert_to_numpy(state["tokens"])))
        return state

    def _program(self, denoiser: Any, state: dict[str, Any], conditions: dict[str, Any]) -> Callable[..., Any]:
        """The compiled step of this denoiser."""
        known = self._programs.get(id(denoiser))
        if known is not None and known[0] is denoiser:
            return known[1]
        call, models = for_inference("denoiser", denoiser)
        build_for(denoiser, self.inputs(state, conditions))

        def step(state: Any, conditions: Any, left: Any, temperature: Any, order_noise: Any) -> Any:
            logits = call(self.inputs(state, conditions))
            rows, length = shape_of(state["tokens"])
            require_logits("denoiser", logits, rows, length)
            return self.advance(state, logits, left, temperature, order_noise)

        program = backend.compiled(step, models)
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
