"""The sampler's log-probabilities are the trainer's: the same states, scored again through a batch."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.backend import compiled
from keras_diffusion_opd.data import Stamp
from keras_diffusion_opd.losses import token_log_probs
from keras_diffusion_opd.samplers import BlockSampler, MaskedSampler
from tests.denoisers import LENGTH, MASK, transformer

MODEL = transformer()

SAMPLERS = {
    "masked": lambda **k: MaskedSampler(MASK, **k),
    "blocks of 1": lambda **k: BlockSampler(MASK, block_size=1, **k),
    "blocks of 2": lambda **k: BlockSampler(MASK, block_size=2, **k),
    "blocks of 4": lambda **k: BlockSampler(MASK, block_size=4, **k),
}
kinds = pytest.mark.parametrize("kind", SAMPLERS)


def prompt():
    given = np.full((3, LENGTH), MASK)
    given[0, :3] = [1, 2, 3]
    given[1, 5] = 0
    return given


def scored(rollout, model=MODEL, **arguments):
    """The sum over the steps of the scores of what each revealed, as a trainer computes them."""
    score = compiled(lambda inputs: model(inputs, training=False), [model])
    return sum(
        ops.convert_to_numpy(token_log_probs(score(batch.model_inputs), batch, **arguments))
        for batch in (rollout.prepare(step) for step in range(rollout.steps))
    )


@kinds
@pytest.mark.parametrize("order, temperature", [("random", 1.0), ("confidence", 0.7)])
def test_the_samplers_log_probs_are_those_of_the_trainer(kind, order, temperature):
    sampler = SAMPLERS[kind](order=order)
    rollout = sampler.rollout(MODEL, shape=(3, LENGTH), steps=3, seed=2, tokens=prompt(), temperature=temperature)
    assert np.array_equal(
        rollout.tokens,
        sampler.sample(MODEL, shape=(3, LENGTH), steps=3, seed=2, tokens=prompt(), temperature=temperature),
    )
    given = prompt() != MASK
    assert np.array_equal(rollout.revealed_at == -1, given)
    assert not rollout.log_probs[given].any() and (rollout.log_probs[~given] < 0).all()
    np.testing.assert_allclose(scored(rollout, temperature=temperature), rollout.log_probs, atol=1e-5)
    np.testing.assert_allclose(rollout.rescore(MODEL), rollout.log_probs, atol=1e-5)
    # A score without the mask, or at another temperature, is another one: the comparison can fail.
    assert np.abs(scored(rollout, temperature=2.0) - rollout.log_probs).max() > 1e-2


def test_scoring_blocks_without_their_mask_is_off():
    rollout = BlockSampler(MASK, block_size=2).rollout(MODEL, shape=(3, LENGTH), steps=2, seed=2)
    batch = rollout.prepare(1)
    inputs = {**batch.model_inputs, "attention_mask": np.ones((3, 2 * LENGTH, 2 * LENGTH), bool)}
    blind = ops.convert_to_numpy(token_log_probs(MODEL(inputs), batch))
    revealed = rollout.revealed_at == 1
    assert np.abs(blind - rollout.log_probs)[revealed].max() > 1e-2


def test_log_probs_are_those_of_the_distribution_that_was_sampled():
    p = np.array([0.5, 0.3, 0.2])

    def fixed(inputs):
        rows = ops.shape(inputs["token_ids"])[0]
        return ops.broadcast_to(ops.convert_to_tensor(np.log(p).astype("float32")), (rows, LENGTH, 3))

    rollout = MaskedSampler(MASK).rollout(fixed, shape=(4, LENGTH), steps=2, seed=0, temperature=0.5)
    q = p**2 / (p**2).sum()  # renormalised, not halved
    np.testing.assert_allclose(rollout.log_probs, np.log(q)[rollout.tokens], rtol=1e-5)
    per_row = np.array([1.0, 0.5, 2.0, 1.0])
    rollout = MaskedSampler(MASK).rollout(fixed, shape=(4, LENGTH), steps=2, seed=0, temperature=per_row)
    q = p ** (1 / per_row[:, None]) / (p ** (1 / per_row[:, None])).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(rollout.log_probs, np.log(np.take_along_axis(q, rollout.tokens, 1)), rtol=1e-5)
    np.testing.assert_allclose(rollout.rescore(fixed), rollout.log_probs, rtol=1e-5)


def test_the_mask_token_is_excluded_from_the_scores_too():
    def scores_it(inputs):
        rows = ops.shape(inputs["token_ids"])[0]
        logits = np.array([0.0, 1.0, 2.0, 9.0], "float32")
        return ops.broadcast_to(ops.convert_to_tensor(logits), (rows, LENGTH, 4))

    rollout = MaskedSampler(3).rollout(scores_it, shape=(2, LENGTH), steps=1, seed=0)
    again = ops.convert_to_numpy(token_log_probs(scores_it, rollout.prepare(0), excluded_id=3))
    np.testing.assert_allclose(again, rollout.log_probs, atol=1e-6)
    np.testing.assert_allclose(rollout.rescore(scores_it), rollout.log_probs, atol=1e-6)
    assert rollout.log_probs.min() > -3


def test_states_and_batches_of_a_rollout():
    sampler = BlockSampler(MASK, block_size=2)
    rollout = sampler.rollout(MODEL, shape=(3, LENGTH), steps=2, seed=2, batch_size=2, tokens=prompt())
    first, second = rollout.state(0), rollout.state(1)
    assert np.array_equal(first, prompt())
    assert np.array_equal(second != MASK, (rollout.revealed_at < 1))
    stamp = Stamp(policy_version=3)
    batches = [rollout.prepare(step, stamp=stamp) for step in range(2)]
    assert batches[0].stamp is stamp
    weights = sum(batch.loss_weights for batch in batches)
    assert np.array_equal(weights, prompt() == MASK)
    assert np.array_equal(batches[1].model_inputs["token_ids"], np.concatenate([second, rollout.tokens], axis=1))
    for wrong in (2, -1, "1"):
        with pytest.raises(ValueError, match="`step` must be"):
            rollout.prepare(wrong)


def test_greedy_samples_have_no_log_probs_to_compare():
    with pytest.raises(ValueError, match="`temperature` must be above 0 where log-probabilities are wanted"):
        MaskedSampler(MASK).rollout(MODEL, shape=(2, LENGTH), steps=2, seed=0, temperature=0.0)


def test_tokens_alone_are_enough_of_an_input():
    def alone(tokens):
        return ops.one_hot(tokens, 6) * 1.0

    rollout = MaskedSampler(MASK, token_key=None).rollout(alone, shape=(2, LENGTH), steps=2, seed=0)
    assert np.array_equal(rollout.prepare(1).model_inputs, rollout.state(1))
