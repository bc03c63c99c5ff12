"""`kdo verify` on a teacher store: every damage is found and named."""

import random
import shutil
from pathlib import Path

import pytest

from keras_diffusion_opd.cli import main
from tests.cli.process import kdo
from tests.stores import batches, content, write

SHARDS = [f"shard-0000-00000{i}.safetensors" for i in range(3)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write(tmp_path / "s", batches(stamped=True))
    return tmp_path / "s"


def said(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["verify", str(path)]) == 1
    text = capsys.readouterr().out
    assert text.endswith(" of the things recorded do not hold.\n")
    return text


def test_sound_store_in_a_process_without_backend(store: Path) -> None:
    run = kdo("verify", str(store), KERAS_BACKEND="none of them")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "(teacher store)" in run.stdout and "12 rows in 3 shards" in run.stdout
    assert run.stdout.endswith("Everything holds.\n")


def test_flipped_bit_anywhere_is_found(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(1)
    for name, data in content(store).items():
        spots = {0, 7, 8, len(data) - 1, *(chance.randrange(len(data)) for _ in range(20))}
        for place in spots:
            changed = bytearray(data)
            changed[place] ^= 1 << chance.randrange(8)
            (store / name).write_bytes(changed)
            assert name in said(store, capsys), f"byte {place}"
        (store / name).write_bytes(data)
    assert main(["verify", str(store)]) == 0


def test_row_that_is_damaged_is_named(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((store / SHARDS[1]).read_bytes())
    data[-1] ^= 1  # the range of the last row's last position
    (store / SHARDS[1]).write_bytes(data)
    text = said(store, capsys)
    assert f"{SHARDS[1]}: its content is not the one recorded" in text
    assert "row 3 of it does not belong, its digest is not that of what the teacher said" in text
    assert SHARDS[0] not in text and SHARDS[2] not in text


def test_missing_shard_and_extra_file_are_named(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / SHARDS[2]).unlink()
    (store / "notes.txt").write_text("")
    (store / "shard-0000-000003.safetensors").write_bytes(b"")
    (store / ".store.json.1-00000000.tmp").write_bytes(b"")
    text = said(store, capsys)
    assert f"{SHARDS[2]} is missing." in text and "notes.txt does not belong to the store" in text
    assert "shard-0000-000003.safetensors does not belong to the store" in text
    assert ".tmp is what a killed process left. Remove it." in text


def test_reordered_shards_are_named_with_whose_content_it_is(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ((store / name).read_bytes() for name in SHARDS[:2])
    (store / SHARDS[0]).write_bytes(second)
    (store / SHARDS[1]).write_bytes(first)
    text = said(store, capsys)
    assert f"{SHARDS[0]}: its content is not the one recorded" in text and f"it is that of {SHARDS[1]}" in text
    assert f"it is that of {SHARDS[0]}" in text


def test_shard_of_another_store_is_found(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "o", batches(seed=4, stamped=True))
    shutil.copy(tmp_path / "o" / SHARDS[0], store / SHARDS[0])
    text = said(store, capsys)
    assert f"{SHARDS[0]}: its content is not the one recorded" in text
    assert f"{SHARDS[0]}: the digests or counts of its rows are not those recorded" in text


def test_store_without_its_manifest_or_without_an_end_is_no_store(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "store.json").unlink()
    assert "store.json is missing" in said(store, capsys)
    write(tmp_path / "half", batches(), writer=(0, 2))
    assert "store.json is missing" in said(tmp_path / "half", capsys)


def test_store_has_no_card(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["card", str(store)]) == 2
    assert "is no model, and has no card" in capsys.readouterr().err
