"""`TimeEmbedding` and `MLPDenoiser` keep the contracts of layers and models."""

import keras
import numpy as np

from keras_diffusion_opd.layers import TimeEmbedding
from keras_diffusion_opd.models import MLPDenoiser
from keras_diffusion_opd.testing import check_layer_contract, check_model_contract

TIMES = np.array([0.1, 0.5, 0.9], "float32")


def test_time_embedding_keeps_the_layer_contract_and_its_phase_in_half_precision() -> None:
    settings = {"units": 4, "frequencies": 3, "scale": 10.0, "max_period": 100.0}
    check_layer_contract(TimeEmbedding, settings, TIMES, policies=("mixed_bfloat16",))
    # In bfloat16 these times are equal; their phases, 1000 s, are half a radian apart.
    layer = TimeEmbedding(4, dtype="bfloat16")
    near = keras.ops.convert_to_numpy(keras.ops.cast(layer(np.array([0.9, 0.9005], "float32")), "float32"))
    assert np.any(near[0] != near[1])


def test_mlp_denoiser_keeps_the_model_contract_and_begins_at_velocity_zero() -> None:
    inputs = {"x": np.ones((3, 2, 2, 1), "float32"), "time": TIMES, "label": np.array([0, 2, 1], "int32")}
    assert not np.any(keras.ops.convert_to_numpy(MLPDenoiser((2, 2, 1), 2, width=4, depth=1, frequencies=3)(inputs)))

    def factory() -> MLPDenoiser:
        model = MLPDenoiser((2, 2, 1), 2, width=4, depth=1, frequencies=3)
        model.exit.kernel.assign(np.random.default_rng(0).normal(0, 0.1, (4, 4)))  # for a gradient of all
        return model

    check_model_contract(factory, inputs, policies=("mixed_bfloat16",))
