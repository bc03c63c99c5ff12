"""`TeacherScorer`: a model in this process as a source of teacher targets."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import leaves_with_paths, map_leaves
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.validation import positive_int


class TeacherScorer:
    """Scores model inputs with a teacher: `scorer(model_inputs) -> TeacherTargets` on the host.

    The teacher runs compiled and without dropout, `batch_size` rows at a time; the last rows are filled up, so
    that one program serves batches of any number of rows. Nothing flows back into it.

    Args:
        model: a Keras model or layer that scores every position: inputs -> float (B, L, V) logits.
        batch_size: None to score all rows of a call at once, or how many at a time.
        targets: from the logits of one call, float (B, L, V), to teacher targets. `DenseTargets` keeps them
            whole; `lambda logits: TopKTargets.from_logits(logits, 64)` keeps 8 bytes for each of 64 ids.

    Raises:
        TypeError, ValueError: the model is no Keras layer, `targets` cannot be called or gives something else,
            `batch_size` is out of range.

    Example:

    ```python
    import keras, numpy as np
    from keras_diffusion_opd.data import TopKTargets
    from keras_diffusion_opd.models import TeacherScorer

    ids = keras.Input((4,), dtype="int32")
    teacher = keras.Model(ids, keras.layers.Dense(6)(keras.layers.Embedding(6, 8)(ids)))
    scorer = TeacherScorer(teacher, batch_size=2, targets=lambda logits: TopKTargets.from_logits(logits, 3))
    assert scorer(np.zeros((5, 4), "int32")).ids.shape == (5, 4, 3)
    ```
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int | None = None,
        targets: Callable[[Any], TeacherTargets] = DenseTargets,
    ) -> None:
        if not isinstance(model, keras.layers.Layer):
            raise TypeError(f"`model` must be a Keras model or layer. Received {type(model).__name__}.")
        if not callable(targets):
            raise TypeError(f"`targets` must be a function from logits to teacher targets. Received {targets!r}.")
        self.model = model
        self.batch_size = None if batch_size is None else positive_int("batch_size", batch_size)
        self.targets = targets
        keywords = {"training": False} if model._call_has_training_arg else {}
        self._score = backend.compiled(lambda inputs: model(inputs, **keywords), [model])

    @property
    def digest(self) -> str:
        """SHA-256 of the teacher's weights as they are now."""
        return digest(self.model)

    def __call__(self, model_inputs: Any) -> TeacherTargets:
        """Targets for every row of `model_inputs`, a nest of arrays (B, ...), as NumPy arrays."""
        rows = next((int(leaf.shape[0]) for _, leaf in leaves_with_paths(model_inputs, "model_inputs")), 0)
        if rows == 0:
            raise ValueError("`model_inputs` must hold arrays of at least one row. There is nothing to score.")
        size = rows if self.batch_size is None else self.batch_size
        parts = []
        for start in range(0, rows, size):
            taken = np.minimum(np.arange(start, start + size), rows - 1)
            logits = self._score(map_leaves(lambda leaf, taken=taken: np.asarray(leaf)[taken], model_inputs))
            targets = self.targets(logits)
            if not isinstance(targets, TeacherTargets):
                raise TypeError(f"`targets` must give TeacherTargets. Received {type(targets).__name__}.")
            kept = min(size, rows - start)
            parts.append(targets.map(lambda array, kept=kept: keras.ops.convert_to_numpy(array)[:kept]))
        if len(parts) == 1:
            return parts[0]
        columns = [list(leaves_with_paths(part.arrays(), "teacher")) for part in parts]
        joined = iter([np.concatenate([leaf for _, leaf in column]) for column in zip(*columns, strict=True)])
        return parts[0].map(lambda _: next(joined))
