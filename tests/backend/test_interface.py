"""The backend interface means the same on the three backends."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd import backend


def test_backend_is_that_of_keras() -> None:
    assert keras.backend.backend() == backend.BACKEND


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_concrete_gives_the_values(dtype: str) -> None:
    values = np.array([[1, 0], [0, 1]])
    given = backend.concrete(ops.cast(ops.convert_to_tensor(values), dtype))
    assert given is not None
    np.testing.assert_array_equal(given.astype("float32"), values.astype("float32"))


def test_concrete_of_an_abstract_tensor_is_none() -> None:
    seen = []

    class Spy(keras.Layer):
        def call(self, x: Any) -> Any:
            seen.append(backend.concrete(x))
            return x

    Spy()(keras.Input((3,), batch_size=2))
    assert seen and all(value is None for value in seen)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_float64_is_what_arrays_show() -> None:
    kept = "float64" in str(ops.convert_to_tensor(np.ones(1), dtype="float64").dtype)
    assert backend.float64_enabled() == kept


def test_compiled_sees_new_weights() -> None:
    layer = keras.layers.Dense(2, kernel_initializer="ones")
    layer.build((None, 3))
    run = backend.compiled(layer, [layer])
    x = np.ones((1, 3), "float32")
    np.testing.assert_allclose(ops.convert_to_numpy(run(x)), [[3.0, 3.0]])
    layer.kernel.assign(2 * layer.kernel)
    np.testing.assert_allclose(ops.convert_to_numpy(run(x)), [[6.0, 6.0]])


@pytest.mark.skipif(backend.BACKEND == "tensorflow", reason="tf.nest has no registry of node types")
def test_registered_class_is_a_node_of_trees() -> None:
    @dataclasses.dataclass
    class Pair:
        left: Any
        right: Any
        name: str

    backend.register_pytree(
        Pair,
        lambda pair: ((("left", pair.left), ("right", pair.right)), pair.name),
        lambda name, children: Pair(*children, name),
    )
    pair = Pair(np.ones(2, "float32"), np.zeros(2, "float32"), "p")
    if backend.BACKEND == "jax":
        import jax

        mapped = jax.tree.map(lambda x: x + 1, pair)
    else:
        from torch.utils import _pytree

        mapped = _pytree.tree_map(lambda x: x + 1, pair)
    assert mapped.name == "p"
    np.testing.assert_array_equal(mapped.left, [2, 2])
    np.testing.assert_array_equal(mapped.right, [1, 1])
