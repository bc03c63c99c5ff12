"""Files that were damaged or made up: an error that names the file, or the data that were written. Never else."""

import json
import os
import random
import tracemalloc

import numpy as np
import pytest

from keras_diffusion_opd.data import StoreError, TeacherStore
from keras_diffusion_opd.provenance import canonical_json, text_digest
from keras_diffusion_opd.provenance.row_merge import verify_rows
from tests.stores import batches, content, write

MUTATIONS = 2200
SHARDS = [f"shard-0000-00000{i}.safetensors" for i in range(3)]
MOST_BYTES = 4 * 2**20  # of memory for a store of 15 kB: nothing is taken on the word of a file


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Every file of a small store, and every row of it."""
    folder = tmp_path_factory.mktemp("hostile") / "s"
    store = write(folder, batches(3, stamped=True), rows_per_shard=3)
    return content(folder), rows_of(store)


def rows_of(store):
    """Every row as bytes, in a form in which rows can be compared."""
    rows = []
    for index in range(len(store)):
        x, y, weights = store[index].as_fit()
        arrays = [*x.values(), y["target_ids"], *(next(iter(y["teacher"].values()))).values(), weights]
        rows.append([(a.dtype.name, a.shape, a.tobytes()) for a in arrays] + [store[index].stamp.to_json()])
    return rows


def lay_out(folder, files):
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


def judge(folder, expected):
    """What a store says of files that are not as they were: an error of ours, or nothing but the truth."""
    try:
        store = TeacherStore.open(folder)
        found = rows_of(store)
    except StoreError as error:
        assert str(folder) in str(error), f"the error must name the file: {error}"
        return "refused"
    assert found == expected, "other data than were written"
    return "harmless"


# ---- mutations -----------------------------------------------------------------------------------------------


def flip(data, chance):
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def flip_early(data, chance):
    return flip(data[:400], chance) + data[400:]


def cut(data, chance):
    return data[: chance.randrange(len(data))]


def append(data, chance):
    return data + bytes(chance.randrange(256) for _ in range(chance.randrange(1, 40)))


def overwrite(data, chance):
    size = chance.choice([1, 2, 4, 8, 16])
    place = chance.randrange(len(data) - size)
    filling = chance.choice([b"\xff", b"\x00", b"\x7f", b"9", b"["]) * size
    return data[:place] + filling + data[place + size :]


def double(data, chance):
    start = chance.randrange(len(data))
    end = min(len(data), start + chance.randrange(1, 200))
    return data[:end] + data[start:end] + data[end:]


def drop(data, chance):
    start = chance.randrange(len(data))
    return data[:start] + data[start + chance.randrange(1, 200) :]


def lie_about_the_header(data, chance):
    return chance.choice([0, 1, 2**20, 2**31, 2**63 - 1, 2**64 - 1, len(data)]).to_bytes(8, "little") + data[8:]


HOSTILE_NUMBERS = [-1, 0, 1, 2, 2**31, 2**53, 2**63, 10**30, 1.5, None, True, "3", [], {}]


def edit_header(data, chance):
    """Another number, name or type somewhere in a shard's header, whose length agrees."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = chance.choice(list(header))
    entry = header[name]
    what = chance.choice(["dtype", "shape", "data_offsets", "rename", "remove", "add", "deep", "twice"])
    if what == "dtype":
        entry["dtype"] = chance.choice(["F64", "U8", "F32", "X", 3, None])
    elif what in ("shape", "data_offsets") and entry[what]:
        entry[what][chance.randrange(len(entry[what]))] = chance.choice(HOSTILE_NUMBERS)
    elif what == "rename":
        header[name + "x"] = header.pop(name)
    elif what == "remove":
        del header[name]
    elif what == "add":
        header["__metadata__"] = {"a": "b"}
    text = json.dumps(header, separators=(",", ":")).encode()
    if what == "deep":
        text = b"[" * 100_000 + b"]" * 100_000
    if what == "twice":
        text = text[:-1] + b',"digests":' + json.dumps(entry).encode() + b"}"
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from places(value[index], (*path, index))


OTHER_PLACES = ["../s/" + SHARDS[0], "/etc/passwd", "C:\\x", "", ".", "a\x00b"]
PATHS = [*OTHER_PLACES, "shard-0000-000009.safetensors", "shard-0000-000000.SAFETENSORS"]


def edit_manifest(data, chance):
    """Another value somewhere in the manifest, with a digest that agrees: only what it says can give it away."""
    value = json.loads(data)
    path = chance.choice([p for p in places(value) if p and p[0] != "digest"])
    parent = value
    for step in path[:-1]:
        parent = parent[step]
    old = parent[path[-1]]
    new = chance.choice([*HOSTILE_NUMBERS, *PATHS, "remove", "double", "f" * 64, [[[[]]]]])
    if new == "remove":
        parent.pop(path[-1])
    elif new == "double" and isinstance(parent, list):
        parent.insert(path[-1], old)
    elif isinstance(old, str) and chance.random() < 0.5:
        parent[path[-1]] = chance.choice(PATHS)
    else:
        parent[path[-1]] = new
    return sealed(value)


def sealed(value):
    """A manifest as JSON, with the digest of what it says."""
    content = {key: item for key, item in value.items() if key != "digest"}
    try:
        return canonical_json({**content, "digest": text_digest(canonical_json(content))}).encode() + b"\n"
    except (ValueError, TypeError):
        return json.dumps(value).encode()


ANY = [flip, flip, flip_early, cut, append, overwrite, double, drop]


