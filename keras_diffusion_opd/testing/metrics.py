"""The contract of a metric."""

from collections.abc import Mapping
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


def check_metric_contract(
    metric_class: type,
    init_kwargs: Mapping[str, Any],
    y_true: Any,
    y_pred: Any,
    *,
    expected: Any = None,
    skip: Mapping[str, str] | None = None,
) -> Report:
    """Hold a metric to what Keras asks of every metric, and to streaming that equals one shot.

    The checks, in order:

    - `config`: every argument is in `get_config`; JSON and back gives the same object.
    - `empty`: the result before any update is finite.
    - `values`: finite, and equal to `expected` if given; an update makes no new state.
    - `streaming`: in batches of different size, in any order, the result is that of one update.
    - `reset`: after `reset_state` the result is the empty one, and the next pass is as the first.
    - `sample_weight`: a sample of weight 0 counts as left out, one of weight 2 as given twice.
    - `precision`: float16 and bfloat16 predictions give the result of the rounded predictions in float32.
    - `compiled`: `evaluate` reports what an eager update gives.

    Args:
        metric_class: a `keras.metrics.Metric` with `update_state(y_true, y_pred, sample_weight=None)`.
        init_kwargs: its arguments, plain Python values.
        y_true: targets, an array or a nest of arrays, each (batch, ...), batch >= 3.
        y_pred: predictions, the same.
        expected: the right result for all samples, of the same structure as the result.
        skip: the checks to leave out, each with the reason.

    Returns:
        What was checked. The first failing check raises a `ContractError` instead.

    Example:
        >>> import keras, numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> y_true, y_pred = np.zeros((4, 2), "float32"), np.full((4, 2), 0.5, "float32")
        >>> report = kdo.testing.check_metric_contract(
        ...     keras.metrics.MeanSquaredError, {}, y_true, y_pred, expected=0.25
        ... )
        >>> len(report.passed)
        8
    """
    if batch_of(y_true) < 3 or batch_of(y_true) != batch_of(y_pred):
        raise ValueError(
            "`y_true` and `y_pred` must hold the same number of samples, at least 3. "
            f"Received {batch_of(y_true)} and {batch_of(y_pred)}."
        )
    contract = _Metric(metric_class, dict(init_kwargs), y_true, y_pred, expected)
    names = ("config", "empty", "values", "streaming", "reset", "sample_weight", "precision", "compiled")
    return run_checks(metric_class.__name__, {name: getattr(contract, name) for name in names}, skip)


class Evaluated(keras.Model):
    """A model that predicts its inputs and has no loss, so that `evaluate` reports metrics alone."""

    def call(self, inputs: Any) -> Any:
        """The inputs."""
        return keras.tree.map_structure(ops.convert_to_tensor, inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing, which Keras would refuse."""
        del args, kwargs
        return ops.zeros(())


class _Metric:
    def __init__(self, cls: type, init: dict[str, Any], y_true: Any, y_pred: Any, expected: Any) -> None:
        self.cls, self.init, self.y_true, self.y_pred, self.expected = cls, init, y_true, y_pred, expected
        self.count = batch_of(y_true)

    def result(self, *parts: Any, metric: Any = None) -> Any:
        """The result after an update for each part: an index, or an index with weights."""
        metric = self.cls(**self.init) if metric is None else metric
        for part in parts:
            index, weights = part if isinstance(part, tuple) else (part, None)
            metric.update_state(rows(self.y_true, index), rows(self.y_pred, index), sample_weight=weights)
        return to_numpy(keras.tree.map_structure(ops.convert_to_tensor, metric.result()))

    def everything(self) -> Any:
        """The result after one update with all samples."""
        return self.result(slice(None))

    def config(self) -> None:
        require_config_round_trip(self.cls(**self.init), self.init)

    def empty(self) -> None:
        require_finite(self.result(), "the result before any update")

    def values(self) -> None:
        metric = self.cls(**self.init)
        before = len(metric.variables)
        assert before, "the metric has no state: make its variables in `__init__`."
        result = self.result(slice(None), metric=metric)
        made = len(metric.variables) - before
        assert not made, f"the first update made {made} variables: make them in `__init__`."
        require_finite(result, "the result")
        if self.expected is not None:
            expected = keras.tree.map_structure(np.asarray, self.expected)
            require_close(result, expected, "the result", FLOAT32_TOLERANCE)

    def streaming(self) -> None:
        once = self.everything()
        first, rest = slice(0, 1), slice(1, None)
        require_close(self.result(first, rest), once, "two updates against one", FLOAT32_TOLERANCE)
        require_close(self.result(rest, first), once, "the updates in another order", FLOAT32_TOLERANCE)
        singles = [slice(i, i + 1) for i in range(self.count)]
        require_close(self.result(*singles), once, "one update for each sample", FLOAT32_TOLERANCE)

    def reset(self) -> None:
        metric = self.cls(**self.init)
        empty = self.result(metric=metric)
        first = self.result(slice(None), metric=metric)
        metric.reset_state()
        require_close(self.result(metric=metric), empty, "the result after `reset_state`", 0.0)
        require_close(self.result(slice(None), metric=metric), first, "the pass after `reset_state`", 0.0)

    def sample_weight(self) -> None:
        weights = np.ones(self.count, "float32")
        require_close(self.result((slice(None), weights)), self.everything(), "weight 1 for all", FLOAT32_TOLERANCE)
        without = np.arange(1, self.count)
        weights[0] = 0.0
        weighted = self.result((slice(None), weights))
        left_out = "a sample of weight 0 against without it"
        require_close(weighted, self.result(without), left_out, FLOAT32_TOLERANCE)
        twice = np.concatenate([without, [1]])
        weights[1] = 2.0
        weighted = self.result((slice(None), weights))
        given_twice = "a sample of weight 2 against it twice"
        require_close(weighted, self.result(twice), given_twice, FLOAT32_TOLERANCE)

    def precision(self) -> None:
        for dtype in ("float16", "bfloat16"):
            rounded = to_dtype(self.y_pred, dtype)
            metric, reference = self.cls(**self.init), self.cls(**self.init)
            metric.update_state(self.y_true, rounded)
            reference.update_state(self.y_true, to_numpy(rounded))
            what = f"the result of {dtype} predictions"
            require_close(self.result(metric=metric), self.result(metric=reference), what, FLOAT32_TOLERANCE)

    def compiled(self) -> None:
        metric = self.cls(**self.init)
        model = Evaluated()
        model.compile(metrics=[metric])
        batch = max(1, self.count - 1)  # two batches, the second shorter
        logs = model.evaluate(self.y_pred, self.y_true, batch_size=batch, verbose=0, return_dict=True)
        result = self.everything()
        received = {name: value for name, value in logs.items() if name != "loss"}
        if not isinstance(result, dict):
            (received,) = received.values()
        received = keras.tree.map_structure(np.asarray, received)
        require_close(received, result, "the result of `evaluate`", FLOAT32_TOLERANCE)
