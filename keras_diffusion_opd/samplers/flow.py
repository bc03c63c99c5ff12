"""`FlowSampler`: from noise to data along a velocity, one compiled step at a time."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.inference import build_for, for_inference
from keras_diffusion_opd.samplers.flow_arguments import FlowCall, checked_call
from keras_diffusion_opd.samplers.flow_plan import (
    DEFAULT_ETA,
    SOLVERS,
    STOCHASTICITY,
    flow_guidance,
    flow_plan,
    rows_of,
)
from keras_diffusion_opd.samplers.flow_rollout import FlowRollout
from keras_diffusion_opd.samplers.flow_step import gaussian_log_prob, guided_velocity, per_row
from keras_diffusion_opd.samplers.row_noise import normal

_LINE = ("time", "keep", "now", "before", "spread", "restart")


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class FlowSampler:
    """Samples from a flow model: asks the denoiser for a velocity and follows it from time 1, noise, to 0, data.

    A denoiser is called with `{x_key: float (B, ...), time_key: float32 (B,), **conditions}` and gives the velocity
    `noise - data`, of the shape of `x`. All that varies is an argument of one compiled step: seed, number of steps,
    shift, guidance, amount of noise. Two programs are compiled at most for a denoiser and a shape, with and without
    guidance. A row's result depends on the row's own seed and inputs: with the same compiled shape it is the same to
    the last bit whatever stands in the other rows.

    Args:
        solver: "euler" (first order), "heun" (second order, two evaluations a step) or "multistep" (second order, one
            evaluation a step: Adams and Bashforth). Only "euler" goes with noise.
        stochasticity: "ode": noise at the start alone. "sde": noise in every step, with the same distributions at every
            time; what Flow-GRPO trains on. "renoise": the predicted data are noised anew to the next time, as few-step
            students are trained to be sampled (DMD2).
        x_key, time_key: names of the denoiser's inputs.

    Raises:
        ValueError: no such solver or stochasticity, or a pair of them that does not go together.

    Source: Esser et al., "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis", 2024,
    arXiv:2403.03206; Liu et al., "Flow-GRPO", 2025, arXiv:2505.05470 ("sde"); Yin et al., "Improved Distribution
    Matching Distillation for Fast Image Synthesis", 2024, arXiv:2405.14867 ("renoise").

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.samplers import FlowSampler

    def denoiser(inputs):                     # data are all 2: the velocity is (x - 2) / time
        return (inputs["x"] - 2.0) / inputs["time"][:, None]

    samples = FlowSampler().sample(denoiser, shape=(3, 4), steps=5, seed=0)
    assert np.allclose(samples, 2.0, atol=1e-5)
    ```
    """

    def __init__(
        self, *, solver: str = "euler", stochasticity: str = "ode", x_key: str = "x", time_key: str = "time"
    ) -> None:
        for name, value, known in (
            ("solver", solver, SOLVERS),
            ("stochasticity", stochasticity, STOCHASTICITY),
        ):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {list(known)}. Received {value!r}.")
        if stochasticity != "ode" and solver != "euler":
            raise ValueError(
                f"`stochasticity` {stochasticity!r} goes with solver='euler' alone: fresh noise in every step leaves "
                f"nothing smooth for a second order to use. Received solver={solver!r}."
            )
        self.solver, self.stochasticity = solver, stochasticity
        self.x_key, self.time_key = x_key, time_key
        self._programs: dict[tuple[int, bool], tuple[Any, Any]] = {}

    # ---- the process: one step ------------------------------------------------------------------------

    def init(self, x: Any, keys: Any) -> dict[str, Any]:
        """The state before the first step.

        Args:
            x: float (B, ...), noise, or a noised image.
            keys: int32 (B, 2), from `row_noise.row_keys`.

        Returns:
            dict of arrays: `x`, `base`, `velocity` float32 (B, ...), `keys` int32 (B, 2), `evaluation` int32 (B,),
            `sound` bool (B,), and `log_prob` float32 (B,), of the last step.
        """
        x = np.asarray(x, "float32")
        return {
            "x": x,
            "base": x,
            "velocity": np.zeros_like(x),
            "keys": np.asarray(keys, "int32"),
            "evaluation": np.zeros(len(x), "int32"),
            "sound": np.ones(len(x), bool),
            "log_prob": np.zeros(len(x), "float32"),
        }

    def inputs(self, state: dict[str, Any], time: Any, conditions: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the denoiser is called with at this state and these times, float32 (B,)."""
        return {self.x_key: state["x"], self.time_key: time, **(conditions or {})}

    def advance(self, state: dict[str, Any], velocity: Any, line: dict[str, Any]) -> dict[str, Any]:
        """One evaluation, pure: usable inside any compiled function.

        Args:
            state: from `init` or `advance`.
            velocity: float (B, ...), the denoiser's at this state.
            line: of `flow_plan`, what each row does now: `keep`, `now`, `before`, `spread` float32 (B,), `restart` bool
                (B,).

        Returns:
            The next state.
        """
        x, velocity = state["x"], ops.cast(velocity, "float32")
        base = ops.where(per_row(line["restart"], x), state["base"], x)
        mean = per_row(line["keep"], x) * base + per_row(line["now"], x) * velocity
        evaluation = state["evaluation"] + 1
        log_prob = state["log_prob"]
        if self.stochasticity == "ode":
            following = mean + per_row(line["before"], x) * state["velocity"]
        else:
            noise = ops.reshape(normal(ops, state["keys"], evaluation, int(np.prod(x.shape[1:]))), ops.shape(x))
            following = mean + per_row(line["spread"], x) * noise
            log_prob = gaussian_log_prob(following, mean, line["spread"])
        finite = ops.all(ops.isfinite(ops.reshape(following, (ops.shape(x)[0], -1))), axis=1)
        return {
            "x": following,
            "base": base,
            "velocity": velocity,
            "keys": state["keys"],
            "evaluation": evaluation,
            "sound": ops.logical_and(state["sound"], finite),
            "log_prob": log_prob,
        }

    def finalize(self, state: dict[str, Any], first_row: int = 0) -> np.ndarray:
        """The samples, float32 (B, ...).

        Args:
            state: after the last step.
            first_row: number of the first row, for the error.

        Raises:
            ValueError: a row is not finite.
        """
        sound = ops.convert_to_numpy(state["sound"])
        if not np.all(sound):
            rows = np.flatnonzero(~sound)
            raise ValueError(
                f"The samples are not finite in {len(rows)} of {len(sound)} rows, first in row {first_row + rows[0]}: "
                "the denoiser's velocity is NaN or infinite. Has training diverged, or does half precision overflow?"
            )
        return np.asarray(ops.convert_to_numpy(state["x"]))

    # ---- the loop -------------------------------------------------------------------------------------

    def sample(self, denoiser: Any, **arguments: Any) -> np.ndarray:
        """Draw samples.

        Args:
            denoiser: Keras model or layer, called with `training=False`, or a function that holds no variables.
            **arguments: of the call:
                shape: (B, ...), of the samples.
                steps: int >= 1.
                seed: int, and row i is the i-th sample of that seed; or int (B,), a seed of its own per row.
                conditions: None, or other inputs of the denoiser by name, each (B, ...).
                guidance: float or (B,), classifier-free guidance; 1 makes no unconditional call.
                unconditional: None, or dict of what stands for no condition, each (B, ...) or (1, ...).
                guidance_rescale: float in [0, 1] or (B,).
                guidance_interval: (low, high), times within which guidance acts.
                shift: float > 0 or (B,), of the times; see `schedules.shift_time`.
                times: None, or falling times (steps + 1,) or (B, steps + 1).
                eta: None for the default (1 for "renoise", 0.7 for "sde"), or float or (B,): amount of noise.
                noise: None for that of the seed, or float (B, ...), the noise at the start.
                init_image: None, or float (B, ...): where to start, noised to `strength`.
                strength: float in (0, 1] or (B,), the time before `shift` at which to start.
                batch_size: None for one batch, or rows per call of the denoiser.
                callback: None, or a function (step, steps, preview) called after every step, with the present
                    prediction of the data, float32 (rows, ...).
                progress: bool, whether to show a progress bar.

        Returns:
            float32 (B, ...).

        Raises:
            TypeError, ValueError: an argument is out of its range or does not fit `shape`; the denoiser gave no
                velocity of the shape of its input, or one that is not finite.
        """
        return self._run(denoiser, _call(self, arguments), keep=False).samples

    def rollout(self, denoiser: Any, **arguments: Any) -> FlowRollout:
        """Draw samples as `sample` does, and keep every state, and the log-probability of every step.

        Args:
            denoiser, **arguments: of `sample`.

        Returns:
            `FlowRollout`.
        """
        return self._run(denoiser, _call(self, arguments), keep=True)

    def _run(self, denoiser: Any, call: FlowCall, *, keep: bool) -> FlowRollout:
        for_inference("denoiser", denoiser)
        plan = flow_plan(call.times, solver=self.solver, stochasticity=self.stochasticity, eta=call.eta)
        weights = flow_guidance(plan["time"], call.guidance, call.interval)
        rows, guided = len(call.start), bool(np.any(weights != 1))
        batches = range(0, rows, call.size)
        bar = keras.utils.Progbar(len(batches) * len(plan["time"])) if call.progress else None
        found: list[dict[str, np.ndarray]] = []
        for start in batches:
            taken = np.minimum(np.arange(start, start + call.size), rows - 1)  # the last row fills up the batch
            part = self._batch(denoiser, call, rows_of({**plan, "guidance": weights}, taken), taken, guided, keep, bar)
            found.append({name: value[: rows - start] for name, value in part.items()})
        whole = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        lines = {name: np.ascontiguousarray(plan[name].T) for name in ("time", "keep", "now", "spread")}
        return FlowRollout(
            whole["samples"],
            call.times,
            call.noise,
            whole.get("states"),
            whole.get("log_probs"),
            lines,
            call.conditions,
        )

    def _batch(
        self,
        denoiser: Any,
        call: FlowCall,
        plan: dict[str, np.ndarray],
        taken: np.ndarray,
        guided: bool,
        keep: bool,
        bar: Any,
    ) -> dict[str, np.ndarray]:
        conditions = {name: value[taken] for name, value in call.conditions.items()}
        free = {name: value[taken] for name, value in call.unconditional.items()} if guided else {}
        state = self.init(call.start[taken], call.keys[taken])
        program = self._program(denoiser, state, conditions, guided)
        states, log_probs, steps, done = [state["x"]], [], int(plan["ends"].sum(axis=0).max()), 0
        for k in range(len(plan["time"])):
            line = {name: plan[name][k] for name in _LINE}
            before = state["x"]
            state = program(state, line, conditions, free, plan["guidance"][k], call.rescale[taken])
            if bar is not None:
                bar.add(1)
            if not plan["ends"][k].any():
                continue
            done += 1
            if keep:
                states.append(_host(state["x"]))
                log_probs.append(_host(state["log_prob"]))
            if call.callback is not None:
                s = plan["time"][k].reshape(-1, *(1,) * (call.start.ndim - 1))
                call.callback(done, steps, _host(before) - s * _host(state["velocity"]))
        found = {"samples": self.finalize(state, int(taken[0]))}
        if keep:
            found |= {"states": np.stack(states, axis=1), "log_probs": np.stack(log_probs, axis=1)}
        return found

    def _program(self, denoiser: Any, state: Any, conditions: Any, guided: bool) -> Callable[..., Any]:
        """The compiled step of this denoiser, with or without guidance."""
        known = self._programs.get((id(denoiser), guided))
        if known is not None and known[0] is denoiser:
            return known[1]
        call, models = for_inference("denoiser", denoiser)
        build_for(denoiser, self.inputs(state, np.ones(len(state["x"]), "float32"), conditions))

        def step(state: Any, line: Any, conditions: Any, free: Any, guidance: Any, rescale: Any) -> Any:
            velocity = _velocity(call(self.inputs(state, line["time"], conditions)), state["x"])
            if guided:
                without = _velocity(call(self.inputs(state, line["time"], free)), state["x"])
                velocity = guided_velocity(velocity, without, guidance, rescale)
            return self.advance(state, velocity, line)

        program = backend.compiled(step, models)
        self._programs = {**dict(list(self._programs.items())[-7:]), (id(denoiser), guided): (denoiser, program)}
        return program

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in ("solver", "stochasticity", "x_key", "time_key")}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FlowSampler":
        """The inverse of `get_config`."""
        return cls(**config)


def _call(sampler: FlowSampler, arguments: dict[str, Any]) -> FlowCall:
    defaults: dict[str, Any] = {
        "conditions": None,
        "guidance": 1.0,
        "unconditional": None,
        "guidance_rescale": 0.0,
        "guidance_interval": (0.0, 1.0),
        "shift": 1.0,
        "times": None,
        "eta": None,
        "noise": None,
        "init_image": None,
        "strength": 1.0,
        "batch_size": None,
        "callback": None,
        "progress": False,
    }
    needed = ("shape", "steps", "seed")
    unknown, missing = sorted(set(arguments) - {*defaults, *needed}), [n for n in needed if n not in arguments]
    if unknown or missing:
        raise TypeError(
            f"`sample` takes {sorted({*defaults, *needed})}. Received {unknown or 'no ' + ', '.join(missing)}."
        )
    given = {**defaults, **arguments}
    if given["eta"] is None:
        given["eta"] = DEFAULT_ETA[sampler.stochasticity]
    most = {"ode": 0.0, "sde": float("inf"), "renoise": 1.0}[sampler.stochasticity]
    return checked_call(**given, reserved=(sampler.x_key, sampler.time_key), eta_most=most)


def _velocity(velocity: Any, x: Any) -> Any:
    velocity = ops.convert_to_tensor(velocity)
    if tuple(velocity.shape) != tuple(x.shape):
        raise ValueError(
            f"`denoiser` must give a velocity of the shape of its input, {tuple(x.shape)}. Received "
            f"{tuple(velocity.shape)}."
        )
    return velocity


def _host(x: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(x))
