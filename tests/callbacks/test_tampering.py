"""Twenty-five ways to tamper with a checkpoint: each is found by `kdo verify` and refused by `resume`, by name."""

import json
import os
import shutil

import pytest

import keras_diffusion_opd as kdo
from keras_diffusion_opd.provenance import Lineage, Parent, Recipe, digest
from keras_diffusion_opd.provenance.checkpoints import sealed
from tests.callbacks.small_run import make_dataset
from tests.students import make_student, make_trainer, same_bits, weights_of

TEACHER, BASE = make_student(seed=8), make_student(seed=1)
PARENTS = [Parent("teacher", "large", digest(TEACHER)), Parent("student", "base", digest(BASE))]
LINEAGE = Lineage().append("base", BASE, Recipe("pretraining", data={"name": "digits"}))


def trainer(seed=1):
    return make_trainer(make_student(dropout=0.3, seed=seed), optimizer="adam", accumulation_steps=3)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints of three windows, of which the newest will be tampered with."""
    directory = tmp_path_factory.mktemp("run")
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(directory, every=1, parents=PARENTS, lineage=LINEAGE)
    trainer().fit(make_dataset(), verbose=0, callbacks=[checkpoint])
    return directory


def read(path):
    return json.loads((path / "checkpoint.json").read_text())


def rewrite(path, **changes):
    """As somebody who can compute digests: the record's own fits again."""
    content = {k: v for k, v in {**read(path), **changes}.items() if k not in ("format", "version", "digest")}
    kdo.provenance.write_json(path / "checkpoint.json", sealed(content))


def refile(path, name):
    """Likewise for the digest of one file."""
    file = path / name
    entry = {"sha256": kdo.provenance.file_digest(file), "bytes": file.stat().st_size}
    rewrite(path, files={**read(path)["files"], name: entry})


def flip(path, name, place=-1):
    data = bytearray((path / name).read_bytes())
    data[place] ^= 1
    (path / name).write_bytes(bytes(data))


def edit(path, old, new):
    text = (path / "checkpoint.json").read_text()
    assert old in text
    (path / "checkpoint.json").write_text(text.replace(old, new, 1))


def swap(path, a, b):
    (path / a).rename(path / "c")
    (path / b).rename(path / a)
    (path / "c").rename(path / b)


def append(path, name, data=b"\0"):
    (path / name).write_bytes((path / name).read_bytes() + data)


def reorder(path):
    """Two tensors of the student change places in header and data: a valid file of the same form."""
    import safetensors.numpy

    file = path / "student.safetensors"
    stored = safetensors.numpy.load_file(file)
    names = sorted(stored)
    one, two = (n for n in names if stored[n].shape == (16,) or stored[n].shape == (16, 16))
    before, after = stored[one].tobytes(), stored[two].tobytes()
    data = file.read_bytes()
    assert data.count(before) == data.count(after) == 1
    size = min(len(before), len(after))
    file.write_bytes(data.replace(before, after[:size] + before[size:]))
    refile(path, file.name)


def other_weights(path):
    flip(path, "student.safetensors")
    refile(path, "student.safetensors")


def edited_lineage(path, change):
    lineage = read(path)["ancestors"]
    change(lineage["links"][0])
    rewrite(path, ancestors=lineage)


def other_parent(path):
    recipe = read(path)["recipe"]
    recipe["parents"][1]["digest"] = "3" * 64
    rewrite(path, recipe=recipe)


def older(path):
    return path.with_name("step-00000002")


TAMPERING = {
    "bit_of_the_weights": (lambda p: flip(p, "student.safetensors"), "student.safetensors: its content is not"),
    "bit_of_the_moments": (lambda p: flip(p, "optimizer.safetensors"), "optimizer.safetensors: its content is not"),
    "bit_of_the_random_state": (lambda p: flip(p, "random.safetensors"), "random.safetensors: its content is not"),
    "bit_of_the_metrics": (lambda p: flip(p, "metrics.safetensors"), "metrics.safetensors: its content is not"),
    "bit_of_a_header": (lambda p: flip(p, "student.safetensors", 12), "student.safetensors: its content is not"),
    "length_of_a_header": (lambda p: flip(p, "student.safetensors", 7), "student.safetensors: its content is not"),
    "bit_of_the_record": (lambda p: flip(p, "checkpoint.json", 40), "checkpoint.json"),
    "position_in_the_record": (lambda p: edit(p, '"epoch": 1', '"epoch": 0'), "was changed after it was written"),
    "key_twice": (lambda p: edit(p, '"epoch": 1', '"epoch": 1, "epoch": 1'), "a key is given twice"),
    "unknown_key": (lambda p: rewrite(p, surprise=1), "unknown: ['surprise']"),
    "missing_weights": (lambda p: (p / "student.safetensors").unlink(), "student.safetensors: "),
    "missing_record": (lambda p: (p / "checkpoint.json").unlink(), "checkpoint.json"),
    "empty_record": (lambda p: (p / "checkpoint.json").write_text(""), "checkpoint.json must be a JSON file"),
    "truncated_weights": (
        lambda p: (p / "student.safetensors").write_bytes((p / "student.safetensors").read_bytes()[:-8]),
        "student.safetensors: it has",
    ),
    "appended_bytes": (lambda p: append(p, "optimizer.safetensors"), "optimizer.safetensors: it has"),
    "swapped_files": (lambda p: swap(p, "random.safetensors", "metrics.safetensors"), "random.safetensors: it has"),
    "extra_file": (lambda p: (p / "code.pkl").write_bytes(b"x"), "code.pkl: it is not in the record"),
    "link_in_place_of_a_file": (
        lambda p: (
            (p / "student.safetensors").rename(p.parent.parent / f"{p.parent.name}.elsewhere"),
            os.symlink(p.parent.parent / f"{p.parent.name}.elsewhere", p / "student.safetensors"),
        ),
        "student.safetensors: it is not a file of the checkpoint",
    ),
    "renamed_directory": (lambda p: p.rename(p.with_name("step-00000009")), "the directory was renamed"),
    "other_weights_with_digests_to_match": (other_weights, "it holds another student than the record says"),
    "reordered_tensors_with_digests_to_match": (reorder, "it holds another student than the record says"),
    "another_base": (
        lambda p: edited_lineage(p, lambda link: link.update(model="2" * 64)),
        "lineage: the lineage of its parents does not hold: `base`",
    ),
    "edited_recipe_of_a_parent": (
        lambda p: edited_lineage(p, lambda link: link["recipe"]["data"].update(name="letters")),
        "lineage: the lineage of its parents does not hold: `base`",
    ),
    "parent_that_is_not_in_the_lineage": (other_parent, "none of the parents in its recipe has the weights of `base`"),
    "rewritten_checkpoint_before": (lambda p: rewrite(older(p), epoch=7), "the checkpoint before it is not the one"),
}


