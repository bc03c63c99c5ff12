"""How weights came to be: method, parents, settings, data and versions, with a digest of it all."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from keras_diffusion_opd.provenance.canonical import (
    RESERVED_KEYS,
    canonical_json,
    check_digest,
    plain_json,
)
from keras_diffusion_opd.provenance.digests import text_digest
from keras_diffusion_opd.provenance.environment import installed_versions
from keras_diffusion_opd.provenance.records import header, open_record, take_keys

_KEYS = ("method", "parents", "hyperparameters", "data", "seed", "versions", "metadata")
_CHANGE = ("name", "before", "after", "updates")


@dataclasses.dataclass(frozen=True)
class Parent:
    """A model that another was made from: known by its digest, called by its name.

    Args:
        role: what it was in the making, such as "student" or "teacher".
        name: what people call it.
        digest: of its weights, as `digest` gives it.

    Raises:
        ValueError: `digest` is none, or a text is empty.

    Example:
        >>> import numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> weights = [np.zeros((2, 2), "float32")]
        >>> kdo.provenance.Parent("teacher", "mdlm-340k", kdo.provenance.digest(weights)).role
        'teacher'
    """

    role: str
    name: str
    digest: str

    def __post_init__(self) -> None:
        for field in ("role", "name"):
            _require_text(getattr(self, field), field)
        check_digest(self.digest, "digest")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decided the weights of a model, as far as a program can write it down.

    Args:
        method: what was done, such as "prepared_distillation" or "pretraining".
        parents: the models it was made from; none for a model trained from nothing.
        hyperparameters: settings of loss, optimizer and schedule: JSON values by name.
        data: what was trained on, by name and digest: JSON values by name.
        seed: the seed of the run, or None where there was none.
        versions: of the libraries, by name; those installed, if not given.
        metadata: whatever else the user wants to keep: JSON values by name, but for reserved names.
        allowed: changes of a setting while the model was made, each that the user allowed by name: mappings of
            `name`, `before`, `after` and `updates`.

    Raises:
        TypeError: a setting that is no JSON value, or a key that is no string; the message names its place.
        ValueError: a number that is not finite, or a reserved name in `metadata`.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> teacher = kdo.provenance.Parent("teacher", "large", "0" * 64)
        >>> recipe = kdo.provenance.Recipe(
        ...     "prepared_distillation",
        ...     parents=[teacher],
        ...     hyperparameters={"temperature": 2.0, "optimizer": {"name": "adamw", "learning_rate": 1e-3}},
        ...     data={"name": "digits", "digest": "1" * 64},
        ...     seed=0,
        ... )
        >>> recipe == kdo.provenance.Recipe.from_json(recipe.to_json())
        True
    """

    method: str
    parents: Sequence[Parent] = ()
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=installed_versions)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allowed: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        _require_text(self.method, "method")
        strange = [p for p in self.parents if not isinstance(p, Parent)]
        if strange:
            raise TypeError(f"`parents` must be a list of `Parent`. Received {strange[0]!r} in it.")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise TypeError(f"`seed` must be an int or None. Received {self.seed!r}.")
        object.__setattr__(self, "parents", tuple(self.parents))
        for field in ("hyperparameters", "data", "versions", "metadata"):
            reserved = RESERVED_KEYS if field == "metadata" else ()
            value = getattr(self, field)
            if not isinstance(value, Mapping):
                raise TypeError(f"`{field}` must be a mapping. Received {type(value).__name__}.")
            object.__setattr__(self, field, plain_json(value, name=field, reserved=reserved))
        changes = [take_keys(change, "change in `allowed`", _CHANGE) for change in self.allowed]
        object.__setattr__(self, "allowed", tuple(plain_json(changes, name="allowed")))

    @property
    def digest(self) -> str:
        """The identity of the recipe: SHA-256 of its canonical JSON."""
        return text_digest(canonical_json(self.to_json()))

    def to_json(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        parents = [dataclasses.asdict(parent) for parent in self.parents]
        fields = {name: plain_json(getattr(self, name)) for name in _KEYS if name != "parents"}
        allowed = {"allowed": list(self.allowed)} if self.allowed else {}
        return {**header("recipe"), **fields, "parents": parents, **allowed}

    @classmethod
    def from_json(cls, value: Any) -> "Recipe":
        """The recipe that `to_json` wrote; a ValueError names what does not belong."""
        fields = open_record(value, "recipe", _KEYS, ("allowed",))
        parents = fields.pop("parents")
        if not isinstance(parents, list):
            raise ValueError(f"`parents` must be a list. Received {type(parents).__name__}.")
        keys = ("role", "name", "digest")
        return cls(parents=[Parent(**take_keys(p, "parent", keys)) for p in parents], **fields)


def _require_text(value: Any, name: str) -> None:
    if not (isinstance(value, str) and value.strip()):
        raise ValueError(f"`{name}` must be a text that is not empty. Received {value!r}.")
