"""A model card in the form of the Hugging Face Hub: front matter, results, lineage and recipe."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from keras_diffusion_opd.provenance.canonical import plain_json
from keras_diffusion_opd.provenance.files import write_bytes
from keras_diffusion_opd.provenance.lineage import Lineage
from keras_diffusion_opd.provenance.recipe import Recipe
from keras_diffusion_opd.provenance.run_record import RunRecord

TAGS = ("keras", "diffusion", "keras_diffusion_opd")


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """What to know of a model before using it, as Markdown that the Hugging Face Hub reads.

    Args:
        name: the title.
        summary: one paragraph of Markdown.
        metrics: numbers by name, or rows of a table: name of a row -> numbers by name of the column.
        lineage: drawn as a diagram.
        recipe: shown as a table of settings; the last one of the lineage, if not given.
        record: the run; gives machine, versions and command.
        license: an identifier of the Hub, such as "apache-2.0".
        datasets: names of data sets.
        base_model: names of models on the Hub that it was made from.
        pipeline_tag: a task of the Hub, such as "text-generation".
        tags: further tags.
        sections: further sections of Markdown: title -> text.

    Raises:
        TypeError: a metric that is no JSON value.
        ValueError: a metric that is not finite.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> card = kdo.provenance.ModelCard(
        ...     "Digits, distilled", "A small masked diffusion model.", metrics={"bits per pixel": 2.25}
        ... )
        >>> print(card.to_markdown())
        ---
        library_name: keras
        tags:
        - "keras"
        - "diffusion"
        - "keras_diffusion_opd"
        ---
        <BLANKLINE>
        # Digits, distilled
        <BLANKLINE>
        A small masked diffusion model.
        <BLANKLINE>
        ## Results
        <BLANKLINE>
        | metric | value |
        | --- | --- |
        | bits per pixel | 2.25 |
        <BLANKLINE>
    """

    name: str
    summary: str = ""
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lineage: Lineage | None = None
    recipe: Recipe | None = None
    record: RunRecord | None = None
    license: str | None = None
    datasets: Sequence[str] = ()
    base_model: Sequence[str] = ()
    pipeline_tag: str | None = None
    tags: Sequence[str] = ()
    sections: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", plain_json(self.metrics, name="metrics"))

    @classmethod
    def from_record(cls, record: RunRecord, **more: Any) -> "ModelCard":
        """The card of the model of a run; `more` are further arguments of the card."""
        own = {"metrics": record.metrics, "lineage": record.lineage, "recipe": record.recipe}
        return cls(**{"name": record.name, "record": record, **own, **more})

    @classmethod
    def from_lineage(cls, lineage: Lineage, **more: Any) -> "ModelCard":
        """The card of the last model of a lineage; `more` are further arguments of the card."""
        name = lineage.links[-1].name if lineage.links else "Empty lineage"
        return cls(**{"name": name, "lineage": lineage, **more})

    def to_markdown(self) -> str:
        """The card as one text of Markdown."""
        recipe = self.recipe
        if recipe is None and self.lineage is not None and self.lineage.links:
            recipe = self.lineage.links[-1].recipe
        sections = [self._front_matter(), f"# {_line(self.name)}", self.summary]
        if self.metrics:
            sections += ["## Results", _metrics_tables(self.metrics)]
        if self.lineage is not None and self.lineage.links:
            sections += ["## Lineage", lineage_diagram(self.lineage)]
        if recipe is not None:
            sections += ["## Recipe", _recipe_table(recipe)]
        if self.record is not None:
            sections += ["## Run", _run_table(self.record)]
        for title, text in self.sections.items():
            sections += [f"## {_line(title)}", text]
        return "\n\n".join(section for section in sections if section) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the card, such as `README.md`, in full or not at all."""
        write_bytes(path, self.to_markdown().encode())

    def _front_matter(self) -> str:
        lines = ["---", "library_name: keras"]
        for key in ("license", "pipeline_tag"):
            if getattr(self, key) is not None:
                lines.append(f"{key}: {_yaml(getattr(self, key))}")
        for key in ("base_model", "datasets"):
            if getattr(self, key):
                lines += [f"{key}:", *(f"- {_yaml(item)}" for item in getattr(self, key))]
        tags = dict.fromkeys((*TAGS, *self.tags))
        return "\n".join([*lines, "tags:", *(f"- {_yaml(tag)}" for tag in tags), "---"])


