"""What a run ran on: versions without importing anything, and the machine without naming it."""

import functools
import importlib.metadata
import os
import platform
import sys

from keras_diffusion_opd.version import __version__

# The distributions that can change a number.
DISTRIBUTIONS = (
    "keras",
    "numpy",
    "safetensors",
    "jax",
    "jaxlib",
    "tensorflow",
    "tensorflow-cpu",
    "torch",
    "keras-hub",
    "scikit-learn",
)


def installed_versions() -> dict[str, str]:
    """The versions of Python, of this library and of the packages that can change a number.

    Returns:
        Name of the distribution -> version, for those that are installed; nothing is imported.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.installed_versions()["keras_diffusion_opd"] == kdo.__version__
        True
    """
    versions = {"python": platform.python_version(), "keras_diffusion_opd": __version__}
    found = {name: _version(name) for name in DISTRIBUTIONS}
    return versions | {name: version for name, version in found.items() if version is not None}


@functools.cache
def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, str | int | None]:
    """The kind of machine, without anything that tells whose it is.

    Returns:
        `system`, `release`, `architecture`, `cpus`, `memory_gib`, and the `backend` of Keras (None before
        keras is imported).

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> sorted(kdo.provenance.machine())
        ['architecture', 'backend', 'cpus', 'memory_gib', 'release', 'system']
    """
    keras = sys.modules.get("keras")
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_gib": _memory(),
        "backend": keras.config.backend() if keras is not None else None,
    }


def _memory() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):  # no such question on this system
        return None
