"""What is refused before training starts: arguments and optimizers that could not do what they promise."""

from typing import Any

import keras
import numpy as np

_BELONGS_ELSEWHERE = {
    "loss": "The loss is an argument of the trainer: PreparedTrainer(student, loss).",
    "loss_weights": "Weights are per token: `loss_weights` of PreparedBatch, or soft_weight/hard_weight of the loss.",
    "steps_per_execution": "One execution is one window: pass accumulation_steps instead.",
}
_TAKEN = ("run_eagerly", "jit_compile", "auto_scale_loss")


def refuse_compile_arguments(arguments: dict[str, Any]) -> None:
    """ValueError or TypeError for arguments of `compile` that a window trainer does not take."""
    for name in arguments:
        if name in _BELONGS_ELSEWHERE:
            raise ValueError(f"`{name}` is not an argument of this compile(). {_BELONGS_ELSEWHERE[name]}")
        if name not in _TAKEN:
            raise TypeError(
                f"compile() got an unexpected argument `{name}`. It takes optimizer, accumulation_steps, on_empty, "
                f"metrics, weighted_metrics, {', '.join(_TAKEN)}."
            )


def optimizer_from(optimizer: Any) -> Any:
    """A `keras.optimizers.Optimizer` from one, its name or its config; TypeError for anything else."""
    try:
        found = keras.optimizers.get(optimizer) if optimizer else None
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"`optimizer` must be a Keras optimizer, its name or its config. Received {optimizer!r}: {error}"
        ) from error
    if not isinstance(found, keras.optimizers.Optimizer):
        raise TypeError(
            f"`optimizer` must be a Keras optimizer, its name or its config, such as keras.optimizers.AdamW(1e-4). "
            f"Received {optimizer!r}."
        )
    return found


def check_optimizer(trainer: Any) -> None:
    """Raise unless the optimizer updates just the student's trainable variables, and can move them."""
    optimizer = trainer.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    variables = trainer.trainable_variables
    if trainer.built and not variables and all(layer.built for layer in trainer._flatten_layers()):
        raise ValueError("The student has no trainable variables. Set `trainable = True` on what is to be trained.")
    if optimizer.built:
        known = {id(v) for v in inner._trainable_variables}
        if known != {id(v) for v in variables}:
            raise ValueError(
                f"The optimizer was built for {len(known)} variables, and the student now has {len(variables)} "
                "trainable ones that are not the same. Layers were added, frozen or given LoRA since: call compile() "
                "again with a new optimizer."
            )
    for variable in variables:
        _refuse_rounded_decay(inner, variable)


def _refuse_rounded_decay(optimizer: Any, variable: Any) -> None:
    """In bfloat16 or float16 a decay of 0.999 rounds to 1: the moment never moves, nor does the weight."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in ("bfloat16", "float16"):
        return
    for name in ("beta_1", "beta_2", "rho"):
        decay = getattr(optimizer, name, None)
        if isinstance(decay, float) and decay < 1.0 and _round(decay, dtype) >= 1.0:
            raise ValueError(
                f"{type(optimizer).__name__} with {name}={decay} cannot train {variable.path!r}, which is stored in "
                f"{dtype}: {decay} rounds to 1 there and the weights would not move. Use the policy 'mixed_{dtype}' "
                f"(float32 variables, {dtype} computation), or {name} <= 0.99, or SGD."
            )


def _round(value: float, dtype: str) -> float:
    if dtype == "float16":
        return float(np.float16(value))
    # bfloat16 is float32 with the lower 16 bits rounded away, to even.
    bits = int(np.float32(value).view(np.uint32))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))
