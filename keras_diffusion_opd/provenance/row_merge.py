"""Several writers' shards become one store, and a store is verified."""

import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from keras_diffusion_opd.provenance.canonical import canonical_json
from keras_diffusion_opd.provenance.digests import text_digest
from keras_diffusion_opd.provenance.files import file_digest, open_regular, remove_left_over
from keras_diffusion_opd.provenance.records import header, open_record
from keras_diffusion_opd.provenance.row_manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    check_settings,
    read_canonical,
    shard_name,
    shard_number,
    write_canonical,
    writer_name,
    writer_number,
)
from keras_diffusion_opd.provenance.row_shard import Column, Shard, StoredRow, StoreError

_WRITER_KIND = "teacher_store_writer"


class Writer(NamedTuple):
    """One writer: its number, the settings it writes with, and, when it is done, how many shards and rows."""

    number: int
    settings: Mapping[str, Any]
    shards: int | None = None
    rows: int | None = None

    def save(self, folder: Path) -> None:
        """Write `writer-0000.json`."""
        content = {**header(_WRITER_KIND), **self._asdict()}
        write_canonical(folder / writer_name(self.number), {**content, "digest": text_digest(canonical_json(content))})

    @classmethod
    def load(cls, folder: Path, number: int) -> "Writer":
        """The record of a writer; StoreError tells what is wrong with it."""
        path = folder / writer_name(number)
        value = read_canonical(path)
        try:
            fields = open_record(value, _WRITER_KIND, (*cls._fields, "digest"))
            content = {key: item for key, item in value.items() if key != "digest"}
            if fields.pop("digest") != text_digest(canonical_json(content)) or fields["number"] != number:
                raise ValueError("it was changed after it was written.")
            check_settings(fields["settings"])
            if not all(n is None or (type(n) is int and n > 0) for n in (fields["shards"], fields["rows"])):
                raise ValueError("`shards` and `rows` must be null or whole numbers of at least 1.")
        except (ValueError, TypeError) as error:
            raise StoreError(f"{path} is damaged: {error}") from None
        return cls(**fields)


