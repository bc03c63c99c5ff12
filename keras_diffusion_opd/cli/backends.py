"""Which backend Keras will use, told without importing any."""

import importlib.util
import json
import os
import sys
from pathlib import Path

# Those that can train here, in the order of preference where nothing is said.
BACKENDS = ("jax", "tensorflow", "torch")


def is_installed(name: str) -> bool:
    """Whether the package `name` can be imported; it is not."""
    return importlib.util.find_spec(name) is not None


def configured_backend() -> tuple[str, str]:
    """The backend that Keras will ask for, and where that is said."""
    if os.environ.get("KERAS_BACKEND"):
        return os.environ["KERAS_BACKEND"], "the environment variable KERAS_BACKEND"
    path = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
    try:
        backend = json.loads(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        backend = None
    return (str(backend), str(path)) if backend else ("tensorflow", "the default of Keras")


def select_backend() -> str | None:
    """Where Keras would ask for a backend that is not there, and nobody insists, choose one that is.

    Returns the problem, if there is no way to go on. A choice is told on stderr.
    """
    backend, source = configured_backend()
    if is_installed(backend):
        return None
    found = [name for name in BACKENDS if is_installed(name)]
    if not found:
        return "no backend is installed. Install one with: pip install 'keras-diffusion-opd[jax]'"
    if os.environ.get("KERAS_BACKEND"):
        return f"{source} asks for {backend}, which is not installed. Set it to {' or '.join(found)}."
    os.environ["KERAS_BACKEND"] = found[0]
    print(f"kdo: {source} asks for {backend}, which is not installed: using {found[0]}.", file=sys.stderr)
    return None
