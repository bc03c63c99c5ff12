"""The layer contract passes stock Keras layers, and names what is wrong with broken ones."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.testing import ContractError, check_layer_contract

X = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
SEQUENCE = np.random.default_rng(1).normal(size=(2, 5, 4)).astype("float32")
register = keras.saving.register_keras_serializable(package="layer_contract_tests")


@pytest.mark.parametrize(
    ("cls", "kwargs", "inputs", "more"),
    [
        (keras.layers.Dense, {"units": 3, "activation": "gelu"}, X, {}),
        (keras.layers.Embedding, {"input_dim": 7, "output_dim": 4}, np.array([[1, 2], [3, 4]]), {}),
        (
            keras.layers.MultiHeadAttention,
            {"num_heads": 2, "key_dim": 3, "use_bias": False},
            SEQUENCE,
            # JAX has no float16 product of three axes on a CPU.
            {"call_arguments": {"value": SEQUENCE[:, :3]}, "policies": ("mixed_bfloat16",)},
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_stock_layer_passes(cls: type, kwargs: dict[str, Any], inputs: Any, more: dict[str, Any]) -> None:
    report = check_layer_contract(cls, kwargs, inputs, **more)
    assert len(report.passed) == 9 and report.skipped == {} and report.subject == cls.__name__


def test_layer_without_weights_and_with_a_dict_of_inputs_passes() -> None:
    report = check_layer_contract(Difference, {}, {"left": X, "right": 2 * X}, policies=["bfloat16"])
    assert len(report.passed) == 9


def test_skipped_check_is_reported_with_its_reason() -> None:
    skip = {"output_shape": "it has a spec", "gradient": "its output is an integer", "fit": "no weights"}
    report = check_layer_contract(Rounded, {}, X, skip=skip)
    assert report.skipped == skip and "gradient" not in report.passed
    assert "3 skipped (output_shape: it has a spec; gradient: its output is an integer; fit: " in str(report)


@pytest.mark.parametrize(
    ("skip", "phrase"),
    [({"gradients": "why"}, "must name checks. Received 'gradients'"), ({"fit": " "}, "must be the reason")],
)
def test_skip_without_sense_is_refused(skip: dict[str, str], phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        check_layer_contract(keras.layers.Dense, {"units": 1}, X, skip=skip)


@register
class Difference(keras.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs["left"] - inputs["right"]

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape["left"]


@register
class Rounded(keras.Layer):
    def call(self, inputs: Any) -> Any:
        return ops.cast(ops.round(inputs), "int32")

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, dtype="int32")


@register
class RoundedWithoutDtype(Rounded):
    """Given a shape alone, Keras takes the dtype for that of the policy."""

    compute_output_spec = keras.Layer.compute_output_spec

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


class Scale(keras.Layer):
    """A right layer, from which each broken one departs in one point."""

    def __init__(self, factor: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="scale")

    def call(self, inputs: Any) -> Any:
        return self.factor * self.scale * inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


@register
class Right(Scale):
    pass


class NotRegistered(Scale):
    pass


@register
class ForgetsArgument(Scale):
    def get_config(self) -> dict[str, Any]:
        return keras.Layer.get_config(self)


@register
class ChangesArgument(Scale):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor + 1}


@register
class ArrayInConfig(Scale):
    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": {1, 2}}


@register
class WeightInCall(Scale):
    def build(self, input_shape: Any) -> None:
        pass

    def call(self, inputs: Any) -> Any:
        if not hasattr(self, "scale"):
            self.scale = self.add_weight(shape=(inputs.shape[-1],), initializer="ones")
        return self.scale * inputs


@register
class LateSublayer(Scale):
    def __init__(self, factor: float = 2.0, **kwargs: Any) -> None:
        super().__init__(factor, **kwargs)
        self.inner = keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


@register
class WrongOutputShape(Scale):
    def compute_output_shape(self, input_shape: Any) -> Any:
        return (*input_shape, 1)


@register
class SpecAndShapeDisagree(WrongOutputShape):
    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, dtype=self.compute_dtype)


@register
class Remembers(Scale):
    def call(self, inputs: Any) -> Any:
        self.last = inputs
        return super().call(inputs)


@register
class Random(Scale):
    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(ops.shape(inputs), seed=self.seeds)

    def build(self, input_shape: Any) -> None:
        self.seeds = keras.random.SeedGenerator(0)


@register
class Counts(Scale):
    def build(self, input_shape: Any) -> None:
        super().build(input_shape)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, inputs: Any) -> Any:
        self.count.assign(self.count + 1.0)
        return super().call(inputs)


@register
class Infinite(Scale):
    def call(self, inputs: Any) -> Any:
        return super().call(inputs) / ops.zeros_like(inputs)


@register
class OwnDtype(Scale):
    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(
            shape=(input_shape[-1],), initializer="ones", name="scale", dtype="float32", autocast=False
        )

    def call(self, inputs: Any) -> Any:
        return ops.cast(inputs, "float32") * self.scale


@register
class Overflows(Scale):
    def call(self, inputs: Any) -> Any:
        return super().call(inputs * 1e5) / 1e5


@register
class Dead(Scale):
    def call(self, inputs: Any) -> Any:
        return ops.stop_gradient(self.scale) * inputs


@register
class ForgetsWeights(Scale):
    def save_own_variables(self, store: Any) -> None:
        store["0"] = np.ones(self.scale.shape, "float32")


@pytest.mark.parametrize(
    ("cls", "check", "phrase"),
    [
        (NotRegistered, "config", "register_keras_serializable"),
        (ForgetsArgument, "config", r"Received one without \['factor'\]"),
        (ChangesArgument, "config", "config.factor: expected 3.0, received 4.0"),
        (ArrayInConfig, "config", "plain Python types|JSON|not build"),
        (WeightInCall, "build", "All state must be created in the"),
        (LateSublayer, "build", r"received \[\(4,\)\]. Build sublayers in `build`"),
        (WrongOutputShape, "symbolic_call", r"has shape \(None, 4, 1\), a real one \(3, 4\)"),
        (SpecAndShapeDisagree, "output_shape", r"gives \(3, 4, 1\), a real call \(3, 4\)"),
        (Remembers, "eager_call", r"It set \['last'\]"),
        (Random, "eager_call", "a second call with training=False: expected"),
        (Counts, "eager_call", "count` after a call: expected 1, received 3"),
        (Infinite, "eager_call", "12 are NaN or infinite"),
        (OwnDtype, "precision", "expected outputs of dtype float16, received float32"),
        (Overflows, "precision", "the output under mixed_float16 must be finite"),
        (Dead, "gradient", "scale` is zero"),
        (ForgetsWeights, "reload", "scale` after loading: expected"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_broken_layer_is_found(cls: type, check: str, phrase: str) -> None:
    with pytest.raises(ContractError, match=phrase) as caught:
        check_layer_contract(cls, {"factor": 2.0}, X)
    assert str(caught.value).startswith(f"`{cls.__name__}` fails `{check}`: "), caught.value


def test_wrong_dtype_of_the_symbolic_output_is_found() -> None:
    with pytest.raises(ContractError, match="the symbolic output has dtype float32, a real one int32"):
        check_layer_contract(RoundedWithoutDtype, {}, X)


def test_the_layer_that_broken_ones_depart_from_passes() -> None:
    assert len(check_layer_contract(Right, {"factor": 2.0}, X).passed) == 9


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`policies` must be of .*mixed_float16.* Received \['int8'\]"):
        check_layer_contract(Right, {"factor": 2.0}, X, policies=["int8"])
