"""What layers and models share: a training step, dtype policies and files, through public Keras alone."""

import contextlib
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.testing.arrays import require_close, require_finite
from keras_diffusion_opd.testing.contract import FLOAT32_TOLERANCE, TOLERANCES


class Flat(keras.Model):
    """A model or layer whose floating outputs are joined into one float32 array (batch, features).

    One weight more, `anchor`, moves every output: without one that the loss depends on, some backends
    refuse the step before a missing gradient can be told.
    """

    def __init__(self, inner: Any, **call_arguments: Any) -> None:
        super().__init__(dtype=inner.dtype_policy)
        self.inner = inner
        self.call_arguments = call_arguments
        self.anchor = self.add_weight(shape=(), initializer="zeros", dtype="float32", name="anchor")

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The joined outputs for `inputs`."""
        outputs = keras.tree.flatten(self.inner(inputs, training=training, **self.call_arguments))
        floating = [x for x in outputs if "float" in keras.backend.standardize_dtype(x.dtype)]
        assert floating, "there is no floating output to train on."
        flat = [ops.reshape(ops.cast(x, "float32"), (-1, math.prod(x.shape[1:]))) for x in floating]
        return ops.concatenate(flat, axis=1) + ops.cast(self.anchor, "float32")


class Constant(keras.Model):
    """A model whose output is one trainable array, whatever its input: its gradient is that of a loss."""

    def __init__(self, values: np.ndarray) -> None:
        super().__init__()
        self.values = self.add_weight(shape=values.shape, initializer="zeros", name="values")
        self.values.assign(values)

    def call(self, inputs: Any) -> Any:
        """The array itself."""
        del inputs
        return ops.convert_to_tensor(self.values)


def gradients(model: keras.Model, x: Any, y: Any, *, loss: Any) -> list[np.ndarray]:
    """The gradients of `loss` for the trainable weights of a built model, which end as they were.

    A gradient is what one compiled step of plain descent moves a weight by.
    """
    model.compile(keras.optimizers.SGD(1.0), loss=loss)
    before = [np.array(ops.convert_to_numpy(v)) for v in model.trainable_variables]
    model.train_on_batch(x, y)
    after = [np.array(ops.convert_to_numpy(v)) for v in model.trainable_variables]
    for variable, value in zip(model.trainable_variables, before, strict=True):
        variable.assign(value)
    return [b - a for b, a in zip(before, after, strict=True)]


def require_fit(model: keras.Model, x: Any, y: Any, *, loss: Any) -> None:
    """For a built model, a compiled step of `fit` gives a finite loss, finite weights, and keeps dtypes."""
    model.compile(keras.optimizers.SGD(1e-3), loss=loss)
    dtypes = [v.dtype for v in model.weights]
    history = model.fit(x, y, batch_size=len(y), epochs=1, verbose=0, shuffle=False).history
    require_finite(np.asarray(history["loss"]), "the loss that `fit` reports")
    for variable in model.weights:
        require_finite(variable.value, f"the weight `{variable.path}` after a step")
    kept = [v.dtype for v in model.weights]
    assert kept == dtypes, f"training must keep dtypes. Expected {dtypes}, received {kept}."


def require_gradients(model: Flat, x: Any, targets: Any) -> None:
    """For a built model, the gradients of every trainable weight are finite and not zero."""
    moved = gradients(model, x, targets, loss="mean_squared_error")
    for variable, gradient in zip(model.trainable_variables, moved, strict=True):
        if variable is model.anchor:
            continue
        require_finite(gradient, f"the gradient of `{variable.path}`")
        assert np.any(gradient), f"the gradient of `{variable.path}` is zero: no output depends on it."


def require_policy(outputs: Any, policy: str, expected: Any, output_dtype: str | None) -> None:
    """Outputs under `policy` have its dtype (or `output_dtype`), are finite and close to `expected`."""
    wanted = output_dtype or keras.DTypePolicy(policy).compute_dtype
    for x in keras.tree.flatten(outputs):
        dtype = keras.backend.standardize_dtype(x.dtype)
        right = "float" not in dtype or dtype == wanted
        assert right, f"under {policy} expected outputs of dtype {wanted}, received {dtype}."
    require_finite(outputs, f"the output under {policy}")
    require_close(outputs, expected, f"the output under {policy}", TOLERANCES[policy])


def require_reload(model: Any, inputs: Any) -> None:
    """`model`, saved as `.keras` and loaded, has equal weights, dtypes and outputs."""
    expected = model(inputs, training=False)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.keras")
        model.save(path)
        loaded = keras.saving.load_model(path)
    dtypes, kept = [v.dtype for v in model.weights], [v.dtype for v in loaded.weights]
    assert kept == dtypes, f"the dtypes of the weights changed. Expected {dtypes}, received {kept}."
    for old, new in zip(model.weights, loaded.weights, strict=True):
        require_close(new.value, old.value, f"the weight `{old.path}` after loading", 0.0)
    require_close(loaded(inputs, training=False), expected, "the output after loading", FLOAT32_TOLERANCE)


@contextlib.contextmanager
def global_policy(name: str) -> Iterator[None]:
    """The dtype policy of what is built inside the block."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
