"""Checks of plain arguments that every folder shares: numbers, flags, counts."""

import math
import numbers
from typing import Any


def finite_real(name: str, value: Any) -> float:
    """`value` as a float; ValueError unless it is a finite real number (a bool is not a number here)."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number and getattr(value, "shape", None) == () and "float" in str(getattr(value, "dtype", "")):
        is_number = True
    if not is_number or not math.isfinite(float(value)):
        raise ValueError(f"`{name}` must be a finite real scalar. Received {value!r} of type {type(value).__name__}.")
    return float(value)


def positive_int(name: str, value: Any) -> int:
    """`value` as an int; ValueError unless it is a whole number of at least 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1. Received {value!r}.")
    return int(value)


def json_value(path: str, value: Any) -> None:
    """Raise unless `value` is made of JSON scalars, lists and mappings with string keys, all finite."""
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"`{path}` must be finite to be written as JSON. Received {value!r}.")
    elif isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise TypeError(f"Keys of `{path}` must be strings. Received {key!r} of type {type(key).__name__}.")
            json_value(f"{path}.{key}", child)
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            json_value(f"{path}[{index}]", child)
    else:
        raise TypeError(
            f"`{path}` must be a JSON scalar, list or mapping. Received {type(value).__name__}. "
            "Convert it to plain Python types."
        )
