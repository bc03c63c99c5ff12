"""The chain from the first model to the last: each link holds the digest of the one before."""

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keras_diffusion_opd.provenance.canonical import canonical_json, check_digest
from keras_diffusion_opd.provenance.digests import digest, text_digest
from keras_diffusion_opd.provenance.files import read_json, write_json
from keras_diffusion_opd.provenance.recipe import Recipe
from keras_diffusion_opd.provenance.records import header, open_record, take_keys

_LINK_KEYS = ("name", "model", "recipe", "parent", "digest")


@dataclasses.dataclass(frozen=True)
class Link:
    """One model of a lineage. Made by `Lineage.append`.

    Args:
        name: what people call the model.
        model: the digest of its weights.
        recipe: how it was made.
        parent: the digest of the link before, or None for the first.
        digest: of the link itself, as recorded; `content_digest` is what it should be.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> lineage = kdo.provenance.Lineage().append("base", "0" * 64, kdo.provenance.Recipe("pretraining"))
        >>> lineage.links[0].name, lineage.links[0].parent
        ('base', None)
    """

    name: str
    model: str
    recipe: Recipe
    parent: str | None
    digest: str

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.strip()):
            raise ValueError(f"`name` must be a text that is not empty. Received {self.name!r}.")
        check_digest(self.model, "model")
        check_digest(self.digest, "digest")
        if self.parent is not None:
            check_digest(self.parent, "parent")

    @property
    def content_digest(self) -> str:
        """The digest of what the link says."""
        return _link_digest(self.name, self.model, self.recipe, self.parent)

    def to_json(self) -> dict[str, Any]:
        """The link as JSON values."""
        own = {name: getattr(self, name) for name in _LINK_KEYS if name != "recipe"}
        return {**own, "recipe": self.recipe.to_json()}


@dataclasses.dataclass(frozen=True)
class Lineage:
    """A chain such as base -> rl -> distilled, in which a changed ancestor breaks every link after it.

    `head`, the digest of the last link, stands for the whole chain: kept elsewhere, it proves that nothing
    in it was changed.

    Args:
        links: from the first model to the last.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> Recipe, Parent = kdo.provenance.Recipe, kdo.provenance.Parent
        >>> lineage = kdo.provenance.Lineage().append("base", "0" * 64, Recipe("pretraining"))
        >>> recipe = Recipe("prepared_distillation", parents=[Parent("student", "base", "0" * 64)])
        >>> lineage = lineage.append("distilled", "1" * 64, recipe)
        >>> lineage.verify()
        []
        >>> lineage.verify({"distilled": "2" * 64})
        ['`distilled`: its weights have the digest 222222222222, the lineage says 111111111111.']
    """

    links: Sequence[Link] = ()

    def __post_init__(self) -> None:
        strange = [link for link in self.links if not isinstance(link, Link)]
        if strange:
            raise TypeError(f"`links` must be a list of `Link`. Received {strange[0]!r} in it.")
        object.__setattr__(self, "links", tuple(self.links))

    @property
    def head(self) -> str | None:
        """The digest of the last link, or None for an empty lineage."""
        return self.links[-1].digest if self.links else None

    def append(self, name: str, model: Any, recipe: Recipe) -> "Lineage":
        """The lineage with one model more.

        Args:
            name: what people call it; no other link may have it.
            model: its digest, or the model itself.
            recipe: how it was made. After the first link, one of its parents must be the model before.

        Returns:
            A new lineage; this one is unchanged.

        Raises:
            ValueError: a name twice, or a recipe that does not name the model before.
        """
        known = check_digest(model, "model") if isinstance(model, str) else digest(model)
        link = Link(name, known, recipe, self.head, _link_digest(name, known, recipe, self.head))
        grown = Lineage((*self.links, link))
        problems = grown.verify()
        if problems:
            raise ValueError(f"`{name}` cannot follow in this lineage: {' '.join(problems)}")
        return grown

    def verify(self, models: Mapping[str, Any] | None = None) -> list[str]:
        """Everything that does not hold; an empty list for a sound lineage.

        Args:
            models: weights to hold against it: name of a link -> a model, arrays, or their digest.

        Returns:
            One sentence for each thing that does not hold.

        Raises:
            ValueError: `models` names a link that is not there.
        """
        names = [link.name for link in self.links]
        unknown = sorted(set(models or {}) - set(names))
        if unknown:
            raise ValueError(f"`models` must name links of the lineage, {names}. Received {unknown}.")
        problems = [f"the name `{name}` is given {n} times." for name, n in Counter(names).items() if n > 1]
        for before, link in zip((None, *self.links), self.links, strict=False):
            problems += [f"`{link.name}`: {problem}" for problem in _link_problems(before, link)]
        for link in self.links:
            if models and link.name in models:
                given = models[link.name]
                received = check_digest(given, link.name) if isinstance(given, str) else digest(given)
                if received != link.model:
                    problems.append(
                        f"`{link.name}`: its weights have the digest {received[:12]}, "
                        f"the lineage says {link.model[:12]}."
                    )
        return problems

    def to_json(self) -> dict[str, Any]:
        """The lineage as JSON values."""
        return {**header("lineage"), "links": [link.to_json() for link in self.links]}

    @classmethod
    def from_json(cls, value: Any) -> "Lineage":
        """The lineage that `to_json` wrote, verified or not; a ValueError names what does not belong."""
        links = open_record(value, "lineage", ("links",))["links"]
        if not isinstance(links, list):
            raise ValueError(f"`links` must be a list. Received {type(links).__name__}.")
        return cls([_read_link(link) for link in links])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the lineage as JSON, in full or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Lineage":
        """The lineage in a file, verified or not."""
        return cls.from_json(read_json(path))


def _read_link(value: Any) -> Link:
    fields = take_keys(value, "link", _LINK_KEYS)
    return Link(**{**fields, "recipe": Recipe.from_json(fields["recipe"])})


def _link_digest(name: str, model: str, recipe: Recipe, parent: str | None) -> str:
    content = {"name": name, "model": model, "recipe": recipe.to_json(), "parent": parent}
    return text_digest(canonical_json(content))


def _link_problems(before: Link | None, link: Link) -> list[str]:
    problems = []
    if link.content_digest != link.digest:
        problems.append(
            f"what it says has the digest {link.content_digest[:12]}, but {link.digest[:12]} is recorded: "
            "its recipe, model, parent or name was changed."
        )
    expected = before.digest if before else None
    if link.parent != expected:
        said = link.parent[:12] if link.parent else "none"
        real = f"`{before.name}`, {before.digest[:12]}" if before else "none, since it is the first"
        problems.append(f"its parent is {said}, but the link before it is {real}.")
    if before and before.model not in {parent.digest for parent in link.recipe.parents}:
        problems.append(f"none of the parents in its recipe has the weights of `{before.name}`.")
    return problems
