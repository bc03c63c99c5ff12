"""keras_diffusion_opd: post-training of diffusion models in Keras 3, exactly.

The public names live one level down, by folder::

    import keras_diffusion_opd as kdo

    batch = kdo.data.PreparedBatch.create(model_inputs=..., target_ids=..., loss_weights=...)
    trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.DistillationLoss(temperature=2.0))

A folder is imported when it is first named, so that `kdo --help` and the provenance tools start
without a backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_diffusion_opd.version import __version__

if TYPE_CHECKING:
    # For editors and type checkers; at run time `__getattr__` below imports them.
    from keras_diffusion_opd import (  # noqa: F401
        adapters,
        callbacks,
        data,
        layers,
        losses,
        metrics,
        models,
        provenance,
        samplers,
        schedules,
        testing,
        trainers,
    )

_FOLDERS = (
    "adapters",
    "callbacks",
    "data",
    "layers",
    "losses",
    "metrics",
    "models",
    "provenance",
    "samplers",
    "schedules",
    "testing",
    "trainers",
)
__all__ = ["__version__", *_FOLDERS]


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}. Its folders are {', '.join(_FOLDERS)}.")


def __dir__() -> list[str]:
    return sorted(__all__)
