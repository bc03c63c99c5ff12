"""In which settings two records differ, told with both values."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from keras_diffusion_opd.provenance.canonical import plain_json

_NOTHING = object()


class Difference(NamedTuple):
    """One setting that differs: its name, and what it was and is; `_NOTHING` where it is not there."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        before, after = ("nothing" if x is _NOTHING else repr(x) for x in (self.before, self.after))
        return f"`{self.name}`: {before} in the checkpoint, {after} here."

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON values; what is not there is null."""
        before, after = (None if x is _NOTHING else x for x in (self.before, self.after))
        return {"name": self.name, "before": before, "after": after}

    def within(self, names: Collection[str]) -> bool:
        """Whether one of `names` is its name, or that of a group that it belongs to."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


def find_differences(
    recorded: Mapping[str, Any], present: Mapping[str, Any], name: str, leave_out: Collection[str] = ()
) -> list[Difference]:
    """Every setting in which two mappings of JSON values differ, under names such as `name.setting`."""
    return [
        difference
        for difference in _differences(plain_json(recorded), plain_json(present), name)
        if difference.name.removeprefix(f"{name}.") not in leave_out
    ]


def differences(
    recorded: Mapping[str, Any], present: Mapping[str, Any], name: str, leave_out: Collection[str] = ()
) -> list[str]:
    """The same as sentences, with both values."""
    return [str(difference) for difference in find_differences(recorded, present, name, leave_out)]


def _differences(old: Any, new: Any, path: str) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _differences(old.get(key, _NOTHING), new.get(key, _NOTHING), f"{path}.{key}")
    elif type(old) is not type(new) or old != new:
        yield Difference(path, old, new)
