"""The settings of a trainer as JSON values: what a record holds, and what two runs are compared by."""

from typing import Any

import keras

from keras_diffusion_opd.provenance import plain_json


def settings_of(trainer: Any) -> dict[str, Any]:
    """Loss, optimizer, accumulation and backend of a trainer that has just been compiled."""
    return {
        "loss": config_of(trainer.loss),
        "optimizer": config_of(trainer.optimizer),
        "accumulation_steps": trainer.accumulation_steps,
        "on_empty": trainer.on_empty,
        "metrics": [metric.name for metric in trainer.metrics],
        "logits_fn": None if getattr(trainer, "logits_fn", None) is None else config_of(trainer.logits_fn),
        "backend": keras.backend.backend(),
    }


def config_of(value: Any) -> Any:
    """Class and configuration without names; the qualified name alone for what does not serialise."""
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        return {"name": name, "config": _unnamed(plain_json(value.get_config()))}
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return {"name": name, "config": None}


def _unnamed(config: Any) -> Any:
    """Without names, which Keras numbers by what the process has made before."""
    if isinstance(config, dict):
        return {key: _unnamed(value) for key, value in config.items() if key != "name"}
    return [_unnamed(value) for value in config] if isinstance(config, list) else config
