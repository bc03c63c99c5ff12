"""The tree: small files, one folder of tests for every folder of the package, every test collected."""

import ast
from pathlib import Path

import pytest

from tests.house.import_rules import PACKAGE, ROOT

MOST_LINES = 400
CODE = [p for top in (PACKAGE, "tests", "benchmarks", "examples") for p in sorted((ROOT / top).rglob("*.py"))]
TESTS = ROOT / "tests"
TEST_FOLDERS = sorted(p for p in TESTS.rglob("*") if p.is_dir() and any(p.glob("*.py")))
# Folders of the package that are tested through others, each with the reason.
TESTED_ELSEWHERE: dict[str, str] = {}


def collected_in(path: Path) -> list[str]:
    """The test functions that pytest collects from a file."""
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    return [
        node.name
        for place in [tree, *classes]
        for node in place.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    ]


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_file_is_short_enough(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{lines} lines: split it by idea"


@pytest.mark.parametrize("folder", TEST_FOLDERS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_folder_of_tests_is_collected(folder: Path) -> None:
    files = list(folder.rglob("test_*.py"))
    assert files, f"{folder} holds no test_*.py"
    assert all(collected_in(path) for path in files), [path.name for path in files if not collected_in(path)]
    uncollected = [p.name for p in folder.glob("*.py") if not p.name.startswith("test_") and collected_in(p)]
    assert not uncollected, f"pytest does not read {uncollected}: call them test_*.py"


def test_every_folder_of_the_package_has_tests() -> None:
    folders = {p.parent.name for p in (ROOT / PACKAGE).glob("*/*.py") if p.name != "__init__.py"}
    tested = {p.parent.name for p in TESTS.glob("*/test_*.py")} | set(TESTED_ELSEWHERE)
    missing = sorted(folders - tested)
    assert not missing, f"no tests/<folder>/test_*.py for {missing}"


def test_collector_sees_functions_and_methods(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text("def test_a(): ...\nclass TestB:\n    def test_c(self): ...\ndef helper(): ...\n")
    assert collected_in(path) == ["test_a", "test_c"]
