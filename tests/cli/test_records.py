"""`kdo verify` and `kdo card`: the status says it all, and every fault is printed."""

import json
from pathlib import Path

import numpy as np
import pytest

from keras_diffusion_opd.cli import main
from keras_diffusion_opd.provenance import Lineage, Recipe, RunRecord
from tests.cli.process import kdo

WEIGHTS = [np.ones((2, 2), "float32")]
LINEAGE = Lineage().append("teacher", WEIGHTS, Recipe("pretraining", versions={}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "report.md").write_text("# Report")
    record = RunRecord("tokens", seed=0, lineage=LINEAGE, command=["kdo", "demo", "tokens"])
    record = record.finish(metrics={"teacher": {"bits": 2.136}}, digests={"teacher": WEIGHTS})
    record.save(tmp_path / "run.json", files=["report.md"])
    LINEAGE.save(tmp_path / "lineage.json")
    return tmp_path


def test_sound_directory_in_a_process_without_backend(folder: Path) -> None:
    run = kdo("verify", str(folder), KERAS_BACKEND="none of them")
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.endswith("Everything holds.\n")
    assert f"head {LINEAGE.head}: teacher" in run.stdout and "1 files, 1 digests" in run.stdout


def test_broken_directory_in_a_process(folder: Path) -> None:
    (folder / "report.md").write_text("# Better")
    value = json.loads((folder / "lineage.json").read_text())
    value["links"][0]["name"] = "other"
    (folder / "lineage.json").write_text(json.dumps(value))
    run = kdo("verify", str(folder))
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "DOES NOT HOLD: `report.md`: its content is not the one recorded" in run.stdout
    assert "DOES NOT HOLD: `other`: what it says has the digest" in run.stdout
    assert run.stdout.endswith("2 of the things recorded do not hold.\n")


def test_single_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder / "lineage.json")]) == 0
    assert "run.json" not in capsys.readouterr().out


def test_file_that_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{")
    assert main(["verify", str(tmp_path)]) == 1
    assert "DOES NOT HOLD" in capsys.readouterr().out
    assert main(["card", str(tmp_path)]) == 1
    assert "must be a JSON file" in capsys.readouterr().err


def test_card_of_a_run_and_of_a_lineage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("---\nlibrary_name: keras\n") and "| teacher | 2.136 |" in text
    assert main(["card", str(folder / "lineage.json")]) == 0
    assert "# teacher" in capsys.readouterr().out


def test_card_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card", str(folder), "--output", str(folder / "README.md")]) == 0
    assert (folder / "README.md").read_text().startswith("---\n") and capsys.readouterr().out == ""
    assert main(["card", str(folder), "--output", str(folder / "none" / "README.md")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_card_of_what_does_not_hold_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "report.md").unlink()
    assert main(["card", str(folder)]) == 1
    said = capsys.readouterr()
    assert "DOES NOT HOLD: `report.md`: the file is missing" in said.err and "# tokens" in said.out
