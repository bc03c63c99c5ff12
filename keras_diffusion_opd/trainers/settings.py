"""The settings of a trainer as JSON values: what a record holds, and what two runs are compared by."""

from typing import Any

import keras

from keras_diffusion_opd.provenance import canonical_json, plain_json, text_digest

_NO_PART = ("shared_object_id", "compile_config")  # of a model: the student's own compile() is not used


def settings_of(trainer: Any) -> dict[str, Any]:
    """Loss, optimizer, accumulation and backend of a trainer that has just been compiled."""
    return {
        "loss": config_of(trainer.loss),
        "optimizer": config_of(trainer.optimizer),
        "accumulation_steps": trainer.accumulation_steps,
        "on_empty": trainer.on_empty,
        "metrics": [metric.name for metric in trainer.metrics],
        **trainer.own_settings(),
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


def architecture_digest(model: Any) -> str | None:
    """The identity of a model's configuration; None for one that does not serialise.

    Names do not count, since Keras numbers layers by what the process has made before: each is replaced by
    its place among the names. Those of dtype policies are no names, and do count.
    """
    try:
        config = plain_json(keras.saving.serialize_keras_object(model))
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return None
    names: dict[str, str] = {}
    _collect(config, names)
    return text_digest(canonical_json(_renamed(config, names)))


def _collect(config: Any, names: dict[str, str]) -> None:
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return
        name = config.get("name")
        if isinstance(name, str):
            names.setdefault(name, f"#{len(names)}")
        for value in config.values():
            _collect(value, names)
    elif isinstance(config, list):
        for value in config:
            _collect(value, names)


def _renamed(config: Any, names: dict[str, str]) -> Any:
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            return config
        return {key: _renamed(value, names) for key, value in config.items() if key not in _NO_PART}
    if isinstance(config, list):
        return [_renamed(value, names) for value in config]
    return names.get(config, config) if isinstance(config, str) else config


def _unnamed(config: Any) -> Any:
    """Without names, which Keras numbers by what the process has made before."""
    if isinstance(config, dict):
        return {key: _unnamed(value) for key, value in config.items() if key != "name"}
    return [_unnamed(value) for value in config] if isinstance(config, list) else config
