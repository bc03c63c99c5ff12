"""Whether a teacher knows anything: a broken checkpoint answers, but says nothing."""

from collections.abc import Collection
from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.targets import TeacherTargets
from keras_diffusion_opd.validation import positive_int

# Names that `allow` takes, and what each means.
DEGENERACIES: dict[str, str] = {
    "uniform": (
        "prefers no id to another at any of {count} active positions looked at. Weights that were never loaded, logits "
        "of zeros, or a temperature far too high do that"
    ),
    "constant": (
        "says the same at all of {count} active positions looked at. A teacher that is not given the inputs, or a head "
        "whose weights are zero and whose bias is not, does that"
    ),
}
_SPREAD = 1e-4  # of the scores at a position, and between positions: below it a teacher says nothing


class DegenerateTeacherError(ValueError):
    """A teacher's answers hold nothing to learn."""


def check_teacher(batch: PreparedBatch, *, allow: Collection[str] = (), positions: int = 256, least: int = 2) -> None:
    """Raise where a batch's teacher answers, but says nothing: uniformly everywhere, or everywhere the same.

    `PreparedDataset` calls it on the first batch that it draws, once: such a teacher is broken from the first
    batch on, and a look at a few positions costs nothing. It is no check of every step, for a single batch can be
    like this by right: one position, or sequences that are masked throughout. NaN and other values that are no
    distribution may come at any time: losses and trainers look for them in every step (`violations`), and here
    they count as an answer.

    Args:
        batch: `PreparedBatch`. Without a teacher, or without values that can be read, nothing is checked.
        allow: which of `"uniform"` and `"constant"` are as they should be.
        positions: at least 2, how many active positions to look at, spread over the batch.
        least: at least 2, how many active positions must be there for their answers to show anything. A dataset
            asks for 16: a toy batch may be like this by right.

    Raises:
        DegenerateTeacherError: names what the teacher does and what usually causes it.
        ValueError: an unknown name in `allow`.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DegenerateTeacherError, DenseTargets, PreparedBatch, check_teacher

    batch = PreparedBatch.create(
        model_inputs=np.zeros((1, 2), "int32"),
        target_ids=np.zeros((1, 2), "int32"),
        loss_weights=np.ones((1, 2), "float32"),
        teacher=DenseTargets(np.zeros((1, 2, 5), "float32")),
    )
    try:
        check_teacher(batch)
    except DegenerateTeacherError as error:
        assert "prefers no id" in str(error)
    ```
    """
    unknown = sorted(set(allow) - set(DEGENERACIES))
    if unknown:
        raise ValueError(f"`allow` must hold names among {sorted(DEGENERACIES)}. Received {unknown}.")
    weights = backend.concrete(batch.loss_weights)
    if batch.teacher is None or weights is None:
        return
    places = np.flatnonzero(weights.reshape(-1))
    count = min(len(places), max(2, positive_int("positions", positions)))
    if count < max(2, positive_int("least", least)):
        return
    # Evenly spread, not the first ones: those may all be of one row.
    places = places[np.linspace(0, len(places) - 1, count).astype("int64")]
    few = _at(batch.teacher, places)
    if few is None or np.any(ops.convert_to_numpy(few.invalid())):
        return
    found = {"uniform": _uniform(few), "constant": _constant(few)}
    named = [name for name, holds in found.items() if holds and name not in allow]
    if named:
        reasons = " It also ".join(DEGENERACIES[name].format(count=count) + "." for name in named)
        raise DegenerateTeacherError(
            f"The teacher {reasons} Check its checkpoint and its inputs; where this is as it should be, pass "
            f"check_teacher(..., allow={named}), or PreparedDataset(..., check_teacher=False)."
        )


def _at(teacher: TeacherTargets, places: np.ndarray) -> TeacherTargets | None:
    """The targets (1, P) at flat positions, as NumPy in float32 or better; None where they cannot be read."""

    def pick(array: Any) -> Any:
        shape = tuple(array.shape)
        array = ops.convert_to_tensor(array)
        flat = ops.reshape(array, (shape[0] * shape[1], *shape[2:]))
        return ops.expand_dims(ops.take(flat, places.astype("int32"), axis=0), 0)

    if any(backend.concrete(array) is None for array in teacher.arrays().values()):
        return None
    return teacher.map(pick)


def _scores(few: TeacherTargets) -> np.ndarray | None:
    """float64 (P, n), the largest of each position 0; -inf where an id is excluded."""
    scores = few.scores()
    if scores is None:
        return None
    values = np.asarray(ops.convert_to_numpy(ops.cast(scores, "float32")), "float64")[0]
    return values - values.max(axis=-1, keepdims=True)


def _uniform(few: TeacherTargets) -> bool:
    """Whether all ids that are not excluded are equally likely everywhere, and there are several."""
    scores = _scores(few)
    if scores is None:
        return False
    allowed = scores > -np.inf
    lowest = np.min(scores, axis=-1, where=allowed, initial=0.0)
    return bool(np.all(lowest > -_SPREAD) and np.any(allowed.sum(axis=-1) > 1))


def _constant(few: TeacherTargets) -> bool:
    """Whether every position is told the same."""
    for name, array in few.arrays().items():
        values = np.asarray(ops.convert_to_numpy(ops.cast(array, "float32")), "float64")[0]
        if name == "logits":
            values = values - values.max(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            same = (values == values[:1]) | (np.abs(values - values[:1]) <= _SPREAD)
        if not np.all(same):
            return False
    return True
