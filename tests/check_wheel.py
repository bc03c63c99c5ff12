"""Build the wheel and use it where nothing but the wheel and JAX is installed.

Run by `make wheel`. What the tests run from is the source tree; this is what a user gets.
"""

import email.parser
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "keras_diffusion_opd"

# Runs in the clean environment: every module but those of the other backends, and every public name.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil
import keras_diffusion_opd as kdo

assert "site-packages" in kdo.__file__, kdo.__file__
for name in ("tensorflow", "torch", "sklearn", "matplotlib", "keras_hub", "pytest", "tests"):
    assert importlib.util.find_spec(name) is None, f"the environment is not clean: {name}"
modules = [m.name for m in pkgutil.walk_packages(kdo.__path__, "keras_diffusion_opd.")]
modules = [m for m in modules if m.split(".")[-1] not in ("_tensorflow", "_torch", "__main__")]
for module in modules:
    importlib.import_module(module)
folders = [name for name in dir(kdo) if not name.startswith("_")]
names = [getattr(getattr(kdo, f), name) for f in folders for name in getattr(getattr(kdo, f), "__all__", ())]
print(f"imported {len(modules)} modules, {len(folders)} folders, {len(names)} public names")
"""

WRITE_RECORD = "import keras_diffusion_opd as kdo; kdo.provenance.RunRecord('wheel').save('run.json')"


def main() -> None:
    """Build, look inside, install, use; the first failure ends it."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run([sys.executable, "-m", "build", "--wheel", "--outdir", str(work / "dist"), str(ROOT)], work)
        (wheel,) = (work / "dist").glob("*.whl")
        check_content(wheel)
        binaries = install(wheel, work / "venv")
        elsewhere = work / "elsewhere"
        elsewhere.mkdir()
        for environment in ({"KERAS_BACKEND": "jax"}, {}):
            environment["KERAS_HOME"] = str(work / "keras")
            use(binaries, elsewhere, environment)
    print("The wheel is good.")


def check_content(wheel: Path) -> None:
    """All of the package is in the wheel, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        head = email.parser.BytesParser().parsebytes(archive.read(metadata))
    files = [*(ROOT / PACKAGE).rglob("*.py"), ROOT / PACKAGE / "py.typed"]
    source = {path.relative_to(ROOT).as_posix() for path in files}
    info = metadata.split("/")[0]
    strangers = sorted(name for name in names - source if not name.startswith(f"{info}/"))
    assert not source - names, f"the wheel lacks {sorted(source - names)}"
    assert not strangers, f"the wheel holds what is not of the package: {strangers}"
    assert any(name.startswith(info) and name.endswith("LICENSE") for name in names), "no license inside"
    assert head["Requires-Python"] == ">=3.11" and head["License-Expression"] == "Apache-2.0", head.items()
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size // 1024} KiB, version {head['Version']}")


def install(wheel: Path, place: Path) -> Path:
    """A new environment with the wheel and JAX alone; the folder of its programs."""
    venv.create(place, with_pip=True)
    binaries = place / ("Scripts" if os.name == "nt" else "bin")
    run([str(binaries / "python"), "-m", "pip", "install", "-q", f"{wheel}[jax]"], place)
    return binaries


def use(binaries: Path, folder: Path, environment: dict[str, str]) -> None:
    """What a new user does first."""
    python, kdo = str(binaries / "python"), str(binaries / "kdo")
    version = run([kdo, "--version"], folder, environment).split()
    assert version[0] == "kdo", version
    report = run([kdo, "doctor"], folder, environment)
    assert "backend: jax" in report and report.endswith("Ready.\n"), report
    assert "pip install 'keras-diffusion-opd[torch]'" in report, report
    if environment.get("KERAS_BACKEND"):
        print(run([python, "-c", IMPORT_ALL], folder, environment), end="")
    run([python, "-c", WRITE_RECORD], folder, {**environment, "KERAS_BACKEND": "jax"})
    assert run([kdo, "verify", "run.json"], folder, environment).endswith("Everything holds.\n")


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """The output of a command that has nothing of this process's Python in its environment."""
    ours = ("PYTHON", "KERAS", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        command, cwd=folder, env={**clean, **(environment or {})}, capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
