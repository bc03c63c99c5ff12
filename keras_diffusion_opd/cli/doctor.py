"""`kdo doctor`: what is there, what is missing, and the line that mends it."""

import argparse
import importlib
import importlib.metadata
import os
import platform
import re
import sys

from keras_diffusion_opd.cli.backends import BACKENDS, configured_backend, select_backend
from keras_diffusion_opd.version import __version__

PROJECT = "keras-diffusion-opd"
CORE = ("keras", "numpy", "safetensors")
# Extra -> distributions, any one of which serves, as `a|b`.
EXTRAS = {
    "jax": ("jax",),
    "tensorflow": ("tensorflow|tensorflow-cpu",),
    "torch": ("torch",),
    "hub": ("keras-hub",),
    "grain": ("grain",),
    "demo": ("scikit-learn", "matplotlib"),
}


def run(options: argparse.Namespace) -> int:
    """Print the report; the status is 0 when training can start."""
    del options
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    print(f"keras_diffusion_opd {__version__} on Python {platform.python_version()}, {system}\n")
    problems = [problem for name in CORE for problem in _line(name, name, f"pip install {name}")]
    for extra, names in EXTRAS.items():
        for name in names:
            _line(f"[{extra}]", name, f"pip install '{PROJECT}[{extra}]'")
    print()
    problems += _backend()
    print()
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print("Ready.")
    return 1 if problems else 0


def installed_version(names: str) -> tuple[str, str] | None:
    """The first of the distributions `a|b` that is installed, and its version."""
    for name in names.split("|"):
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def requirement_of(name: str) -> str:
    """What this library asks of the version of `name`, such as "<3.16,>=3.15"; empty if it asks nothing."""
    try:
        lines = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return ""
    found = [re.fullmatch(rf"{re.escape(name)}([<>=!~].*)?", line.split(";")[0].strip()) for line in lines]
    return next(((match[1] or "") for match in found if match), "")


def satisfies(version: str, requirement: str) -> bool:
    """Whether a version meets bounds of the form `>=a,<b`; other forms count as met."""

    def numbers(text: str) -> tuple[int, ...]:
        parts = [int(part) for part in re.findall(r"\d+", text)[:3]]
        return tuple(parts + [0] * (3 - len(parts)))

    for bound in requirement.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", bound)
        if match and (numbers(version) >= numbers(match[2])) != (match[1] == ">="):
            return False
    return True


def _line(group: str, names: str, mend: str) -> list[str]:
    """Print one line of the report; the problem, if it is one that keeps anything from running."""
    found = installed_version(names)
    shown = names.split("|")[0]
    if found is None:
        print(f"  {shown:<14}{'missing':<14}{mend}")
        return [f"{shown} is missing. {mend}"]
    name, version = found
    bounds = requirement_of(name)
    if satisfies(version, bounds):
        print(f"  {name:<14}{version:<14}{group if group != name else ''}".rstrip())
        return []
    print(f"  {name:<14}{version:<14}wanted: {bounds}")
    return [f"{name} {version} is installed, but {bounds} is wanted. pip install '{name}{bounds}'"]


def _backend() -> list[str]:
    """Print backend and devices; the problems that keep it from running."""
    problem = select_backend()
    if problem:
        return [problem]
    backend, source = configured_backend()
    print(f"backend: {backend} (from {source})")
    if backend not in BACKENDS:
        return [f"{backend} cannot train. Set KERAS_BACKEND to {', '.join(BACKENDS)}."]
    try:
        importlib.import_module("keras")
        devices = importlib.import_module(f"keras_diffusion_opd.cli._{backend}").devices()
    except Exception as error:  # a broken driver can raise anything, and telling of it is the purpose here
        return [f"{backend} does not start: {type(error).__name__}: {error}"]
    print("devices: " + ", ".join(devices))
    if backend == "torch" and not os.environ.get("OMP_NUM_THREADS") and (os.cpu_count() or 1) <= 4:
        print("hint: on few CPUs PyTorch is faster with OMP_NUM_THREADS=1", file=sys.stdout)
    return []
