"""The state of a training run as arrays, by section: what a checkpoint holds and `resume` puts back."""

from typing import Any

import keras
import numpy as np

SECTIONS = ("student", "trainer", "optimizer", "random", "metrics")


def state_variables(trainer: Any) -> dict[str, list[Any]]:
    """Every variable that the next window depends on.

    Args:
        trainer: a compiled trainer. On JAX, within `fit`, its state must have been synchronised, which
            reading `callback.model` does.

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
    return dict(zip(SECTIONS, (student, others, optimizer, seeds, metrics), strict=True))


def state_arrays(variables: dict[str, list[Any]]) -> dict[str, list[np.ndarray]]:
    """The values of the variables, section by section; bfloat16 stays bfloat16."""
    return {name: [as_array(v) for v in section] for name, section in variables.items()}


def as_array(variable: Any) -> np.ndarray:
    """The present value of a Keras variable."""
    return np.asarray(keras.ops.convert_to_numpy(variable.value))


def layout(variables: dict[str, list[Any]], state: dict[str, list[np.ndarray]]) -> dict[str, list[dict[str, Any]]]:
    """Path, dtype, shape and trainability of every variable: what has to agree for a state to be put back."""
    return {
        name: [
            {
                "path": str(variable.path),
                "dtype": array.dtype.name,
                "shape": list(map(int, array.shape)),
                "trainable": bool(variable.trainable),
            }
            for variable, array in zip(section, state[name], strict=True)
        ]
        for name, section in variables.items()
    }


def _without(variables: list[Any], known: list[Any]) -> list[Any]:
    seen = {id(v) for v in known}
    return [v for v in variables if id(v) not in seen]
