"""Checkpoints as records on disk: their names, what `checkpoint.json` says, and whether the files bear it out.

A checkpoint appears under its name only when it is complete and on the disk, and is never changed after
that. Several at one number of updates (an epoch's end after a window that weighed nothing) are
`step-00000042`, `step-00000042.1`, and so on. Temporary directories are hidden and end in `.tmp`.

Nothing here needs Keras: tensors are known by their bytes.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keras_diffusion_opd.provenance.canonical import canonical_json, check_digest
from keras_diffusion_opd.provenance.digests import LeafDigest, digest_of_leaves, text_digest
from keras_diffusion_opd.provenance.files import file_digest, read_json
from keras_diffusion_opd.provenance.lineage import Lineage
from keras_diffusion_opd.provenance.recipe import Recipe
from keras_diffusion_opd.provenance.records import header, open_record, take_keys

CHECKPOINT_RECORD = "checkpoint.json"
CHECKPOINT_KEYS = (
    *("number", "previous", "epoch", "batch", "updates", "name", "student", "base", "identity", "recipe", "ancestors"),
    *("monitor", "data_state", "storage", "layout", "files", "digest"),
)
CHECKPOINT_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_CHUNK = 1 << 22


class Place(NamedTuple):
    """One checkpoint; the greater, the newer."""

    updates: int
    repeat: int
    path: Path


def places(directory: Path) -> list[Place]:
    """The checkpoints in a directory, oldest first."""
    found = [(path, CHECKPOINT_NAME.fullmatch(path.name)) for path in directory.iterdir() if path.is_dir()]
    return sorted(Place(int(match[1]), int(match[2] or 0), path) for path, match in found if match)


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint, with its header and its own digest."""
    whole = {**header("checkpoint"), **content}
    return {**whole, "digest": text_digest(canonical_json(whole))}


