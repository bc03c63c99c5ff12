"""`kdo verify` on adapters and on presets that carry them."""

from pathlib import Path

import keras
import pytest

from keras_diffusion_opd.adapters import save_to_preset
from keras_diffusion_opd.cli import main
from keras_diffusion_opd.provenance import RunRecord
from tests.adapters.tools import mlp, random_adapter


@pytest.fixture
def model() -> keras.Model:
    return mlp()


def flip_last_bit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def said(path: Path, status: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["verify", str(path)]) == status
    found = capsys.readouterr()
    return found.out + found.err


def test_adapter_holds_until_a_bit_changes(
    model: keras.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "style"
    random_adapter("style", model).save(path)
    for place in (path, path / "adapter_model.safetensors"):
        text = said(place, 0, capsys)
        assert "(adapter)" in text and text.endswith("Everything holds.\n")
    flip_last_bit(path / "adapter_model.safetensors")
    assert "DOES NOT HOLD: adapter_model.safetensors has tensors of digest" in said(path, 1, capsys)
    (path / "adapter_model.safetensors").unlink()
    assert "DOES NOT HOLD" in said(path, 1, capsys)


def test_preset_names_the_adapter_that_does_not_hold_and_reads_its_records_too(
    model: keras.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "preset").mkdir()
    save_to_preset(tmp_path / "preset", [random_adapter(name, model) for name in ("code", "math")])
    RunRecord("tokens").save(tmp_path / "preset" / "run.json")
    text = said(tmp_path / "preset", 0, capsys)
    assert "(adapters of a preset)" in text and "(run record)" in text
    flip_last_bit(tmp_path / "preset" / "adapters" / "math" / "adapter_model.safetensors")
    text = said(tmp_path / "preset", 1, capsys)
    assert "DOES NOT HOLD: `math`" in text and "`code`" not in text


def test_directory_without_anything_has_nothing_to_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapters").mkdir()
    assert "holds none of them" in said(tmp_path, 2, capsys)
