"""The demo as people run it, in its small size."""

import keras
import pytest

from keras_diffusion_opd.demos.tokens import main
from keras_diffusion_opd.provenance import RunRecord, digest, verify_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tokens"
    assert main(["--quick", "--seed", "3", "--out", str(out)]) == 0
    return out


def test_the_run_leaves_a_picture_a_report_a_record_and_models(finished):
    assert sorted(path.name for path in finished.iterdir()) == [
        "checkpoints",
        "distilled.keras",
        "report.md",
        "report.png",
        "run.json",
        "teacher.keras",
    ]
    assert (finished / "report.png").read_bytes().startswith(b"\x89PNG")
    text = (finished / "report.md").read_text()
    assert "the numbers mean nothing" in text
    for name in ("real scans", "teacher", "hard labels", "distilled", "on-policy", "mixture"):
        assert f"| {name} |" in text


def test_the_record_holds_and_knows_everything(finished):
    record = RunRecord.load(finished / "run.json")
    assert record.verify(finished) == []
    assert record.seed == 3
    assert record.hyperparameters["quick"] is True
    assert set(record.metrics) == {"real scans", "teacher", "hard labels", "distilled", "on-policy", "mixture"}
    assert len(set(record.digests.values())) == len(record.digests) == 8
    versions = [stamp["policy_version"] for stamp in record.metadata["rollouts"]["on-policy"]]
    assert versions == [0, 10]  # twice, in two epochs of ten updates
    assert len({stamp["policy_digest"] for stamp in record.metadata["rollouts"]["on-policy"]}) == 2


def test_the_models_are_those_of_the_record(finished):
    record = RunRecord.load(finished / "run.json")
    for file, name in (("teacher.keras", "teacher"), ("distilled.keras", "distilled")):
        model = keras.models.load_model(finished / file)
        assert digest(model) == record.digests[name]


def test_every_training_leaves_a_checkpoint_that_holds_and_names_its_parents(finished):
    record = RunRecord.load(finished / "run.json")
    found = {}
    for directory in (finished / "checkpoints").iterdir():
        (checkpoint,) = verify_path(directory)
        assert checkpoint.problems == []
        found[directory.name] = link = checkpoint.record.links[-1]
        assert link.model == record.digests[link.name]
    assert set(found) == {"teacher", "hard-labels", "distilled", "on-policy", "mixture"}
    parents = {parent.role: parent.digest for parent in found["distilled"].recipe.parents}
    assert parents == {
        name: record.digests[of] for name, of in (("student", "students at the start"), ("teacher", "teacher"))
    }


def test_help_says_what_it_does(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for word in ("--out", "--seed", "--quick", "handwritten digits", "default: runs/tokens"):
        assert word in said


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--seed", "x"], ["--sead", "1"]])
def test_wrong_use_is_refused_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_told_before_anything_runs(tmp_path, capsys):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(tmp_path / "taken")])
    assert stopped.value.code == 2
    assert "argument --out: cannot make the directory" in capsys.readouterr().err