def read_checkpoint_record(path: Path) -> dict[str, Any]:
    """`checkpoint.json` of a checkpoint; ValueError if it is not there, no record, or was changed."""
    file = path / CHECKPOINT_RECORD
    if not file.is_file():
        raise ValueError(f"{path} must be a checkpoint. It has no {CHECKPOINT_RECORD}: the checkpoint is damaged.")
    record = read_json(file)
    try:
        content = open_record(record, "checkpoint", CHECKPOINT_KEYS)
        _check_types(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    recorded = content.pop("digest")
    if recorded != sealed(content)["digest"]:
        raise ValueError(f"{file} was changed after it was written: its digest does not belong to what it says.")
    return {**content, "digest": recorded}


def _check_types(content: Mapping[str, Any]) -> None:
    """ValueError unless every value is of the kind that readers rely on."""
    for key in ("number", "epoch", "batch", "updates"):
        _require(type(content[key]) is int and content[key] >= 0, key, "a whole number", content[key])
    for key in ("identity", "recipe", "data_state", "layout", "files"):
        _require(isinstance(content[key], dict), key, "an object", content[key])
    for key in ("student", "digest", *(() if content["previous"] is None else ("previous",))):
        check_digest(content[key], key)
    if content["base"] is not None:
        for key, value in take_keys(content["base"], "base", ("digest", "stored")).items():
            check_digest(value, key)
    if content["monitor"] is not None:
        value = take_keys(content["monitor"], "monitor", ("name", "value"))["value"]
        _require(value is None or type(value) in (int, float), "monitor", "a number", value)
    _require(content["storage"] in ("safetensors", "orbax"), "storage", "'safetensors' or 'orbax'", content["storage"])
    for name, entry in content["files"].items():
        fields = take_keys(entry, f"entry of `files[{name!r}]`", ("sha256", "bytes"))
        check_digest(fields["sha256"], f"files[{name!r}]")
    for section, entries in content["layout"].items():
        _require(isinstance(entries, list), f"layout.{section}", "a list", entries)
        for entry in entries:
            fields = take_keys(entry, "tensor", ("path", "dtype", "shape", "trainable"))
            sound = isinstance(fields["path"], str) and isinstance(fields["dtype"], str)
            sizes = fields["shape"] if isinstance(fields["shape"], list) else [None]
            sound = sound and all(type(size) is int and size >= 0 for size in sizes)
            _require(sound, f"layout.{section}", "path, dtype and shape of tensors", entry)


def _require(holds: bool, key: str, expected: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"`{key}` must be {expected}. Received {value!r}.")


def checkpoint_lineage(record: Mapping[str, Any]) -> Lineage:
    """From the first ancestor that is known to the student of a checkpoint; ValueError where they do not fit."""
    before = Lineage() if record["ancestors"] is None else Lineage.from_json(record["ancestors"])
    problems = before.verify()
    if problems:
        raise ValueError(f"the lineage of its parents does not hold: {' '.join(problems)}")
    return before.append(record["name"], record["student"], Recipe.from_json(record["recipe"]))


def checkpoint_problems(path: Path, record: Mapping[str, Any]) -> list[str]:
    """A sentence for each thing that a record says and its directory or its parts do not bear out.

    Args:
        path: the checkpoint.
        record: what `read_checkpoint_record` gave.
    """
    return [*_place_problems(path, record), *_file_problems(path, record), *_content_problems(path, record)]


def chain_problems(record: Mapping[str, Any], older: Mapping[str, Any] | None) -> list[str]:
    """A sentence if the checkpoint written before, where it is still there, is not the one that it was."""
    if older is None or older["number"] != record["number"] - 1 or older["digest"] == record["previous"]:
        return []
    said = str(record["previous"])[:12]
    return [
        f"the checkpoint before it is not the one that it followed: its record has the digest "
        f"{older['digest'][:12]}, but {said} is recorded."
    ]


def _place_problems(path: Path, record: Mapping[str, Any]) -> list[str]:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match and int(match[1]) != record["updates"]:
        return [f"{path.name}: its record is that of {record['updates']} updates; the directory was renamed"]
    return []


def _file_problems(path: Path, record: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, entry in record["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
            if file.is_symlink() or ".." in Path(name).parts or Path(name).is_absolute():
                problems.append(f"{name}: it is not a file of the checkpoint")
            elif size != entry["bytes"]:
                problems.append(f"{name}: it has {size} bytes, and {entry['bytes']} are expected")
            elif file_digest(file) != entry["sha256"]:
                problems.append(f"{name}: its content is not the one recorded")
        except OSError as error:
            problems.append(f"{name}: {error}")
    there = {file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()}
    strange = sorted(there - {CHECKPOINT_RECORD, *record["files"]})
    return problems + [f"{name}: it is not in the record" for name in strange]


def _content_problems(path: Path, record: Mapping[str, Any]) -> list[str]:
    problems = []
    try:
        checkpoint_lineage(record)
    except (ValueError, TypeError) as error:
        problems.append(f"lineage: {error}")
    if record["storage"] != "safetensors":
        return problems
    for section in record["layout"]:
        name = f"{section}.safetensors"
        if name not in record["files"]:
            problems.append(f"{name}: it is not in the record")
            continue
        try:
            leaves = section_leaves(path / name, record["layout"][section])
        except (ValueError, OSError, TypeError, AttributeError, RecursionError) as error:
            if (path / name).is_file():
                problems.append(f"{name}: {error}")
            continue
        expected = record["student"] if record["base"] is None else record["base"]["stored"]
        if section == "student" and digest_of_leaves(leaves) != expected:
            problems.append(f"{name}: it holds another student than the record says")
    return problems


class Tensor(NamedTuple):
    """One tensor of a section: what the record says of it, and where its bytes are in the file."""

    entry: Mapping[str, Any]
    offset: int
    bytes: int


def section_tensors(file: Path, entries: list[dict[str, Any]]) -> list[Tensor]:
    """Where the tensors of a section lie.

    Args:
        file: of the section.
        entries: the section's layout in the record. Nothing that the file says decides how much is read: its
            header must hold exactly these shapes, one after the other, and end with the file.

    Raises:
        ValueError: any other form.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"it has {size} bytes, less than its header asks for")
        found = json.loads(stream.read(length))
    tensors: list[Tensor] = []
    offset = 0
    for index, entry in enumerate(entries):
        there = found.pop(f"{index:05d}", {})
        begin, end = there.get("data_offsets", (offset, -1))
        count = math.prod(entry["shape"])
        sound = there.get("shape") == entry["shape"] and begin == offset <= end <= size - 8 - length
        if not sound or (count and (end - begin) % count):
            raise ValueError(f"{entry['path']} is {there or 'not there'}, and shape {entry['shape']} is recorded")
        tensors.append(Tensor(entry, 8 + length + begin, end - begin))
        offset = end
    if found or 8 + length + offset != size:
        raise ValueError("it holds more than the record says")
    return tensors


def section_leaves(file: Path, entries: list[dict[str, Any]]) -> list[LeafDigest]:
    """The digests of the tensors of a section, as `leaf_digests` of the list of arrays gives them."""
    leaves = []
    with open(file, "rb") as stream:
        for index, tensor in enumerate(section_tensors(file, entries)):
            stream.seek(tensor.offset)
            sha, left = hashlib.sha256(), tensor.bytes
            while left:
                chunk = stream.read(min(left, _CHUNK))
                if not chunk:
                    raise ValueError("it ends too early")
                sha.update(chunk)
                left -= len(chunk)
            entry = tensor.entry
            leaves.append(LeafDigest((index,), entry["path"], entry["dtype"], tuple(entry["shape"]), sha.hexdigest()))
    return leaves
