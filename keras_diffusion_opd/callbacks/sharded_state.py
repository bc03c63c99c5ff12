"""Sharded state through Orbax: every device's part is written by itself, and read to where it belongs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.backend import BACKEND

FOLDER = "sharded"


def require_orbax() -> None:
    """ImportError with the pip line where Orbax is not there; ValueError on another backend than JAX."""
    if BACKEND != "jax":
        raise ValueError(f"`format='orbax'` needs the JAX backend. Received {BACKEND!r}: use 'safetensors'.")
    try:
        import orbax.checkpoint  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "`format='orbax'` needs Orbax, which is not installed: pip install 'keras-diffusion-opd[orbax]'."
        ) from error


def write_sharded(folder: Path, variables: Mapping[str, list[Any]], sums: list[np.ndarray]) -> None:
    """Write the values of variables as they lie on their devices.

    Args:
        folder: of the checkpoint that is being written.
        variables: by section.
        sums: in place of the metrics' variables.
    """
    import orbax.checkpoint

    tree = {name: {f"{i:05d}": v.value for i, v in enumerate(section)} for name, section in variables.items()}
    tree["metrics"] = {f"{i:05d}": value for i, value in enumerate(sums)}
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((folder / FOLDER).absolute(), {name: part for name, part in tree.items() if part})


def read_sharded(path: Path, variables: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The arrays of a checkpoint, each on the devices of the variable that it belongs to.

    Args:
        path: the checkpoint, its files verified.
        variables: by section, of the present trainer.
    """
    import orbax.checkpoint

    def argument(variable: Any) -> Any:
        return orbax.checkpoint.ArrayRestoreArgs(sharding=variable.value.sharding, dtype=variable.value.dtype)

    sections = {name: section for name, section in variables.items() if section}
    arguments = {name: {f"{i:05d}": argument(v) for i, v in enumerate(part)} for name, part in sections.items()}
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore((path / FOLDER).absolute(), restore_args=arguments)
    found: dict[str, list[Any]] = {name: [] for name in variables}
    for name, section in sections.items():
        found[name] = [tree[name][f"{i:05d}"] for i in range(len(section))]
    return found