def lineage_diagram(lineage: Lineage) -> str:
    """The lineage as a Mermaid diagram, which GitHub and the Hub draw.

    Args:
        lineage: the chain; other parents, such as teachers, are drawn beside it.

    Returns:
        A fenced block of Markdown.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> lineage = kdo.provenance.Lineage().append("base", "0" * 64, kdo.provenance.Recipe("pretraining"))
        >>> kdo.provenance.lineage_diagram(lineage).splitlines()[1:-1]
        ['graph LR', '  m0["base<br/>000000000000"]']
    """
    lines = ["```mermaid", "graph LR"]
    for i, link in enumerate(lineage.links):
        lines.append(f'  m{i}["{_node(link.name)}<br/>{link.model[:12]}"]')
        if i:
            lines.append(f'  m{i - 1} -->|"{_node(link.recipe.method)}"| m{i}')
        before = lineage.links[i - 1].model if i else None
        others = [parent for parent in link.recipe.parents if parent.digest != before]
        for j, parent in enumerate(others):
            lines.append(f'  p{i}_{j}(["{_node(parent.name)}<br/>{parent.digest[:12]}"])')
            lines.append(f'  p{i}_{j} -.->|"{_node(parent.role)}"| m{i}')
    return "\n".join([*lines, "```"])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown, with what would break it escaped.

    Args:
        head: the titles of the columns.
        rows: the cells; floats are shown with six digits, None as nothing.

    Returns:
        The lines of the table.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> print(kdo.provenance.markdown_table(["name", "bits"], [["a|b", 2.1360001]]))
        | name | bits |
        | --- | --- |
        | a\\|b | 2.136 |
    """
    lines = [[_cell(x) for x in line] for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _metrics_tables(metrics: Mapping[str, Any]) -> str:
    rows = {name: value for name, value in metrics.items() if isinstance(value, dict)}
    single = {name: value for name, value in metrics.items() if name not in rows}
    tables = []
    if single:
        tables.append(markdown_table(["metric", "value"], list(single.items())))
    if rows:
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        cells = [[name, *(row.get(column) for column in columns)] for name, row in rows.items()]
        tables.append(markdown_table(["", *columns], cells))
    return "\n\n".join(tables)


def _recipe_table(recipe: Recipe) -> str:
    rows: list[tuple[str, Any]] = [("method", recipe.method), ("digest", recipe.digest)]
    rows.append(("seed", recipe.seed))
    rows += [(f"{parent.role} (parent)", f"{parent.name}, {parent.digest}") for parent in recipe.parents]
    rows += [*recipe.hyperparameters.items()]
    rows += [(f"data: {name}", value) for name, value in recipe.data.items()]
    rows += [*recipe.metadata.items()]
    return markdown_table(["setting", "value"], rows)


def _run_table(record: RunRecord) -> str:
    rows: list[tuple[str, Any]] = [("started", record.started), ("ended", record.ended)]
    rows += [("seed", record.seed), ("command", " ".join(record.command)), ("record", record.digest)]
    rows += [(f"digest of {name}", value) for name, value in record.digests.items()]
    rows += [*record.machine.items(), *record.versions.items()]
    return markdown_table(["", "value"], rows)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _line(text).replace("|", "\\|")


def _line(text: str) -> str:
    return " ".join(text.split())


def _node(text: str) -> str:
    """`text` inside quotes of Mermaid."""
    return _line(text).replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def _yaml(text: str) -> str:
    """`text` as a YAML scalar: JSON strings are YAML."""
    return json.dumps(_line(text), ensure_ascii=False)