def test_there_are_twenty_five_kinds():
    assert len(TAMPERING) == 25


@pytest.mark.parametrize("kind", TAMPERING)
def test_tampering_is_found_by_verify_and_refused_by_resume_by_name(kind, run, tmp_path, capsys):
    from keras_diffusion_opd.cli import main

    tamper, phrase = TAMPERING[kind]
    directory = tmp_path / "run"
    shutil.copytree(run, directory)
    assert main(["verify", str(directory)]) == 0
    tamper(directory / "step-00000003")
    capsys.readouterr()
    assert main(["verify", str(directory)]) == 1
    assert phrase in capsys.readouterr().out
    fresh = trainer(seed=9)
    before = weights_of(fresh)
    with pytest.raises((ValueError, OSError)) as caught:
        kdo.callbacks.resume(fresh, directory)
    assert phrase in str(caught.value)
    assert same_bits(weights_of(fresh), before)


def test_teacher_of_the_same_shapes_is_refused_with_both_digests(run):
    other = digest(make_student(seed=5))
    with pytest.raises(ValueError, match=f"`parents.teacher/large`: '{digest(TEACHER)}' in the checkpoint, '{other}'"):
        kdo.callbacks.resume(trainer(), run, parents=[Parent("teacher", "large", other), PARENTS[1]])


def test_forger_who_computes_every_digest_is_found_by_the_digest_that_was_kept_elsewhere(run, tmp_path, capsys):
    from keras_diffusion_opd.cli import main

    directory = tmp_path / "run"
    shutil.copytree(run, directory)
    newest = directory / "step-00000003"
    kept = read(newest)["digest"]
    other_weights(newest)
    forged = digest_of_stored(newest)
    rewrite(newest, student=forged)
    assert main(["verify", str(directory)]) == 0  # nothing contradicts anything
    assert main(["verify", str(directory), "--record", kept]) == 1
    assert "the newest record should have the digest" in capsys.readouterr().out
    kdo.callbacks.resume(trainer(), directory)
    with pytest.raises(ValueError, match="and `record` is"):
        kdo.callbacks.resume(trainer(), directory, record=kept)


def digest_of_stored(path):
    leaves = kdo.provenance.checkpoints.section_leaves(path / "student.safetensors", read(path)["layout"]["student"])
    return kdo.provenance.digest_of_leaves(leaves)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"updates": "3"},
        {"layout": []},
        {"layout": {"student": [3]}},
        {"layout": {"student": [{"path": "a", "dtype": "float32", "shape": [-1], "trainable": True}]}},
        {"files": {"a": 1}},
        {"base": {}},
        {"monitor": {"name": "a", "value": "b"}},
        {"storage": "pickle"},
        {"student": "x"},
        {"recipe": None},
    ],
)
def test_record_of_the_wrong_types_is_refused_and_never_a_traceback(change, run, tmp_path, capsys):
    from keras_diffusion_opd.cli import main

    shutil.copytree(run, tmp_path / "run")
    rewrite(tmp_path / "run" / "step-00000003", **change)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "is damaged" in capsys.readouterr().out


@pytest.mark.parametrize("header", [b"[]", b"{", b"[" * 5000, b'{"00000": 3}', b'{"00000": {"data_offsets": [0]}}'])
def test_file_with_a_made_up_header_is_refused_and_never_a_traceback(header, run, tmp_path, capsys):
    from keras_diffusion_opd.cli import main

    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "step-00000003"
    (path / "student.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refile(path, "student.safetensors")
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "DOES NOT HOLD: student.safetensors: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="student.safetensors: "):
        kdo.callbacks.resume(trainer(), tmp_path / "run")
