"""The state of a run at one moment, on the host: what a checkpoint is written from while training goes on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_diffusion_opd.callbacks.batch_arrays import array_layout, to_arrays
from keras_diffusion_opd.callbacks.checkpoint_files import State
from keras_diffusion_opd.callbacks.training_state import FrozenWeights, layout, state_arrays, state_variables
from keras_diffusion_opd.provenance import Lineage, Parent, Recipe, digest


@dataclasses.dataclass(frozen=True)
class Origin:
    """What every checkpoint of a run says of where it comes from.

    Args:
        name: of the student.
        metadata, identity: of the user.
        parents: of the student.
        lineage: None, or that of the parent that the student began as.
        frozen: None, or the base, where only trainable weights are stored.
        allowed: differences that the user has allowed, as in a recipe.
    """

    name: str
    metadata: Mapping[str, Any]
    identity: Mapping[str, Any]
    parents: tuple[Parent, ...]
    lineage: Lineage | None
    frozen: FrozenWeights | None
    allowed: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything of a checkpoint but its digests, which are taken while it is written.

    Args:
        content: of the record.
        state: arrays by section.
        origin: see there.
    """

    content: dict[str, Any]
    state: State
    origin: Origin

    def digests(self) -> dict[str, Any]:
        """The identity of student and base."""
        student, frozen = self.state["student"], self.origin.frozen
        if frozen is None:
            return {"student": digest(student), "base": None}
        base = {"digest": frozen.digest, "stored": digest(student)}
        return {"student": frozen.digest_with(student), "base": base}


def take_snapshot(
    trainer: Any,
    origin: Origin,
    position: tuple[int, int],
    sums: list[np.ndarray] | None,
    monitor: dict[str, Any] | None,
) -> Snapshot:
    """Copy what the next window depends on.

    Args:
        trainer: its variables up to date.
        origin: what the record says of where the run comes from.
        position: epoch and batch at which the next window begins.
        sums: None, or the epoch's metric sums, where validation has reset them.
        monitor: None, or the name and value by which checkpoints are ranked.
    """
    variables = state_variables(trainer, trainable_only=origin.frozen is not None)
    state = state_arrays(variables)
    if sums is not None:
        state["metrics"] = sums
    described = layout(variables)
    data_state = trainer.data_state()
    if data_state["kind"] == "dataset":
        data_state["batches"], arrays = to_arrays(trainer.dataset.held_for(*position))
        if arrays:
            state["batches"], described["batches"] = arrays, array_layout(arrays)
    content = {
        "epoch": position[0],
        "batch": position[1],
        "updates": trainer.policy_version,
        "name": origin.name,
        "identity": dict(origin.identity),
        "recipe": _recipe(trainer, origin).to_json(),
        "ancestors": None if origin.lineage is None else origin.lineage.to_json(),
        "monitor": monitor,
        "data_state": data_state,
        "layout": described,
    }
    return Snapshot(content, state, origin)


def _recipe(trainer: Any, origin: Origin) -> Recipe:
    dataset = trainer.dataset
    return Recipe(
        method=type(trainer).__name__,
        parents=origin.parents,
        hyperparameters=trainer.training_settings,
        data={} if dataset is None else dataset.settings(),
        seed=None if dataset is None else dataset.seed,
        metadata=origin.metadata,
        allowed=origin.allowed,
    )