def test_thousands_of_mutations_are_refused_or_harmless(sound, tmp_path):
    files, expected = sound
    chance = random.Random(2024)
    folder = tmp_path / "s"
    lay_out(folder, files)
    assert judge(folder, expected) == "harmless" and verify_rows(folder)[1] == []
    counts = {"refused": 0, "harmless": 0}
    peak = 0
    for number in range(MUTATIONS):
        name = chance.choice([*SHARDS, "store.json", "store.json"])
        special = [edit_manifest] * 6 if name == "store.json" else [edit_header] * 4 + [lie_about_the_header]
        mutate = chance.choice([*ANY, *special])
        changed = mutate(files[name], chance)
        (folder / name).write_bytes(changed)
        measured = number % 10 == 0  # counting memory takes several times as long
        if measured:
            tracemalloc.start()
        verdict = judge(folder, expected)
        if measured:
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        if changed != files[name] and mutate is not edit_manifest:
            # A manifest that is sealed anew may be sound: it is one of other metadata, say. All else may not be.
            assert verdict == "refused", (mutate, name)
            assert number % 4 or any(name in problem for problem in verify_rows(folder)[1]), (mutate, name)
        counts[verdict] += 1
        (folder / name).write_bytes(files[name])
    assert 0 < peak < MOST_BYTES, peak
    assert counts["refused"] > 0.85 * MUTATIONS and sum(counts.values()) == MUTATIONS >= 2000, counts


# ---- what no mutation finds ----------------------------------------------------------------------------------


@pytest.fixture
def folder(sound, tmp_path):
    lay_out(tmp_path / "s", sound[0])
    return tmp_path / "s"


def refused(folder, match):
    with pytest.raises(StoreError, match=match) as caught:
        rows_of(TeacherStore.open(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
@pytest.mark.parametrize("name", [SHARDS[1], "store.json"])
def test_symbolic_link_is_refused_even_to_the_right_content(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    refused(folder, "link")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", [SHARDS[1], "store.json"])
def test_pipe_is_refused_and_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refused(folder, "must be a file")


@pytest.mark.parametrize("name", [SHARDS[1], "store.json"])
def test_directory_in_the_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(folder, "must be a file|Is a directory")


@pytest.mark.parametrize("path", PATHS)
def test_path_out_of_the_store_is_refused_before_anything_is_opened(folder, path, sound):
    value = json.loads(sound[0]["store.json"])
    value["shards"][1]["file"] = path
    (folder / "store.json").write_bytes(sealed(value))
    refused(folder, "`file` of a shard must be a name such as|is not in its place")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"[" * 200_000, "does not read as one"),
        (b'{"a":1,"a":1}\n', "a key is given twice"),
        (b'{"a":NaN}\n', "NaN is no JSON"),
        (b'{"a":1e999}\n', "must be finite"),
        (b'{"a":' + b"9" * 10_000 + b"}\n", "does not read as one"),
        (b"\xff\xfe", "does not read as one"),
        (b"", "does not read as one"),
        (b'{"a": 1}\n', "not the canonical JSON"),
        (b"{}\n", "`format` must be"),
    ],
)
def test_json_that_is_none_of_ours_is_refused(folder, text, match):
    (folder / "store.json").write_bytes(text)
    refused(folder, match)


def test_json_too_large_is_refused_before_it_is_read(folder):
    with open(folder / "store.json", "wb") as file:
        file.truncate(2**30)  # sparse: a gigabyte that takes no room
    tracemalloc.start()
    refused(folder, "must be at most")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MOST_BYTES


def test_manifest_of_another_version_is_refused_by_name(folder, sound):
    value = json.loads(sound[0]["store.json"])
    value["version"] = 2
    (folder / "store.json").write_bytes(sealed(value))
    refused(folder, "`version` of a teacher_store must be 1. Received 2")


def test_row_of_another_store_in_the_place_of_one_is_named(folder, tmp_path):
    """Its data are sound, and are not those of the digest at their place."""
    write(tmp_path / "other", batches(3, seed=8, stamped=True), rows_per_shard=3)
    path, other = folder / SHARDS[0], tmp_path / "other" / SHARDS[0]
    data, foreign = bytearray(path.read_bytes()), other.read_bytes()
    assert len(data) == len(foreign)
    ids = TeacherStore.open(folder)[1].target_ids.tobytes()
    place = bytes(data).index(ids, 2000 if bytes(data).count(ids) > 1 else 0)
    data[place : place + len(ids)] = foreign[place : place + len(ids)]
    path.write_bytes(data)
    refused(folder, r"shard-0000-000000.safetensors is damaged: row 1 of it does not belong")


def test_ids_that_are_not_those_of_their_digest_are_refused_even_where_all_else_agrees(tmp_path):
    """A store made by hand, in which only the digest of the ids tells."""
    from keras_diffusion_opd.provenance import row_shard

    pack, made = row_shard.pack_shard, []

    def forged(columns, rows):
        made.append(len(rows))
        return pack(columns, [row._replace(ids=rows[0].ids) for row in rows])

    import keras_diffusion_opd.data.store.writing as writing

    writing.pack_shard = forged
    try:
        with pytest.raises(StoreError, match="does not belong: its target ids are not those that its digest is of"):
            write(tmp_path / "s", batches(2))
    finally:
        writing.pack_shard = pack
    assert made == [4, 2]


def test_numbers_are_compared_bit_by_bit(sound):
    _, rows = sound
    assert len(rows) == 9 and all(len(row) == 8 for row in rows)
    assert np.frombuffer(rows[0][0][2], "int32").shape == (5,)
