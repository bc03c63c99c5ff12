"""Imports point down, backends stay in their files, optional packages wait until they are used."""

import subprocess
import sys

import pytest

from tests.house.import_rules import (
    BACKEND_FILES,
    KERAS_SRC_ALLOWED,
    PACKAGE,
    RANK,
    ROOT,
    imports_of,
    package_files,
    violations,
)

FILES = [path.relative_to(ROOT).as_posix() for path in package_files()]


@pytest.mark.parametrize("file", FILES)
def test_file_imports_only_what_it_may(file: str) -> None:
    assert not (found := violations(file, (ROOT / file).read_text())), "\n".join(found)


def test_allowed_uses_of_keras_src_exist_and_have_a_reason() -> None:
    for file, reason in KERAS_SRC_ALLOWED.items():
        assert file in FILES and len(reason) > 20, file
        used = [item.module for item in imports_of((ROOT / file).read_text(), "x")]
        assert any(module.startswith("keras.src") for module in used), f"{file} no longer needs keras.src"


KDO = PACKAGE
TYPING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "

# A made-up file for each rule, and a phrase that the checker must say about it.
BAD = {
    "up": ("losses/a.py", f"from {KDO}.trainers import T", "trainers, which lies above losses"),
    "up, relative": ("losses/a.py", "from ..trainers import T", "trainers, which lies above losses"),
    "up, by name": ("data/a.py", f"from {KDO} import losses", "losses, which lies above data"),
    "up, in a function": ("data/a.py", f"def f():\n    import {KDO}.losses", "above data"),
    "up, by string": (
        "data/a.py",
        f"import importlib\nimportlib.import_module('{KDO}.losses')",
        "above data",
    ),
    "up, typing": ("data/a.py", f"{TYPING}from {KDO}.losses import L", "losses, which lies above data"),
    "trainers to serving": ("trainers/a.py", f"import {KDO}.serving", "serving, which lies beside"),
    "serving to callbacks": ("serving/a.py", f"import {KDO}.callbacks", "callbacks, which lies beside"),
    "whole package": ("losses/a.py", f"import {KDO} as kdo", "name the folder"),
    "unknown folder": ("losses/a.py", f"import {KDO}.extras", "does not know"),
    "no folder of the table": ("extras/a.py", "import os", "no line in the table"),
    "root imports at once": ("__init__.py", f"from {KDO} import losses", "imports losses at once"),
    "keras.src import": ("losses/a.py", "from keras.src.losses import loss", "keras.src"),
    "keras.src by name": ("losses/a.py", "from keras import src", "keras.src"),
    "keras.src attribute": ("losses/a.py", "import keras\nx = keras.src.losses", "keras.src"),
    "backend elsewhere": ("losses/a.py", "def f():\n    import jax.numpy", "only files called _jax.py"),
    "wrong backend file": ("trainers/_jax.py", "import torch", "only files called _torch.py"),
    "optional at the top": ("data/a.py", "import sklearn.datasets", "import it where it is used"),
    "optional in try": (
        "data/a.py",
        "try:\n    import grain\nexcept ImportError:\n    x = 1",
        "where it is used",
    ),
    "optional in a class": ("data/a.py", "class A:\n    import keras_hub", "import it where it is used"),
    "undeclared": ("data/a.py", "def f():\n    import pandas", "does not declare"),
    "provenance with keras": ("provenance/a.py", "def f():\n    import keras", "standard library and numpy"),
    "slow command line": ("cli/a.py", "import keras", "must start with the standard library"),
}


@pytest.mark.parametrize("case", BAD)
def test_checker_finds_a_made_up_fault(case: str) -> None:
    file, source, phrase = BAD[case]
    found = violations(f"{PACKAGE}/{file}", source)
    assert len(found) == 1 and phrase in found[0], found
    assert found[0].startswith(f"{PACKAGE}/{file}:")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("losses/a.py", f"import keras\nfrom keras import ops\nfrom {KDO}.data import PreparedBatch"),
        ("losses/a.py", f"from .b import X\nfrom {KDO}.losses._c import Y"),
        ("losses/__init__.py", "from .a import X"),
        ("trainers/_jax.py", "import jax\nimport numpy as np"),
        ("data/a.py", "def f():\n    import sklearn.datasets"),
        ("data/a.py", f"{TYPING}import grain"),
        ("provenance/a.py", f"import hashlib\nimport numpy as np\nfrom {KDO}.version import __version__"),
        ("cli/a.py", "def f():\n    import keras"),
        ("__init__.py", f"from {KDO}.version import __version__"),
    ],
)
def test_checker_lets_good_files_pass(file: str, source: str) -> None:
    assert violations(f"{PACKAGE}/{file}", source) == []


def test_table_knows_every_folder() -> None:
    top = {file.split("/")[1].removesuffix(".py") for file in FILES} - {"__init__"}
    assert top <= set(RANK)


@pytest.mark.parametrize("module", [f"{PACKAGE}.provenance", f"{PACKAGE}.cli"])
def test_starts_without_a_backend(module: str) -> None:
    """Read from a real interpreter, so that an import by any road counts."""
    code = f"import sys, {module}; print(*[m for m in {['keras', *BACKEND_FILES]} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
