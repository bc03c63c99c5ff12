"""Checkpoints on disk: `step-00000042/` with one safetensors file per section and `checkpoint.json`.

Names and records are those of `keras_diffusion_opd.provenance.checkpoints`; here they are written, and read
into arrays.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.provenance import file_digest, new_directory, write_json
from keras_diffusion_opd.provenance.checkpoints import (
    CHECKPOINT_NAME,
    CHECKPOINT_RECORD,
    places,
    read_checkpoint_record,
    sealed,
)
from keras_diffusion_opd.provenance.tensor_file import chunks, unpacked

_LEFT_OVER = re.compile(r"\.step-\d{8,}.*\.tmp")
_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|b?float(16|32|64)|float8_e4m3fn|float8_e5m2")

State = dict[str, list[np.ndarray]]


def foreign_files(directory: Path) -> list[str]:
    """Names in a directory that no checkpoint callback wrote."""
    ours = (CHECKPOINT_NAME, _LEFT_OVER)
    return sorted(p.name for p in directory.iterdir() if not any(name.fullmatch(p.name) for name in ours))


def remove_left_over(directory: Path) -> None:
    """Remove the temporary directories of a process that was killed while it wrote."""
    for path in directory.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def write_checkpoint(
    directory: Path, content: dict[str, Any], state: State, more: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Write one checkpoint, in full or not at all.

    Args:
        directory: an existing directory of checkpoints.
        content: of the record; the files' digests, the header and the record's own digest are added. Its
            number of updates names the checkpoint.
        state: arrays by section.
        more: None, or a function that writes further files into the folder that it is given.

    Returns:
        The record.

    Raises:
        OSError: it cannot be written; nothing is left over.
    """
    updates = content["updates"]
    repeat = max((place.repeat + 1 for place in places(directory) if place.updates == updates), default=0)
    with new_directory(directory / (f"step-{updates:08d}" + (f".{repeat}" if repeat else ""))) as folder:
        if more is not None:
            more(folder)
        files = {path.relative_to(folder).as_posix(): _entry(path) for path in folder.rglob("*") if path.is_file()}
        files |= {f"{section}.safetensors": _write_section(folder, section, state[section]) for section in state}
        record = sealed({**content, "files": files})
        write_json(folder / CHECKPOINT_RECORD, record)
    return record


def file_entries(state: State) -> dict[str, dict[str, Any]]:
    """What `files` of a record says of these arrays, which are not written."""
    return {f"{section}.safetensors": _digest_section(arrays) for section, arrays in state.items()}


def _entry(path: Path) -> dict[str, Any]:
    return {"sha256": file_digest(path), "bytes": path.stat().st_size}


def _write_section(folder: Path, section: str, arrays: list[np.ndarray]) -> dict[str, Any]:
    with open(folder / f"{section}.safetensors", "xb") as file:
        return _digest_section(arrays, file.write)


def _digest_section(arrays: list[np.ndarray], write: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    sha, size = hashlib.sha256(), 0
    for chunk in chunks(_named(arrays)):
        if write is not None:
            write(chunk)
        sha.update(chunk)
        size += len(chunk)
    return {"sha256": sha.hexdigest(), "bytes": size}


def prune(directory: Path, keep: int, keep_best: int, mode: str) -> None:
    """Remove all but the `keep` newest checkpoints and the `keep_best` best ones.

    What is being removed no longer has a checkpoint's name.
    """
    kept = {place.path for place in places(directory)[-keep:]} | set(ranked(directory, mode)[:keep_best])
    for place in places(directory):
        if place.path not in kept:
            hidden = place.path.with_name(f".{place.path.name}.removed.tmp")
            place.path.rename(hidden)
            shutil.rmtree(hidden)


def ranked(directory: Path, mode: str) -> list[Path]:
    """Checkpoints that hold a value of the monitor, best first; of equal ones the older."""
    found = []
    for index, place in enumerate(places(directory)):
        monitor = read_checkpoint_record(place.path)["monitor"]
        if monitor is not None and monitor["value"] is not None:
            value = monitor["value"] if mode == "min" else -monitor["value"]
            found.append((value, index, place.path))
    return [path for _, _, path in sorted(found)]


def likes_of(entries: list[dict[str, Any]]) -> list[np.ndarray]:
    """Arrays of the recorded dtypes and shapes that take no memory; ValueError for a dtype that is none."""
    for entry in entries:
        if not _DTYPES.fullmatch(entry["dtype"]):
            raise ValueError(f"{entry['path']} has no dtype that tensors have: {entry['dtype']!r}")
    return [np.broadcast_to(np.zeros((), entry["dtype"]), entry["shape"]) for entry in entries]


def read_state(path: Path, likes: Mapping[str, list[np.ndarray]]) -> tuple[State, list[str]]:
    """The arrays of a checkpoint, and a sentence for each file that is missing or of another form.

    Args:
        path: the checkpoint.
        likes: arrays of the shapes and dtypes that are expected. Nothing is read that has another form.
    """
    state, problems = {}, []
    for section, expected in likes.items():
        file = path / f"{section}.safetensors"
        try:
            state[section] = list(unpacked(file, _named(expected)).values())
        except (ValueError, OSError) as error:
            problems.append(f"{file.name}: {error}")
    return state, problems


def _named(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{index:05d}": array for index, array in enumerate(arrays)}
