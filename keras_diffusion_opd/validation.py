"""Checks of plain arguments that every folder shares: numbers, flags, counts."""

import math
import numbers
from typing import Any

_COLDEST, _HOTTEST = 1e-6, 1e6


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


def positive_temperature(temperature: Any) -> float:
    """`temperature` as a float, or ValueError unless it is a finite real number above 0."""
    temperature = finite_real("temperature", temperature)
    if temperature <= 0.0:
        raise ValueError(f"`temperature` must be positive. Received {temperature}. 1.0 leaves the logits as they are.")
    if not _COLDEST <= temperature <= _HOTTEST:
        raise ValueError(
            f"`temperature` must be between {_COLDEST:g} and {_HOTTEST:g}: beyond, its square or the logits divided "
            f"by it leave float32. Received {temperature}."
        )
    return temperature


def whole_number(name: str, value: Any, least: int | None = 0) -> int:
    """`value` as an int; ValueError unless it is a whole number of at least `least` (None: any)."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be a whole number. Received {value!r} of type {type(value).__name__}.")
    if least is not None and int(value) < least:
        raise ValueError(f"`{name}` must be at least {least}. Received {value!r}.")
    return int(value)
