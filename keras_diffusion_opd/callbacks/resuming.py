"""`resume`: continue a run from its newest checkpoint, exactly or not at all."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.callbacks.checkpoint_files import places, read_record, read_state
from keras_diffusion_opd.callbacks.training_state import layout, state_arrays, state_variables
from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.provenance import Parent, Recipe, digest
from keras_diffusion_opd.provenance.differences import differences


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a resumed run stands.

    Attributes:
        epoch: int, the `initial_epoch` of the next `fit`.
        batch: int, batches of that epoch that are done.
        updates: int, updates that the optimizer has made.
        recipe: how the weights were made, with the user's metadata.
        path: the checkpoint.
    """

    epoch: int
    batch: int
    updates: int
    recipe: Recipe
    path: Path


def resume(
    trainer: Any,
    directory: str | os.PathLike[str],
    *,
    dataset: PreparedDataset | None = None,
    parents: Sequence[Parent] | None = None,
) -> RunState:
    """Put a trainer where the newest checkpoint of a directory is, so that `fit` continues bit for bit.

    Everything is checked before anything is changed. The next `fit` must be given `initial_epoch=state.epoch`
    and the same dataset; it goes on within the epoch where the run was stopped within one.

    Args:
        trainer: a compiled trainer, made as the one that was interrupted; its weights do not matter.
        directory: of a `ProvenanceCheckpoint`.
        dataset: None, or the dataset of the next `fit`, to compare now what `fit` will compare anyway.
        parents: None, or the parents that the run must have: teacher and base by digest.

    Returns:
        The state: `epoch`, `batch`, `updates`, `recipe`, `path`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: a damaged checkpoint, or one of another student, loss, optimizer, window, dataset, backend
            or Keras; every difference is listed with both values.
        TypeError: the trainer is none.

    Example:

    ```python
    import keras, numpy as np
    import keras_diffusion_opd as kdo

    def make():
        ids = keras.Input((4,), dtype="int32")
        student = keras.Model(ids, keras.layers.Dense(6)(keras.layers.Embedding(6, 8)(ids)))
        trainer = kdo.trainers.PreparedTrainer(student, kdo.losses.TokenCrossEntropyLoss())
        trainer.compile(keras.optimizers.Adam(0.01))
        return trainer

    batch = kdo.data.PreparedBatch.create(
        model_inputs=np.array([[1, 5, 5, 2]]),
        target_ids=np.array([[1, 3, 0, 2]]),
        loss_weights=np.array([[0.0, 1.0, 1.0, 0.0]], "float32"),
    )
    dataset = kdo.data.PreparedDataset([batch] * 3)
    checkpoint = kdo.callbacks.ProvenanceCheckpoint("checkpoints")
    make().fit(dataset, epochs=1, callbacks=[checkpoint], verbose=0)

    trainer = make()
    state = kdo.callbacks.resume(trainer, "checkpoints")
    assert (state.epoch, state.batch, state.updates) == (1, 0, 3)
    _ = trainer.fit(dataset, epochs=2, initial_epoch=state.epoch, callbacks=[checkpoint], verbose=0)
    assert trainer.policy_version == 6
    ```
    """
    _check_trainer(trainer)
    path = _newest(Path(directory))
    record = read_record(path)
    recipe = Recipe.from_json(record["recipe"])
    different = _differences_of(recipe, trainer, dataset, parents) + _layout_differences(record, trainer, "optimizer")
    if not different and not trainer.optimizer.built:
        trainer.optimizer.build(trainer.trainable_variables)  # its moments, which are 0 so far
    different = different or _layout_differences(record, trainer)
    if different:
        raise ValueError(f"The checkpoint {path} is not one of this run:\n- " + "\n- ".join(different))
    variables = state_variables(trainer)
    state, problems = read_state(path, record, state_arrays(variables))
    if not problems and digest(state["student"]) != record["student"]:
        problems = ["student.safetensors: it holds another student than the record says"]
    if problems:
        raise ValueError(f"The checkpoint {path} is damaged:\n- " + "\n- ".join(problems))
    run = RunState(record["epoch"], record["batch"], record["updates"], recipe, path)
    return _put_back(trainer, variables, state, run)


def _put_back(
    trainer: Any, variables: dict[str, list[Any]], state: dict[str, list[np.ndarray]], run: RunState
) -> RunState:
    sums = state.pop("metrics")
    for section, arrays in state.items():
        for variable, array in zip(variables[section], arrays, strict=True):
            variable.assign(array)
    trainer.continue_from(epoch=run.epoch, batch=run.batch, metric_sums=sums, dataset=run.recipe.data)
    return run


def _check_trainer(trainer: Any) -> None:
    if not hasattr(trainer, "continue_from") or not hasattr(trainer, "student"):
        raise TypeError(f"`trainer` must be a trainer of keras_diffusion_opd. Received {type(trainer).__name__}.")
    if not trainer.compiled:
        raise ValueError("`trainer` must be compiled as it was before: call compile(...) first.")
    if not all(layer.built for layer in trainer._flatten_layers()):
        raise ValueError("`trainer` has a student that is not built. Call it on an input first.")


def _newest(directory: Path) -> Path:
    found = places(directory) if directory.is_dir() else []
    if not found:
        raise FileNotFoundError(f"`directory` must hold a checkpoint, such as step-00000042. {directory} holds none.")
    return found[-1].path


def _differences_of(
    recipe: Recipe, trainer: Any, dataset: PreparedDataset | None, parents: Sequence[Parent] | None
) -> list[str]:
    """A sentence for every setting that is not what it was."""
    found = differences({"method": recipe.method}, {"method": type(trainer).__name__}, "trainer")
    found += differences(recipe.hyperparameters, trainer.training_settings, "trainer")
    keras_versions = [".".join(v.split(".")[:2]) for v in (recipe.versions.get("keras", "none"), keras.__version__)]
    found += differences({"keras": keras_versions[0]}, {"keras": keras_versions[1]}, "versions")
    if dataset is not None:
        found += differences(recipe.data, dataset.settings(), "dataset", leave_out=("replacements",))
    if parents is not None:
        old, new = ({f"{p.role}/{p.name}": p.digest for p in group} for group in (recipe.parents, parents))
        found += differences(old, new, "parents")
    return found


def _layout_differences(record: dict[str, Any], trainer: Any, leave_out: str | None = None) -> list[str]:
    """A sentence for every variable of another shape or dtype. Paths are told, not compared: Keras counts layers."""
    variables = state_variables(trainer)
    present, found = layout(variables, state_arrays(variables)), []
    for section, new in present.items():
        old = record["layout"][section]
        if section == leave_out:
            continue
        if len(old) != len(new):
            found.append(f"`{section}`: {len(old)} variables in the checkpoint, {len(new)} here.")
            continue
        for a, b in zip(old, new, strict=True):
            if {**a, "path": None} != {**b, "path": None}:
                found.append(f"`{section}`: {_said(a)} in the checkpoint, {_said(b)} here.")
    return found


def _said(entry: dict[str, Any]) -> str:
    frozen = "" if entry["trainable"] else ", not trainable"
    return f"{entry['path']} {entry['dtype']} {tuple(entry['shape'])}{frozen}"
