"""The contract of a loss."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.testing.arrays import (
    batch_of,
    require_close,
    require_finite,
    rows,
    to_dtype,
    to_numpy,
)
from keras_diffusion_opd.testing.config import require_config_round_trip
from keras_diffusion_opd.testing.contract import FLOAT32_TOLERANCE, Report, run_checks
from keras_diffusion_opd.testing.training import Constant, gradients, require_fit


def check_loss_contract(
    loss_class: type,
    init_kwargs: Mapping[str, Any],
    y_true: Any,
    y_pred: np.ndarray,
    *,
    reference: Callable[[Any, Any], np.ndarray] | None = None,
    skip: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Report:
    """Hold a loss to what Keras asks of every loss.

    The checks, in order:

    - `config`: every argument is in `get_config`; JSON and back gives the same object.
    - `values`: with `reduction=None` a finite value for each sample at least; those of `reference` if given.
    - `independence`: the value of a sample does not depend on the other samples.
    - `reduction`: "sum" is the sum of the values, "sum_over_batch_size" their mean.
    - `sample_weight`: multiplies the values; a batch of weight 0 gives exactly 0.
    - `precision`: float16 and bfloat16 predictions give the float32 value of the rounded predictions.
    - `gradient`: finite, and equal to central differences along a random direction.
    - `fit`: a compiled step; the loss that `fit` reports is that of a call.
    - `reload`: a compiled model, saved as `.keras` and loaded, evaluates to the same loss.

    Args:
        loss_class: a subclass of `keras.losses.Loss`.
        init_kwargs: its arguments but for `reduction`, plain Python values.
        y_true: targets, an array or a nest of arrays, each (batch, ...), batch >= 2.
        y_pred: predictions, float (batch, ...), away from kinks and from the edge of the loss's domain.
        reference: (y_true, y_pred as float64) -> the values with `reduction=None`, written in NumPy.
        skip: the checks to leave out, each with the reason.
        seed: of the random weights and directions.

    Returns:
        What was checked. The first failing check raises a `ContractError` instead.

    Example:
        >>> import keras, numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> y_true, y_pred = np.eye(3, dtype="float32"), np.full((3, 3), 0.25, "float32")
        >>> report = kdo.testing.check_loss_contract(
        ...     keras.losses.MeanSquaredError, {}, y_true, y_pred,
        ...     reference=lambda t, p: ((t - p) ** 2).mean(-1),
        ... )
        >>> len(report.passed)
        9
    """
    if batch_of(y_true) < 2 or batch_of(y_true) != batch_of(y_pred):
        raise ValueError(
            "`y_true` and `y_pred` must hold the same number of samples, at least 2. "
            f"Received {batch_of(y_true)} and {batch_of(y_pred)}."
        )
    contract = _Loss(loss_class, dict(init_kwargs), y_true, np.asarray(y_pred), reference, seed)
    names = ("config", "values", "independence", "reduction", "sample_weight", "precision", "gradient")
    checks = {name: getattr(contract, name) for name in (*names, "fit", "reload")}
    return run_checks(loss_class.__name__, checks, skip)


class _Loss:
    def __init__(
        self, cls: type, init: dict[str, Any], y_true: Any, y_pred: np.ndarray, reference: Any, seed: int
    ) -> None:
        self.cls, self.init, self.y_true, self.y_pred, self.reference = cls, init, y_true, y_pred, reference
        self.random = np.random.default_rng(seed)

    def call(self, reduction: str | None, y_true: Any, y_pred: Any, weights: Any = None) -> np.ndarray:
        """The value of a new loss, as NumPy."""
        value = self.cls(**self.init, reduction=reduction)(y_true, y_pred, sample_weight=weights)
        return np.asarray(to_numpy(value))

    def each(self) -> np.ndarray:
        """The values without reduction."""
        return self.call(None, self.y_true, self.y_pred)

    def config(self) -> None:
        require_config_round_trip(self.cls(**self.init), self.init)

    def values(self) -> None:
        values = self.each()
        batch = len(self.y_pred)
        assert values.shape[:1] == (batch,), (
            f"with `reduction=None` expected one value for each of {batch} samples, "
            f"received shape {values.shape}: `call` must not reduce over the batch."
        )
        require_finite(values, "the loss")
        if self.reference is not None:
            expected = np.asarray(self.reference(self.y_true, self.y_pred.astype("float64")))
            require_close(values, expected, "the loss against the reference", FLOAT32_TOLERANCE)

    def independence(self) -> None:
        together = self.each()
        for i in range(len(together)):
            alone = self.call(None, rows(self.y_true, slice(i, i + 1)), self.y_pred[i : i + 1])
            what = f"sample {i} alone against in its batch"
            require_close(alone, together[i : i + 1], what, FLOAT32_TOLERANCE)

    def reduction(self) -> None:
        values = self.each().astype("float64")
        total = self.call("sum", self.y_true, self.y_pred)
        require_close(total, np.asarray(values.sum()), '`reduction="sum"`', FLOAT32_TOLERANCE)
        mean = self.call("sum_over_batch_size", self.y_true, self.y_pred)
        require_close(mean, np.asarray(values.mean()), '`reduction="sum_over_batch_size"`', FLOAT32_TOLERANCE)

    def sample_weight(self) -> None:
        values = self.each()
        weights = self.random.uniform(0.5, 2.0, values.shape).astype("float32")
        weighted = self.call(None, self.y_true, self.y_pred, weights)
        require_close(weighted, weights * values, "the weighted loss", FLOAT32_TOLERANCE)
        nothing = self.call("sum", self.y_true, self.y_pred, np.zeros_like(weights))
        require_close(nothing, np.zeros(()), "the loss with weight 0", 0.0)

    def precision(self) -> None:
        for dtype in ("float16", "bfloat16"):
            rounded = to_dtype(self.y_pred, dtype)
            expected = self.call(None, self.y_true, to_numpy(rounded))
            value = self.cls(**self.init, reduction=None)(self.y_true, rounded)
            received = keras.backend.standardize_dtype(value.dtype)
            assert received == "float32", f"expected float32 from {dtype} predictions, received {received}."
            require_close(value, expected, f"the loss of {dtype} predictions", FLOAT32_TOLERANCE)

    def _inputs(self) -> np.ndarray:
        return np.zeros((len(self.y_pred), 1), "float32")

    def _constant(self) -> Constant:
        model = Constant(self.y_pred)
        model(self._inputs())
        return model

    def gradient(self) -> None:
        loss = self.cls(**self.init, reduction="sum")
        (gradient,) = gradients(self._constant(), self._inputs(), self.y_true, loss=loss)
        require_finite(gradient, "the gradient for the predictions")
        direction = self.random.uniform(-1.0, 1.0, self.y_pred.shape)
        step = 1e-2 * direction
        above, below = (self.call(None, self.y_true, (self.y_pred + sign * step).astype("float32")) for sign in (1, -1))
        # Central differences are wrong by the third derivative times 1e-4 / 6, and by rounding, 1e-7 / 1e-2.
        slope = np.sum(above.astype("float64") - below) / 2e-2
        expected = float(np.sum(gradient * direction))
        allowed = 1e-2 * max(1.0, float(np.abs(gradient).max()))
        assert abs(slope - expected) <= allowed, (
            f"along a random direction the loss changes by {slope:.6g}, "
            f"but its gradient says {expected:.6g}; they may differ by {allowed:.2g}."
        )

    def fit(self) -> None:
        model = self._constant()
        loss = self.cls(**self.init)
        require_fit(model, self._inputs(), self.y_true, loss=loss)
        model.values.assign(self.y_pred)
        model.compile(keras.optimizers.SGD(0.0), loss=loss)
        logged = model.evaluate(self._inputs(), self.y_true, batch_size=len(self.y_pred), verbose=0)
        expected = ops.convert_to_numpy(loss(self.y_true, self.y_pred))
        require_close(np.asarray(logged), np.asarray(expected), "the loss of `evaluate`", FLOAT32_TOLERANCE)

    def reload(self) -> None:
        symbols = keras.Input(self.y_pred.shape[1:])
        model = keras.Model(symbols, keras.layers.Activation("linear")(symbols))
        model.compile("sgd", loss=self.cls(**self.init))
        expected = model.evaluate(self.y_pred, self.y_true, batch_size=len(self.y_pred), verbose=0)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            model.save(path)
            loaded = keras.saving.load_model(path)
        received = loaded.evaluate(self.y_pred, self.y_true, batch_size=len(self.y_pred), verbose=0)
        require_close(np.asarray(received), np.asarray(expected), "the loss after loading", FLOAT32_TOLERANCE)
