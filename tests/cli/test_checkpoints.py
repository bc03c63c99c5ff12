"""`kdo verify`, `kdo lineage`, `kdo diff` and `kdo card` of checkpoints; their statuses are those that help tells."""

import keras
import numpy as np
import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.cli import main
from keras_diffusion_opd.provenance import Lineage, Parent, Recipe, digest
from tests.cli.process import kdo as process
from tests.students import make_batches, make_student, make_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    base = make_student()
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(
        directory,
        metadata={"purpose": "test"},
        parents=[Parent("student", "base", digest(base))],
        lineage=Lineage().append("base", base, Recipe("pretraining")),
        name="distilled",
    )
    dataset = kdo.data.PreparedDataset(make_batches([(2, 6)] * 2))
    make_trainer(base, optimizer="adam").fit(dataset, epochs=2, verbose=0, callbacks=[checkpoint])
    return directory


def test_verify_of_checkpoints_needs_no_backend_and_prints_the_digest_of_each_record(run):
    done = process("verify", str(run), KERAS_BACKEND="none of them")
    assert done.returncode == 0, done.stdout + done.stderr
    for path in run.iterdir():
        record = kdo.provenance.checkpoints.read_checkpoint_record(path)
        assert f"  record {record['digest']}" in done.stdout
    assert "base -> distilled" in done.stdout


def test_lineage_names_every_model_with_its_digest(run, capsys):
    assert main(["lineage", str(run)]) == 0
    said = capsys.readouterr().out
    record = kdo.provenance.checkpoints.read_checkpoint_record(run / "step-00000004")
    assert said.index("base\n") < said.index("distilled\n") and record["student"] in said
    assert "method  pretraining" in said and "parent  student base" in said
    assert main(["card", str(run)]) == 0
    assert "distilled" in capsys.readouterr().out


def test_diff_tells_settings_and_every_tensor_furthest_first(run, capsys):
    old, new = run / "step-00000002", run / "step-00000004"
    assert main(["diff", str(old), str(old)]) == 0
    assert capsys.readouterr().out == "0 settings and 0 tensors differ.\n"
    assert main(["diff", str(old), str(run)]) == 1  # a directory is its newest
    lines = capsys.readouterr().out.splitlines()
    assert "updates: 2 -> 4" in lines and "epoch: 1 -> 2" in lines
    weights = [line for line in lines if line.startswith("student/")]
    relative = [float(line.rsplit(" ", 1)[1]) for line in weights]
    assert len(weights) == 5
    entries = kdo.provenance.checkpoints.read_checkpoint_record(old)["layout"]["student"]
    import safetensors.numpy

    arrays = [safetensors.numpy.load_file(path / "student.safetensors") for path in (old, new)]
    for index, entry in enumerate(entries):
        a, b = (np.asarray(stored[f"{index:05d}"], "float64") for stored in arrays)
        said = next(line for line in weights if line.startswith(f"student/{entry['path']}:"))
        largest = float(said.split("largest ")[1].split(",")[0])
        assert largest == pytest.approx(np.max(np.abs(a - b)), rel=1e-3)  # printed with four digits
        if "relative" in said:
            norm = np.linalg.norm(b - a) / np.linalg.norm(a)
            assert float(said.split("relative ")[1]) == pytest.approx(norm, rel=1e-3)
    assert relative == sorted(relative, reverse=True)


def test_diff_of_other_forms_and_of_nothing(run, tmp_path, capsys):
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(tmp_path / "b")
    dataset = kdo.data.PreparedDataset(make_batches([(2, 6)] * 2))
    trainer = make_trainer(make_student(dtype="bfloat16"), optimizer=keras.optimizers.SGD(0.1))
    trainer.fit(dataset, epochs=2, verbose=0, callbacks=[checkpoint])
    assert main(["diff", str(run), str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert "float32 (16, 16) and bfloat16 (16, 16)" in said
    assert "optimizer/: " in said and "recipe.hyperparameters.optimizer.name" in said
    one, two = checkpoint.paths()
    assert main(["diff", str(one), str(two)]) == 1
    assert "largest" in capsys.readouterr().out
    assert main(["diff", str(run), str(tmp_path / "nowhere")]) == 2
    assert "must be a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "card", "lineage", "diff"])
def test_help_tells_what_the_statuses_mean(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Exit status: 0 " in said and "; 1 " in said and "; 2 " in said
