"""`docs/parity.md` is complete, and the tests that it names exist."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.house.import_rules import ROOT
from tests.house.test_tree import collected_in

PAGE = ROOT / "docs" / "parity.md"
BEHAVIOURS = [str(number) for number in range(1, 71)]
GAPS = [f"9{letter}" for letter in "abcdefghi"]
REPORTS = [
    *(f"A{n}" for n in range(1, 11)),
    *(f"B{n}" for n in range(11, 18)),
    *(f"C{n}" for n in (18, 19, 20, 22, 23)),
    *(f"D{n}" for n in (24, 25, 26, 28, 29, 30, 31, 32, 34)),
    *(f"E{n}" for n in (35, 36, 37, 38, 39, 40, 42)),
    *(f"F{n}" for n in range(43, 47)),
    *(f"G{n}" for n in range(47, 51)),
    *(f"H{n}" for n in (51, 52, 56)),
]
ADAPTERS = [
    *(f"LA{n}" for n in range(1, 17)),
    *(f"LD{n}" for n in range(1, 5)),
    *(f"LJ{n}" for n in range(1, 43) if n not in (7, 10, 14, 21, 24, 37)),
]
# Everything that the package does not do so far. A row leaves this list when its tests arrive.
NOT_YET = {"LD3", "LD4", "LJ29"}
REASON = re.compile(r"^(not applicable|not yet): .{40,}")


class Row(NamedTuple):
    """One line of a table."""

    number: str
    fact: str
    shown: str

    @property
    def tests(self) -> list[tuple[str, str]]:
        """(file, function) of every test that the row names."""
        return re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", self.shown)


def rows_of(text: str) -> list[Row]:
    """The rows of all tables of a page."""
    found = re.findall(r"^\| *(\d+[a-i]?|[A-H]\d+|L[ADJ]\d+) *\|(.*)\|(.*)\|$", text, re.MULTILINE)
    return [Row(*(part.strip() for part in row)) for row in found]


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(collected_in(path)) if path.exists() else frozenset()


def problems_of(row: Row) -> list[str]:
    """What is wrong with a row: pending, without a test, without a reason, or with a test that is gone."""
    if "pending" in row.shown:
        return [f"{row.number}: pending"]
    if row.tests:
        gone = [f"{file}::{name}" for file, name in row.tests if name not in names_in(ROOT / file)]
        return [f"{row.number}: no test {test}" for test in gone]
    if not REASON.match(row.shown):
        return [f"{row.number}: neither a test nor a reason"]
    if row.shown.startswith("not yet") != (row.number in NOT_YET):
        return [f"{row.number}: what is not there yet is listed here too"]
    return []


ROWS = rows_of(PAGE.read_text())


def test_every_number_is_there_once_and_in_order() -> None:
    assert [row.number for row in ROWS] == [*BEHAVIOURS, *GAPS, *REPORTS, *ADAPTERS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_row_is_shown_by_tests_that_exist(row: Row) -> None:
    assert problems_of(row) == []


def test_rows_say_something_and_each_something_else() -> None:
    facts = [row.fact for row in ROWS]
    assert len(set(facts)) == len(facts) and min(len(fact) for fact in facts) >= 25


def test_what_is_not_there_yet_is_no_longer_than_listed() -> None:
    assert {row.number for row in ROWS if row.shown.startswith("not yet")} == NOT_YET


def test_missing_tests_and_reasons_are_found() -> None:
    here = "tests/house/test_parity.py"
    text = (
        f"| 1 | a fact | `{here}::test_missing_tests_and_reasons_are_found` |\n"
        f"| 9a | a fact | `{here}::test_that_nobody_wrote`<br>`tests/none.py::test_x` |\n"
        "| A1 | a fact | pending |\n"
        "| B11 | a fact | not applicable |\n"
        "| F43 | a fact | not yet: it is very much wanted, and it will come with the next one |\n"
    )
    found = [problems_of(row) for row in rows_of(text)]
    assert found[0] == []
    assert found[1] == [f"9a: no test {here}::test_that_nobody_wrote", "9a: no test tests/none.py::test_x"]
    assert [len(problems) for problems in found[2:]] == [1, 1, 1]
