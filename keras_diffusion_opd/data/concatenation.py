"""Several batches as one: the micro-batches of a rollout, the parts of a source."""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import keras
import numpy as np

from keras_diffusion_opd.data.arrays import dtype_of, leaves_with_paths, map_leaves, same_shape, shape_of
from keras_diffusion_opd.data.training_batch import TrainingBatch

Batch = TypeVar("Batch", bound=TrainingBatch)


@overload
def concatenate_batches(batches: Sequence[Batch], *, rows: Sequence[int] | None = None) -> Batch: ...


@overload
def concatenate_batches(batches: Sequence[Batch | None], *, rows: Sequence[int] | None = None) -> Batch | None: ...


def concatenate_batches(batches: Sequence[Batch | None], *, rows: Sequence[int] | None = None) -> Batch | None:
    """The rows of several batches as one. NumPy stays NumPy; dtypes stay what they are.

    The stamp is that of the oldest policy; none where a batch has none, for then the age is not known.

    Args:
        batches: sequence of `PreparedBatch` (or of `FlowBatch`), all of one structure, row shape and dtype; or of
            None alone: parts of a rollout that prepared nothing.
        rows: None, or how many rows each batch should have: the number of completions of that part.

    Returns:
        One batch of that kind with all rows, in order; None where all of `batches` are None.

    Raises:
        TypeError: something is neither a PreparedBatch nor None.
        ValueError: no batch; some are None and some are not; structures, teachers' kinds, shapes of a row or
            dtypes that differ; another number of rows than `rows` says.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import PreparedBatch, concatenate_batches

    ids = np.zeros((2, 3), "int32")
    batch = PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=np.ones((2, 3), bool))
    assert concatenate_batches([batch, batch]).rows == 4
    ```
    """
    checked = _present(batches)
    if checked is None:
        return None
    batches = checked
    _require_row_counts(batches, rows)
    if len(batches) == 1:
        return batches[0]
    parts = [list(leaves_with_paths(list(batch.as_fit()), "batch")) for batch in batches]
    for index, other in enumerate(parts):
        _require_same_rows(parts[0], other, index)
    joined = iter(
        [
            np.concatenate(column) if all(isinstance(c, np.ndarray) for c in column) else keras.ops.concatenate(column)
            for column in zip(*([leaf for _, leaf in part] for part in parts), strict=True)
        ]
    )
    x, y, weights = map_leaves(lambda _: next(joined), list(batches[0].as_fit()))
    stamps = [batch.stamp for batch in batches if batch.stamp is not None]
    stamp = min(stamps, key=lambda s: s.policy_version) if len(stamps) == len(batches) else None
    return type(batches[0]).from_fit(x, y, weights, stamp)


def _present(batches: Sequence[Batch | None]) -> list[Batch] | None:
    """The batches; None where all are None. TypeError or ValueError where they are something else, or mixed."""
    if not batches:
        raise ValueError("Nothing to concatenate: `batches` is empty.")
    for index, batch in enumerate(batches):
        if batch is not None and not isinstance(batch, TrainingBatch):
            raise TypeError(f"`batches` must hold PreparedBatch objects. Received {type(batch).__name__} at {index}.")
    present = [batch for batch in batches if batch is not None]
    if not present:
        return None
    kinds = sorted({type(batch).__name__ for batch in present})
    if len(kinds) > 1:
        raise TypeError(f"`batches` must be of one kind. Received {' and '.join(kinds)}.")
    if len(present) < len(batches):
        missing = [index for index, batch in enumerate(batches) if batch is None]
        raise ValueError(
            "Parts of one rollout either all provide a prepared batch or none does. Received None at "
            f"{missing} of {len(batches)}: those rows could not be trained on. Let every part prepare one."
        )
    return present


def _require_row_counts(batches: Sequence[TrainingBatch], rows: Sequence[int] | None) -> None:
    if rows is None:
        return
    found = [batch.rows for batch in batches]
    if len(rows) != len(found) or not same_shape(tuple(found), tuple(int(r) for r in rows)):
        raise ValueError(
            f"The batch size must match the number of completions, `rows`: expected {list(rows)}. Received batches of "
            f"{found} rows. A row of the batch belongs to each completion, in the same order."
        )


def _require_same_rows(first: list[tuple[str, Any]], other: list[tuple[str, Any]], index: int) -> None:
    """ValueError unless both batches have the same leaves, and each the same dtype and shape but for the rows."""
    if [path for path, _ in first] != [path for path, _ in other]:
        raise ValueError(
            "Batches must have the same pytree structure (inputs, teacher or none) to become one. Batch 0 has "
            f"{[path for path, _ in first]}, batch {index} has {[path for path, _ in other]}."
        )
    for (path, a), (_, b) in zip(first, other, strict=True):
        if dtype_of(a) != dtype_of(b) or not same_shape(shape_of(a)[1:], shape_of(b)[1:]):
            raise ValueError(
                f"Batches must have rows of the same shape and dtype to become one. `{path}` is {dtype_of(a)} "
                f"{shape_of(a)} in batch 0 and {dtype_of(b)} {shape_of(b)} in batch {index}. Pad with positions of "
                "weight 0, or cast."
            )
