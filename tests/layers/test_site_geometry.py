"""Layers as matrices: rows times matrix is the layer, for every kind that can be adapted."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.layers.site_geometry import geometry_of

RNG = np.random.default_rng(0)
# Every equation that KerasHub's Bert, Llama3 and Gemma3 use, one that permutes, one with an ellipsis.
EQUATIONS = [
    ("abc,cde->abde", (3, 4), (None, 2, 5)),
    ("abcd,cde->abe", (3, 2, 4), (None, 6)),
    ("bqm,muh->bquh", (3, 4), (None, 2, 5)),
    ("bquh,uhm->bqm", (3, 2, 4), (None, 6)),
    ("bsd,kdh->bskh", (3, 4), (None, 2, 5)),
    ("btnh,nhd->btd", (3, 2, 4), (None, 6)),
    ("btd,df->btf", (3, 4), (None, 6)),
    ("abc,cd->adb", (3, 4), (6, None)),
    ("...c,cd->...d", (3, 2, 4), (3, 2, 6)),
]
CONVOLUTIONS: list[tuple[Any, dict[str, Any], tuple[int, ...]]] = [
    (keras.layers.Conv1D, {"kernel_size": 3, "padding": "causal"}, (7, 4)),
    (keras.layers.Conv1D, {"kernel_size": 2, "strides": 2, "padding": "same", "groups": 2}, (7, 4)),
    (keras.layers.Conv2D, {"kernel_size": 2, "strides": 2}, (6, 4, 4)),
    (keras.layers.Conv2D, {"kernel_size": (3, 2), "padding": "same"}, (5, 6, 4)),
    (keras.layers.Conv2D, {"kernel_size": 3, "strides": (2, 1), "padding": "same", "groups": 2}, (5, 6, 4)),
    (keras.layers.Conv2D, {"kernel_size": 2, "dilation_rate": 2, "groups": 4}, (5, 6, 4)),
]


def check(layer: Any, x: np.ndarray) -> None:
    """The layer without its bias is rows times matrix."""
    expected = ops.convert_to_numpy(layer(x))
    geometry = geometry_of(layer)
    kernel = ops.convert_to_numpy(layer.kernel)
    matrix = geometry.matrix(kernel)
    assert matrix.shape == (geometry.in_features, geometry.out_features)
    assert np.array_equal(geometry.kernel(matrix), kernel)
    assert np.array_equal(ops.convert_to_numpy(geometry.matrix_of(ops.convert_to_tensor(kernel))), matrix)
    rows, shape = geometry.rows(ops.convert_to_tensor(x))
    y = geometry.restore(ops.matmul(rows, ops.convert_to_tensor(matrix)), shape)
    # float32 sums of up to 24 products in another order.
    np.testing.assert_allclose(ops.convert_to_numpy(y), expected, atol=3e-6)


@pytest.mark.parametrize(("equation", "inputs", "outputs"), EQUATIONS, ids=[e for e, _, _ in EQUATIONS])
def test_einsum(equation: str, inputs: tuple[int, ...], outputs: Any) -> None:
    check(keras.layers.EinsumDense(equation, outputs), RNG.normal(size=(2, *inputs)).astype("float32"))


@pytest.mark.parametrize("inputs", [(4,), (3, 4), (2, 3, 4)])
def test_dense(inputs: tuple[int, ...]) -> None:
    check(keras.layers.Dense(5, use_bias=False), RNG.normal(size=(2, *inputs)).astype("float32"))


@pytest.mark.parametrize(("kind", "arguments", "inputs"), CONVOLUTIONS)
def test_convolution(kind: Any, arguments: dict[str, Any], inputs: tuple[int, ...]) -> None:
    check(kind(8, use_bias=False, **arguments), RNG.normal(size=(2, *inputs)).astype("float32"))


def test_channels_first() -> None:
    layer = keras.layers.Conv2D(8, 2, data_format="channels_first")
    layer.build((2, 4, 5, 6))
    geometry = geometry_of(layer)
    x = RNG.normal(size=(2, 4, 5, 6)).astype("float32")
    last = keras.layers.Conv2D(8, 2, use_bias=False)
    last.build((2, 5, 6, 4))
    last.set_weights([ops.convert_to_numpy(layer.kernel)])
    expected = ops.convert_to_numpy(last(x.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
    rows, shape = geometry.rows(ops.convert_to_tensor(x))
    matrix = ops.convert_to_tensor(geometry.matrix(ops.convert_to_numpy(layer.kernel)))
    y = ops.convert_to_numpy(geometry.restore(ops.matmul(rows, matrix), shape))
    np.testing.assert_allclose(y, expected, atol=3e-6)  # float32 sums of 16 products
    assert geometry.bias(layer.bias).shape == (8, 1, 1)


def test_equation_that_is_no_matrix_product_is_refused() -> None:
    layer = keras.layers.EinsumDense("abc,bcd->abd", (3, 6))  # a kernel for each position
    layer.build((2, 3, 4))
    with pytest.raises(ValueError, match="no matrix product"):
        geometry_of(layer)
    with pytest.raises(ValueError, match="built first"):
        geometry_of(keras.layers.Dense(3))
