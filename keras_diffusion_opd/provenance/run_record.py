"""One run: what was started, on what, with which seed, and what came out."""

import dataclasses
import datetime
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from keras_diffusion_opd.provenance.canonical import (
    RESERVED_KEYS,
    canonical_json,
    check_digest,
    plain_json,
)
from keras_diffusion_opd.provenance.digests import digest, text_digest
from keras_diffusion_opd.provenance.environment import installed_versions, machine
from keras_diffusion_opd.provenance.files import file_digest, read_json, write_json
from keras_diffusion_opd.provenance.lineage import Lineage
from keras_diffusion_opd.provenance.recipe import Recipe
from keras_diffusion_opd.provenance.records import header, open_record, take_keys

_MAPPINGS = ("machine", "versions", "hyperparameters", "metrics", "digests", "files", "metadata")
_PLAIN = ("name", "seed", "started", "ended", "command", *_MAPPINGS)
_KEYS = (*_PLAIN, "recipe", "lineage", "digest")


def now() -> str:
    """The time as ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The record of one run, as `run.json` holds it.

    Args:
        name: what was run.
        seed: of the run, or None.
        started: ISO 8601 with offset; now, if not given.
        ended: the same, or None while it runs.
        command: the command line; that of this process, if not given.
        machine: what it ran on; this machine, if not given.
        versions: of the libraries; those installed, if not given.
        hyperparameters: settings: JSON values by name.
        metrics: results: JSON values by name. A mapping of mappings is shown as a table, a row for each.
        digests: name of a model or data set -> its digest.
        files: path relative to the record -> `sha256` and `bytes`; filled by `save`.
        recipe: how the model of the run was made.
        lineage: where it came from.
        metadata: whatever else: JSON values by name, but for reserved names.

    Raises:
        TypeError: a value that is no JSON value; the message names its place.
        ValueError: a number that is not finite, a digest or time that is none, a file outside of the
            directory.

    Example:
        >>> import numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> record = kdo.provenance.RunRecord("tokens", seed=0, hyperparameters={"updates": 100})
        >>> kdo.provenance.write_bytes("report.md", b"# Report")
        >>> record = record.finish(metrics={"teacher": {"bits": 2.1}}, digests={"teacher": [np.ones(3)]})
        >>> record.save("run.json", files=["report.md"])
        >>> kdo.provenance.RunRecord.load("run.json").verify(".")
        []
        >>> kdo.provenance.write_bytes("report.md", b"# Better")
        >>> kdo.provenance.RunRecord.load("run.json").verify(".")
        ['`report.md`: its content is not the one recorded (e236078623d9, not 04e1d1467e73).']
    """

    name: str
    seed: int | None = None
    started: str = dataclasses.field(default_factory=now)
    ended: str | None = None
    command: Sequence[str] = dataclasses.field(default_factory=lambda: list(sys.argv))
    machine: Mapping[str, Any] = dataclasses.field(default_factory=machine)
    versions: Mapping[str, str] = dataclasses.field(default_factory=installed_versions)
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    recipe: Recipe | None = None
    lineage: Lineage | None = None
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name.strip()):
            raise ValueError(f"`name` must be a text that is not empty. Received {self.name!r}.")
        for field in _PLAIN:
            reserved = RESERVED_KEYS if field == "metadata" else ()
            object.__setattr__(self, field, plain_json(getattr(self, field), name=field, reserved=reserved))
            if field in _MAPPINGS and not isinstance(getattr(self, field), Mapping):
                raise TypeError(f"`{field}` must be a mapping. Received {getattr(self, field)!r}.")
        if not (isinstance(self.command, list) and all(isinstance(word, str) for word in self.command)):
            raise TypeError(f"`command` must be a list of strings. Received {self.command!r}.")
        if self.seed is not None and type(self.seed) is not int:
            raise TypeError(f"`seed` must be an int or None. Received {self.seed!r}.")
        for field in ("started", "ended"):
            _check_time(getattr(self, field), field)
        for name, value in self.digests.items():
            check_digest(value, f"digests[{name!r}]")
        for path, entry in self.files.items():
            _check_file(path, entry)

    @property
    def digest(self) -> str:
        """The identity of the record: SHA-256 of the canonical JSON of all it says."""
        return text_digest(canonical_json(self._content()))

    def finish(self, *, metrics: Mapping[str, Any], digests: Mapping[str, Any] | None = None) -> "RunRecord":
        """The record of the run that has ended now.

        Args:
            metrics: the results.
            digests: name -> a model, arrays, or their digest.

        Returns:
            A new record; this one is unchanged.
        """
        taken = {k: v if isinstance(v, str) else digest(v) for k, v in (digests or {}).items()}
        return dataclasses.replace(self, ended=now(), metrics=metrics, digests={**self.digests, **taken})

    def save(self, path: str | os.PathLike[str], *, files: Iterable[str | os.PathLike[str]] = ()) -> None:
        """Write the record as JSON, in full or not at all.

        Args:
            path: the file, such as `runs/tokens/run.json`.
            files: files of the run whose content to record, relative to the directory of `path`.

        Raises:
            OSError: a file is not there, or `path` cannot be written.
        """
        folder = Path(path).parent
        entries = dict(self.files)
        for file in files:
            name = Path(file).as_posix()
            _check_file(name, {"sha256": "0" * 64, "bytes": 0})
            entries[name] = {"sha256": file_digest(folder / file), "bytes": (folder / file).stat().st_size}
        write_json(path, dataclasses.replace(self, files=entries).to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "RunRecord":
        """The record in a file; a ValueError tells if it was changed since it was written."""
        return cls.from_json(read_json(path))

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, with its digest."""
        return {**header("run_record"), **self._content(), "digest": self.digest}

    @classmethod
    def from_json(cls, value: Any) -> "RunRecord":
        """The record that `to_json` wrote; a ValueError tells what does not belong or was changed."""
        record, problems = read_run_record(value)
        if problems:
            raise ValueError(problems[0])
        return record

    def verify(self, folder: str | os.PathLike[str]) -> list[str]:
        """Everything that does not hold of the files and the lineage that the record names.

        Args:
            folder: the directory that the record lies in.

        Returns:
            One sentence for each thing that does not hold; none for a sound record.
        """
        problems = []
        for name, entry in self.files.items():
            path = Path(folder, name)
            if not path.is_file():
                problems.append(f"`{name}`: the file is missing.")
            elif path.stat().st_size != entry["bytes"]:
                problems.append(f"`{name}`: it has {path.stat().st_size} bytes, not {entry['bytes']}.")
            elif (found := file_digest(path)) != entry["sha256"]:
                was = entry["sha256"][:12]
                problems.append(f"`{name}`: its content is not the one recorded ({found[:12]}, not {was}).")
        if self.lineage is not None:
            known = {name: value for name, value in self.digests.items() if name in _names(self.lineage)}
            problems += [f"lineage: {problem}" for problem in self.lineage.verify(known)]
        return problems

    def _content(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "recipe": None if self.recipe is None else self.recipe.to_json(),
            "lineage": None if self.lineage is None else self.lineage.to_json(),
        }


def read_run_record(value: Any) -> tuple[RunRecord, list[str]]:
    """A stored record, and a sentence if it was changed after it was written."""
    fields = open_record(value, "run_record", _KEYS)
    recorded = check_digest(fields.pop("digest"), "digest")
    recipe, lineage = fields.pop("recipe"), fields.pop("lineage")
    record = RunRecord(
        **fields,
        recipe=None if recipe is None else Recipe.from_json(recipe),
        lineage=None if lineage is None else Lineage.from_json(lineage),
    )
    if record.digest == recorded:
        return record, []
    return record, [
        f"the record was changed after it was written: what it says has the digest {record.digest[:12]}, "
        f"but {recorded[:12]} is recorded."
    ]


def _names(lineage: Lineage) -> set[str]:
    return {link.name for link in lineage.links}


def _check_time(value: Any, name: str) -> None:
    if value is None and name == "ended":
        return
    try:
        offset = datetime.datetime.fromisoformat(value).utcoffset()
    except (TypeError, ValueError):
        offset = None
    if offset is None:
        raise ValueError(
            f"`{name}` must be a time in ISO 8601 with its offset, such as '2024-05-01T12:00:00+00:00'. "
            f"Received {value!r}."
        )


def _check_file(path: str, entry: Any) -> None:
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or PurePosixPath(path).is_absolute() or "\\" in path or ":" in path:
        raise ValueError(
            f"`files` must hold paths inside the directory of the record, relative to it. Received {path!r}."
        )
    fields = take_keys(entry, f"entry of `files[{path!r}]`", ("sha256", "bytes"))
    check_digest(fields["sha256"], f"files[{path!r}]")
    if type(fields["bytes"]) is not int or fields["bytes"] < 0:
        raise ValueError(f"`files[{path!r}]` must give its bytes as an int. Received {fields['bytes']!r}.")
