"""Prepared batches as a list of arrays and a description in JSON: what a checkpoint keeps of rollouts."""

from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.data.flow_batch import FlowBatch
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.reward_batch import RewardBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.training_batch import TrainingBatch

_KINDS: dict[str, type[TrainingBatch]] = {kind.__name__: kind for kind in (PreparedBatch, FlowBatch, RewardBatch)}


def to_arrays(batches: list[TrainingBatch]) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """A description of every batch, and the arrays that it numbers."""
    arrays: list[np.ndarray] = []

    def number(nest: Any) -> Any:
        if isinstance(nest, dict):
            return {"dict": {key: number(value) for key, value in nest.items()}}
        if isinstance(nest, list | tuple):
            return {type(nest).__name__: [number(value) for value in nest]}
        arrays.append(np.array(keras.ops.convert_to_numpy(nest)))
        return len(arrays) - 1

    described = []
    for batch in batches:
        x, y, weights = batch.as_fit()
        stamp = None if batch.stamp is None else batch.stamp.to_json()
        kind = {} if isinstance(batch, PreparedBatch) else {"kind": type(batch).__name__}
        described.append({"fit": [number(x), number(y), number(weights)], "stamp": stamp, **kind})
    return described, arrays


def from_arrays(described: list[dict[str, Any]], arrays: list[np.ndarray]) -> list[TrainingBatch]:
    """The batches that `to_arrays` took apart; validated."""

    def nest(node: Any) -> Any:
        if isinstance(node, int):
            return arrays[node]
        ((kind, value),) = node.items()
        if kind == "dict":
            return {key: nest(item) for key, item in value.items()}
        return {"list": list, "tuple": tuple}[kind](nest(item) for item in value)

    batches = []
    for entry in described:
        kind = _KINDS[entry.get("kind", "PreparedBatch")]
        stamp = None if entry["stamp"] is None else Stamp.from_json(entry["stamp"])
        x, y, weights = (nest(node) for node in entry["fit"])
        batches.append(kind.from_fit(x, y, weights, stamp).validate())
    return batches


def array_layout(arrays: list[np.ndarray]) -> list[dict[str, Any]]:
    """dtype and shape of the arrays, as a section of a checkpoint's layout."""
    return [
        {"path": f"batches/{i}", "dtype": a.dtype.name, "shape": list(map(int, a.shape)), "trainable": False}
        for i, a in enumerate(arrays)
    ]
