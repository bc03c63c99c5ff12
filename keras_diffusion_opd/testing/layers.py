"""The contract of a layer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.testing.arrays import batch_of, require_close, require_finite, symbols_of, to_dtype
from keras_diffusion_opd.testing.config import require_config_round_trip
from keras_diffusion_opd.testing.contract import TOLERANCES, Report, known_policies, run_checks
from keras_diffusion_opd.testing.training import (
    Flat,
    require_fit,
    require_gradients,
    require_policy,
    require_reload,
)


def check_layer_contract(
    layer_class: type,
    init_kwargs: Mapping[str, Any],
    inputs: Any,
    *,
    call_arguments: Mapping[str, Any] | None = None,
    output_dtype: str | None = None,
    policies: Sequence[str] = tuple(TOLERANCES),
    skip: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Report:
    """Hold a layer to what Keras asks of every layer.

    The checks, in order:

    - `config`: every argument is in `get_config`; JSON and back gives the same object.
    - `build`: the second call makes no weights, and `build_from_config` makes all that the first call made.
    - `symbolic_call`: shapes and dtypes on `keras.Input` equal those of a real call.
    - `output_shape`: `compute_output_shape` gives the shapes of a real call.
    - `eager_call`: finite; twice the same; weights and public attributes unchanged.
    - `precision`: under each of `policies` the outputs and weights have its dtypes, are finite and close to
      float32.
    - `gradient`: finite, and not zero, for every trainable weight.
    - `fit`: a compiled step under float32 and `policies`.
    - `reload`: a model with the layer, saved as `.keras` and loaded, gives equal outputs and weights.

    Args:
        layer_class: a subclass of `keras.Layer`.
        init_kwargs: its arguments, plain Python values.
        inputs: the first argument of `call`: an array or a nest of arrays, each (batch, ...).
        call_arguments: further arguments of `call`, passed as they are.
        output_dtype: the dtype of floating outputs where it is not the policy's compute dtype.
        policies: dtype policies besides float32; of "mixed_float16", "mixed_bfloat16" and "bfloat16".
        skip: the checks to leave out, each with the reason.
        seed: of the random targets.

    Returns:
        What was checked. The first failing check raises a `ContractError` instead.

    Example:
        >>> import keras, numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> report = kdo.testing.check_layer_contract(
        ...     keras.layers.Dense, {"units": 3}, np.ones((2, 4), "float32")
        ... )
        >>> len(report.passed)
        9
    """
    contract = _Layer(
        cls=layer_class,
        init=dict(init_kwargs),
        inputs=inputs,
        call=dict(call_arguments or {}),
        output_dtype=output_dtype,
        policies=known_policies(policies),
        random=np.random.default_rng(seed),
    )
    names = ("config", "build", "symbolic_call", "output_shape", "eager_call", "precision", "gradient")
    checks = {name: getattr(contract, name) for name in (*names, "fit", "reload")}
    return run_checks(layer_class.__name__, checks, skip)


@dataclasses.dataclass
class _Layer:
    cls: type
    init: dict[str, Any]
    inputs: Any
    call: dict[str, Any]
    output_dtype: str | None
    policies: Sequence[str]
    random: np.random.Generator

    def make(self, policy: str | None = None) -> Any:
        """A new layer, built by a call; under a policy, with the inputs in its compute dtype."""
        layer = self.cls(**self.init, **({"dtype": policy} if policy else {}))
        layer(self.inputs, **self.call)
        return layer

    def config(self) -> None:
        require_config_round_trip(self.cls(**self.init), self.init)

    def build(self) -> None:
        first = self.make()
        shapes = [tuple(v.shape) for v in first.variables]
        first(self.inputs, **self.call)
        made = len(first.variables) - len(shapes)
        assert not made, f"the second call made {made} weights: make them in `build`."
        fresh = self.cls(**self.init)
        fresh.build_from_config(first.get_build_config() or {})
        built = [tuple(v.shape) for v in fresh.variables]
        assert built == shapes, (
            "`build` alone must make all weights, or loading a file leaves some unset. "
            f"Expected the shapes {shapes}, received {built}. Build sublayers in `build`."
        )

    def symbolic_call(self) -> None:
        eager = self.make()(self.inputs, **self.call)
        symbolic = self.cls(**self.init)(symbols_of(self.inputs), **self.call)
        keras.tree.assert_same_structure(symbolic, eager)
        for got, real in zip(keras.tree.flatten(symbolic), keras.tree.flatten(eager), strict=True):
            expected = tuple(real.shape)
            fits = len(got.shape) == len(expected) and all(
                s in (None, e) for s, e in zip(got.shape, expected, strict=True)
            )
            assert fits, f"the symbolic output has shape {got.shape}, a real one {expected}."
            dtype = keras.backend.standardize_dtype(real.dtype)
            assert got.dtype == dtype, f"the symbolic output has dtype {got.dtype}, a real one {dtype}."

    def output_shape(self) -> None:
        layer = self.make()
        eager = layer(self.inputs, **self.call)
        named = (layer.get_build_config() or {}).get("shapes_dict")
        single = keras.tree.map_structure(np.shape, self.inputs)
        given = layer.compute_output_shape(**named) if named else layer.compute_output_shape(single)
        expected = keras.tree.map_structure(lambda x: tuple(x.shape), eager)
        same = keras.tree.flatten(given) == keras.tree.flatten(expected)
        assert same, f"`compute_output_shape` gives {given}, a real call {expected}."

    def eager_call(self) -> None:
        layer = self.make()
        weights = [np.array(keras.ops.convert_to_numpy(v)) for v in layer.weights]
        attributes = {k: id(v) for k, v in vars(layer).items() if not k.startswith("_")}
        first = layer(self.inputs, training=False, **self.call)
        second = layer(self.inputs, training=False, **self.call)
        require_finite(first, "the output")
        require_close(second, first, "a second call with training=False", 0.0)
        now = {k: id(v) for k, v in vars(layer).items() if not k.startswith("_")}
        changed = sorted(k for k in attributes.keys() | now.keys() if attributes.get(k) != now.get(k))
        assert not changed, f"`call` must not change the layer. It set {changed}: pass them as values."
        for variable, before in zip(layer.weights, weights, strict=True):
            require_close(variable.value, before, f"the weight `{variable.path}` after a call", 0.0)

    def precision(self) -> None:
        reference = self.make("float32")
        expected = reference(self.inputs, training=False, **self.call)
        for policy in self.policies:
            layer = self.make(policy)
            layer.set_weights(reference.get_weights())
            for v in layer.weights:
                right = "float" not in v.dtype or v.dtype == layer.variable_dtype
                wrong = f"the weight `{v.path}` is {v.dtype}, not {layer.variable_dtype}"
                assert right, f"under {policy} {wrong}: leave its dtype to `add_weight`."
            outputs = layer(to_dtype(self.inputs, layer.compute_dtype), training=False, **self.call)
            require_policy(outputs, policy, expected, self.output_dtype)

    def _flat(self, policy: str) -> tuple[Flat, np.ndarray]:
        model = Flat(self.make(policy), **self.call)
        shape = model(self.inputs).shape
        assert shape[0] == batch_of(self.inputs), "the first axis of the output is not the batch."
        return model, self.random.normal(size=shape).astype("float32")

    def gradient(self) -> None:
        model, targets = self._flat("float32")
        require_gradients(model, self.inputs, targets)

    def fit(self) -> None:
        for policy in ("float32", *self.policies):
            model, targets = self._flat(policy)
            require_fit(model, self.inputs, targets, loss="mean_squared_error")

    def reload(self) -> None:
        symbols = symbols_of(self.inputs)
        model = keras.Model(symbols, self.cls(**self.init)(symbols, **self.call))
        for variable in model.weights:  # not as initialised: a layer that forgets to save shows
            if "float" in variable.dtype:
                variable.assign(np.abs(self.random.normal(1.0, 0.1, variable.shape)))
        require_reload(model, self.inputs)
