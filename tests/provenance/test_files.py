"""A file is there in full or not at all, whatever happens while it is written."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keras_diffusion_opd.provenance import (
    file_digest,
    new_directory,
    read_json,
    write_bytes,
    write_json,
)

ROOT = Path(__file__).parents[2]


def test_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": [1, None], "a": "ü"})
    assert read_json(path) == {"b": [1, None], "a": "ü"}
    assert path.read_text() == '{\n  "b": [\n    1,\n    null\n  ],\n  "a": "ü"\n}\n'
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["a.json"]


def test_rights_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_value_that_is_no_json_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`a.json\['x'\]` must be finite"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_missing_directory_and_a_directory_in_the_way_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_bytes(tmp_path / "none" / "a", b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_bytes(tmp_path / "folder", b"")
    assert os.listdir(tmp_path) == ["folder"]


WRITER = """
import sys
from keras_diffusion_opd.provenance import write_bytes
print("ready", flush=True)
while True:
    for letter in b"ab":
        write_bytes(sys.argv[1], bytes([letter]) * 3_000_000)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
def test_killed_writer_never_leaves_a_half_written_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    write_bytes(path, b"a" * 3_000_000)
    for i in range(8):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(random.Random(i).uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert content in (b"a" * 3_000_000, b"b" * 3_000_000)
    assert all(name.endswith(".tmp") for name in os.listdir(tmp_path) if name != "weights")


def test_directory_appears_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    with new_directory(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("x")
        assert not path.exists() and folder.parent == tmp_path
    assert (path / "inner" / "a").read_text() == "x" and os.listdir(tmp_path) == ["step-1"]


def test_directory_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "step-1") as folder:
        (folder / "a").write_text("x")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda p: p.symlink_to("nowhere")])
def test_directory_replaces_nothing(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "taken"
    make(path)
    with pytest.raises(FileExistsError, match="must not exist yet"), new_directory(path):
        pass
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("{", "does not read as one"),
        ("", "does not read as one"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": -Infinity}', "-Infinity is no JSON"),
        ('{"a": 1, "a": 2}', "a key is given twice"),
        ("[" * 100_000, "does not read as one"),
        ('"\udcff"', "does not read as one"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path: Path, text: str, phrase: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=f"must be a JSON file.*{phrase}"):
        read_json(path)


def test_huge_json_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ValueError, match="must be at most 67108864 bytes"):
        read_json(path)


def test_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
