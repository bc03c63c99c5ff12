"""Shards: safetensors files whose rows are known by digests, and whose form leaves nothing to a header."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from keras_diffusion_opd.provenance.row_manifest import (
    check_order,
    shard_name,
    shard_number,
    writer_name,
    writer_number,
)
from keras_diffusion_opd.provenance.row_shard import (
    Column,
    Shard,
    StoredRow,
    StoreError,
    pack_shard,
    row_content_digests,
)
from keras_diffusion_opd.provenance.tensor_file import item_bytes, tensor_header

COLUMNS = [
    Column("inputs.0", "int32", (), True),
    Column("inputs.1", "float32", (2,), False),
    Column("inputs.2", "uint8", (3, 1), True),
    Column("teacher.logits", "float16", (4,), True),
]


def row(counts, seed):
    rng = np.random.default_rng(seed)
    items = iter(counts)
    data = tuple(rng.bytes((next(items) if c.ragged else 1) * c.bytes) for c in COLUMNS)
    return StoredRow(rng.bytes(16), *row_content_digests(COLUMNS, data), tuple(counts), data)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=6), st.integers(0, 999))
def test_rows_of_any_lengths_come_back_one_by_one(tmp_path_factory, lengths, seed):
    rows = [row(counts, seed + i) for i, counts in enumerate(lengths)]
    path = tmp_path_factory.mktemp("shard") / "x"
    path.write_bytes(pack_shard(COLUMNS, rows))
    shard = Shard(path, COLUMNS)
    order = np.random.default_rng(seed).permutation(len(rows))
    assert list(shard.read(order)) == [rows[i] for i in order]


def test_shard_is_a_safetensors_file_that_others_read():
    rows = [row((2, 1, 3), 0), row((1, 0, 1), 1)]
    found = load(pack_shard(COLUMNS, rows))
    assert list(found["digests"].shape) == [2, 3, 16] and found["counts"].tolist() == [[2, 1, 3], [1, 0, 1]]
    assert found["inputs.0"].tobytes() == rows[0].data[0] + rows[1].data[0]
    assert found["inputs.1"].shape == (2, 2) and found["teacher.logits"].shape == (4, 4)


def test_digests_are_what_the_format_says():
    data = (b"\1\2\3\4", b"12345678", b"", b"abcdefgh")
    source, teacher = row_content_digests(COLUMNS, data)
    text = b"".join(len(part).to_bytes(8, "little") + part for part in data[:3])
    assert source == hashlib.blake2b(text, digest_size=16).digest()
    assert teacher == hashlib.blake2b((8).to_bytes(8, "little") + b"abcdefgh", digest_size=16).digest()


@pytest.mark.parametrize(
    "columns", [COLUMNS[:3], COLUMNS[::-1], [*COLUMNS[:3], Column("teacher.logits", "bfloat16", (4,), True)]]
)
def test_shard_of_other_columns_is_refused(tmp_path, columns):
    (tmp_path / "x").write_bytes(pack_shard(COLUMNS, [row((2, 1, 3), 0)]))
    with pytest.raises(StoreError, match="is damaged: (its header is not that of|it cannot hold)"):
        Shard(tmp_path / "x", columns)


def test_counts_that_do_not_add_up_are_refused(tmp_path):
    data = bytearray(pack_shard(COLUMNS, [row((2, 1, 3), 0), row((2, 1, 3), 1)]))
    place = bytes(data).index(np.array([2, 1, 3, 2, 1, 3], "<u4").tobytes())
    data[place] = 3
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(StoreError, match="the items of its rows do not add up"):
        Shard(tmp_path / "x", COLUMNS)


@pytest.mark.parametrize(
    "value",
    [
        {"name": "inputs.0", "dtype": "int32", "item": [2**33], "ragged": True},
        {"name": "inputs.0", "dtype": "int32", "item": [2**20, 2**21], "ragged": True},
        {"name": "inputs.0", "dtype": "int32", "item": [-1], "ragged": True},
        {"name": "inputs.0", "dtype": "complex64", "item": [], "ragged": True},
        {"name": "inputs.0", "dtype": ["int32"], "item": [], "ragged": True},
        {"name": "../x", "dtype": "int32", "item": [], "ragged": True},
        {"name": "inputs.0", "dtype": "int32", "item": [], "ragged": 1},
        {"name": "inputs.0", "dtype": "int32", "item": []},
        [],
    ],
)
def test_columns_that_are_none_are_refused(value):
    with pytest.raises(ValueError):
        Column.from_json(value)


def test_columns_come_back_from_json():
    assert [Column.from_json(column.to_json()) for column in COLUMNS] == COLUMNS


@pytest.mark.parametrize(("dtype", "size"), [("bool", 1), ("float8_e4m3fn", 1), ("bfloat16", 2), ("uint64", 8)])
def test_bytes_of_dtypes(dtype, size):
    assert item_bytes(dtype) == size
    header = tensor_header({"x": (dtype, (3, 5))})
    assert f"[0,{size * math.prod((3, 5))}]".encode() in header and len(header) % 8 == 0


def test_names_of_shards_and_writers_are_strict():
    assert shard_number(shard_name(3, 12)) == (3, 12) and shard_name(0, 1_234_567) == "shard-0000-1234567.safetensors"
    assert writer_number(writer_name(7)) == 7
    for name in (
        "shard-0-0.safetensors",
        "shard-00001-000000.safetensors",
        "x/shard-0000-000000.safetensors",
        "writer-7.json",
    ):
        assert shard_number(name) is None and writer_number(name) is None


def test_order_of_shards_has_no_gap_and_no_repetition():
    names = [shard_name(0, 0), shard_name(0, 1), shard_name(1, 0)]
    check_order(names, 2)
    for wrong, writers in ((names[::-1], 2), (names[1:], 2), ([*names, names[-1]], 2), (names, 3), (names[:2], 2)):
        with pytest.raises(ValueError, match="`shards` must be"):
            check_order(wrong, writers)
