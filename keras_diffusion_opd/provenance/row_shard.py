"""A shard: some rows of a store in one safetensors file, each row readable alone and known by digests.

The tensors of the file, in this order:

- `digests`: uint8 (rows, 3, 16): of the row's ids, of all that was given (source), of what the teacher said.
- `counts`: uint32 (rows, ragged columns): how many items the row has in each ragged column.
- the columns: (rows, *item), or (items of all rows, *item) where ragged.

Header and first two tensors are the index: all that has to be read before any row can be. The whole form of a
file follows from the columns and from the number of rows and items, so that a header either has the one text
that it can have, or is refused before anything is read by it.
"""

import hashlib
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from keras_diffusion_opd.provenance.files import open_regular, parse_json
from keras_diffusion_opd.provenance.records import take_keys
from keras_diffusion_opd.provenance.tensor_file import item_bytes, tensor_header

DIGEST_BYTES = 16
_LARGEST_HEADER = 2**20
_MOST_ITEMS = 2**32 - 1
_LARGEST_ITEM = 2**40
_COLUMN_NAME = re.compile(r"[a-z][a-z_]*(\.[a-z0-9_]+)?")


class StoreError(ValueError):
    """A store, or a file of one, is damaged, incomplete, or not the one that is expected."""


class Column(NamedTuple):
    """One column of a store.

    `item` is the shape of one item; a row has one item, or any number of them where `ragged`.
    """

    name: str
    dtype: str
    item: tuple[int, ...]
    ragged: bool

    @property
    def bytes(self) -> int:
        """Of one item."""
        return item_bytes(self.dtype) * math.prod(self.item)

    @property
    def of_teacher(self) -> bool:
        """Whether the teacher said it; all else was given."""
        return self.name.startswith("teacher.")

    def to_json(self) -> dict[str, Any]:
        """JSON values; `from_json` is the inverse."""
        return {"name": self.name, "dtype": self.dtype, "item": list(self.item), "ragged": self.ragged}

    @classmethod
    def from_json(cls, value: Any) -> "Column":
        """The column that `to_json` wrote; ValueError for anything else."""
        fields = take_keys(value, "column", ("name", "dtype", "item", "ragged"))
        name, dtype, item, ragged = (fields[key] for key in ("name", "dtype", "item", "ragged"))
        if not (isinstance(name, str) and _COLUMN_NAME.fullmatch(name)):
            raise ValueError(f"a column's `name` must be such as 'inputs.0'. Received {name!r}.")
        try:
            item_bytes(dtype)
        except (KeyError, TypeError):
            raise ValueError(f"`dtype` of column {name} is not known: {dtype!r}.") from None
        sizes = (
            isinstance(item, list) and len(item) <= 8 and all(type(n) is int and 0 <= n <= _MOST_ITEMS for n in item)
        )
        if not sizes or type(ragged) is not bool:
            raise ValueError(f"column {name} must have a list of sizes as `item` and true or false as `ragged`.")
        column = cls(name, dtype, tuple(item), ragged)
        if column.bytes > _LARGEST_ITEM:
            raise ValueError(f"an item of column {name} must have at most {_LARGEST_ITEM} bytes: {column.bytes}.")
        return column


class StoredRow(NamedTuple):
    """One row: its three digests, its items in each ragged column, its data in each column."""

    ids: bytes
    source: bytes
    targets: bytes
    counts: tuple[int, ...]
    data: tuple[bytes, ...]


def row_content_digests(columns: Sequence[Column], data: Sequence[bytes]) -> tuple[bytes, bytes]:
    """BLAKE2b-128 of the row's columns that were given, and of those that the teacher said.

    Hashed are, for each column in turn, the number of bytes as little-endian int64 and the bytes.
    """
    hashes = hashlib.blake2b(digest_size=DIGEST_BYTES), hashlib.blake2b(digest_size=DIGEST_BYTES)
    for column, part in zip(columns, data, strict=True):
        hashes[column.of_teacher].update(len(part).to_bytes(8, "little"))
        hashes[column.of_teacher].update(part)
    return hashes[0].digest(), hashes[1].digest()


def pack_shard(columns: Sequence[Column], rows: Sequence[StoredRow]) -> bytes:
    """The content of a shard's file."""
    if any(count > _MOST_ITEMS for row in rows for count in row.counts):
        raise ValueError(f"a row must have at most {_MOST_ITEMS} items in a column.")
    counts = np.array([row.counts for row in rows], "<u4").reshape(len(rows), -1)
    digests = b"".join(itertools.chain.from_iterable((row.ids, row.source, row.targets) for row in rows))
    header = _header(columns, len(rows), [int(n) for n in counts.sum(axis=0, dtype="int64")])
    data = (row.data[index] for index in range(len(columns)) for row in rows)
    return b"".join([header, digests, counts.tobytes(), *data])


def _header(columns: Sequence[Column], rows: int, totals: Sequence[int]) -> bytes:
    return tensor_header(_forms(columns, rows, totals))


