"""Block sampling: its two ends, prompts, independence of rows, one trace."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.backend import BACKEND
from keras_diffusion_opd.models import block_causal_mask
from keras_diffusion_opd.samplers import BlockSampler, MaskedSampler
from keras_diffusion_opd.samplers.row_noise import gumbel, row_keys
from tests.denoisers import LENGTH, MASK, V, transformer

MODEL = transformer()


def blind(inputs):
    """Logits that depend on the tokens alone, and not on the attention mask."""
    seen = ops.cast(inputs["token_ids"], "float32")
    places = ops.convert_to_tensor(np.arange(LENGTH * V, dtype="float32").reshape(1, LENGTH, V))
    return ops.sin(places + ops.expand_dims(seen, -1) + ops.sum(seen, axis=1)[:, None, None])


@pytest.mark.parametrize("order", ["random", "confidence", "margin"])
def test_one_block_of_the_whole_length_is_the_masked_sampler(order):
    arguments = {"shape": (4, LENGTH), "steps": 3, "seed": 5, "schedule": "cosine"}
    whole = MaskedSampler(MASK, order=order).sample(blind, **arguments)
    assert np.array_equal(BlockSampler(MASK, block_size=LENGTH, order=order).sample(blind, **arguments), whole)
    # A transformer that sees everything through a mask of all True.
    whole = MaskedSampler(MASK, order=order).sample(MODEL, **arguments)
    assert np.array_equal(BlockSampler(MASK, block_size=LENGTH, order=order).sample(MODEL, **arguments), whole)


def test_blocks_of_one_token_sample_autoregressively():
    rows, temperature = 3, 0.7
    sampled = BlockSampler(MASK, block_size=1).sample(
        MODEL, shape=(rows, LENGTH), steps=1, seed=5, temperature=temperature
    )
    tokens = np.full((rows, LENGTH), MASK, "int32")
    causal = np.tile(np.tril(np.ones((LENGTH, LENGTH), bool)), (rows, 1, 1))
    keys = ops.convert_to_tensor(row_keys(5, rows))
    for i in range(LENGTH):
        logits = ops.convert_to_numpy(MODEL({"token_ids": tokens, "attention_mask": causal}))[:, i]
        noise = ops.convert_to_numpy(gumbel(keys, ops.full((rows,), i, "int32"), LENGTH, V + 1))[:, i, :V]
        tokens[:, i] = np.argmax(logits + temperature * noise, axis=-1)
    assert np.array_equal(sampled, tokens)


def test_blocks_are_filled_in_order_and_later_ones_change_nothing_before():
    seen = []
    BlockSampler(MASK, block_size=2).sample(
        MODEL,
        shape=(2, LENGTH),
        steps=2,
        seed=1,
        callback=lambda step, steps, tokens: seen.append((step, steps, tokens)),
    )
    assert [(step, steps) for step, steps, _ in seen] == [(k + 1, 6) for k in range(6)]
    for k, (_, _, tokens) in enumerate(seen):
        assert ((tokens == MASK).sum(axis=1) == LENGTH - k - 1).all()
        assert not (tokens[:, : 2 * ((k + 1) // 2)] == MASK).any()
        assert (tokens[:, 2 * (k // 2) + 2 :] == MASK).all()


@pytest.mark.parametrize("order", ["random", "confidence", "margin"])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_nothing_is_masked_at_the_end_also_with_a_short_last_block(order, steps):
    out = BlockSampler(MASK, block_size=4, order=order).sample(MODEL, shape=(3, LENGTH), steps=steps, seed=0)
    assert out.dtype == np.int32 and out.min() >= 0 and out.max() < MASK


def test_a_prompt_stays_and_a_row_does_not_depend_on_the_prompts_of_others():
    given = np.full((4, LENGTH), MASK)
    given[0, :3] = [1, 2, 3]  # one block and a half
    given[1, :] = 4  # nothing to do
    given[2, 4] = 0  # in the middle
    own = np.array([7, 8, 9, 10])
    sampler, arguments = BlockSampler(MASK, block_size=2), {"steps": 2, "batch_size": 4}
    out = sampler.sample(MODEL, shape=(4, LENGTH), seed=own, tokens=given, **arguments)
    assert np.array_equal(out[given != MASK], given[given != MASK])
    assert out.max() < MASK
    flipped = sampler.sample(MODEL, shape=(4, LENGTH), seed=own[::-1], tokens=given[::-1], **arguments)
    assert np.array_equal(flipped[::-1], out)
    free = sampler.sample(MODEL, shape=(4, LENGTH), seed=own, **arguments)
    assert np.array_equal(free[3], out[3])
    numbered = sampler.sample(MODEL, shape=(9, LENGTH), seed=5, **arguments)
    assert np.array_equal(numbered[:6], sampler.sample(MODEL, shape=(6, LENGTH), seed=5, **arguments))


def test_what_comes_after_a_block_is_not_seen():
    given = np.full((16, LENGTH), MASK)
    given[:, 4:] = np.random.default_rng(0).integers(0, V, (16, 2))
    arguments = {"shape": (16, LENGTH), "steps": 1, "seed": np.full(16, 3), "tokens": given}
    out = BlockSampler(MASK, block_size=2).rollout(MODEL, **arguments)
    assert len(np.unique(out.tokens[:, :4], axis=0)) == 1
    assert np.ptp(out.log_probs[:, :4], axis=0).max() < 1e-5
    masked = MaskedSampler(MASK).rollout(MODEL, **arguments)
    assert np.ptp(masked.log_probs[:, :4], axis=0).max() > 1e-3  # which sees everything


@pytest.mark.skipif(BACKEND == "torch", reason="torch runs eagerly: there is no trace to count")
def test_one_trace_serves_every_step_count_prompt_and_temperature():
    calls = []

    def counted(inputs):
        calls.append(1)
        return blind(inputs)

    sampler = BlockSampler(MASK, block_size=2)
    prompt = np.full((2, LENGTH), MASK)
    prompt[:, :3] = 1
    for steps, tokens, temperature in [(1, None, 1.0), (4, None, 0.0), (2, prompt, 0.5)]:
        sampler.sample(counted, shape=(2, LENGTH), steps=steps, seed=steps, tokens=tokens, temperature=temperature)
    assert len(calls) == 1


def test_a_denoiser_that_knows_its_blocks_gets_no_mask():
    def own(inputs):
        assert set(inputs) == {"token_ids"}
        mask = np.tile(block_causal_mask(LENGTH, 2), (2, 1, 1))
        return MODEL({**inputs, "attention_mask": mask}, training=False)

    # A function that holds variables would not see their updates; here they stay as they are.
    arguments = {"shape": (2, LENGTH), "steps": 2, "seed": 0}
    out = BlockSampler(MASK, block_size=2, attention_key=None).sample(own, **arguments)
    assert np.array_equal(out, BlockSampler(MASK, block_size=2).sample(MODEL, **arguments))


def test_the_sampler_survives_serialisation():
    sampler = BlockSampler(MASK, block_size=2, order="margin", order_noise=0.5, schedule="cosine")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(sampler))
    assert again.get_config() == sampler.get_config()


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="`block_size` must be a whole number of at least 1"):
        BlockSampler(MASK, block_size=0)
    with pytest.raises(ValueError, match="`token_key` must name the tokens"):
        BlockSampler(MASK, block_size=2, token_key=None)
    with pytest.raises(ValueError, match="`conditions` must not hold 'attention_mask'"):
        BlockSampler(MASK, block_size=2).sample(
            MODEL, shape=(1, LENGTH), steps=1, seed=0, conditions={"attention_mask": np.ones((1, 6, 6))}
        )
