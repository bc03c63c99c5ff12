"""Checkpoints on disk: `step-00000042/` with one safetensors file per section and `checkpoint.json`.

A checkpoint appears under its name only when it is complete and on the disk, and is never changed after
that. Several at one number of updates (an epoch's end after a window that weighed nothing) are
`step-00000042`, `step-00000042.1`, and so on. Temporary directories are hidden and end in `.tmp`.
"""

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_diffusion_opd.provenance import (
    canonical_json,
    file_digest,
    new_directory,
    read_json,
    text_digest,
    write_json,
)
from keras_diffusion_opd.provenance.records import take_keys
from keras_diffusion_opd.provenance.tensor_file import packed, unpacked

RECORD = "checkpoint.json"
FORMAT = "keras_diffusion_opd/checkpoint"
VERSION = 1
_KEYS = ("format", "version", "epoch", "batch", "updates", "student", "recipe", "layout", "files", "digest")
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_LEFT_OVER = re.compile(r"\.step-\d{8,}.*\.tmp")


class Place(NamedTuple):
    """One checkpoint; the greater, the newer."""

    updates: int
    repeat: int
    path: Path


def places(directory: Path) -> list[Place]:
    """The checkpoints in a directory, oldest first."""
    found = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir() if path.is_dir()]
    return sorted(Place(int(match[1]), int(match[2] or 0), path) for path, match in found if match)


def foreign_files(directory: Path) -> list[str]:
    """Names in a directory that no checkpoint callback wrote."""
    ours = (_NAME, _LEFT_OVER)
    return sorted(p.name for p in directory.iterdir() if not any(name.fullmatch(p.name) for name in ours))


def remove_left_over(directory: Path) -> None:
    """Remove the temporary directories of a process that was killed while it wrote."""
    for path in directory.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def write_checkpoint(directory: Path, updates: int, record: dict[str, Any], state: dict[str, list[np.ndarray]]) -> Path:
    """Write one checkpoint, in full or not at all.

    Args:
        directory: an existing directory of checkpoints.
        updates: number of updates, which names it.
        record: JSON values; format, the files' digests and the record's own digest are added.
        state: arrays by section.

    Returns:
        The checkpoint's directory.

    Raises:
        OSError: it cannot be written; nothing is left over.
    """
    repeat = max((place.repeat + 1 for place in places(directory) if place.updates == updates), default=0)
    path = directory / (f"step-{updates:08d}" + (f".{repeat}" if repeat else ""))
    with new_directory(path) as folder:
        files = {}
        for section, arrays in state.items():
            file = folder / _file_of(section)
            file.write_bytes(packed(_named(arrays)))
            files[file.name] = {"sha256": file_digest(file), "bytes": file.stat().st_size}
        content = {"format": FORMAT, "version": VERSION, **record, "updates": updates, "files": files}
        write_json(folder / RECORD, {**content, "digest": text_digest(canonical_json(content))})
    return path


def keep_newest(directory: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints; what is being removed no longer has a checkpoint's name."""
    for place in places(directory)[:-keep]:
        hidden = place.path.with_name(f".{place.path.name}.removed.tmp")
        place.path.rename(hidden)
        shutil.rmtree(hidden)


def _file_of(section: str) -> str:
    return f"{section}.safetensors"


def _named(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{index:05d}": array for index, array in enumerate(arrays)}


def read_record(path: Path) -> dict[str, Any]:
    """`checkpoint.json` of a checkpoint; ValueError if it is not there, no record, or was changed."""
    file = path / RECORD
    if not file.is_file():
        raise ValueError(f"{path} must be a checkpoint. It has no {RECORD}: the checkpoint is damaged.")
    record = read_json(file)
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
        raise ValueError(f"{file} must be a record of format {FORMAT!r}, version {VERSION}. It is not.")
    try:
        take_keys(record, "checkpoint", _KEYS)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    content = {key: value for key, value in record.items() if key != "digest"}
    if record.get("digest") != text_digest(canonical_json(content)):
        raise ValueError(f"{file} was changed after it was written: its digest does not belong to what it says.")
    return record


def read_state(
    path: Path, record: dict[str, Any], likes: dict[str, list[np.ndarray]]
) -> tuple[dict[str, list[np.ndarray]], list[str]]:
    """The arrays of a checkpoint, and a sentence for each file that is missing, damaged or of another form.

    Args:
        path: the checkpoint.
        record: what `read_record` gave.
        likes: arrays of the shapes and dtypes that are expected. Nothing is read that has another form.
    """
    state, problems = {}, []
    for section, expected in likes.items():
        file = path / _file_of(section)
        try:
            state[section] = _checked(file, record["files"][file.name], expected)
        except (ValueError, KeyError, OSError) as error:
            problems.append(f"{file.name}: {error if not isinstance(error, KeyError) else 'it is not in the record'}")
    return state, problems


def _checked(file: Path, entry: dict[str, Any], expected: list[np.ndarray]) -> list[np.ndarray]:
    arrays = list(unpacked(file, _named(expected)).values())
    if file_digest(file) != entry["sha256"]:
        raise ValueError("its content is not the one recorded")
    return arrays
