"""The state of a training run as arrays, by section: what a checkpoint holds and `resume` puts back."""

from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.provenance import LeafDigest, digest_of_leaves, leaf_digests

SECTIONS = ("student", "trainer", "optimizer", "random", "metrics")


def state_variables(trainer: Any, *, trainable_only: bool = False) -> dict[str, list[Any]]:
    """Every variable that the next window depends on.

    Args:
        trainer: a compiled trainer. On JAX, within `fit`, its state must have been synchronised, which
            reading `callback.model` does.
        trainable_only: leave out the student's frozen weights.

    Returns:
        For each of `SECTIONS` a list of Keras variables in the model's own order: the student's weights, other
        weights (of a loss that is a layer, say), the optimizer's variables, the states of the seed generators,
        and the sums of the metrics.
    """
    student = list(trainer.student.weights)
    others = _without(trainer.weights, student)
    optimizer = list(trainer.optimizer.variables)
    metrics = list(trainer.metrics_variables)
    seeds = _without(trainer.variables, [*student, *others, *optimizer, *metrics])
    if trainable_only:
        student = [v for v in student if v.trainable]
    return dict(zip(SECTIONS, (student, others, optimizer, seeds, metrics), strict=True))


def state_arrays(variables: dict[str, list[Any]]) -> dict[str, list[np.ndarray]]:
    """Copies of the variables' values, section by section; bfloat16 stays bfloat16.

    Copies: what a backend hands out may be the memory that the next update writes to.
    """
    return {name: [as_array(v) for v in section] for name, section in variables.items()}


def as_array(variable: Any) -> np.ndarray:
    """A copy of the present value of a Keras variable."""
    return np.array(keras.ops.convert_to_numpy(variable.value))


def layout(variables: dict[str, list[Any]]) -> dict[str, list[dict[str, Any]]]:
    """Path, dtype, shape and trainability of every variable: what has to agree for a state to be put back."""
    return {
        name: [
            {
                "path": str(variable.path),
                "dtype": keras.backend.standardize_dtype(variable.value.dtype),  # PyTorch keeps a uint32 as an int64
                "shape": [int(size) for size in variable.shape],
                "trainable": bool(variable.trainable),
            }
            for variable in section
        ]
        for name, section in variables.items()
    }


class FrozenWeights:
    """The frozen weights of a student, as digests: the base of a checkpoint that holds only the others."""

    def __init__(self, student: Any) -> None:
        self._weights = list(student.weights)
        self._leaves = {i: self._leaf(i, v) for i, v in enumerate(self._weights) if not v.trainable}

    @staticmethod
    def _leaf(index: int, value: Any) -> LeafDigest:
        (leaf,) = leaf_digests([value])
        return LeafDigest((index,), leaf.label, leaf.dtype, leaf.shape, leaf.sha256)

    @property
    def digest(self) -> str:
        """Of the frozen weights alone, with their places among all."""
        return digest_of_leaves(list(self._leaves.values()))

    def digest_with(self, others: list[np.ndarray]) -> str:
        """Of the whole student, given the values of the weights that are not frozen."""
        rest, leaves = iter(others), []
        for index in range(len(self._weights)):
            leaves.append(self._leaves.get(index) or self._leaf(index, next(rest)))
        return digest_of_leaves(leaves)


def _without(variables: list[Any], known: list[Any]) -> list[Any]:
    seen = {id(v) for v in known}
    return [v for v in variables if id(v) not in seen]
