"""`resume`: continue a run from its newest checkpoint, exactly or not at all."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.callbacks.batch_arrays import from_arrays
from keras_diffusion_opd.callbacks.checkpoint_files import State, likes_of, read_state
from keras_diffusion_opd.callbacks.comparison import (
    base_differences,
    layout_differences,
    origin_differences,
    recipe_differences,
)
from keras_diffusion_opd.callbacks.training_state import state_variables
from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.provenance import Parent, Recipe, plain_json
from keras_diffusion_opd.provenance.checkpoints import (
    chain_problems,
    checkpoint_problems,
    places,
    read_checkpoint_record,
)


@dataclasses.dataclass(frozen=True)
class RunState:
    """Where a resumed run stands.

    Attributes:
        epoch: int, the `initial_epoch` of the next `fit`.
        batch: int, batches of that epoch that are done.
        updates: int, updates that the optimizer has made.
        recipe: how the weights were made, with the user's metadata.
        path: the checkpoint.
        allowed: differences from the run before that were allowed, each with its name and both values.
    """

    epoch: int
    batch: int
    updates: int
    recipe: Recipe
    path: Path
    allowed: tuple[Mapping[str, Any], ...] = ()


def resume(
    trainer: Any,
    directory: str | os.PathLike[str],
    *,
    dataset: PreparedDataset | None = None,
    parents: Sequence[Parent] | None = None,
    identity: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    record: str | None = None,
) -> RunState:
    """Put a trainer where the newest checkpoint of a directory is, so that `fit` continues bit for bit.

    Everything is checked before anything is changed. The next `fit` must be given `initial_epoch=state.epoch`
    and the same dataset; it goes on within the epoch where the run was stopped within one. `parents` and
    `identity` that are not given here are compared when `fit` begins, with those of its `ProvenanceCheckpoint`.

    Args:
        trainer: a compiled trainer, made as the one that was interrupted; its weights do not matter (but for
            the frozen ones, where the checkpoint holds only the others).
        directory: of a `ProvenanceCheckpoint`.
        dataset: None, or the dataset of the next `fit`, to compare now what `fit` will compare anyway.
        parents: None, or the parents that the run must have: teacher and base by digest.
        identity: None, or what else must be the same: as given to `ProvenanceCheckpoint`.
        allow: names of settings that may differ, as the error says them (`"versions.keras"`), or of groups of
            them (`"trainer.optimizer"`). What differs is recorded in all later checkpoints. The run is then
            another one: nothing is said of bits.
        record: None, or the digest that the record of the newest checkpoint must have, as kept elsewhere
            (`kdo verify` prints it): proof against somebody who can compute digests too.

    Returns:
        The state: `epoch`, `batch`, `updates`, `recipe`, `path`, `allowed`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: a damaged checkpoint, or one of another student, loss, optimizer, window, dataset, parent,
            base, identity, backend or library version; every difference is listed with both values.
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
    checkpoint = kdo.callbacks.ProvenanceCheckpoint("checkpoints", identity={"mask_id": 5})
    make().fit(dataset, epochs=1, callbacks=[checkpoint], verbose=0)

    trainer = make()
    state = kdo.callbacks.resume(trainer, "checkpoints", identity={"mask_id": 5})
    assert (state.epoch, state.batch, state.updates) == (1, 0, 3)
    _ = trainer.fit(dataset, epochs=2, initial_epoch=state.epoch, callbacks=[checkpoint], verbose=0)
    assert trainer.policy_version == 6
    ```
    """
    _check_arguments(trainer, dataset, allow)
    path, said = _newest(Path(directory), record)
    recipe = Recipe.from_json(said["recipe"])
    identity = None if identity is None else plain_json(identity, name="identity")
    different = [
        *recipe_differences(recipe, trainer, dataset),
        *origin_differences(said, parents, identity),
        *base_differences(said, trainer),
    ]
    refused = [str(found) for found in different if not found.within(allow) or found.name.startswith("base.")]
    refused += layout_differences(said, trainer, "optimizer")
    if not refused and not trainer.optimizer.built:
        trainer.optimizer.build(trainer.trainable_variables)  # its moments, which are 0 so far
    refused = refused or layout_differences(said, trainer)
    if refused:
        raise ValueError(f"The checkpoint {path} is not one of this run:\n- " + "\n- ".join(refused))
    state = _read(path, said, trainer)
    changes = tuple({**found.to_json(), "updates": said["updates"]} for found in different)
    run = RunState(said["epoch"], said["batch"], said["updates"], recipe, path, (*recipe.allowed, *changes))
    data = dict(recipe.data) if dataset is None else dataset.settings()
    _put_back(trainer, said, state, run, {"dataset": data, "allow": tuple(allow)})
    return run


def _check_arguments(trainer: Any, dataset: Any, allow: Sequence[str]) -> None:
    if not hasattr(trainer, "continue_from") or not hasattr(trainer, "student"):
        raise TypeError(f"`trainer` must be a trainer of keras_diffusion_opd. Received {type(trainer).__name__}.")
    if not trainer.compiled:
        raise ValueError("`trainer` must be compiled as it was before: call compile(...) first.")
    if not all(layer.built for layer in trainer._flatten_layers()):
        raise ValueError("`trainer` has a student that is not built. Call it on an input first.")
    if isinstance(allow, str) or not all(isinstance(name, str) for name in allow):
        raise TypeError(f"`allow` must be a list of names such as 'versions.keras'. Received {allow!r}.")
    if dataset is None and any(name.split(".")[0] == "dataset" for name in allow):
        raise ValueError("`dataset` must be given where `allow` names settings of it, so that both can be recorded.")


def _newest(directory: Path, digest: str | None) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint and its record, after everything that it says was held against its files."""
    found = places(directory) if directory.is_dir() else []
    if not found:
        raise FileNotFoundError(f"`directory` must hold a checkpoint, such as step-00000042. {directory} holds none.")
    path = found[-1].path
    record = read_checkpoint_record(path)
    problems = checkpoint_problems(path, record)
    if len(found) > 1:
        problems += chain_problems(record, read_checkpoint_record(found[-2].path))
    if digest is not None and digest != record["digest"]:
        problems.append(f"its record has the digest {record['digest']}, and `record` is {digest}")
    if problems:
        before = f" Remove it to continue from {found[-2].path.name}." if len(found) > 1 else ""
        raise ValueError(f"The checkpoint {path} is damaged:\n- " + "\n- ".join(problems) + before)
    return path, record


def _read(path: Path, record: Mapping[str, Any], trainer: Any) -> State:
    if record["storage"] == "orbax":
        from keras_diffusion_opd.callbacks.sharded_state import read_sharded

        state, left = read_sharded(path, _variables(record, trainer)), ["batches"]
    else:
        state, left = {}, list(record["layout"])
    likes = {section: likes_of(record["layout"][section]) for section in left if section in record["layout"]}
    arrays, problems = read_state(path, likes)
    if problems:
        raise ValueError(f"The checkpoint {path} is damaged:\n- " + "\n- ".join(problems))
    return {**state, **arrays}


def _variables(record: Mapping[str, Any], trainer: Any) -> dict[str, list[Any]]:
    return state_variables(trainer, trainable_only=record["base"] is not None)


def _put_back(trainer: Any, record: Mapping[str, Any], state: State, run: RunState, given: dict[str, Any]) -> None:
    batches = from_arrays(record["data_state"].get("batches", []), state.pop("batches", []))
    sums = [np.asarray(value) for value in state.pop("metrics")]
    variables = _variables(record, trainer)
    for section, arrays in state.items():
        for variable, array in zip(variables[section], arrays, strict=True):
            variable.assign(array)
    trainer.continue_from(
        resumed={"record": dict(record), "allowed": run.allowed, "allow": given["allow"]},
        epoch=run.epoch,
        batch=run.batch,
        metric_sums=sums,
        dataset=given["dataset"],
        data_state=record["data_state"],
        batches=batches,
    )
