"""JSON that is the same for the same content: what digests are taken of, and what metadata may hold."""

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

# The keys that files of this library write themselves, at the top of what a user may add.
RESERVED_KEYS = frozenset(
    ("format", "version", "digest", "parent", "parents", "recipe", "lineage", "step", "epoch", "files")
)

_DEEPEST = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")


def canonical_json(value: Any) -> str:
    """JSON text that depends on nothing but the content: sorted keys, no spaces, shortest numbers.

    Args:
        value: None, a bool, int, finite float or string, or lists and mappings of them with strings as keys.
            A tuple counts as a list, a NumPy scalar as its Python value; 1 and 1.0 differ.

    Returns:
        The text; encoded as UTF-8 it is what digests are taken of.

    Raises:
        TypeError: a value or key of another type; the message names its place.
        ValueError: a number that is not finite, a string that is not Unicode, or nesting without end.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.canonical_json({"b": (1, 2.5), "a": None})
        '{"a":null,"b":[1,2.5]}'
    """
    text: str = json.dumps(
        plain_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text


def plain_json(value: Any, *, name: str = "value", reserved: Collection[str] = (), _depth: int = 0) -> Any:
    """A copy of `value` in plain Python types, or an error that names what JSON cannot hold.

    Args:
        value: as for `canonical_json`.
        name: what to call the value in errors, such as "metadata".
        reserved: keys that the top mapping must not have.

    Returns:
        None, a bool, int, float, str, list or dict.

    Raises:
        TypeError: a value or key of another type.
        ValueError: a reserved key, a number that is not finite, a string that is not Unicode, or nesting
            without end.

    Example:
        >>> import numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.plain_json({"rate": np.float32(0.5), "shape": (2, 3)})
        {'rate': 0.5, 'shape': [2, 3]}
        >>> kdo.provenance.plain_json({"loss": float("nan")}, name="metadata")
        Traceback (most recent call last):
        ...
        ValueError: `metadata['loss']` must be finite, since JSON has no such number. Received nan. ...
    """
    if _depth > _DEEPEST:
        raise ValueError(f"`{name[:60]}...` is nested deeper than {_DEEPEST} levels. Does it hold itself?")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"`{name}` must be finite, since JSON has no such number. Received {value}. Use None or a string."
            )
        return float(value)
    if isinstance(value, str):
        return _unicode(value, name)
    if isinstance(value, Mapping):
        _check_keys(value, name, reserved)
        return {
            _unicode(key, name): plain_json(item, name=f"{name}[{key!r}]", _depth=_depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_json(x, name=f"{name}[{i}]", _depth=_depth + 1) for i, x in enumerate(value)]
    raise TypeError(
        f"`{name}` must be a JSON value: None, a bool, an int, a finite float, a string, or a list or "
        f"mapping of them. Received {type(value).__name__}. Convert it, for example with `.tolist()`."
    )


def check_digest(value: Any, name: str) -> str:
    """`value`, if it is a digest: 64 hexadecimal digits in lower case.

    Args:
        value: what should be a digest.
        name: what to call it in the error.

    Returns:
        The digest.

    Raises:
        ValueError: it is something else.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.check_digest("0" * 64, "teacher")[:4]
        '0000'
    """
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise ValueError(
            f"`{name}` must be a digest, 64 hexadecimal digits in lower case. Received {value!r}. "
            "Take it with `keras_diffusion_opd.provenance.digest`."
        )
    return value


def _unicode(text: str, name: str) -> str:
    plain = str.__str__(text)
    try:
        plain.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` must be Unicode text. Received {plain!r}: {error.reason}.") from error
    return plain


def _check_keys(value: Mapping[Any, Any], name: str, reserved: Collection[str]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise TypeError(
                f"`{name}` must have strings as keys. Received {key!r} of type {type(key).__name__}: use {str(key)!r}."
            )
        if key in reserved:
            raise ValueError(
                f"`{name}` must not use the reserved key {key!r}. Reserved are {sorted(reserved)}: choose another name."
            )
