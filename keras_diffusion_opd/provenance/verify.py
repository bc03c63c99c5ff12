"""What a path holds, and whether it holds true."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from keras_diffusion_opd.provenance.checkpoints import (
    CHECKPOINT_RECORD,
    chain_problems,
    checkpoint_lineage,
    checkpoint_problems,
    places,
    read_checkpoint_record,
)
from keras_diffusion_opd.provenance.files import read_json
from keras_diffusion_opd.provenance.lineage import Lineage
from keras_diffusion_opd.provenance.records import header
from keras_diffusion_opd.provenance.row_manifest import KIND, MANIFEST, Manifest, shard_number, writer_number
from keras_diffusion_opd.provenance.row_merge import verify_rows
from keras_diffusion_opd.provenance.run_record import RunRecord, read_run_record

# The names under which a directory keeps its records.
RECORD_NAMES = ("run.json", "lineage.json")
_KINDS = {header(kind)["format"]: kind for kind in ("run_record", "lineage")}


@dataclasses.dataclass(frozen=True)
class Verified:
    """What was found in one file.

    Args:
        path: the file.
        kind: "run_record", "lineage", "checkpoint" or "teacher_store"; None if the file does not say.
        record: what it holds (of a checkpoint its lineage), or None if it cannot be read.
        problems: one sentence for each thing that does not hold.
        digest: of the record of a checkpoint.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.RunRecord("tokens").save("run.json")
        >>> (found,) = kdo.provenance.verify_path("run.json")
        >>> found.kind, found.problems
        ('run_record', [])
    """

    path: Path
    kind: str | None
    record: RunRecord | Lineage | Manifest | None
    problems: list[str]
    digest: str | None = None


def record_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of records at `path`.

    Args:
        path: a file; a directory with `run.json` or `lineage.json`; a checkpoint, or a directory of them; a store.

    Returns:
        At least one path.

    Raises:
        FileNotFoundError: there is nothing at `path`, or no record in the directory.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.RunRecord("tokens").save("run.json")
        >>> [found.name for found in kdo.provenance.record_files(".")]
        ['run.json']
    """
    path = Path(path)
    if path.is_dir():
        names = (*RECORD_NAMES, CHECKPOINT_RECORD)
        found = [path / name for name in names if (path / name).is_file()]
        found += [place.path / CHECKPOINT_RECORD for place in places(path)]
        if any(_of_a_store(inside.name) for inside in path.iterdir()):
            found.append(path / MANIFEST)  # even if it is missing: that is what has to be told
        if not found:
            listed = ", ".join((*names, MANIFEST))
            raise FileNotFoundError(
                f"`path` must hold {listed} or checkpoints. The directory {path} holds none of them."
            )
        return found
    if not path.is_file():
        raise FileNotFoundError(f"`path` must be a record or a directory with one. {path} does not exist.")
    return [path]


def verify_path(path: str | os.PathLike[str]) -> list[Verified]:
    """Recompute every digest of the records at `path`.

    Args:
        path: a file; a directory with `run.json` or `lineage.json`; a checkpoint, or a directory of them; a store.

    Returns:
        One entry for each record.

    Raises:
        FileNotFoundError: there is no record at `path`.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.write_json("run.json", {"format": "something else"})
        >>> kdo.provenance.verify_path("run.json")[0].problems
        ["`format` must be one of ['keras_diffusion_opd/run_record', ...]. Received 'something else'."]
    """
    found, older = [], None
    for file in record_files(path):
        if file.name == CHECKPOINT_RECORD:
            verified, older = _verify_checkpoint(file, older)
        else:
            verified = _verify_file(file)
        found.append(verified)
    return found


def _verify_checkpoint(file: Path, older: Any) -> tuple[Verified, Any]:
    """What holds of one checkpoint, and its record, which the next one is chained to."""
    try:
        record = read_checkpoint_record(file.parent)
    except (ValueError, TypeError, OSError) as error:
        return Verified(file, "checkpoint", None, [str(error)]), None
    problems = [*checkpoint_problems(file.parent, record), *chain_problems(record, older)]
    try:
        lineage = checkpoint_lineage(record)
    except (ValueError, TypeError):
        lineage = None  # one of the problems says so
    return Verified(file, "checkpoint", lineage, problems, record["digest"]), record


def _of_a_store(name: str) -> bool:
    return name == MANIFEST or shard_number(name) is not None or writer_number(name) is not None


def _verify_file(path: Path) -> Verified:
    if path.name == MANIFEST:
        return Verified(path, KIND, *verify_rows(path.parent))
    kind = None
    try:
        value = read_json(path)
        found = value.get("format") if isinstance(value, dict) else None
        kind = _KINDS.get(str(found))
        if kind is None:
            raise ValueError(f"`format` must be one of {list(_KINDS)}. Received {found!r}.")
        if kind == "lineage":
            lineage = Lineage.from_json(value)
            return Verified(path, kind, lineage, lineage.verify())
        record, problems = read_run_record(value)
        return Verified(path, kind, record, problems + record.verify(path.parent))
    except (ValueError, TypeError, OSError) as error:
        return Verified(path, kind, None, [str(error)])
