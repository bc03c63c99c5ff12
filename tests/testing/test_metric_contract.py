"""The metric contract passes stock Keras metrics, and names what is wrong with broken ones."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.testing import ContractError, check_metric_contract

RANDOM = np.random.default_rng(0)
TARGETS = RANDOM.normal(size=(5, 2)).astype("float32")
PREDICTIONS = RANDOM.normal(size=(5, 2)).astype("float32")
register = keras.saving.register_keras_serializable(package="metric_contract_tests")


def test_mean_squared_error_passes() -> None:
    expected = ((TARGETS - PREDICTIONS) ** 2).mean()
    metric, skip = keras.metrics.MeanSquaredError, {"precision": "Keras subtracts in the predictions' dtype"}
    report = check_metric_contract(metric, {}, TARGETS, PREDICTIONS, expected=expected, skip=skip)
    assert len(report.passed) == 7


def test_top_k_accuracy_passes() -> None:
    ids, logits = np.array([0, 1, 2, 1]), RANDOM.normal(size=(4, 3)).astype("float32")
    metric = keras.metrics.SparseTopKCategoricalAccuracy
    skip = {"precision": "TensorFlow ranks no float16"}
    assert len(check_metric_contract(metric, {"k": 2}, ids, logits, skip=skip).passed) == 7


class Mean(keras.metrics.Metric):
    """A right metric, from which each broken one departs in one point."""

    def __init__(self, name: str = "mean", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")
        self.weight = self.add_weight(shape=(), initializer="zeros", name="weight")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        values = ops.mean((ops.cast(y_pred, "float32") - y_true) ** 2, axis=-1)
        weights = ops.ones_like(values) if sample_weight is None else ops.cast(sample_weight, "float32")
        self.total.assign(self.total + ops.sum(weights * values))
        self.weight.assign(self.weight + ops.sum(weights))

    def result(self) -> Any:
        return ops.divide_no_nan(self.total, self.weight)


@register
class Right(Mean):
    pass


@register
class Named(Mean):
    def result(self) -> Any:
        mean = super().result()
        return {"mean": mean, "root": ops.sqrt(mean)}


@register
class EmptyIsNan(Mean):
    def result(self) -> Any:
        return self.total / self.weight


@register
class MeanOfMeans(Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(self.total + ops.mean((y_pred - y_true) ** 2))
        self.weight.assign(self.weight + 1.0)


@register
class LateState(Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        if not hasattr(self, "late"):
            self.late = self.add_weight(shape=(), initializer="zeros", name="late")
        super().update_state(y_true, y_pred, sample_weight)


@register
class NeverForgets(Mean):
    def reset_state(self) -> None:
        self.weight.assign(0.0 * self.weight)


@register
class IgnoresWeights(Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(y_true, y_pred)


@register
class HalfPrecision(Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        dtype = keras.backend.standardize_dtype(y_pred.dtype)
        error = ops.cast(ops.convert_to_tensor(y_pred) - ops.cast(y_true, dtype), "float32")
        super().update_state(ops.zeros_like(error), error, sample_weight)


@register
class KeepsPythonState(Mean):
    """Its count lives outside of the variables, so that a compiled program does not see it."""

    seen = 0

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen = self.seen + 1
        super().update_state(y_true, y_pred, sample_weight)

    def reset_state(self) -> None:
        super().reset_state()
        self.seen = 0

    def result(self) -> Any:
        traced = 1.0 if isinstance(self.seen, int) and self.seen > 1 else 0.0
        return super().result() + 0.0 * traced


@pytest.mark.parametrize(
    ("cls", "check", "phrase"),
    [
        (EmptyIsNan, "empty", "before any update must be finite"),
        (LateState, "values", "the first update made 1 variables"),
        (MeanOfMeans, "streaming", "two updates against one: expected"),
        (NeverForgets, "reset", "after `reset_state`"),
        (IgnoresWeights, "sample_weight", "a sample of weight 0 against without it: expected"),
        (HalfPrecision, "precision", "the result of float16 predictions: expected"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_broken_metric_is_found(cls: type, check: str, phrase: str) -> None:
    with pytest.raises(ContractError, match=phrase) as caught:
        check_metric_contract(cls, {}, TARGETS, PREDICTIONS)
    assert str(caught.value).startswith(f"`{cls.__name__}` fails `{check}`: "), caught.value


@pytest.mark.parametrize("cls", [Right, Named])
def test_the_metric_that_broken_ones_depart_from_passes(cls: type) -> None:
    assert len(check_metric_contract(cls, {}, TARGETS, PREDICTIONS).passed) == 8


def test_wrong_value_is_found_by_the_expected_one() -> None:
    with pytest.raises(ContractError, match="the result: expected 1, received"):
        check_metric_contract(Right, {}, TARGETS, PREDICTIONS, expected=1.0)


def test_two_samples_are_too_few() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        check_metric_contract(Right, {}, TARGETS[:2], PREDICTIONS[:2])
