"""Scores of a policy: known values, inactive positions, gradients, refusals."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import PreparedBatch
from keras_diffusion_opd.losses import token_entropy, token_log_probs
from tests.batches import prepared
from tests.oracles import compiled, numpy, tensor, value_and_grad

# The numbers were computed in float64 from the formulas; float32 logits leave seven digits.
TOLERANCE = 2e-7


def scores(logits, batch, **arguments):
    return [numpy(x) for x in token_log_probs(tensor(logits), batch, return_entropy=True, **arguments)]


def test_known_log_probs_and_entropies_at_temperature_two():
    logits = [[[2, 0, -1], [0, 1, 3]], [[-2, 1, 0], [4, 0, -1]]]
    batch = prepared(np.ones((2, 2)), ids=[[0, 2], [1, 0]])
    log_probs, entropy = scores(logits, batch, temperature=2.0)
    np.testing.assert_allclose(log_probs, [[-0.46436878, -0.46436878], [-0.60413061, -0.19673410]], atol=TOLERANCE)
    np.testing.assert_allclose(entropy, [[0.90595926, 0.90595926], [0.95280756, 0.58762874]], atol=TOLERANCE)
    assert log_probs.dtype == entropy.dtype == np.float32


def test_inactive_positions_are_exactly_zero_whatever_is_there():
    logits = [[[2, -1], [np.nan, np.inf], [-np.inf, np.inf]]]
    batch = prepared([[1.0, 0.0, 0.0]], ids=[[0, -1, 99]])
    log_probs, entropy = scores(logits, batch)
    assert log_probs[0, 0] == pytest.approx(-0.04858735, abs=TOLERANCE)
    assert entropy[0, 0] == pytest.approx(0.19086497, abs=TOLERANCE)
    assert log_probs[0, 1:].tolist() == entropy[0, 1:].tolist() == [0.0, 0.0]


def test_an_excluded_id_counts_nothing_and_the_entropy_is_finite():
    batch = prepared([[1.0]], ids=[[0]])
    log_probs, entropy = scores([[[2, 0, -np.inf]]], batch)
    assert log_probs[0, 0] == pytest.approx(-0.12692801, abs=TOLERANCE)
    assert entropy[0, 0] == pytest.approx(0.36533386, abs=TOLERANCE)
    # The mask token of a model that scores it: excluded by name, it is the same.
    named = scores([[[2, 0, 50]]], batch, excluded_id=2)
    assert [x[0, 0] for x in named] == pytest.approx([log_probs[0, 0], entropy[0, 0]], abs=TOLERANCE)
    impossible, _ = scores([[[2, 0, -np.inf]]], prepared([[1.0]], ids=[[2]]))
    assert impossible[0, 0] == -np.inf


def test_gradients_stop_unless_wanted():
    batch = prepared([[1.0, 0.0]], ids=[[0, -1]])
    logits = np.array([[[2.0, -1.0, -np.inf], [np.nan, np.inf, 0.0]]], "float32")

    def total(stop):
        def function(x):
            log_probs, entropy = token_log_probs(x, batch, temperature=2.0, stop_gradient=stop, return_entropy=True)
            return ops.sum(log_probs) + ops.sum(entropy) + 0 * ops.sum(ops.where(ops.isfinite(x), x, 0.0))

        return function

    _, stopped = value_and_grad(total(True), logits)
    assert not stopped.any()
    _, gradient = value_and_grad(total(False), logits)
    p = np.exp([1.0, -0.5]) / np.exp([1.0, -0.5]).sum()
    entropy = -(p * np.log(p)).sum()
    expected = (([1, 0] - p) - p * (np.log(p) + entropy)) / 2  # d/dlogits of both, over the temperature
    np.testing.assert_allclose(gradient[0, 0], [*expected, 0.0], atol=1e-6)
    assert not gradient[0, 1].any()


@pytest.mark.parametrize("temperature", [0, -1, float("inf"), float("nan"), True, "1"])
def test_temperature_must_be_a_finite_positive_real(temperature):
    with pytest.raises(ValueError, match="`temperature` must be"):
        token_log_probs(np.zeros((1, 1, 2), "float32"), prepared([[1.0]]), temperature=temperature)
    with pytest.raises(ValueError, match="`temperature` must be"):
        token_entropy(np.zeros((1, 1, 2), "float32"), temperature=temperature)


def test_a_temperature_renormalises_where_halved_log_probs_would_not():
    logits = np.log([[[0.7, 0.2, 0.1]]])
    mass = sum(
        np.exp(scores(logits, prepared([[1.0]], ids=[[i]]), temperature=2.0)[0][0, 0].astype("float64"))
        for i in range(3)
    )
    assert mass == pytest.approx(1.0, abs=1e-6)
    assert np.exp(logits / 2).sum() > 1.4


def test_a_model_is_called_without_dropout_on_the_inputs_of_the_batch():
    ids = keras.Input((3,), dtype="int32", name="token_ids")
    x = keras.layers.Embedding(5, 4)(ids)
    model = keras.Model({"token_ids": ids}, keras.layers.Dense(5)(keras.layers.Dropout(0.5)(x)))
    batch = PreparedBatch.create(
        model_inputs={"token_ids": np.array([[1, 2, 3]])},
        target_ids=np.array([[1, 2, 3]]),
        loss_weights=np.ones((1, 3), "float32"),
    )
    expected = numpy(token_log_probs(model(batch.model_inputs, training=False), batch))
    assert np.array_equal(numpy(token_log_probs(model, batch)), expected)
    np.testing.assert_allclose(numpy(token_log_probs(lambda x: model(x), batch)), expected, rtol=1e-6)


def test_it_runs_inside_a_compiled_function():
    batch = prepared([[1.0, 0.5]], ids=[[0, 2]])
    logits = tensor([[[2, 0, -1], [0, 1, 3]]])
    run = compiled(lambda x: token_log_probs(x, batch, temperature=2.0))
    np.testing.assert_allclose(numpy(run(logits)), numpy(token_log_probs(logits, batch, temperature=2.0)), rtol=1e-6)


def test_half_precision_logits_are_scored_in_float32():
    found = token_log_probs(tensor([[[2, 0, -1]]], "bfloat16"), prepared([[1.0]], ids=[[0]]))
    assert keras.backend.standardize_dtype(found.dtype) == "float32"
    assert float(numpy(found)[0, 0]) == pytest.approx(float(-np.log(1 + np.exp(-2) + np.exp(-3))), abs=TOLERANCE)


def test_what_does_not_fit_is_refused():
    batch = prepared([[1.0, 1.0]])
    with pytest.raises(ValueError, match="must align with target_ids"):
        token_log_probs(np.zeros((1, 3, 4), "float32"), batch)
    with pytest.raises(ValueError, match="`model_or_logits` must give logits of shape"):
        token_log_probs(lambda x: ops.zeros((1, 1, 4)), batch)
    with pytest.raises(TypeError, match="`model_or_logits` must be a Keras model"):
        token_log_probs("student", batch)
    with pytest.raises(TypeError, match="`batch` must be a PreparedBatch"):
        token_log_probs(np.zeros((1, 2, 4), "float32"), batch.as_fit())
