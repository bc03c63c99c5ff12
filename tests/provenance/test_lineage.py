"""A changed ancestor breaks the chain, and `verify` names everything that does not hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_diffusion_opd.provenance import Lineage, Link, Parent, Recipe, digest

WEIGHTS = {name: [np.full((2, 2), i, "float32")] for i, name in enumerate(["base", "rl", "distilled"])}
TEACHER = "f" * 64


def recipe(method: str, before: str | None, **settings: Any) -> Recipe:
    parents = [Parent("student", before, digest(WEIGHTS[before]))] if before else []
    if method == "prepared_distillation":
        parents.append(Parent("teacher", "large", TEACHER))
    return Recipe(method, parents=parents, hyperparameters=settings, versions={})


def lineage() -> Lineage:
    chain = Lineage().append("base", WEIGHTS["base"], recipe("pretraining", None, rate=0.1))
    chain = chain.append("rl", WEIGHTS["rl"], recipe("nft", "base", rate=0.2))
    return chain.append("distilled", WEIGHTS["distilled"], recipe("prepared_distillation", "rl", rate=0.3))


def stored() -> Any:
    return json.loads(json.dumps(lineage().to_json()))


def test_sound_lineage_has_no_problems(tmp_path: Path) -> None:
    chain = lineage()
    assert chain.verify() == [] and chain.verify(WEIGHTS) == []
    chain.save(tmp_path / "lineage.json")
    assert Lineage.load(tmp_path / "lineage.json") == chain


def test_appending_leaves_the_shorter_lineage_as_it_was() -> None:
    chain = Lineage()
    longer = chain.append("base", WEIGHTS["base"], recipe("pretraining", None))
    assert chain.links == () and chain.head is None and longer.head == longer.links[0].digest


def test_each_link_holds_the_digest_of_the_one_before() -> None:
    links = lineage().links
    assert [link.parent for link in links] == [None, links[0].digest, links[1].digest]
    assert lineage().head == links[2].digest


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_changed_ancestor_breaks_the_chain(changed: int) -> None:
    """Whoever changes a link and its digest leaves the next link with another parent."""
    value = stored()
    value["links"][changed]["recipe"]["hyperparameters"]["rate"] = 9.9
    problems = Lineage.from_json(value).verify()
    name = value["links"][changed]["name"]
    assert len(problems) == 1 and problems[0].startswith(f"`{name}`: what it says has the digest")
    honest = Lineage.from_json(value).links[changed].content_digest
    value["links"][changed]["digest"] = honest
    problems = Lineage.from_json(value).verify()
    if changed < 2:
        child = value["links"][changed + 1]["name"]
        assert len(problems) == 1 and problems[0].startswith(f"`{child}`: its parent is")
        assert f"`{name}`, {honest[:12]}" in problems[0]
    else:  # the last link has no child: its digest, kept elsewhere, tells
        assert problems == [] and Lineage.from_json(value).head != lineage().head


def test_lineage_rewritten_from_a_changed_ancestor_on_has_another_head() -> None:
    chain = Lineage().append("base", WEIGHTS["base"], recipe("pretraining", None, rate=9.9))
    chain = chain.append("rl", WEIGHTS["rl"], recipe("nft", "base", rate=0.2))
    chain = chain.append("distilled", WEIGHTS["distilled"], recipe("prepared_distillation", "rl", rate=0.3))
    assert chain.verify() == [] and chain.head != lineage().head


@pytest.mark.parametrize(
    ("edit", "phrases"),
    [
        (lambda links: links.pop(1), ["`distilled`: its parent is", "has the weights of `base`"]),
        (lambda links: links.pop(0), ["is none, since it is the first"]),
        (lambda links: links.reverse(), ["`distilled`: its parent", "`base`: its parent is none"]),
        (lambda links: links[1].update(model="0" * 64), ["`rl`: what it says", "has the weights of `rl`"]),
        (lambda links: links[1].update(name="rl2"), ["`rl2`: what it says has the digest"]),
        (lambda links: links[1].update(name="base"), ["the name `base` is given 2 times"]),
        (lambda links: links[2].update(parent=None), ["`distilled`: what it says", "its parent is none"]),
        (lambda links: links[2]["recipe"]["parents"].pop(0), ["what it says", "has the weights of `rl`"]),
        (lambda links: links[0].update(digest="0" * 64), ["`base`: what it says", "`rl`: its parent is"]),
    ],
)
def test_tampering_is_named(edit: Any, phrases: list[str]) -> None:
    value = stored()
    edit(value["links"])
    problems = Lineage.from_json(value).verify()
    for phrase in phrases:
        assert any(phrase in problem for problem in problems), problems


def test_other_weights_are_named() -> None:
    other = {**WEIGHTS, "rl": [np.full((2, 2), 1.0000001, "float32")]}
    (problem,) = lineage().verify(other)
    assert problem.startswith("`rl`: its weights have the digest")
    assert lineage().verify({"rl": digest(WEIGHTS["rl"])}) == []


def test_weights_of_an_unknown_link_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must name links of the lineage, \['base', 'rl', 'distilled'\]"):
        lineage().verify({"rll": WEIGHTS["rl"]})


def test_link_that_does_not_follow_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`x` cannot follow in this lineage.*weights of `distilled`"):
        lineage().append("x", WEIGHTS["base"], recipe("nft", "base"))
    with pytest.raises(ValueError, match="the name `base` is given 2 times"):
        lineage().append("base", WEIGHTS["base"], recipe("nft", "distilled"))
    with pytest.raises(ValueError, match="`model` must be a digest"):
        Lineage().append("base", "weights.h5", recipe("pretraining", None))


@pytest.mark.parametrize(
    ("edit", "phrase"),
    [
        (lambda v: v.update(links={}), "`links` must be a list"),
        (lambda v: v["links"][0].pop("model"), r"a link must have the keys.*Missing: \['model'\]"),
        (lambda v: v["links"][0].update(digest="x"), "`digest` must be a digest"),
        (lambda v: v["links"][0].update(recipe=None), "a recipe must be a JSON object"),
        (lambda v: v["links"][0].update(name=""), "`name` must be a text"),
        (lambda v: v.update(version="1"), "`version` of a lineage must be 1"),
    ],
)
def test_json_that_is_no_lineage_is_refused(edit: Any, phrase: str) -> None:
    value = stored()
    edit(value)
    with pytest.raises(ValueError, match=phrase):
        Lineage.from_json(value)


def test_links_are_links() -> None:
    with pytest.raises(TypeError, match="`links` must be a list of `Link`"):
        Lineage(["base"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="`name` must be a text"):
        Link("", "0" * 64, recipe("pretraining", None), None, "0" * 64)
