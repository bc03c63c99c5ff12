"""The contract of a model."""

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.testing.arrays import batch_of, require_close, require_finite, rows, to_dtype
from keras_diffusion_opd.testing.config import require_config_round_trip
from keras_diffusion_opd.testing.contract import (
    FLOAT32_TOLERANCE,
    TOLERANCES,
    Report,
    known_policies,
    run_checks,
)
from keras_diffusion_opd.testing.training import (
    Flat,
    global_policy,
    require_fit,
    require_gradients,
    require_policy,
    require_reload,
)


def check_model_contract(
    factory: Callable[[], Any],
    inputs: Any,
    *,
    output_dtype: str | None = None,
    policies: Sequence[str] = tuple(TOLERANCES),
    skip: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Report:
    """Hold a model to what Keras asks of every model.

    The checks, in order:

    - `config`: JSON and back gives the same model.
    - `eager_call`: finite; twice the same; weights unchanged.
    - `predict`: the compiled `predict` equals a call, and a sample alone equals the same sample in a batch.
    - `precision`: built under each of `policies`, the outputs have the compute dtype, are finite and close to
      float32.
    - `gradient`: finite, and not zero, for every trainable weight.
    - `fit`: a compiled step under float32 and `policies`.
    - `reload`: saved as `.keras` and loaded, it gives equal outputs and weights.
    - `weights_file`: a second model of the factory that loads `.weights.h5` gives equal outputs.

    Args:
        factory: makes a new model, such as `lambda: MyModel(width=8)`; called under several dtype policies.
        inputs: the first argument of `call`: an array or a nest of arrays, each (batch, ...), batch >= 2.
        output_dtype: the dtype of floating outputs where it is not the policy's compute dtype.
        policies: dtype policies besides float32; of "mixed_float16", "mixed_bfloat16" and "bfloat16".
        skip: the checks to leave out, each with the reason.
        seed: of the random targets.

    Returns:
        What was checked. The first failing check raises a `ContractError` instead.

    Example:
        >>> import keras, numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> def factory():
        ...     x = keras.Input((4,))
        ...     return keras.Model(x, keras.layers.Dense(3)(x))
        >>> report = kdo.testing.check_model_contract(factory, np.ones((2, 4), "float32"))
        >>> len(report.passed)
        8
    """
    if batch_of(inputs) < 2:
        raise ValueError("`inputs` must hold at least 2 samples, to compare one alone. Received 1.")
    contract = _Model(factory, inputs, output_dtype, known_policies(policies), np.random.default_rng(seed))
    names = ("config", "eager_call", "predict", "precision", "gradient", "fit", "reload", "weights_file")
    name = getattr(factory, "__name__", type(factory).__name__)
    return run_checks(name, {name: getattr(contract, name) for name in names}, skip)


@dataclasses.dataclass
class _Model:
    factory: Callable[[], Any]
    inputs: Any
    output_dtype: str | None
    policies: Sequence[str]
    random: np.random.Generator

    def make(self, policy: str = "float32") -> Any:
        """A new model under a policy, built by a call."""
        with global_policy(policy):
            model = self.factory()
            model(self.inputs)
        return model

    def config(self) -> None:
        with global_policy("float32"):
            require_config_round_trip(self.factory())

    def eager_call(self) -> None:
        model = self.make()
        weights = model.get_weights()
        first = model(self.inputs, training=False)
        require_finite(first, "the output")
        require_close(model(self.inputs, training=False), first, "a second call with training=False", 0.0)
        for variable, before in zip(model.weights, weights, strict=True):
            require_close(variable.value, before, f"the weight `{variable.path}` after a call", 0.0)

    def predict(self) -> None:
        model = self.make()
        expected = model(self.inputs, training=False)
        predicted = model.predict(self.inputs, verbose=0)
        require_close(predicted, expected, "`predict` against a call", FLOAT32_TOLERANCE)
        one = model.predict(rows(self.inputs, slice(0, 1)), verbose=0)
        alone = "the first sample alone against the same in a batch"
        require_close(one, rows(predicted, slice(0, 1)), alone, FLOAT32_TOLERANCE)

    def precision(self) -> None:
        reference = self.make()
        expected = reference(self.inputs, training=False)
        for policy in self.policies:
            model = self.make(policy)
            model.set_weights(reference.get_weights())
            inputs = to_dtype(self.inputs, keras.DTypePolicy(policy).compute_dtype)
            require_policy(model(inputs, training=False), policy, expected, self.output_dtype)

    def _flat(self, policy: str) -> tuple[Flat, np.ndarray]:
        model = Flat(self.make(policy))
        return model, self.random.normal(size=model(self.inputs).shape).astype("float32")

    def gradient(self) -> None:
        model, targets = self._flat("float32")
        require_gradients(model, self.inputs, targets)

    def fit(self) -> None:
        for policy in ("float32", *self.policies):
            model, targets = self._flat(policy)
            require_fit(model, self.inputs, targets, loss="mean_squared_error")

    def reload(self) -> None:
        require_reload(self.make(), self.inputs)

    def weights_file(self) -> None:
        model, other = self.make(), self.make()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.weights.h5")
            model.save_weights(path)
            other.load_weights(path)
        expected = model(self.inputs, training=False)
        received = other(self.inputs, training=False)
        require_close(received, expected, "the output after loading the weights", FLOAT32_TOLERANCE)
