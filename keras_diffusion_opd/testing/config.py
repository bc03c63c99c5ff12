"""The round trip of a configuration: object -> JSON -> object."""

import json
from collections.abc import Iterable
from typing import Any

import keras


def require_config_round_trip(value: Any, arguments: Iterable[str] = ()) -> None:
    """`value` survives serialisation through JSON, and its configuration holds every one of `arguments`."""
    config = value.get_config()
    missing = [name for name in arguments if name not in config]
    assert not missing, (
        f"`get_config` must hold every argument of `__init__`. Received one without {missing}. "
        "Keep each under its own name and return it."
    )
    try:
        text = json.dumps(keras.saving.serialize_keras_object(value))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"`get_config` must hold plain Python types: {error}.") from error
    try:
        revived = keras.saving.deserialize_keras_object(json.loads(text))
    except Exception as error:
        raise AssertionError(
            f"the configuration does not build the object again: {error} Register the class with "
            "`keras.saving.register_keras_serializable` and accept what `get_config` returns."
        ) from error
    expected, received = type(value).__name__, type(revived).__name__
    assert type(revived) is type(value), f"expected an object of {expected}, received one of {received}."
    again = keras.saving.serialize_keras_object(revived)
    changed = differences(json.loads(json.dumps(again)), json.loads(text))
    assert not changed, "the configuration changed on the way: " + "; ".join(changed)


def differences(received: Any, expected: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, as `path: expected ..., received ...`."""
    if isinstance(received, dict) and isinstance(expected, dict):
        keys = sorted(received.keys() | expected.keys())
        return [
            line
            for key in keys
            for line in differences(received.get(key), expected.get(key), f"{path}.{key}".lstrip("."))
        ]
    if isinstance(received, list) and isinstance(expected, list) and len(received) == len(expected):
        pairs = zip(received, expected, strict=True)
        return [line for i, (r, e) in enumerate(pairs) for line in differences(r, e, f"{path}[{i}]")]
    return [] if received == expected else [f"{path}: expected {expected!r}, received {received!r}"]
