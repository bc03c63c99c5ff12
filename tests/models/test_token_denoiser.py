"""The token denoiser: shapes, saving, dtypes, and that it learns through `fit`."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import PreparedBatch, PreparedDataset
from keras_diffusion_opd.losses import TokenCrossEntropyLoss
from keras_diffusion_opd.models.token_denoiser import TokenDenoiser, token_features
from keras_diffusion_opd.trainers import PreparedTrainer


def denoiser(**arguments):
    arguments = {"width": 12, "depth": 2, "channels": 3, **arguments}
    return TokenDenoiser(5, 9, 4, **arguments)


def inputs(rows=3):
    rng = np.random.default_rng(0)
    return {
        "token_ids": rng.integers(0, 6, (rows, 9)).astype("int32"),
        "class_ids": rng.integers(0, 4, (rows,)).astype("int32"),
    }


def run(model, x, **kwargs):
    return ops.convert_to_numpy(ops.cast(model(x, **kwargs), "float32"))


def test_the_output_has_the_declared_shape_and_no_row_for_the_mask():
    model = denoiser()
    out = model(inputs())
    assert out.shape == (3, 9, 5)
    shapes = {name: value.shape for name, value in inputs().items()}
    assert model.compute_output_shape(shapes) == (3, 9, 5)
    assert model.mask_id == 5


def test_the_parameters_are_those_of_the_formula():
    model = denoiser()
    model.build()
    w, c, length, v = 12, 3, 9, 5
    block = 2 * w + 2 * (w * w + w)
    decoder = w * length * c + length * c + c * v + length * v
    assert model.count_params() == 4 * w + (length * 5 * w + w) + 2 * block + 2 * w + decoder


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_every_dtype_policy_gives_its_dtype_and_finite_values(policy):
    model = denoiser(dtype=policy)
    out = model(inputs())
    assert keras.backend.standardize_dtype(out.dtype) == keras.DTypePolicy(policy).compute_dtype
    assert np.all(np.isfinite(ops.convert_to_numpy(ops.cast(out, "float32"))))
    assert all(v.dtype == keras.DTypePolicy(policy).variable_dtype for v in model.trainable_variables)


def test_a_saved_model_comes_back_equal(tmp_path):
    model = denoiser(dropout=0.2)
    before = run(model, inputs())
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert np.array_equal(run(again, inputs()), before)
    assert again.get_config() == model.get_config()


def test_each_row_is_scored_by_itself_and_without_dropout_outside_training():
    model = denoiser(dropout=0.5)
    x = inputs(4)
    whole = run(model, x)
    part = run(model, {name: value[1:3] for name, value in x.items()})
    np.testing.assert_allclose(part, whole[1:3], rtol=1e-5, atol=1e-6)  # another batch shape, another sum order
    assert np.array_equal(run(model, x), whole)
    assert not np.array_equal(run(model, x, training=True), whole)


def test_class_and_tokens_both_matter():
    model = denoiser()
    x = inputs()
    base = run(model, x)
    assert not np.allclose(run(model, {**x, "class_ids": (x["class_ids"] + 1) % 4}), base)
    assert not np.allclose(run(model, {**x, "token_ids": (x["token_ids"] + 1) % 6}), base)


def test_it_learns_a_class_through_fit():
    model = denoiser()
    classes = np.arange(4, dtype="int32")
    batch = PreparedBatch.create(
        model_inputs={"token_ids": np.full((4, 9), model.mask_id, "int32"), "class_ids": classes},
        target_ids=np.repeat(classes[:, None], 9, axis=1),
        loss_weights=np.ones((4, 9), "float32"),
    )
    trainer = PreparedTrainer(model, TokenCrossEntropyLoss())
    trainer.compile(keras.optimizers.Adam(0.02))
    trainer.fit(PreparedDataset([batch]), epochs=60, verbose=0)
    assert np.array_equal(run(model, batch.model_inputs).argmax(-1), batch.target_ids)


def test_features_order_the_levels_and_the_mask_is_zero():
    rows = token_features(5)
    assert rows.shape == (6, 5)
    assert rows[:5, 0].tolist() == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert not rows[5].any()


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="`width`"):
        denoiser(width=0)
    with pytest.raises(ValueError, match="`vocabulary_size` must be at least 2"):
        TokenDenoiser(1, 4, 2)
    with pytest.raises(ValueError, match="`dropout` must lie in"):
        denoiser(dropout=1.0)
