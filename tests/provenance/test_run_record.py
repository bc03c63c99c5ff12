"""A run record keeps what was run, and tells when it or one of its files was changed."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_diffusion_opd.provenance import Lineage, Recipe, RunRecord, digest, record_files, verify_path

WEIGHTS = [np.ones((2, 2), "float32")]
LINEAGE = Lineage().append("teacher", WEIGHTS, Recipe("pretraining", versions={}))


def record(**changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "name": "tokens",
        "seed": 0,
        "hyperparameters": {"updates": 100, "rates": (0.1, 0.2)},
        "metadata": {"note": "first"},
        "lineage": LINEAGE,
        "recipe": LINEAGE.links[0].recipe,
    }
    return RunRecord(**{**fields, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "report.md").write_text("# Report")
    (tmp_path / "out" / "weights").write_bytes(b"\x00" * 100)
    done = record().finish(metrics={"teacher": {"bits": 2.136}}, digests={"teacher": WEIGHTS})
    done.save(tmp_path / "run.json", files=["report.md", "out/weights"])
    return tmp_path


def test_record_is_read_as_it_was_written(folder: Path) -> None:
    loaded = RunRecord.load(folder / "run.json")
    assert loaded.verify(folder) == []
    assert loaded.metrics == {"teacher": {"bits": 2.136}} and loaded.digests == {"teacher": digest(WEIGHTS)}
    assert loaded.lineage == LINEAGE and loaded.seed == 0 and loaded.hyperparameters["rates"] == [0.1, 0.2]
    assert loaded.files["out/weights"]["bytes"] == 100
    assert loaded.started <= str(loaded.ended)
    assert loaded == RunRecord.from_json(json.loads(json.dumps(loaded.to_json())))


def test_it_says_what_ran_and_on_what() -> None:
    made = RunRecord("x")
    assert made.command and made.machine["cpus"] >= 1 and "numpy" in made.versions and made.ended is None


def change(path: Path, edit: Any) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: v["metrics"]["teacher"].update(bits=1.0),
        lambda v: v.update(seed=1),
        lambda v: v["hyperparameters"].update(updates=10),
        lambda v: v["digests"].update(teacher="0" * 64),
        lambda v: v["files"].pop("report.md"),
        lambda v: v["files"]["report.md"].update(bytes=7),
        lambda v: v["versions"].update(numpy="0"),
        lambda v: v.update(lineage=None),
        lambda v: v.update(started="2024-01-01T00:00:00+00:00"),
        lambda v: v.update(digest="0" * 64),
        lambda v: v["recipe"].update(seed=5),
    ],
)
def test_changed_record_is_found(folder: Path, edit: Any) -> None:
    change(folder / "run.json", edit)
    with pytest.raises(ValueError, match="was changed after it was written"):
        RunRecord.load(folder / "run.json")
    (found,) = verify_path(folder)
    assert found.kind == "run_record" and "was changed after it was written" in found.problems[0]


def test_every_changed_file_is_named(folder: Path) -> None:
    (folder / "report.md").unlink()
    weights = bytearray((folder / "out" / "weights").read_bytes())
    weights[50] ^= 1
    (folder / "out" / "weights").write_bytes(weights)
    problems = RunRecord.load(folder / "run.json").verify(folder)
    assert len(problems) == 2
    assert problems[0] == "`report.md`: the file is missing."
    assert problems[1].startswith("`out/weights`: its content is not the one recorded")


def test_longer_file_is_named(folder: Path) -> None:
    with (folder / "out" / "weights").open("ab") as file:
        file.write(b"x")
    assert RunRecord.load(folder / "run.json").verify(folder) == ["`out/weights`: it has 101 bytes, not 100."]


def test_lineage_is_held_against_the_digests_of_the_run(folder: Path) -> None:
    other = record(digests={"teacher": "0" * 64})
    assert other.verify(folder) == [
        f"lineage: `teacher`: its weights have the digest 000000000000, the lineage says {digest(WEIGHTS)[:12]}."
    ]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "C:\\x", "a\\..\\b", "."])
def test_file_outside_of_the_directory_is_refused(folder: Path, name: str) -> None:
    entry = {"sha256": "0" * 64, "bytes": 0}
    with pytest.raises(ValueError, match="paths inside the directory of the record"):
        record(files={name: entry})
    before = (folder / "run.json").read_bytes()
    with pytest.raises(ValueError, match="paths inside the directory of the record"):
        record().save(folder / "run.json", files=[name])
    assert (folder / "run.json").read_bytes() == before


def test_missing_file_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        record().save(tmp_path / "run.json", files=["none"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "error", "phrase"),
    [
        ({"name": ""}, ValueError, "`name` must be a text"),
        ({"seed": 0.5}, TypeError, "`seed` must be an int or None"),
        ({"seed": True}, TypeError, "`seed` must be an int or None"),
        ({"metrics": {"a": float("nan")}}, ValueError, r"`metrics\['a'\]` must be finite"),
        ({"metrics": [1]}, TypeError, "`metrics` must be a mapping"),
        ({"command": "kdo demo"}, TypeError, "`command` must be a list of strings"),
        ({"metadata": {"files": 1}}, ValueError, "reserved key 'files'"),
        ({"digests": {"a": "b"}}, ValueError, r"`digests\['a'\]` must be a digest"),
        ({"started": "yesterday"}, ValueError, "`started` must be a time in ISO 8601"),
        ({"started": "2024-05-01T12:00:00"}, ValueError, "with its offset"),
        ({"ended": 3}, ValueError, "`ended` must be a time"),
        ({"files": {"a": {"sha256": "0" * 64}}}, ValueError, r"Missing: \['bytes'\]"),
        ({"files": {"a": {"sha256": "0" * 64, "bytes": -1}}}, ValueError, "bytes as an int"),
    ],
)
def test_bad_field_is_refused(changes: dict[str, Any], error: type, phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        record(**changes)


# What a path holds.


def test_directory_with_record_and_lineage_gives_both(folder: Path) -> None:
    LINEAGE.save(folder / "lineage.json")
    assert [path.name for path in record_files(folder)] == ["run.json", "lineage.json"]
    kinds = {found.kind: found.problems for found in verify_path(folder)}
    assert kinds == {"run_record": [], "lineage": []}


def test_path_without_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold run.json, lineage.json, .* holds none"):
        verify_path(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        verify_path(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "keras_diffusion_opd/recipe"}', "\x00\xff"])
def test_file_that_is_no_record_is_a_problem(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    (found,) = verify_path(tmp_path / "run.json")
    assert found.record is None and len(found.problems) == 1


def test_broken_lineage_is_a_problem(tmp_path: Path) -> None:
    LINEAGE.save(tmp_path / "lineage.json")
    change(tmp_path / "lineage.json", lambda v: v["links"][0].update(name="other"))
    (found,) = verify_path(tmp_path)
    assert found.kind == "lineage" and found.problems[0].startswith("`other`: what it says has the digest")
