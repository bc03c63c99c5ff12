"""`store.json`: what a store of rows consists of; and `writer-0000.json`, which stands for one before it is there."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_diffusion_opd.provenance.canonical import canonical_json, check_digest, plain_json
from keras_diffusion_opd.provenance.digests import text_digest
from keras_diffusion_opd.provenance.files import LARGEST_JSON, open_regular, parse_json, write_bytes
from keras_diffusion_opd.provenance.records import header, open_record, take_keys
from keras_diffusion_opd.provenance.row_shard import Column, StoreError

MANIFEST = "store.json"
KIND = "teacher_store"
_SHARD_NAME = re.compile(r"shard-(\d{4,9})-(\d{6,12})\.safetensors")
_WRITER_NAME = re.compile(r"writer-(\d{4,9})\.json")
_SETTINGS = ("columns", "inputs", "targets", "fingerprints", "metadata", "rows_per_shard", "writers")


def shard_name(writer: int, index: int) -> str:
    """Name of the `index`-th shard that a writer writes."""
    return f"shard-{writer:04d}-{index:06d}.safetensors"


def shard_number(name: str) -> tuple[int, int] | None:
    """Writer and index of a shard's name; None for any other name."""
    match = _SHARD_NAME.fullmatch(name)
    numbers = (int(match[1]), int(match[2])) if match else None
    return numbers if numbers and shard_name(*numbers) == name else None


def writer_name(writer: int) -> str:
    """Name of the record of a writer."""
    return f"writer-{writer:04d}.json"


def writer_number(name: str) -> int | None:
    """Number of the writer that a name belongs to; None for any other name."""
    match = _WRITER_NAME.fullmatch(name)
    return int(match[1]) if match and writer_name(int(match[1])) == name else None


class ShardEntry(NamedTuple):
    """What the manifest says of one shard: its file, rows, bytes, and SHA-256 of the whole and of its index."""

    file: str
    rows: int
    bytes: int
    sha256: str
    index_sha256: str

    @classmethod
    def from_json(cls, value: Any) -> "ShardEntry":
        """The entry in a manifest; ValueError for anything else."""
        fields = take_keys(value, "shard", cls._fields)
        file = fields["file"]
        if not isinstance(file, str) or shard_number(file) is None:
            raise ValueError(f"`file` of a shard must be a name such as {shard_name(0, 0)!r}. Received {file!r}.")
        for name in ("rows", "bytes"):
            if type(fields[name]) is not int or fields[name] < 1:
                raise ValueError(f"`{name}` of {file} must be a whole number of at least 1. Received {fields[name]!r}.")
        for name in ("sha256", "index_sha256"):
            check_digest(fields[name], f"{name} of {file}")
        return cls(**fields)