def refuse_other_settings(first: Mapping[str, Any], other: Mapping[str, Any], where: str) -> None:
    """StoreError that names every setting in which a store differs from what is to be written or expected."""
    for name in first:
        if first[name] == other.get(name):
            continue
        here, there = first[name], other.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            inner = next(key for key in [*here, *there] if here.get(key) != there.get(key))
            name, here, there = f"{name}[{inner!r}]", here.get(inner), there.get(inner)
        raise StoreError(
            f"{where} has other settings: `{name}` is {_short(there)} there, and {_short(here)} here. Write with the "
            "same settings, or to another directory."
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def merge_rows(
    folder: Path,
    *,
    allow_duplicates: bool,
    visit: Callable[[Mapping[str, Any], StoredRow, str], Any],
    summary: Callable[[], Any],
) -> Manifest:
    """Write the manifest of a store whose writers are all done.

    Every row is read and held against its digests. What the manifest says depends on the shards alone.

    Args:
        folder: of the store.
        allow_duplicates: whether a row may come from two writers.
        visit: called with the settings, every row, and where it is from; may raise StoreError.
        summary: gives the manifest's summary, after all rows.

    Returns:
        The manifest.

    Raises:
        StoreError: a writer or a shard is missing, damaged or too many; settings differ; writers wrote equal rows.
    """
    if (folder / MANIFEST).exists():
        manifest = Manifest.load(folder)
        _remove_writers(folder)
        return manifest
    writers = _all_writers(folder)
    settings = writers[0].settings
    columns = [Column.from_json(column) for column in settings["columns"]]
    names = [shard_name(writer.number, index) for writer in writers for index in range(writer.shards or 0)]
    _refuse_extra(folder, {*names, *(writer_name(writer.number) for writer in writers)})
    entries: list[ShardEntry] = []
    owners: dict[tuple[Any, ...], tuple[int, str, int]] = {}
    for name in names:
        shard = Shard(folder / name, columns)
        number, _ = shard_number(name) or (0, 0)
        for index, row in enumerate(shard.read(range(shard.rows))):
            owner = owners.setdefault(row[:3], (number, name, index)) if len(writers) > 1 else (number, name, index)
            if owner[0] != number and not allow_duplicates:
                raise StoreError(
                    f"{folder}: row {index} of {name} is the same as row {owner[2]} of {owner[1]}, from another "
                    "writer. Give every writer its own share of the batches, or pass allow_duplicates=True."
                )
            visit(settings, row, f"row {index} of {folder / name}")
        entries.append(ShardEntry(name, shard.rows, shard.bytes, file_digest(folder / name), shard.index_sha256))
    manifest = Manifest(settings, entries, summary())
    for writer in writers:
        rows = manifest.rows_of(writer.number)
        if rows != writer.rows:
            raise StoreError(f"{folder}: writer {writer.number} wrote {writer.rows} rows, and its shards have {rows}.")
    manifest.save(folder)
    _remove_writers(folder)
    return manifest


def _all_writers(folder: Path) -> list[Writer]:
    numbers = sorted(n for path in folder.iterdir() if (n := writer_number(path.name)) is not None)
    if not numbers:
        raise StoreError(f"{folder} must hold the shards of a store. It has neither {MANIFEST} nor {writer_name(0)}.")
    writers = [Writer.load(folder, number) for number in numbers]
    for writer in writers[1:]:
        refuse_other_settings(writers[0].settings, writer.settings, str(folder / writer_name(writer.number)))
    count = writers[0].settings["writers"]
    lacking = sorted(set(range(count)) - set(numbers))
    if lacking or numbers[-1] >= count:
        raise StoreError(f"{folder} is written by {count} writers. Missing are {lacking}, present {numbers}.")
    working = [writer.number for writer in writers if writer.shards is None]
    if working:
        raise StoreError(f"{folder}: the writers {working} are not done. Start them again with the same settings.")
    return writers


def _refuse_extra(folder: Path, expected: set[str]) -> None:
    found = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    missing, extra = sorted(expected - found), sorted(found - expected)
    if missing or extra:
        raise StoreError(f"{folder} must hold the files of its writers. Missing: {missing[:9]}; others: {extra[:9]}.")


def _remove_writers(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if writer_number(path.name) is not None:
            path.unlink(missing_ok=True)
            remove_left_over(folder, path.name)
    remove_left_over(folder, MANIFEST)


def verify_rows(
    folder: Path, visit: Callable[[StoredRow, str], Any] | None = None
) -> tuple[Manifest | None, list[str]]:
    """Everything that does not hold of a store: one sentence for each thing.

    Args:
        folder: of the store.
        visit: None, or called with every row that holds, and where it is from; may raise StoreError.

    Returns:
        The manifest, or None where it cannot be read, and the problems.
    """
    try:
        manifest = Manifest.load(folder)
    except (StoreError, OSError) as error:
        return None, [str(error)]
    problems = []
    known = {entry.sha256: entry.file for entry in manifest.shards}
    for entry in manifest.shards:
        problems += list(_shard_problems(folder, entry, manifest.columns, known, visit))
    expected = {MANIFEST, *(entry.file for entry in manifest.shards)}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            problems.append(f"{path} is what a killed process left. Remove it.")
        elif path.name not in expected:
            problems.append(f"{path} does not belong to the store.")
    return manifest, problems


def _shard_problems(
    folder: Path,
    entry: ShardEntry,
    columns: list[Column],
    known: Mapping[str, str],
    visit: Callable[[StoredRow, str], Any] | None,
) -> Iterator[str]:
    path = folder / entry.file
    try:
        with open_regular(path):
            found = file_digest(path)
        if found != entry.sha256:
            whose = f": it is that of {known[found]}" if found in known else ""
            yield f"{path}: its content is not the one recorded ({found[:12]}, not {entry.sha256[:12]}){whose}."
        shard = open_shard(folder, entry, columns, check_index=False)
        if shard.index_sha256 != entry.index_sha256:
            yield f"{path}: the digests or counts of its rows are not those recorded."
        for row in range(shard.rows):
            try:
                for stored in shard.read([row]):
                    if visit is not None:
                        visit(stored, f"row {row} of {path}")
            except StoreError as error:
                yield str(error)
    except FileNotFoundError:
        yield f"{path} is missing."
    except (ValueError, OSError) as error:
        yield str(error)


def check_size(folder: Path, entry: ShardEntry) -> None:
    """StoreError unless an entry's file is there, is a file itself, and has the bytes recorded. It is not read."""
    path = folder / entry.file
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise StoreError(f"{path} is missing.") from None
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} must be a file. It is a link or something else.")
    if found.st_size != entry.bytes:
        raise StoreError(f"{path} is damaged: it has {found.st_size} bytes, not {entry.bytes}.")


def open_shard(folder: Path, entry: ShardEntry, columns: list[Column], *, check_index: bool = True) -> Shard:
    """The shard of an entry of the manifest; StoreError where it is not the one recorded."""
    shard = Shard(folder / entry.file, columns)
    if (shard.rows, shard.bytes) != (entry.rows, entry.bytes):
        raise StoreError(
            f"{shard.path} is damaged: it has {shard.rows} rows in {shard.bytes} bytes, not "
            f"{entry.rows} in {entry.bytes}."
        )
    if check_index and shard.index_sha256 != entry.index_sha256:
        raise StoreError(f"{shard.path} is damaged: the digests or counts of its rows are not those recorded.")
    return shard
