"""Checkpoints of the demo: one directory for each model, the newest one kept."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from keras_diffusion_opd.callbacks import ProvenanceCheckpoint
from keras_diffusion_opd.demos.tokens.digits import LEVELS
from keras_diffusion_opd.provenance import Parent
from keras_diffusion_opd.provenance.checkpoints import places


def checkpoint_of(out: Path, name: str, parents: Sequence[Parent] = ()) -> ProvenanceCheckpoint:
    """What saves one training in `out/checkpoints`; checkpoints of an earlier run of the demo are removed."""
    directory = out / "checkpoints" / name.replace(" ", "-")
    if directory.is_dir():
        for place in places(directory):
            shutil.rmtree(place.path)
    return ProvenanceCheckpoint(
        directory,
        keep=1,
        identity={"mask_id": LEVELS, "vocabulary_size": LEVELS},
        parents=parents,
        name=name,
    )
