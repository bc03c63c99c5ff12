"""The documentation is true: its links lead somewhere, its code runs, its files are what the code reads."""

import json
import re
from pathlib import Path

import pytest

from keras_diffusion_opd.provenance import Lineage, RunRecord
from tests.house.import_rules import ROOT
from tests.house.name_rules import run_example

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def broken_links(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    return [t for t in targets if not re.match(r"[a-z]+:", t) and not (page.parent / t).exists()]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md) [there](none.md#part) [web](https://keras.io) [part](#part)\n")
    assert broken_links(page) == ["none.md"]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program."""
    code = "\n".join(blocks(page, "python"))
    if page.name == "README.md" and page.parent == ROOT:
        pytest.skip("the README needs KerasHub and has a test of its own")
    monkeypatch.chdir(tmp_path)
    run_example(code, page.name)


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d[^)]+)\)", (folder / "README.md").read_text())
    assert listed == sorted(page.name for page in folder.glob("[0-9]*.md"))


def test_file_formats_are_those_that_the_code_reads() -> None:
    lineage, record = (json.loads(text) for text in blocks(ROOT / "docs" / "file_formats.md", "json"))
    assert Lineage.from_json(lineage).verify() == []
    assert Lineage.from_json(lineage).to_json() == lineage
    assert RunRecord.from_json(record).to_json() == record
