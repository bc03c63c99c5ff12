"""The transformer denoiser: what it sees, saving, dtypes, and block diffusion through `fit`."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import BlockCorruption, PreparedDataset
from keras_diffusion_opd.losses import TokenCrossEntropyLoss
from keras_diffusion_opd.models import TokenDenoiser, TransformerDenoiser, block_causal_mask
from keras_diffusion_opd.samplers import BlockSampler
from keras_diffusion_opd.trainers import PreparedTrainer

V, LENGTH = 5, 6


def denoiser(**arguments):
    keras.utils.set_random_seed(0)
    return TransformerDenoiser(V, LENGTH, **{"width": 8, "depth": 2, "heads": 2, **arguments})


def tokens(rows=3, seed=0):
    return np.random.default_rng(seed).integers(0, V, (rows, LENGTH)).astype("int32")


def side_by_side(noised, clean, size):
    return BlockCorruption(V, block_size=size).model_inputs(noised, clean)


def run(model, inputs, **kwargs):
    return ops.convert_to_numpy(ops.cast(model(inputs, **kwargs), "float32"))


def test_the_output_has_the_declared_shape_for_one_sequence_and_for_two_side_by_side():
    model = denoiser()
    assert model({"token_ids": tokens()}).shape == (3, LENGTH, V)
    assert model(side_by_side(tokens(), tokens(), 2)).shape == (3, LENGTH, V)
    assert model.compute_output_shape({"token_ids": (3, 2 * LENGTH)}) == (3, LENGTH, V)
    assert model.mask_id == V


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_one_pass_over_both_sequences_equals_a_pass_for_every_block(size):
    model, clean = denoiser(), tokens()
    noised = np.where(np.random.default_rng(1).random(clean.shape) < 0.5, V, clean)
    together = run(model, side_by_side(noised, clean, size))
    causal = np.tile(block_causal_mask(LENGTH, size), (3, 1, 1))
    for start in range(0, LENGTH, size):
        block = slice(start, start + size)
        alone = clean.copy()
        alone[:, block] = noised[:, block]
        alone[:, start + size :] = V  # not seen
        expected = run(model, {"token_ids": alone, "attention_mask": causal})[:, block]
        np.testing.assert_allclose(together[:, block], expected, atol=1e-5)  # other sums, in float32


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_that_knows_its_blocks_needs_no_mask(size):
    model, knowing, clean = denoiser(), denoiser(block_size=size), tokens()
    model.build()
    knowing.build()
    knowing.set_weights(model.get_weights())
    both = side_by_side(np.full_like(clean, V), clean, size)
    without = {"token_ids": both["token_ids"]}
    np.testing.assert_allclose(run(knowing, without), run(model, both), atol=1e-6)
    causal = np.tile(block_causal_mask(LENGTH, size), (3, 1, 1))
    expected = run(model, {"token_ids": clean, "attention_mask": causal})
    np.testing.assert_allclose(run(knowing, {"token_ids": clean}), expected, atol=1e-6)
    assert knowing.get_config()["block_size"] == size
    rollout = BlockSampler(V, block_size=size, attention_key=None).rollout(knowing, shape=(2, LENGTH), steps=2, seed=0)
    with_mask = BlockSampler(V, block_size=size).rollout(model, shape=(2, LENGTH), steps=2, seed=0)
    assert np.array_equal(rollout.tokens, with_mask.tokens)
    np.testing.assert_allclose(rollout.rescore(knowing), rollout.log_probs, atol=1e-5)


def test_a_noised_block_sees_no_clean_token_of_its_own_or_of_later_blocks():
    model, clean = denoiser(), tokens()
    base = run(model, side_by_side(np.full_like(clean, V), clean, 2))
    other = clean.copy()
    other[:, 2:4] = (other[:, 2:4] + 1) % V
    changed = run(model, side_by_side(np.full_like(clean, V), other, 2))
    assert np.array_equal(changed[:, :4], base[:, :4])
    assert not np.allclose(changed[:, 4:], base[:, 4:])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_every_dtype_policy_gives_its_dtype_and_finite_values(policy):
    out = denoiser(dtype=policy)(side_by_side(tokens(), tokens(), 2))
    assert keras.backend.standardize_dtype(out.dtype) == keras.DTypePolicy(policy).compute_dtype
    assert np.all(np.isfinite(ops.convert_to_numpy(ops.cast(out, "float32"))))


def test_a_saved_model_comes_back_equal(tmp_path):
    model = denoiser(dropout=0.2, num_classes=3)
    inputs = {**side_by_side(tokens(), tokens(), 2), "class_ids": np.array([0, 1, 2])}
    before = run(model, inputs)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(run(again, inputs), before)
    assert again.get_config() == model.get_config()
    assert not np.allclose(run(model, {**inputs, "class_ids": np.array([1, 2, 0])}), before)
    assert not np.allclose(run(model, inputs, training=True), before)


def test_block_diffusion_trains_through_fit_and_learns_what_comes_next():
    # A token repeats the one two places before: to be known from the clean block before.
    first = np.random.default_rng(0).integers(0, V, (32, 2))
    clean = np.tile(first, (1, 3)).astype("int32")
    model = denoiser(width=16, depth=1)
    corruption = BlockCorruption(model.mask_id, block_size=2)
    batches = [corruption.prepare(0, step, np.arange(32), clean) for step in range(6)]
    trainer = PreparedTrainer(model, TokenCrossEntropyLoss())
    trainer.compile(keras.optimizers.Adam(0.02), accumulation_steps=2)
    history = trainer.fit(PreparedDataset(batches), epochs=12, verbose=0).history["loss"]
    # The first block of three is a coin of V sides, the others are certain.
    assert history[-1] < 0.75 * history[0]
    masked = np.full_like(clean, V)
    guess = run(model, side_by_side(masked, clean, 2)).argmax(-1)
    assert np.mean(guess[:, 2:] == clean[:, 2:]) > 0.9


def test_errors_name_the_argument_and_a_leak_is_refused():
    model = denoiser()
    with pytest.raises(ValueError, match="need an 'attention_mask', or the model reads the answer"):
        model({"token_ids": np.zeros((2, 2 * LENGTH), "int32")})
    with pytest.raises(ValueError, match=r"`token_ids` must have 6 tokens, or 12.*\(2, 7\)"):
        model({"token_ids": np.zeros((2, 7), "int32")})
    with pytest.raises(ValueError, match=r"`attention_mask` must have shape \(rows, 6, 6\)"):
        model({"token_ids": tokens(2), "attention_mask": np.ones((2, 4, 4), bool)})
    with pytest.raises(ValueError, match=r"dict of \['token_ids'\].*Received \['class_ids', 'token_ids'\]"):
        model({"token_ids": tokens(2), "class_ids": np.zeros(2, "int32")})
    with pytest.raises(ValueError, match="`width` must be a multiple of `heads`"):
        denoiser(width=7)
    with pytest.raises(ValueError, match="`vocabulary_size` must be at least 2"):
        TransformerDenoiser(1, 4)
    with pytest.raises(ValueError, match="`dropout` must lie in"):
        denoiser(dropout=1.0)
    canvas = TokenDenoiser(V, LENGTH, 2, width=4, depth=1, channels=1)
    with pytest.raises(ValueError, match="no attention for an 'attention_mask'.*TransformerDenoiser"):
        canvas({"token_ids": tokens(2), "class_ids": np.zeros(2, "int32"), "attention_mask": np.ones((2, 6, 6), bool)})
