"""The model contract passes ordinary models, and names what is wrong with broken ones."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.testing import ContractError, check_model_contract

X = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
register = keras.saving.register_keras_serializable(package="model_contract_tests")


def functional() -> keras.Model:
    x = keras.Input((4,))
    return keras.Model(x, keras.layers.Dense(2)(keras.layers.Dense(5, activation="tanh")(x)))


def sequential() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(3), keras.layers.LayerNormalization()])


def two_inputs() -> keras.Model:
    x = {"ids": keras.Input((2,), dtype="int32", name="ids"), "noise": keras.Input((1,), name="noise")}
    ids = keras.layers.Flatten()(keras.layers.Embedding(5, 3)(x["ids"]))
    joined = keras.layers.Concatenate()([ids, x["noise"]])
    return keras.Model(x, {"logits": keras.layers.Dense(2)(joined), "ids": x["ids"]})


@pytest.mark.parametrize("factory", [functional, sequential])
def test_ordinary_model_passes(factory: Callable[[], Any]) -> None:
    report = check_model_contract(factory, X, policies=["mixed_float16"])
    assert len(report.passed) == 8 and report.subject == factory.__name__


def test_model_with_nests_of_inputs_and_outputs_passes() -> None:
    inputs = {"ids": np.array([[1, 2], [3, 4], [0, 1]], "int32"), "noise": X[:, :1]}
    assert len(check_model_contract(two_inputs, inputs, policies=["mixed_bfloat16"]).passed) == 8


@register
class Model(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)


@register
class MixesTheBatch(Model):
    def call(self, inputs: Any) -> Any:
        return self.dense(inputs - ops.mean(inputs, axis=0, keepdims=True))


@register
class CastsOutput(Model):
    def call(self, inputs: Any) -> Any:
        return ops.cast(self.dense(inputs), "float32")


@register
class DropsTheWeights(Model):
    def call(self, inputs: Any) -> Any:
        return ops.stop_gradient(self.dense(inputs))


@register
class NeedsArgument(Model):
    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(width)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}


def test_subclassed_model_passes() -> None:
    assert len(check_model_contract(Model, X, policies=["bfloat16"]).passed) == 8


def test_float32_outputs_may_be_declared() -> None:
    report = check_model_contract(CastsOutput, X, output_dtype="float32", policies=["bfloat16"])
    assert "precision" in report.passed


@pytest.mark.parametrize(
    ("factory", "check", "phrase"),
    [
        (lambda: NeedsArgument(2), "config", "does not build the object again"),
        (MixesTheBatch, "predict", "the first sample alone against the same in a batch"),
        (CastsOutput, "precision", "expected outputs of dtype float16, received float32"),
        (DropsTheWeights, "gradient", "kernel` is zero"),
    ],
)
def test_broken_model_is_found(factory: Callable[[], Any], check: str, phrase: str) -> None:
    with pytest.raises(ContractError, match=phrase) as caught:
        check_model_contract(factory, X)
    assert f"fails `{check}`: " in str(caught.value)


def test_one_sample_is_too_few() -> None:
    with pytest.raises(ValueError, match="at least 2 samples"):
        check_model_contract(functional, X[:1])


def test_global_policy_is_given_back_after_a_failure() -> None:
    before = keras.config.dtype_policy().name
    with pytest.raises(ContractError):
        check_model_contract(CastsOutput, X)
    assert keras.config.dtype_policy().name == before
