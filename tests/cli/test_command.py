"""`kdo` as people run it: a process of its own."""

import os
import subprocess
import sys
import types

import pytest

from keras_diffusion_opd.cli import command
from keras_diffusion_opd.version import __version__
from tests.cli.process import ROOT, kdo


def test_version() -> None:
    run = kdo("--version")
    assert (run.returncode, run.stdout) == (0, f"kdo {__version__}\n")


def test_help_suffices_and_needs_no_backend() -> None:
    run = kdo("--help", KERAS_BACKEND="none of them")
    assert run.returncode == 0
    for name in ("doctor", "demo", "verify", "card"):
        assert f"    {name} " in run.stdout
        assert kdo(name, "--help", KERAS_BACKEND="none of them").returncode == 0


def test_help_imports_neither_keras_nor_numpy() -> None:
    code = (
        "import sys\nfrom keras_diffusion_opd.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'keras', 'numpy', 'jax', 'tensorflow', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ((), "usage: kdo"),
        (("nonsense",), "invalid choice: 'nonsense'"),
        (("demo",), "the following arguments are required: name"),
        (("demo", "nonsense"), "invalid choice: 'nonsense' (choose from"),
        (("verify",), "the following arguments are required: path"),
        (("verify", "/nowhere/run.json"), "/nowhere/run.json does not exist"),
        (("card", "/nowhere"), "/nowhere does not exist"),
        (
            ("card", os.path.dirname(__file__)),
            "must hold run.json, lineage.json, checkpoint.json, store.json",
        ),
    ],
)
def test_wrong_use_is_told_on_stderr_with_status_2(arguments: tuple[str, ...], phrase: str) -> None:
    run = kdo(*arguments)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert phrase in run.stderr + (run.stdout if not arguments else "")


def test_doctor_tells_backend_and_devices() -> None:
    run = kdo("doctor")
    assert run.returncode == 0, run.stdout + run.stderr
    backend = os.environ["KERAS_BACKEND"]
    assert f"backend: {backend} (from the environment variable KERAS_BACKEND)" in run.stdout
    assert "devices: cpu" in run.stdout and run.stdout.endswith("Ready.\n")
    for name in ("keras", "numpy", "safetensors", backend):
        assert f"  {name} " in run.stdout


def test_doctor_tells_a_backend_that_is_not_there() -> None:
    run = kdo("doctor", KERAS_BACKEND="jux")
    assert run.returncode == 1
    problem = "PROBLEM: the environment variable KERAS_BACKEND asks for jux, which is not installed"
    assert problem in run.stdout


# A demo gets all that follows its name, and says what it misses.


def with_demo(monkeypatch: pytest.MonkeyPatch, main: object) -> None:
    module = types.ModuleType("keras_diffusion_opd.demos.fake")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(command.DEMOS, "fake", "for this test")


def test_demo_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    with_demo(monkeypatch, seen.append)
    assert command.main(["demo", "fake", "--help", "--seed", "1", "x"]) == 0
    assert seen == [["--help", "--seed", "1", "x"]]


def test_status_of_a_demo_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with_demo(monkeypatch, lambda _: 3)
    assert command.main(["demo", "fake"]) == 3


def test_package_that_a_demo_misses_is_told_with_the_mend(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: list[str]) -> None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn.datasets")

    with_demo(monkeypatch, main)
    assert command.main(["demo", "fake"]) == 1
    assert "needs sklearn, which is not installed" in (said := capsys.readouterr().err)
    assert "pip install 'keras-diffusion-opd[demo]'" in said


def test_fault_inside_a_demo_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(_: list[str]) -> None:
        raise ModuleNotFoundError("No module named 'own'", name="own")

    with_demo(monkeypatch, main)
    with pytest.raises(ModuleNotFoundError, match="own"):
        command.main(["demo", "fake"])


def test_interrupted_demo_has_status_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: list[str]) -> None:
        raise KeyboardInterrupt

    with_demo(monkeypatch, main)
    assert command.main(["demo", "fake"]) == 130
    assert capsys.readouterr().err == "kdo: interrupted\n"
