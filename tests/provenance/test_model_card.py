"""A model card is Markdown with YAML front matter, whatever the names and numbers in it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_diffusion_opd.provenance import (
    Lineage,
    ModelCard,
    Parent,
    Recipe,
    RunRecord,
    digest,
    lineage_diagram,
    markdown_table,
)

BASE, DISTILLED = ([np.full(2, i, "float32")] for i in range(2))
NASTY = 'a "quoted" <b> #1 | name\nwith --- lines: [x]'


def lineage(name: str = "base") -> Lineage:
    parents = [Parent("student", name, digest(BASE)), Parent("teacher", "large", "f" * 64)]
    chain = Lineage().append(name, BASE, Recipe("pretraining", versions={}))
    settings = {"temperature": 2.0, "divergence": "forward_kl"}
    made = Recipe("prepared_distillation", parents, settings, data={"digits": "e" * 64}, seed=7, versions={})
    return chain.append("distilled", DISTILLED, made)


def front_matter(text: str) -> dict[str, Any]:
    """The front matter, read by the rules that the card itself keeps to: keys, lists and JSON strings."""
    assert text.startswith("---\n")
    values: dict[str, Any] = {}
    for line in text.split("---\n")[1].splitlines():
        if line.startswith("- "):
            values[list(values)[-1]].append(json.loads(line[2:]))
        else:
            key, _, rest = line.partition(":")
            values[key] = rest.strip().strip('"') or []
    return values


def test_front_matter_has_what_the_hub_reads() -> None:
    card = ModelCard(
        "m",
        license="apache-2.0",
        datasets=["mnist"],
        base_model=["org/base"],
        pipeline_tag="text-generation",
        tags=["keras", "digits"],
    )
    assert front_matter(card.to_markdown()) == {
        "library_name": "keras",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "base_model": ["org/base"],
        "datasets": ["mnist"],
        "tags": ["keras", "diffusion", "keras_diffusion_opd", "digits"],
    }


def test_front_matter_is_yaml() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not among the requirements")
    card = ModelCard(NASTY, datasets=[NASTY, "yes", "1.0", "null"], license="cc-by-4.0", tags=[": - #"])
    read = yaml.safe_load(card.to_markdown().split("---\n")[1])
    assert read["datasets"] == [" ".join(NASTY.split()), "yes", "1.0", "null"]
    assert read["license"] == "cc-by-4.0" and ": - #" in read["tags"]


def test_metrics_are_tables() -> None:
    rows = {"teacher": {"bits": 2.1364999, "KL": 0.0}, "student": {"bits": 2.25, "seconds": 3}}
    text = ModelCard("m", metrics={"steps": 100, **rows}).to_markdown()
    assert "| steps | 100 |" in text
    assert "|  | bits | KL | seconds |" in text
    assert "| teacher | 2.1365 | 0 |  |" in text and "| student | 2.25 |  | 3 |" in text


def test_lineage_is_a_diagram_with_all_parents() -> None:
    lines = lineage_diagram(lineage()).splitlines()
    assert lines[0] == "```mermaid" and lines[-1] == "```"
    assert f'  m0["base<br/>{digest(BASE)[:12]}"]' in lines
    assert '  m0 -->|"prepared_distillation"| m1' in lines
    assert '  p1_0(["large<br/>ffffffffffff"])' in lines and '  p1_0 -.->|"teacher"| m1' in lines


def test_recipe_of_the_last_model_is_shown() -> None:
    text = ModelCard.from_lineage(lineage()).to_markdown()
    assert text.count("# distilled") == 1
    for row in ("| method | prepared_distillation |", "| temperature | 2 |", "| seed | 7 |"):
        assert row in text
    assert f"| teacher (parent) | large, {'f' * 64} |" in text and f"| data: digits | {'e' * 64} |" in text


def test_card_of_a_run_has_its_results_and_its_machine(tmp_path: Path) -> None:
    record = RunRecord("tokens", seed=1, lineage=lineage(), command=["kdo", "demo", "tokens"])
    record = record.finish(metrics={"distilled": {"bits": 2.2}}, digests={"distilled": DISTILLED})
    card = ModelCard.from_record(record, license="mit", sections={"Limits": "Sixty-four pixels."})
    card.save(tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert text == card.to_markdown() and text.endswith("## Limits\n\nSixty-four pixels.\n")
    for part in ("| distilled | 2.2 |", "| command | kdo demo tokens |", "graph LR", "| cpus |"):
        assert part in text
    assert record.digest in text


@pytest.mark.parametrize("name", [NASTY, "x", "``` y"])
def test_names_cannot_break_the_card(name: str) -> None:
    text = ModelCard(name, metrics={name: {name: 1.0}}, lineage=lineage(name)).to_markdown()
    lines = text.splitlines()
    assert sum(line.startswith("# ") for line in lines) == 1
    assert lines.count("---") == 2 and lines.count("```") == 1
    diagram = lines[lines.index("```mermaid") + 1 : lines.index("```")]
    for line in diagram[1:]:
        assert line.count('"') == 2 and line.count("<") == line.count("<br/>")
    head = next(i for i, line in enumerate(lines) if line.startswith("| --- |"))
    table = [line.replace("\\|", "") for line in lines[head - 1 : head + 2]]
    assert [line.count("|") for line in table] == [3, 3, 3]


def test_table_cells() -> None:
    table = markdown_table(["a", "b"], [[None, [1, "x"]], [1e-12, True], ["two\nlines", {"k": 1}]])
    assert table.splitlines()[2:] == ['|  | [1, "x"] |', "| 1e-12 | true |", '| two lines | {"k": 1} |']


def test_empty_lineage_gives_a_card_without_diagram() -> None:
    text = ModelCard.from_lineage(Lineage()).to_markdown()
    assert "Empty lineage" in text and "mermaid" not in text


def test_metric_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`metrics\['bits'\]` must be finite"):
        ModelCard("m", metrics={"bits": float("inf")})
