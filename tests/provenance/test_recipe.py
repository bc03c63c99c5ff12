"""A recipe holds JSON values alone, goes through JSON unchanged, and everything in it counts."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from keras_diffusion_opd.provenance import Parent, Recipe, installed_versions, machine
from keras_diffusion_opd.version import __version__

A, B = "a" * 64, "b" * 64


def recipe(**changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "method": "prepared_distillation",
        "parents": [Parent("student", "base", A), Parent("teacher", "large", B)],
        "hyperparameters": {"temperature": 2.0, "optimizer": {"name": "adamw"}, "betas": (0.9, 0.999)},
        "data": {"name": "digits", "digest": A},
        "seed": 3,
        "versions": {"keras": "3.15.1"},
        "metadata": {"note": "ü"},
    }
    return Recipe(**{**fields, **changes})


def test_goes_through_json_unchanged() -> None:
    text = json.dumps(recipe().to_json())
    back = Recipe.from_json(json.loads(text))
    assert back == recipe() and back.digest == recipe().digest


@pytest.mark.parametrize(
    "change",
    [
        {"method": "other"},
        {"parents": [Parent("student", "base", A)]},
        {"parents": [Parent("teacher", "large", B), Parent("student", "base", A)]},
        {"parents": [Parent("student", "base", B), Parent("teacher", "large", B)]},
        {"hyperparameters": {"temperature": 2}},
        {"data": {}},
        {"seed": None},
        {"versions": {"keras": "3.15.2"}},
        {"metadata": {}},
    ],
)
def test_every_field_counts(change: dict[str, Any]) -> None:
    assert recipe(**change).digest != recipe().digest


def test_digest_does_not_depend_on_the_order_of_settings() -> None:
    assert recipe(data={"digest": A, "name": "digits"}).digest == recipe().digest


def test_later_changes_of_the_arguments_do_not_reach_it() -> None:
    settings = {"layers": [1, 2]}
    made = recipe(hyperparameters=settings)
    settings["layers"].append(3)
    assert made.hyperparameters == {"layers": [1, 2]}


def test_versions_are_those_installed() -> None:
    assert Recipe("pretraining").versions == installed_versions()
    assert installed_versions()["keras_diffusion_opd"] == __version__
    assert {"python", "keras", "numpy"} <= set(installed_versions())


def test_machine_tells_nothing_of_its_owner() -> None:
    import platform

    assert platform.node() not in machine().values()
    assert machine()["cpus"] >= 1 and machine()["backend"] in ("jax", "tensorflow", "torch")


@pytest.mark.parametrize(
    ("change", "error", "phrase"),
    [
        ({"method": ""}, ValueError, "`method` must be a text"),
        ({"method": None}, ValueError, "`method` must be a text"),
        ({"parents": ["base"]}, TypeError, "`parents` must be a list of `Parent`. Received 'base'"),
        ({"seed": 1.5}, TypeError, "`seed` must be an int or None. Received 1.5"),
        ({"seed": True}, TypeError, "`seed` must be an int or None"),
        ({"hyperparameters": {"rate": float("nan")}}, ValueError, r"\['rate'\]` must be finite"),
        ({"hyperparameters": {"x": np.ones(1)}}, TypeError, r"`hyperparameters\['x'\]` must be a JSON value"),
        ({"hyperparameters": [1]}, TypeError, "`hyperparameters` must be a mapping. Received list"),
        ({"metadata": {"digest": 1}}, ValueError, "`metadata` must not use the reserved key 'digest'"),
        ({"metadata": {1: 1}}, TypeError, "`metadata` must have strings as keys"),
    ],
)
def test_bad_field_is_refused(change: dict[str, Any], error: type, phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        recipe(**change)


@pytest.mark.parametrize(
    ("role", "name", "digest", "phrase"),
    [("", "n", A, "`role`"), ("r", " ", A, "`name`"), ("r", "n", "abc", "`digest` must be a digest")],
)
def test_bad_parent_is_refused(role: str, name: str, digest: str, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        Parent(role, name, digest)


@pytest.mark.parametrize(
    ("edit", "phrase"),
    [
        (lambda v: v.pop("seed"), r"Missing: \['seed'\]"),
        (lambda v: v.update(extra=1), r"unknown: \['extra'\]"),
        (lambda v: v.update(format="x"), "`format` must be 'keras_diffusion_opd/recipe'"),
        (lambda v: v.update(version=2), "`version` of a recipe must be 1. Received 2. Read it with"),
        (lambda v: v.update(parents={}), "`parents` must be a list"),
        (lambda v: v["parents"].append(3), "a parent must be a JSON object"),
        (lambda v: v["parents"][0].pop("role"), r"a parent must have the keys.*Missing: \['role'\]"),
    ],
)
def test_json_that_is_no_recipe_is_refused(edit: Any, phrase: str) -> None:
    value = json.loads(json.dumps(recipe().to_json()))
    edit(value)
    with pytest.raises(ValueError, match=phrase):
        Recipe.from_json(value)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe().seed = 4  # type: ignore[misc]
