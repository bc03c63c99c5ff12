"""Masked language models of two sizes, and prepared batches for them."""

from typing import Any

import keras
import keras_hub
import numpy as np

from keras_diffusion_opd.data import DenseTargets, PreparedBatch
from keras_diffusion_opd.models import token_scorer

# About 1 and 20 million parameters.
SIZES = {
    "small": {
        "vocabulary_size": 2048,
        "num_layers": 4,
        "num_heads": 4,
        "hidden_dim": 128,
        "intermediate_dim": 512,
    },
    "medium": {
        "vocabulary_size": 8192,
        "num_layers": 5,
        "num_heads": 8,
        "hidden_dim": 512,
        "intermediate_dim": 2048,
    },
}
ROWS, LENGTH = 8, 64


def build(size: str) -> Any:
    """A BERT with its masked-LM head, as a scorer of every position. The same weights every time."""
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.BertBackbone(**SIZES[size], max_sequence_length=LENGTH, dropout=0.0)
    return token_scorer(keras_hub.models.BertMaskedLM(backbone))


def batches(size: str, count: int) -> list[PreparedBatch]:
    """Random tokens; each batch masks another share of them and has weights of another size."""
    vocabulary = SIZES[size]["vocabulary_size"]
    rng = np.random.default_rng(1)
    made = []
    for index in range(count):
        targets = rng.integers(5, vocabulary, (ROWS, LENGTH)).astype("int32")
        masked = rng.random((ROWS, LENGTH)) < (0.2 + 0.6 * (index % 4) / 3)
        masked[:, 0] = True
        inputs = {
            "token_ids": np.where(masked, 4, targets).astype("int32"),
            "segment_ids": np.zeros((ROWS, LENGTH), "int32"),
            "padding_mask": np.ones((ROWS, LENGTH), "int32"),
        }
        weights = (masked * rng.uniform(0.5, 4.0, (ROWS, 1))).astype("float32")
        teacher = DenseTargets(3 * rng.standard_normal((ROWS, LENGTH, vocabulary), "float32"))
        made.append(
            PreparedBatch.create(model_inputs=inputs, target_ids=targets, loss_weights=weights, teacher=teacher)
        )
    return made
