"""The matrix of a layer as numbers, also where it is stored in fewer bits."""

from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd.layers.site_geometry import EinsumGeometry, SiteGeometry


def is_quantised(layer: Any) -> bool:
    """Whether the kernel is stored in a form that holds no floats."""
    return getattr(layer, "quantization_mode", None) in ("int8", "int4", "gptq", "awq")


def kernel_variable(layer: Any) -> Any:
    """The variable of a kernel that is stored as floats."""
    return layer._embeddings if hasattr(layer, "_embeddings") else layer._kernel


def base_matrix(layer: Any, geometry: SiteGeometry) -> np.ndarray:
    """(in, out) in float64; a quantised kernel as the layer itself applies it.

    Args:
        layer: built.
        geometry: its geometry.

    Raises:
        ValueError: a quantised layer whose numbers cannot be asked for.
    """
    if not is_quantised(layer):
        return geometry.matrix(to_numpy(kernel_variable(layer).value)).astype("float64")
    if geometry.looks_up:
        return to_numpy(layer(np.arange(geometry.in_features, dtype="int32")[None])[0]).astype("float64")
    # One input at a time: 1 survives the quantisation of activations as it is.
    one_by_one = np.eye(geometry.in_features, dtype="float32")
    if isinstance(geometry, EinsumGeometry):
        one_by_one = geometry.unit_inputs()
    activation = layer.activation
    values = vars(layer)
    values["activation"] = None
    try:
        y = to_numpy(layer.quantized_call(ops.convert_to_tensor(one_by_one)))
        bias: Any = 0.0 if layer.bias is None else to_numpy(layer.bias.value)
    finally:
        values["activation"] = activation
    return (y.astype("float64") - bias).reshape(geometry.in_features, geometry.out_features)


def to_numpy(value: Any) -> np.ndarray:
    """A tensor as NumPy, bfloat16 as float32."""
    if "bfloat16" in str(value.dtype):
        value = ops.cast(value, "float32")
    return np.array(ops.convert_to_numpy(value))