def _forms(columns: Sequence[Column], rows: int, totals: Sequence[int]) -> dict[str, tuple[str, list[int]]]:
    forms: dict[str, tuple[str, list[int]]] = {
        "digests": ("uint8", [rows, 3, DIGEST_BYTES]),
        "counts": ("uint32", [rows, len(totals)]),
    }
    sizes = iter(totals)
    for column in columns:
        forms[column.name] = (column.dtype, [next(sizes) if column.ragged else rows, *column.item])
    return forms


class Shard:
    """The index of a shard's file; rows are read one by one.

    Args:
        path: the file.
        columns: of the store.

    Raises:
        StoreError: it is missing, no file, or has another form than that of a shard with these columns.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self.path, self.columns = path, tuple(columns)
        with self._open() as file:
            self.bytes = os.fstat(file.fileno()).st_size
            header, self.rows, totals = self._read_header(file)
            index = _exactly(file, len(header), self.rows * (3 * DIGEST_BYTES + 4 * len(totals)), path)
        self.index_sha256 = hashlib.sha256(header + index).hexdigest()
        cut = self.rows * 3 * DIGEST_BYTES
        self.digests = np.frombuffer(index, "uint8", cut).reshape(self.rows, 3, DIGEST_BYTES)
        self.counts = np.frombuffer(index, "<u4", offset=cut).reshape(self.rows, len(totals)).astype("int64")
        if [int(n) for n in self.counts.sum(axis=0)] != totals:
            raise StoreError(f"{path} is damaged: the items of its rows do not add up to those of its columns.")
        self._places = self._column_places(len(header) + len(index), totals)

    def _open(self) -> BinaryIO:
        try:
            return open_regular(self.path)
        except FileNotFoundError:
            raise StoreError(f"{self.path} is missing.") from None
        except ValueError as error:
            raise StoreError(str(error)) from None

    def _read_header(self, file: BinaryIO) -> tuple[bytes, int, list[int]]:
        """The header's bytes, the number of rows and the items of the ragged columns, all checked."""
        length = int.from_bytes(_exactly(file, 0, 8, self.path), "little")
        if length > min(_LARGEST_HEADER, self.bytes - 8):
            raise StoreError(f"{self.path} is damaged: its header would have {length} bytes.")
        text = _exactly(file, 8, length, self.path)
        try:
            entries = parse_json(text, self.path)
            rows = entries["digests"]["shape"][0]
            totals = [entries[column.name]["shape"][0] for column in self.columns if column.ragged]
        except (ValueError, LookupError, TypeError) as error:
            raise StoreError(f"{self.path} is damaged: its header is not that of a shard ({error}).") from None
        if not all(type(n) is int and 0 <= n <= self.bytes for n in [rows, *totals]) or rows < 1:
            raise StoreError(f"{self.path} is damaged: it cannot hold {rows} rows with {totals} items in its bytes.")
        header = _header(self.columns, rows, totals)
        if header != length.to_bytes(8, "little") + text:
            raise StoreError(f"{self.path} is damaged: its header is not that of a shard with the store's columns.")
        expected = len(header) + rows * (3 * DIGEST_BYTES + 4 * len(totals)) + sum(self._column_bytes(rows, totals))
        if expected != self.bytes:
            raise StoreError(f"{self.path} is damaged: it has {self.bytes} bytes, not the {expected} of its header.")
        return header, rows, totals

    def _column_bytes(self, rows: int, totals: Sequence[int]) -> list[int]:
        sizes = iter(totals)
        return [column.bytes * (next(sizes) if column.ragged else rows) for column in self.columns]

    def _column_places(self, start: int, totals: Sequence[int]) -> list[np.ndarray]:
        """For every column int64 (rows + 1,): where each row's data begin in the file, and where the last ends."""
        places, ragged = [], 0
        for column, size in zip(self.columns, self._column_bytes(self.rows, totals), strict=True):
            items = np.ones(self.rows, "int64")
            if column.ragged:
                items, ragged = self.counts[:, ragged], ragged + 1
            places.append(start + np.concatenate([[0], np.cumsum(items * column.bytes)]))
            start += size
        return places

    def read(self, rows: Sequence[int]) -> Iterator[StoredRow]:
        """The given rows in turn, each checked against its digests.

        Raises:
            StoreError: a row's content is not the one that its digests are of.
            OSError: it cannot be read.
        """
        with self._open() as file:
            for row in rows:
                data = tuple(
                    _exactly(file, int(place[row]), int(place[row + 1] - place[row]), self.path)
                    for place in self._places
                )
                ids, source, targets = (self.digests[row, part].tobytes() for part in range(3))
                found = row_content_digests(self.columns, data)
                if found != (source, targets):
                    which = "the source" if found[0] != source else "what the teacher said"
                    raise StoreError(
                        f"{self.path} is damaged: row {row} of it does not belong, its digest is not that of {which}."
                    )
                yield StoredRow(ids, source, targets, tuple(int(n) for n in self.counts[row]), data)


def _exactly(file: BinaryIO, start: int, size: int, path: Path) -> bytes:
    file.seek(start)
    data = file.read(size)
    while len(data) < size:
        more = file.read(size - len(data))
        if not more:
            raise StoreError(f"{path} is damaged: it ends after {start + len(data)} bytes, in the middle of its data.")
        data += more
    return data