def check_settings(value: Any) -> dict[str, Any]:
    """The settings of a store, if they are such; ValueError otherwise."""
    settings = take_keys(plain_json(value, name="settings"), "store's settings", _SETTINGS)
    if not isinstance(settings["columns"], list) or not settings["columns"]:
        raise ValueError("`columns` of a store must be a list of columns.")
    names = [Column.from_json(column).name for column in settings["columns"]]
    if len(set(names)) != len(names) or {"target_ids", "loss_weights"} - set(names):
        raise ValueError(f"`columns` must hold target_ids and loss_weights, and no name twice. Received {names[:20]}.")
    for name in ("targets", "fingerprints", "metadata"):
        if not isinstance(settings[name], Mapping):
            raise ValueError(f"`{name}` of a store must be a mapping. Received {type(settings[name]).__name__}.")
    for name in ("rows_per_shard", "writers"):
        if type(settings[name]) is not int or settings[name] < 1:
            raise ValueError(f"`{name}` of a store must be a whole number of at least 1. Received {settings[name]!r}.")
    return settings


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The manifest of a store.

    Args:
        settings: columns, structure of the inputs, packing of the targets, fingerprints, metadata, rows per
            shard, number of writers.
        shards: in order of writer and index.
        summary: JSON values that were counted when the store was merged.
    """

    settings: Mapping[str, Any]
    shards: Sequence[ShardEntry]
    summary: Mapping[str, Any]

    @property
    def columns(self) -> list[Column]:
        """The columns."""
        return [Column.from_json(column) for column in self.settings["columns"]]

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    def rows_of(self, writer: int) -> int:
        """Rows that one writer wrote."""
        return sum(shard.rows for shard in self.shards if (shard_number(shard.file) or (-1,))[0] == writer)

    @property
    def digest(self) -> str:
        """The store's identity: SHA-256 of the canonical JSON of what the manifest says."""
        return text_digest(canonical_json(self._content()))

    def _content(self) -> dict[str, Any]:
        shards = [shard._asdict() for shard in self.shards]
        return {**header(KIND), "settings": self.settings, "summary": self.summary, "rows": self.rows, "shards": shards}

    def save(self, folder: Path) -> None:
        """Write it, in full or not at all."""
        write_canonical(folder / MANIFEST, {**self._content(), "digest": self.digest})

    @classmethod
    def from_json(cls, value: Any) -> "Manifest":
        """The manifest that `save` wrote; ValueError tells what does not belong or was changed."""
        fields = open_record(value, KIND, ("settings", "summary", "rows", "shards", "digest"))
        if not isinstance(fields["shards"], list) or not fields["shards"]:
            raise ValueError("`shards` of a store must be a list of at least one shard.")
        if not isinstance(fields["summary"], Mapping):
            raise ValueError("`summary` of a store must be a mapping.")
        manifest = cls(
            check_settings(fields["settings"]),
            [ShardEntry.from_json(entry) for entry in fields["shards"]],
            plain_json(fields["summary"], name="summary"),
        )
        check_order([shard.file for shard in manifest.shards], manifest.settings["writers"])
        if type(fields["rows"]) is not int or manifest.rows != fields["rows"]:
            raise ValueError(f"`rows` is {fields['rows']!r}, and the shards have {manifest.rows}.")
        if manifest.digest != fields["digest"]:
            raise ValueError("it was changed after it was written: its digest does not belong to what it says.")
        return manifest

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """The manifest of a store; StoreError tells what is wrong with it."""
        value = read_canonical(folder / MANIFEST)
        try:
            return cls.from_json(value)
        except (ValueError, TypeError) as error:
            raise StoreError(f"{folder / MANIFEST} is damaged: {error}") from None


def check_order(files: Sequence[str], writers: int) -> None:
    """ValueError unless the shards come in order of writer and index, without gap or repetition."""
    expected, before = (0, 0), -1
    for file in files:
        number = shard_number(file)
        if number is None or number not in (expected, (before + 1, 0)):
            raise ValueError(f"`shards` must be in order without gap or repetition. {file} is not in its place.")
        before, expected = number[0], (number[0], number[1] + 1)
    if before + 1 != writers:
        raise ValueError(f"`shards` must be those of {writers} writers. They are those of {before + 1}.")


def write_canonical(path: Path, value: Any) -> None:
    """Write canonical JSON, in full or not at all."""
    write_bytes(path, canonical_json(value).encode() + b"\n")


def read_canonical(path: Path) -> Any:
    """The value of a file that `write_canonical` wrote. StoreError for a file of any other form."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > LARGEST_JSON:
                raise StoreError(f"{path} must be at most {LARGEST_JSON} bytes. It is larger.")
            data = file.readall() if hasattr(file, "readall") else file.read()
        value = parse_json(data, path)
        if canonical_json(value).encode() + b"\n" != data:
            raise StoreError(f"{path} is damaged: it is not the canonical JSON that was written.")
    except FileNotFoundError:
        raise StoreError(f"{path} is missing.") from None
    except StoreError:
        raise
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    return value
