"""What has to agree for a run to go on: recipe, student, identities, parents, base, versions."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_diffusion_opd.callbacks.training_state import FrozenWeights, layout, state_variables
from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.provenance import Parent, Recipe, installed_versions
from keras_diffusion_opd.provenance.differences import Difference, find_differences

_BACKENDS = {"jax": ("jax", "jaxlib"), "tensorflow": ("tensorflow", "tensorflow-cpu"), "torch": ("torch",)}


def recipe_differences(recipe: Recipe, trainer: Any, dataset: PreparedDataset | None) -> list[Difference]:
    """Settings of the trainer, the libraries and the dataset that are not what they were."""
    found = find_differences({"method": recipe.method}, {"method": type(trainer).__name__}, "trainer")
    found += find_differences(recipe.hyperparameters, trainer.training_settings, "trainer")
    found += find_differences(_versions(recipe.versions), _versions(installed_versions()), "versions")
    if dataset is not None:
        found += dataset.differences(recipe.data)
    return found


def origin_differences(
    record: Mapping[str, Any], parents: Sequence[Parent] | None, identity: Mapping[str, Any] | None
) -> list[Difference]:
    """Parents and identities that are not what they were; None compares nothing."""
    found = []
    if parents is not None:
        was = Recipe.from_json(record["recipe"]).parents
        old, new = ({f"{p.role}/{p.name}": p.digest for p in group} for group in (was, parents))
        found += find_differences(old, new, "parents")
    if identity is not None:
        found += find_differences(record["identity"], identity, "identity")
    return found


def base_differences(record: Mapping[str, Any], trainer: Any) -> list[Difference]:
    """Another base than the one that a checkpoint of trainable weights alone belongs to."""
    if record["base"] is None:
        return []
    present = {"digest": FrozenWeights(trainer.student).digest}
    return find_differences({"digest": record["base"]["digest"]}, present, "base")


def layout_differences(record: Mapping[str, Any], trainer: Any, leave_out: str | None = None) -> list[str]:
    """A sentence for every variable of another shape or dtype. Paths are told, not compared: Keras counts layers."""
    variables = state_variables(trainer, trainable_only=record["base"] is not None)
    found = []
    for section, new in layout(variables).items():
        old = record["layout"][section]
        if section == leave_out:
            continue
        if len(old) != len(new):
            found.append(f"`{section}`: {len(old)} variables in the checkpoint, {len(new)} here.")
            continue
        for a, b in zip(old, new, strict=True):
            if {**a, "path": None} != {**b, "path": None}:
                found.append(f"`{section}`: {_said(a)} in the checkpoint, {_said(b)} here.")
    return found


def _said(entry: Mapping[str, Any]) -> str:
    frozen = "" if entry["trainable"] else ", not trainable"
    return f"{entry['path']} {entry['dtype']} {tuple(entry['shape'])}{frozen}"


def _versions(installed: Mapping[str, str]) -> dict[str, str]:
    """What of a version has to agree: of Keras, and of what is not yet 1.0, the minor version too."""
    wanted = {"keras": 2, "numpy": 1, **dict.fromkeys(_BACKENDS[keras.backend.backend()], 1)}
    found = {}
    for name, parts in wanted.items():
        if name in installed:
            numbers = installed[name].split(".")
            found[name] = ".".join(numbers[: 2 if numbers[0] == "0" else parts])
    return found
