"""The choice of a backend: what is said counts, what is not there is told."""

import json
import os
from pathlib import Path

import pytest

from keras_diffusion_opd.cli import backends, doctor


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of Keras that says nothing, and no variable that does."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "")
    return tmp_path


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(backends, "is_installed", lambda name: name in names)


def test_variable_counts_before_the_file_and_the_file_before_the_default(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backends.configured_backend() == ("tensorflow", "the default of Keras")
    (home / "keras.json").write_text(json.dumps({"backend": "torch"}))
    assert backends.configured_backend() == ("torch", str(home / "keras.json"))
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert backends.configured_backend() == ("jax", "the environment variable KERAS_BACKEND")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_file_that_says_nothing_is_passed_over(home: Path, text: str) -> None:
    (home / "keras.json").write_text(text)
    assert backends.configured_backend()[0] == "tensorflow"


def test_installed_backend_is_left_as_configured(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "tensorflow", "jax")
    assert backends.select_backend() is None and os.environ["KERAS_BACKEND"] == ""


def test_default_that_is_not_there_gives_way_aloud(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, "torch", "jax")
    assert backends.select_backend() is None and os.environ["KERAS_BACKEND"] == "jax"
    assert capsys.readouterr().err == (
        "kdo: the default of Keras asks for tensorflow, which is not installed: using jax.\n"
    )


def test_what_the_user_asks_for_never_gives_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    only(monkeypatch, "torch", "jax")
    assert str(backends.select_backend()).endswith("which is not installed. Set it to jax or torch.")
    assert os.environ["KERAS_BACKEND"] == "tensorflow"


def test_without_any_backend_the_mend_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    assert "pip install 'keras-diffusion-opd[jax]'" in str(backends.select_backend())


# What `kdo doctor` makes of versions.


@pytest.mark.parametrize(
    ("version", "requirement", "met"),
    [
        ("3.15.1", "<3.16,>=3.15", True),
        ("3.15", "<3.16,>=3.15", True),
        ("3.16.0", "<3.16,>=3.15", False),
        ("3.14.9", "<3.16,>=3.15", False),
        ("2.13.0+cpu", ">=2.6", True),
        ("0.10.2", ">=0.7", True),
        ("0.5", ">=0.5", True),
        ("1.9", "", True),
    ],
)
def test_bounds(version: str, requirement: str, met: bool) -> None:
    assert doctor.satisfies(version, requirement) == met


def test_bounds_come_from_the_package_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["keras<3.16,>=3.15", "keras-hub>=0.32; extra == 'hub'", "numpy"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: lines)
    assert doctor.requirement_of("keras") == "<3.16,>=3.15"
    assert doctor.requirement_of("keras-hub") == ">=0.32"
    assert doctor.requirement_of("numpy") == doctor.requirement_of("torch") == ""


def test_doctor_names_what_is_missing_or_too_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"keras": ("keras", "3.16.1"), "numpy": ("numpy", "2.0.0"), "jax": ("jax", "0.10")}
    monkeypatch.setattr(doctor, "installed_version", found.get)
    monkeypatch.setattr(doctor, "requirement_of", lambda name: "<3.16,>=3.15" if name == "keras" else "")
    monkeypatch.setattr(doctor, "select_backend", lambda: "no backend is installed.")
    assert doctor.run(None) == 1  # type: ignore[arg-type]
    said = capsys.readouterr().out.splitlines()
    assert "  torch         missing       pip install 'keras-diffusion-opd[torch]'" in said
    assert [line for line in said if line.startswith("PROBLEM")] == [
        "PROBLEM: keras 3.16.1 is installed, but <3.16,>=3.15 is wanted. pip install 'keras<3.16,>=3.15'",
        "PROBLEM: safetensors is missing. pip install safetensors",
        "PROBLEM: no backend is installed.",
    ]


def test_doctor_tells_of_a_backend_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", fail)
    assert doctor.run(None) == 1  # type: ignore[arg-type]
    assert "does not start: OSError: libcuda.so.1" in capsys.readouterr().out
