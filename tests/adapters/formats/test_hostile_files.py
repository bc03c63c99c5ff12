"""Files that want harm, or are merely broken: a clear error, little memory, and a bank that stays as it was."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keras_diffusion_opd.adapters import Adapter, AdapterBank
from keras_diffusion_opd.adapters.formats import verify_file
from keras_diffusion_opd.adapters.formats.archive import read_tensors, write_tensors
from tests.adapters.tools import mlp, random_adapter, same_bits, values

NAME = "adapter_model.safetensors"
MUTATIONS = 2000


@pytest.fixture(scope="module")
def model() -> Any:
    return mlp()


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: Any = (2,), start: int = 0, stop: int = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, stop]}


EIGHT = b"\0" * 8
HOSTILE = {
    "empty": (b"", "no safetensors"),
    "header of 2^63 bytes": (safetensors({}, length=2**63), "no safetensors"),
    "header longer than the file": (safetensors({}, length=64), "no safetensors"),
    "no JSON": (safetensors(b"{]"), "does not read"),
    "no UTF-8": (safetensors(b"\xff\xfe"), "does not read"),
    "nested deeply": (safetensors(b"[" * 100_000), "does not read"),
    "a list": (safetensors([]), "must name"),
    "a name twice": (safetensors(b'{"a":{},"a":{}}'), "given twice"),
    "NaN": (safetensors(b'{"a":NaN}'), "no JSON"),
    "2^60 numbers": (safetensors({"a": entry((2**30, 2**30))}, EIGHT), "bytes, and its range"),
    "overflowing product": (safetensors({"a": entry((2**32, 2**32))}, EIGHT), "bytes, and its range"),
    "2^64 as a size": (safetensors({"a": entry((2**64,))}, EIGHT), "no shape"),
    "negative size": (safetensors({"a": entry((-2,))}, EIGHT), "no shape"),
    "a size that is no number": (safetensors({"a": entry(["2"])}, EIGHT), "no shape"),
    "true as a size": (safetensors({"a": entry([True])}, EIGHT), "no shape"),
    "nine axes": (safetensors({"a": entry((1,) * 9)}, EIGHT), "no shape"),
    "beyond the end": (safetensors({"a": entry((2,), 8, 16)}, EIGHT), "no range"),
    "backwards": (safetensors({"a": entry((2,), 8, 0)}, EIGHT), "no range"),
    "overlap": (safetensors({"a": entry(), "b": entry((1,), 4, 8)}, EIGHT), "overlaps"),
    "hole": (safetensors({"a": entry((1,), 4, 8)}, EIGHT), "hole"),
    "left over": (safetensors({"a": entry((1,), 0, 4)}, EIGHT), "belong to no tensor"),
    "wrong dtype": (safetensors({"a": entry(dtype="I64", shape=(1,))}, EIGHT), "dtype 'I64'"),
    "dtype that is no text": (safetensors({"a": entry(dtype=["F32"])}, EIGHT), "dtype"),
    "more keys": (safetensors({"a": {**entry(), "pickle": "x"}}, EIGHT), "must have dtype"),
    "metadata that are no text": (safetensors({"__metadata__": {"a": 1}}), "hold strings"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_header_is_refused_without_allocating(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message):
            read_tensors(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_size_is_looked_at_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.truncate(2**40)  # sparse: a terabyte that takes no space
    with pytest.raises(ValueError, match="max_bytes"):
        read_tensors(path)
    path.unlink()
    write_tensors(path, {"a": np.zeros(1000, "float32")}, {})
    with pytest.raises(ValueError, match="`max_bytes` allows 1000"):
        read_tensors(path, 1000)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises((ValueError, OSError)):
        read_tensors(tmp_path / "folder")


def test_links_out_of_a_directory_are_refused_and_those_of_a_cache_are_read(model: Any, tmp_path: Path) -> None:
    adapter = random_adapter("a", model)
    adapter.save(tmp_path / "real")
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((tmp_path / "real" / "adapter_config.json").read_bytes())
    os.symlink(tmp_path / "real" / NAME, folder / NAME)
    with pytest.raises(ValueError, match="link to a file outside"):
        Adapter.load(folder, model)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for digit, name in enumerate(("adapter_config.json", NAME)):
        blob = blobs / (str(digit) * 64)
        blob.write_bytes((tmp_path / "real" / name).read_bytes())
        os.symlink(Path("..", "..", "blobs", blob.name), snapshot / name)
    assert Adapter.load(snapshot, model).digest == adapter.digest


def test_names_lead_nowhere(model: Any, tmp_path: Path) -> None:
    adapter = random_adapter("a", model)
    for name in ("../../etc/passwd", "/tmp/x", "a/b", "a\\b", "..", "x\0"):
        with pytest.raises(ValueError, match="name"):
            adapter.renamed(name)
    part = next(iter(adapter.parts.values()))
    strange = Adapter("strange", {"../../head": part})
    with pytest.raises(ValueError, match="does not have"):
        strange.check_fits(model)
    strange.save(tmp_path / "strange")  # a path of a layer is a key within the file, and nothing else
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["adapter_config.json", NAME, "strange"]
    with pytest.raises(ValueError, match="belong"):
        Adapter.load(tmp_path / "strange", model)


def test_changed_content_does_not_hold_its_digest(model: Any, tmp_path: Path) -> None:
    random_adapter("a", model).save(tmp_path / "a")
    path = tmp_path / "a" / NAME
    assert verify_file(path) == []
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert "is noted" in verify_file(path)[0]


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """`data` with one to four changes: bytes, cuts, doublings, digits of the header."""
    changed = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        kind, at = rng.integers(6), int(rng.integers(len(changed) or 1))
        if kind == 0 and changed:
            changed[at] = rng.integers(256)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = bytes(rng.integers(0, 256, int(rng.integers(1, 9)), "uint8"))
        elif kind == 3:
            del changed[at : at + int(rng.integers(1, 9))]
        elif kind == 4:  # a digit of the header
            digits = [i for i, byte in enumerate(changed[8:600], start=8) if 48 <= byte < 58]
            if digits:
                changed[digits[int(rng.integers(len(digits)))]] = 48 + int(rng.integers(10))
        else:
            changed[at:at] = changed[at : at + 32]
    return bytes(changed)


def test_2000_mutations_give_a_clear_error_or_an_adapter_that_is_sound(model: Any, tmp_path: Path) -> None:
    bank = AdapterBank(model, ".*", slots=1, max_rank=2, max_stack=1)
    random_adapter("a", model).save(tmp_path / "a")
    bank.add(Adapter.load(tmp_path / "a", model))
    before = values(bank)
    sound = {name: (tmp_path / "a" / name).read_bytes() for name in (NAME, "adapter_config.json")}
    rng = np.random.default_rng(0)
    refused = 0
    tracemalloc.start()
    try:
        for index in range(MUTATIONS):
            name = NAME if index % 4 else "adapter_config.json"
            data = mutated(sound[name], rng)
            (tmp_path / "a" / name).write_bytes(data)
            try:
                loaded = Adapter.load(tmp_path / "a", model)
                assert all(np.isfinite(part.delta()).all() for part in loaded.parts.values())
            except (ValueError, TypeError) as error:
                refused += 1
                assert len(str(error)) > 10
            (tmp_path / "a" / name).write_bytes(sound[name])
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()
    assert refused > MUTATIONS / 2  # the others changed numbers to other numbers, or a name
    assert same_bits(values(bank), before) and bank.names == ["a"]
    bank.detach()
