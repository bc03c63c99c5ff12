"""Small bases, random adapters, and float64 references for the tests of adapters."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.adapters import Adapter, AdapterBank, Stack
from keras_diffusion_opd.adapters.attribute_paths import chosen_paths, layers_by_path
from keras_diffusion_opd.adapters.base_matrix import base_matrix, kernel_variable, to_numpy
from keras_diffusion_opd.layers.site_geometry import geometry_of


def mlp(seed: int = 0, dtype: Any = None, activation: str = "relu") -> keras.Model:
    """(batch, 5, 6) -> (batch, 5, 4): a hidden layer with an activation, an EinsumDense, a head."""
    keras.utils.set_random_seed(seed)
    x = keras.Input((5, 6))
    h = keras.layers.Dense(8, activation=activation, name="hidden", dtype=dtype)(x)
    h = keras.layers.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d", name="mixed", dtype=dtype)(h)
    return keras.Model(x, keras.layers.Dense(4, name="head", dtype=dtype)(h), name="mlp")


def random_adapter(
    name: str,
    model: Any,
    targets: Any = ".*",
    *,
    rank: int = 2,
    seed: int = 0,
    size: float = 0.3,
    dora: bool = False,
    **arguments: Any,
) -> Adapter:
    """An adapter of normal factors at the chosen layers, embeddings without magnitude."""
    rng = np.random.default_rng([seed, *name.encode()])
    layers = layers_by_path(model)
    arrays, magnitude = {}, {}
    for path in chosen_paths(model, targets):
        geometry = geometry_of(layers[path])
        arrays[path] = (
            (rng.normal(size=(geometry.in_features, rank)) / np.sqrt(geometry.in_features)).astype("float32"),
            (size * rng.normal(size=(rank, geometry.out_features))).astype("float32"),
        )
        if dora and not geometry.looks_up:
            magnitude[path] = rng.uniform(0.5, 1.5, geometry.out_features).astype("float32")
    return Adapter.from_arrays(name, model, arrays, magnitude=magnitude, **arguments)


def run(bank: AdapterBank, x: Any, stacks: list[Any]) -> np.ndarray:
    """The model's outputs with a stack for each row, without compiling."""
    with bank.scope(bank.select(stacks)):
        return to_numpy(bank.model(x, training=False))


def plain(model: Any, x: Any) -> np.ndarray:
    """The model's outputs."""
    return to_numpy(model(x, training=False))


def merged(model: Any, adapters: dict[str, Adapter], stack: Stack, x: Any) -> np.ndarray:
    """The outputs with the stack added to the kernels in float64; the kernels are put back."""
    layers, saved = layers_by_path(model), {}
    for path, layer in layers.items():
        geometry = geometry_of(layer)
        matrix = base_matrix(layer, geometry)
        whole = matrix.copy()
        for name, weight in stack:
            part = adapters[name].parts.get(path)
            if part is not None:
                factor = part.column_factor(matrix)
                delta = part.delta()
                whole += weight * (delta if factor is None else (factor - 1) * matrix + factor * delta)
        variable = kernel_variable(layer)
        saved[path] = to_numpy(variable.value)
        variable.assign(geometry.kernel(whole).astype("float32"))
    try:
        return plain(model, x)
    finally:
        for path, value in saved.items():
            kernel_variable(layers[path]).assign(value)


def values(model: Any) -> list[np.ndarray]:
    """Copies of all variables of a model."""
    return [np.array(ops.convert_to_numpy(v.value)) for v in model.variables]


def same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    """Whether two lists of arrays are equal bit for bit."""
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))
