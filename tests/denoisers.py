"""A small transformer with something to say, for samplers, scores and bounds."""

import functools

import keras
import numpy as np

from keras_diffusion_opd.models import TransformerDenoiser

V, LENGTH = 5, 6
MASK = V


@functools.cache
def transformer() -> TransformerDenoiser:
    """One model for all tests: its logits differ from place to place and with what it sees."""
    keras.utils.set_random_seed(0)
    model = TransformerDenoiser(V, LENGTH, width=8, depth=1, heads=2)
    model.build()
    rng = np.random.default_rng(0)
    for weight in model.trainable_variables:
        weight.assign(weight + 0.5 * rng.normal(size=weight.shape))
    return model
