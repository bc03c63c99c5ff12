"""`FlowMatchingTrainer`: population minimiser, exact windows, draws of a row, averages, resuming."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.callbacks import ProvenanceCheckpoint, resume
from keras_diffusion_opd.data import FlowBatch, PreparedDataset
from keras_diffusion_opd.samplers.flow_draws import FlowDraws
from keras_diffusion_opd.trainers import FlowMatchingTrainer

ROWS = 12


def denoiser() -> keras.Model:
    """A tiny network of x, s and a label; label 3 is the null class."""
    inputs = {
        "x": keras.Input((2,)),
        "time": keras.Input((), dtype="float32"),
        "label": keras.Input((), dtype="int32"),
    }
    label = keras.layers.Embedding(4, 3, embeddings_initializer=keras.initializers.RandomNormal(seed=3))(
        inputs["label"]
    )
    joined = keras.layers.Concatenate()([inputs["x"], keras.layers.Reshape((1,))(inputs["time"]), label])
    hidden = keras.layers.Dense(5, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1))(joined)
    return keras.Model(inputs, keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(2))(hidden))


def rows(count: int = ROWS) -> FlowBatch:
    random = np.random.default_rng(0)
    return FlowBatch.create(
        random.normal(size=(count, 2)).astype("float32"),
        conditions={"label": np.arange(count, dtype="int32") % 3},
        weights=random.uniform(0.2, 1.0, count).astype("float32"),
    )


def trainer(k: int = 1, **settings: object) -> FlowMatchingTrainer:
    made = FlowMatchingTrainer(denoiser(), seed=5, class_dropout=0.3, null_condition={"label": 3}, weighting="min_snr")
    made.compile(keras.optimizers.Adam(0.02), accumulation_steps=k, **settings)
    return made


def weights(model: object) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(v)) for v in model.weights]  # type: ignore[attr-defined]


def test_micro_batches_equal_one_batch_and_the_same_holds_for_the_average() -> None:
    whole, parts = trainer(ema=0.5), trainer(3, ema=0.5)
    whole.fit(PreparedDataset(rows(), batch_size=ROWS), epochs=3, verbose=0)
    cut = rows()
    pieces = [cut.map(lambda a, s=s: a[s]) for s in (slice(0, 5), slice(5, 6), slice(6, ROWS))]
    parts.fit(PreparedDataset(pieces), epochs=3, verbose=0)
    assert whole.policy_version == parts.policy_version == 3
    for a, b in zip(weights(whole), weights(parts), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)  # float32 sums in another order, three steps of Adam


def test_draws_belong_to_the_row_and_have_the_distribution_they_are_named_for() -> None:
    ids = np.stack([np.arange(4096), np.zeros(4096)], axis=1).astype("int32")
    draws = FlowDraws(7, 3, ids)
    noise = keras.ops.convert_to_numpy(draws.noise(np.zeros((4096, 3), "float32")))
    # The errors of mean and deviation over 12288 draws have deviations of .009 and .0064: five of them.
    assert abs(noise.mean()) < 0.045 and abs(noise.std() - 1) < 0.032
    times = keras.ops.convert_to_numpy(draws.times("logit_normal"))
    logits = np.log(times / (1 - times))
    assert abs(logits.mean()) < 0.078 and abs(logits.std() - 1) < 0.055  # over 4096
    assert abs(np.corrcoef(logits, noise[:, 0])[0, 1]) < 0.078
    uniform = keras.ops.convert_to_numpy(draws.times("uniform"))
    assert abs(uniform.mean() - 0.5) < 0.0226  # five times 1 / sqrt(12 * 4096)
    few = keras.ops.convert_to_numpy(FlowDraws(7, 3, ids[100:103]).noise(np.zeros((3, 3), "float32")))
    # The bits are equal; the vectorised sine of TensorFlow rounds the last elements of an array otherwise.
    np.testing.assert_allclose(few, noise[100:103], atol=1e-6)
    other = keras.ops.convert_to_numpy(FlowDraws(7, 4, ids[:8]).noise(np.zeros((8, 3), "float32")))
    assert not np.any(other == noise[:8])


def test_evaluation_is_deterministic_and_does_not_depend_on_batches_or_updates() -> None:
    made = trainer()
    first = made.evaluate(PreparedDataset(rows(), batch_size=5), verbose=0, return_dict=True)
    again = made.evaluate(PreparedDataset(rows(), batch_size=ROWS), verbose=0, return_dict=True)
    assert first["loss"] == pytest.approx(again["loss"], rel=1e-5)  # float32 sums in another order
    assert set(first) == {"loss", "flow/velocity_error"}
    made.optimizer.learning_rate = 0.0
    made.fit(PreparedDataset(rows(), batch_size=ROWS), verbose=0)
    later = made.evaluate(PreparedDataset(rows(), batch_size=ROWS), verbose=0, return_dict=True)
    assert later["loss"] == again["loss"]  # nothing has moved, and the draws are those of the row


def test_linear_denoiser_at_one_time_reaches_the_velocity_of_gaussian_data() -> None:
    # E[e - x0 | x_s = x] = -m + (s - (1 - s) c^2) / var (x - (1 - s) m) is linear in x at each s. The network is
    # given the features that make it linear in its weights at every s, so that least squares has it as minimum.
    m, c = 2.0, 0.5

    class Linear(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.weight = self.add_weight(shape=(2,), initializer="zeros", name="weight")
            self.built = True

        def call(self, inputs: dict[str, object]) -> object:
            x, s = inputs["x"], keras.ops.expand_dims(inputs["time"], -1)
            variance = keras.ops.square((1 - s) * c) + keras.ops.square(s)
            slope = (s - (1 - s) * c**2) / variance
            return -self.weight[0] + slope * (x - (1 - s) * self.weight[1])

    made = FlowMatchingTrainer(Linear(), times="uniform", seed=2)
    made.compile(keras.optimizers.Adam(0.1), ema=0.95)
    data = np.random.default_rng(1).normal(m, c, size=(512, 4)).astype("float32")
    made.fit(PreparedDataset(FlowBatch.create(data), batch_size=512), epochs=150, verbose=0)
    with made.ema_weights():
        learned = weights(made.student)[0]
    # The minimum over the population is (m, m). 2048 numbers, an average of about 40 updates with fresh noise: the
    # error of the mean is about sqrt(1.25 / 2048 / 20) = .006, of Adam's oscillation about as much, and that of the
    # data .5 / sqrt(2048) = .011; the two weights share it.
    np.testing.assert_allclose(learned, [m, m], atol=0.08)


def test_average_goes_back_even_on_an_exception_and_follows_its_recursion() -> None:
    made = trainer(ema=0.75)
    expected = [w.copy() for w in weights(made.student)]
    for _ in range(2):
        made.train_on_batch(rows())
        expected = [0.75 * e + 0.25 * w for e, w in zip(expected, weights(made.student), strict=True)]
    own = weights(made.student)
    with pytest.raises(RuntimeError, match="stop"), made.ema_weights():
        for a, b in zip(weights(made.student), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)  # float32
        raise RuntimeError("stop")
    for a, b in zip(weights(made.student), own, strict=True):
        np.testing.assert_array_equal(a, b)


def test_resumed_run_is_the_uninterrupted_run_with_its_average(tmp_path: object) -> None:
    def data() -> PreparedDataset:
        return PreparedDataset(rows(), batch_size=4, shuffle=True, seed=1)

    whole = trainer(ema=0.9)
    whole.fit(data(), epochs=2, verbose=0)
    first = trainer(ema=0.9)
    first.fit(data(), epochs=1, verbose=0, callbacks=[ProvenanceCheckpoint(tmp_path)])
    second = trainer(ema=0.9)
    state = resume(second, tmp_path)
    second.fit(data(), epochs=2, initial_epoch=state.epoch, verbose=0)
    for a, b in zip(weights(whole), weights(second), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="ema"):
        resume(trainer(ema=0.8), tmp_path)


def test_rows_of_weight_zero_may_hold_anything() -> None:
    clean, dirty = rows(), rows()
    zero = np.where(np.arange(ROWS) % 4 == 0, 0.0, 1.0).astype("float32")
    samples = clean.samples.copy()
    samples[::4] = np.nan
    one, other = trainer(), trainer()
    one.train_on_batch(FlowBatch(clean.samples, clean.conditions, zero, clean.sample_ids))
    other.train_on_batch(FlowBatch(samples, dirty.conditions, zero, dirty.sample_ids))
    for a, b in zip(weights(one), weights(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_trainer_saves_and_loads(tmp_path: object) -> None:
    made = trainer(ema=0.9)
    made.train_on_batch(rows())
    path = f"{tmp_path}/trainer.keras"
    made.save(path)
    loaded = keras.saving.load_model(path)
    assert loaded.get_config()["class_dropout"] == 0.3 and loaded.ema == 0.9
    for a, b in zip(weights(made), weights(loaded), strict=True):
        np.testing.assert_array_equal(a, b)
    made.train_on_batch(rows())
    loaded.train_on_batch(rows())
    for a, b in zip(weights(made), weights(loaded), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)  # another program, another order of sums


def test_refusals() -> None:
    with pytest.raises(ValueError, match="null_condition"):
        FlowMatchingTrainer(denoiser(), class_dropout=0.1)
    with pytest.raises(ValueError, match="times"):
        FlowMatchingTrainer(denoiser(), times="cosine")
    with pytest.raises(ValueError, match="metrics"):
        trainer(metrics=["accuracy"])
    with pytest.raises(ValueError, match="compile"):
        trainer().ema_weights()
    with pytest.raises(ValueError, match="finite"):
        FlowBatch.create(np.full((2, 2), np.inf, "float32"))
    with pytest.raises(ValueError, match="names other"):
        FlowBatch.create(np.zeros((2, 2), "float32"), conditions={"time": np.zeros(2)})
    with pytest.raises(TypeError, match="floating"):
        FlowBatch.create(np.zeros((2, 2), "uint8"))
    bad = rows()
    samples = bad.samples.copy()
    samples[2, 1] = np.nan
    with pytest.raises(ValueError, match="row 2"):
        FlowBatch(samples, bad.conditions, bad.weights, bad.sample_ids).validate()
    with pytest.raises(ValueError, match=r"1 row\(s\), the first at micro-batch 0, row 2"):
        x, y, w = FlowBatch(samples, bad.conditions, bad.weights, bad.sample_ids).as_fit()
        trainer().fit(iter([(x, y, w)]), verbose=0)
