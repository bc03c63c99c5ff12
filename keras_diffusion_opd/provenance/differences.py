"""In which settings two records differ, told with both values."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from keras_diffusion_opd.provenance.canonical import plain_json

_NOTHING = object()


def differences(
    recorded: Mapping[str, Any], present: Mapping[str, Any], name: str, leave_out: Collection[str] = ()
) -> list[str]:
    """A sentence for every setting in which two mappings of JSON values differ, with both values."""
    return [
        f"`{path}`: {'nothing' if old is _NOTHING else repr(old)} in the checkpoint, "
        f"{'nothing' if new is _NOTHING else repr(new)} here."
        for path, old, new in _differences(plain_json(recorded), plain_json(present), name)
        if path.removeprefix(f"{name}.") not in leave_out
    ]


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key, _NOTHING), new.get(key, _NOTHING), f"{path}.{key}")
    elif type(old) is not type(new) or old != new:
        yield path, old, new
