"""What all files of records share: a format, a version, and no key that nobody knows."""

from collections.abc import Collection, Mapping
from typing import Any

VERSION = 1


def header(kind: str) -> dict[str, Any]:
    """The first keys of a file that holds a record of `kind`."""
    return {"format": f"keras_diffusion_opd/{kind}", "version": VERSION}


def open_record(value: Any, kind: str, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """The keys of a stored record of `kind` without its header, or an error that names what is wrong."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a {kind} must be a JSON object. Received {type(value).__name__}.")
    if value.get("format") != header(kind)["format"]:
        expected = header(kind)["format"]
        raise ValueError(f"`format` must be {expected!r}. Received {value.get('format')!r}.")
    if value.get("version") != VERSION:
        raise ValueError(
            f"`version` of a {kind} must be {VERSION}. Received {value.get('version')!r}. "
            "Read it with the release of keras_diffusion_opd that wrote it."
        )
    return take_keys({k: v for k, v in value.items() if k not in header(kind)}, kind, required, optional)


def take_keys(value: Any, what: str, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """`value`, if it is a mapping with all `required` keys and no others but `optional` ones."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a {what} must be a JSON object. Received {type(value).__name__}.")
    missing = sorted(set(required) - set(value))
    unknown = sorted(set(value) - set(required) - set(optional))
    if missing or unknown:
        raise ValueError(f"a {what} must have the keys {sorted(required)}. Missing: {missing}; unknown: {unknown}.")
    return dict(value)
