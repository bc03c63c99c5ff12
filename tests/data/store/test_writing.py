"""A store that was killed while it was written becomes the store that it would have been, byte for byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keras_diffusion_opd.data import PackedTopK, PreparedBatch, PreparedDataset, StoreError, TeacherStore
from keras_diffusion_opd.provenance import file_digest
from tests.stores import TEACHER, VOCABULARY, batches, content, write

ROOT = Path(__file__).parents[3]


class InterruptedWriterError(Exception):
    pass


def interrupted(given, after):
    """The batches up to one, then an end without an end."""
    yield from given[:after]
    raise InterruptedWriterError


def bare(given):
    return [PreparedBatch(b.model_inputs, b.target_ids, b.loss_weights, None, b.stamp) for b in given]


@pytest.mark.parametrize("after", range(1, 7))
@pytest.mark.parametrize("rows_per_shard", [2, 3, 4, 100])
def test_interrupted_after_any_batch_it_continues_to_the_same_bytes(tmp_path, after, rows_per_shard):
    given = batches(6, stamped=True)
    write(tmp_path / "whole", given, rows_per_shard=rows_per_shard)
    with pytest.raises(InterruptedWriterError):
        options = {"targets": PackedTopK(8, VOCABULARY), "fingerprints": TEACHER, "metadata": {"corpus": "random"}}
        TeacherStore.write(
            tmp_path / "part", interrupted(given, after), rows_per_shard=rows_per_shard, progress=False, **options
        )
    with pytest.raises(StoreError, match=r"store.json is missing"):
        TeacherStore.open(tmp_path / "part")
    write(tmp_path / "part", given, rows_per_shard=rows_per_shard)
    assert content(tmp_path / "part") == content(tmp_path / "whole")


def test_teacher_is_not_asked_again_for_shards_that_are_there(tmp_path):
    given = batches(6, rows=2)
    answers = {b.target_ids.tobytes(): b.teacher for b in given}
    asked = []

    def teacher(batch):
        asked.append(batch.target_ids.tobytes())
        if len(asked) == 4:
            raise InterruptedWriterError
        return answers[asked[-1]]

    options = {"targets": PackedTopK(8, VOCABULARY), "teacher": teacher, "rows_per_shard": 2}
    with pytest.raises(InterruptedWriterError):
        write(tmp_path / "s", bare(given), **options)
    write(tmp_path / "s", bare(given), **options)
    assert asked[4:] == [b.target_ids.tobytes() for b in given[3:]]
    before = list(asked)
    write(tmp_path / "s", bare(given), **options)
    assert asked == before, "a store that is complete is only compared"
    (tmp_path / "s" / "shard-0000-000001.safetensors").unlink()
    (tmp_path / "s" / "store.json").unlink()
    with pytest.raises(StoreError, match="no record of it"):
        write(tmp_path / "s", bare(given), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"corpus": "other"}}, r"`metadata\['corpus'\]` is 'random' there, and 'other' here"),
        ({"fingerprints": {"teacher": "2" * 64}}, r"`fingerprints\['teacher'\]` is '1+' there, and '2+' here"),
        ({"rows_per_shard": 5}, "`rows_per_shard` is 4 there, and 5 here"),
        ({"targets": PackedTopK(8, VOCABULARY, "float16")}, "`columns` is"),
        ({"targets": PackedTopK(8, VOCABULARY - 1)}, r"`targets\['vocabulary_size'\]`|`fingerprints"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_and_change_nothing(tmp_path, options, message, finished):
    given = batches()
    if finished:
        write(tmp_path / "s", given)
    else:
        with pytest.raises(InterruptedWriterError):
            settings = {"fingerprints": TEACHER, "rows_per_shard": 4, "metadata": {"corpus": "random"}}
            TeacherStore.write(
                tmp_path / "s", interrupted(given, 2), targets=PackedTopK(8, VOCABULARY), progress=False, **settings
            )
    before = content(tmp_path / "s")
    with pytest.raises(StoreError, match=message):
        write(tmp_path / "s", given, **options)
    assert content(tmp_path / "s") == before


def test_other_batches_are_refused_also_where_only_the_corruption_differs(tmp_path):
    given = batches()
    write(tmp_path / "s", given)
    with pytest.raises(StoreError, match=r"row 0 of `batches` is not the one that is stored in .*shard-0000-000000"):
        write(tmp_path / "s", batches(seed=5))
    other = PreparedBatch(
        {**given[2].model_inputs, "token_ids": given[2].target_ids}, given[2].target_ids, given[2].loss_weights
    )
    with pytest.raises(StoreError, match="row 6 of `batches` is not the one"):
        write(tmp_path / "s", [*given[:2], other, given[3]])
    with pytest.raises(StoreError, match="`batches` has 9 rows, and .* holds more"):
        write(tmp_path / "s", given[:3])
    with pytest.raises(StoreError, match="is complete with 12 rows, and `batches` has more"):
        write(tmp_path / "s", [*given, *batches(1, seed=9)])
    assert TeacherStore.open(tmp_path / "s").verify() == []


def test_shard_that_was_lost_is_written_anew(tmp_path):
    write(tmp_path / "s")
    before = content(tmp_path / "s")
    (tmp_path / "s" / "shard-0000-000001.safetensors").unlink()
    with pytest.raises(StoreError, match="shard-0000-000001.safetensors is missing"):
        TeacherStore.open(tmp_path / "s")
    write(tmp_path / "s")
    assert content(tmp_path / "s") == before


def test_directory_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"must hold nothing but a store. It holds \['notes.txt'\]"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_shard_that_was_damaged_before_the_end_is_found_at_the_end(tmp_path):
    given = batches()
    settings = {"fingerprints": TEACHER, "rows_per_shard": 3, "progress": False}
    with pytest.raises(InterruptedWriterError):
        TeacherStore.write(tmp_path / "s", interrupted(given, 3), targets=PackedTopK(8, VOCABULARY), **settings)
    path = tmp_path / "s" / "shard-0000-000001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"shard-0000-000001.safetensors is damaged: row 2 of it does not belong"):
        TeacherStore.write(tmp_path / "s", given, targets=PackedTopK(8, VOCABULARY), **settings)
    path.unlink()
    assert TeacherStore.write(tmp_path / "s", given, targets=PackedTopK(8, VOCABULARY), **settings).verify() == []


def test_a_dataset_what_fit_takes_and_a_single_batch_are_written_alike(tmp_path):
    given = batches()
    write(tmp_path / "a", given)
    options = {"targets": PackedTopK(8, VOCABULARY), "fingerprints": TEACHER, "rows_per_shard": 4, "progress": False}
    options["metadata"] = {"corpus": "random"}
    TeacherStore.write(tmp_path / "b", PreparedDataset(given), **options)
    TeacherStore.write(tmp_path / "c", (b.as_fit() for b in given), **options)
    assert content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c")
    TeacherStore.write(tmp_path / "d", given[0], **options)
    assert len(TeacherStore.open(tmp_path / "d")) == 3
    with pytest.raises(TypeError, match="`batches` must yield PreparedBatch objects. Received int at 0"):
        TeacherStore.write(tmp_path / "e", [3], **options)
    with pytest.raises(TypeError, match="`batches` must yield PreparedBatch objects. Received int"):
        TeacherStore.write(tmp_path / "e", 3, **options)


def test_progress_is_shown_and_can_be_left_out(tmp_path, capsys):
    write(tmp_path / "a", batches(), progress=True)
    assert "4/4" in capsys.readouterr().out
    write(tmp_path / "b", batches())
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_twenty_random_moments_and_at_every_step_to_the_disk(tmp_path):
    """One process imports, and forks the writers that it kills; see `killing.py`."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-m", "tests.data.store.killing", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["different"] == [] and told["problems"] == []
    assert told["random kills"] == 20 and told["kills at a step"] >= 3 * told["shards"]
    assert told["inside a shard"] >= 1 and told["kills before the end"] >= 15, told
    assert file_digest(tmp_path / "whole" / "store.json") == told["manifest"]
    assert np.all(TeacherStore.open(tmp_path / "whole")[0].loss_weights >= 0)
