"""Two estimators of nats per token: divided by the weights, or by the tokens."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import MaskedCorruption
from keras_diffusion_opd.losses import TokenCrossEntropyLoss
from tests.oracles import numpy, tensor

ROWS, LENGTH, STEPS = 8, 16, 120


def losses(normalization, steps=STEPS):
    """Of a model that tosses a coin, on batches of masked coins with weights 1 / t."""
    corruption, loss = MaskedCorruption(2), TokenCrossEntropyLoss(normalization=normalization)
    logits = tensor(np.zeros((ROWS, LENGTH, 2)))
    batches = [corruption.prepare(0, step, np.arange(ROWS), np.zeros((ROWS, LENGTH), "int32")) for step in range(steps)]
    return np.array([float(numpy(loss(logits, batch).primary.mean())) for batch in batches])


def test_divided_by_the_weights_a_constant_cross_entropy_is_the_loss_of_every_batch():
    np.testing.assert_allclose(losses("weights", steps=20), np.log(2), rtol=1e-6)


def test_divided_by_the_tokens_it_is_the_loss_on_average():
    found = losses("tokens")
    assert found.std() > 0.01  # E[sum mask / t] / L is 1, but not in every batch
    assert abs(found.mean() - np.log(2)) < 5 * found.std() / np.sqrt(STEPS)


def test_ids_below_zero_are_no_tokens():
    corruption = MaskedCorruption(2)
    frozen = np.zeros((ROWS, LENGTH), bool)
    frozen[:, 12:] = True
    batch = corruption.prepare(0, 0, np.arange(ROWS), np.zeros((ROWS, LENGTH), "int32"), frozen=frozen)
    logits = tensor(np.zeros((ROWS, LENGTH, 2)))
    output = TokenCrossEntropyLoss(normalization="tokens")(logits, batch).primary
    assert float(numpy(output.weight)) == ROWS * LENGTH
    marked = type(batch)(batch.model_inputs, np.where(frozen, -1, batch.target_ids), batch.loss_weights)
    assert float(numpy(TokenCrossEntropyLoss(normalization="tokens")(logits, marked).primary.weight)) == ROWS * 12


def test_the_name_survives_serialisation():
    loss = TokenCrossEntropyLoss(normalization="tokens")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert again.normalization == "tokens"


def test_another_name_is_refused():
    with pytest.raises(ValueError, match=r"`normalization` must be one of \['weights', 'tokens'\]. Received 'count'"):
        TokenCrossEntropyLoss(normalization="count")
