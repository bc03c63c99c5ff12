"""The loss contract passes stock Keras losses, and names what is wrong with broken ones."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.testing import ContractError, check_loss_contract

RANDOM = np.random.default_rng(0)
IDS = np.array([[0, 2], [1, 1], [2, 0]], "int32")
LOGITS = RANDOM.normal(size=(3, 2, 3)).astype("float32")
TARGETS = RANDOM.normal(size=(3, 2)).astype("float32")
PREDICTIONS = RANDOM.normal(size=(3, 2)).astype("float32")
register = keras.saving.register_keras_serializable(package="loss_contract_tests")


def cross_entropy(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probs, ids[..., None], -1)[..., 0]


def test_mean_squared_error_passes() -> None:
    report = check_loss_contract(
        keras.losses.MeanSquaredError,
        {},
        TARGETS,
        PREDICTIONS,
        reference=lambda t, p: ((t - p) ** 2).mean(-1),
    )
    assert len(report.passed) == 9


def test_token_cross_entropy_passes() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy
    report = check_loss_contract(loss, {"from_logits": True}, IDS, LOGITS, reference=cross_entropy)
    assert len(report.passed) == 9


class Square(keras.losses.Loss):
    """A right loss, from which each broken one departs in one point."""

    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.factor * ops.mean((y_pred - y_true) ** 2, axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


@register
class Right(Square):
    pass


@register
class ForgetsArgument(Square):
    def get_config(self) -> dict[str, Any]:
        return keras.losses.Loss.get_config(self)


@register
class Reduces(Square):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(super().call(y_true, y_pred))


@register
class SubtractsTheBatchMean(Square):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        values = super().call(y_true, y_pred)
        return values - ops.mean(values)


@register
class DividesByZero(Square):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(y_true, y_pred) / (y_true[:, 0] * 0.0)


@register
class IgnoresWeights(Square):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return super().__call__(y_true, y_pred)


@register
class OwnReduction(Square):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = super().__call__(y_true, y_pred, sample_weight)
        return 2.0 * value if self.reduction == "sum" else value


@register
class KeepsHalfPrecision(Square):
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        dtype = keras.backend.standardize_dtype(y_pred.dtype)
        return ops.cast(super().__call__(y_true, y_pred, sample_weight), dtype)


@register
class NoGradient(Square):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(y_true, ops.stop_gradient(y_pred)) + 0.0 * ops.mean(y_pred, axis=-1)


@register
class NanGradient(Square):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        hole = ops.where(y_pred > 1e9, ops.exp(y_pred + 1e3), 0.0)
        return super().call(y_true, y_pred) + ops.mean(hole, axis=-1)


@pytest.mark.parametrize(
    ("cls", "check", "phrase"),
    [
        (ForgetsArgument, "config", r"Received one without \['factor'\]"),
        (Reduces, "values", r"one value for each of 3 samples, received shape \(\)"),
        (DividesByZero, "values", "the loss must be finite"),
        (SubtractsTheBatchMean, "independence", "sample 0 alone against in its batch: expected"),
        (OwnReduction, "reduction", 'reduction="sum"'),
        (IgnoresWeights, "sample_weight", "the weighted loss: expected"),
        (KeepsHalfPrecision, "precision", "expected float32 from float16 predictions, received float16"),
        (NoGradient, "gradient", "its gradient says"),
        (NanGradient, "gradient", "the gradient for the predictions must be finite"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_broken_loss_is_found(cls: type, check: str, phrase: str) -> None:
    with pytest.raises(ContractError, match=phrase) as caught:
        check_loss_contract(cls, {"factor": 1.0}, TARGETS, PREDICTIONS)
    assert str(caught.value).startswith(f"`{cls.__name__}` fails `{check}`: "), caught.value


def test_wrong_values_are_found_by_the_reference() -> None:
    with pytest.raises(ContractError, match="the loss against the reference: expected"):
        check_loss_contract(
            Right, {"factor": 1.01}, TARGETS, PREDICTIONS, reference=lambda t, p: ((t - p) ** 2).mean(-1)
        )


def test_the_loss_that_broken_ones_depart_from_passes() -> None:
    assert len(check_loss_contract(Right, {"factor": 1.0}, TARGETS, PREDICTIONS).passed) == 9


def test_different_numbers_of_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"same number of samples.*Received 3 and 2"):
        check_loss_contract(Right, {}, TARGETS, PREDICTIONS[:2])
