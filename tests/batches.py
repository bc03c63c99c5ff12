"""Small prepared batches for tests."""

from typing import Any

import numpy as np

from keras_diffusion_opd.data import DenseTargets, PreparedBatch


def fields(**changes: Any) -> dict[str, Any]:
    """Sound arguments of `PreparedBatch.create`, B = 2, L = 3, two inputs; `changes` replace some."""
    return {
        "model_inputs": {
            "input_tokens": np.arange(6, dtype="int32").reshape(2, 3),
            "noise_levels": np.array([0.25, 0.75], "float32"),
        },
        "target_ids": np.array([[1, 2, 3], [4, 0, 2]], "int32"),
        "loss_weights": np.array([[1.0, 0.5, 0.0], [0.0, 2.0, 0.25]], "float32"),
        **changes,
    }


def prepared(weights: Any, *, ids: Any = None, teacher: Any = None, stamp: Any = None) -> PreparedBatch:
    """A validated batch with these weights (B, L); ids default to 0, the teacher to none."""
    weights = np.asarray(weights)
    if weights.dtype == "float64":
        weights = weights.astype("float32")
    return PreparedBatch.create(
        model_inputs=np.zeros(weights.shape, "int32"),
        target_ids=np.zeros(weights.shape, "int32") if ids is None else np.asarray(ids),
        loss_weights=weights,
        teacher=None if teacher is None else DenseTargets(teacher),
        stamp=stamp,
    )
