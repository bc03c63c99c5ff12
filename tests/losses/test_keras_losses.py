"""The losses as `keras.losses.Loss`: called directly, and in a plain `model.compile`, `fit`, `evaluate`."""

import keras
import numpy as np
import pytest
from keras import ops
from tests.oracles import DIVERGENCES, cross_entropy, numpy, reference, tensor, value_and_grad

from keras_diffusion_opd.losses import TeacherDivergence, TokenCrossEntropy

B, L, V = 2, 3, 5
WEIGHTS = np.array([[1.0, 0.25, 0.0], [0.5, 0.0, 2.0]], "float32")


def pair(seed=0):
    return np.random.default_rng(seed).normal(size=(2, B, L, V)).astype("float32")


def student(vocabulary=V, policy="float32", mask_zero=False):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((None,), dtype="int32"),
        keras.layers.Embedding(vocabulary, 4, dtype=policy, mask_zero=mask_zero),
        keras.layers.Dense(vocabulary, dtype=policy),
    ]
    return keras.Sequential(layers)


def compiled_student(loss, **arguments):
    model = student(**arguments)
    # XLA would take seconds to compile what runs for microseconds.
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=loss, jit_compile=False if keras.backend.backend() == "tensorflow" else "auto")
    return model


def ids(seed=1, vocabulary=V, low=0):
    return np.random.default_rng(seed).integers(low, vocabulary, size=(B, L)).astype("int32")


# ---- called directly ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIVERGENCES)
def test_teacher_divergence_is_the_weighted_mean_of_token_divergence(name):
    teacher, logits = pair()
    got = float(numpy(TeacherDivergence(name, temperature=2.0)(teacher, logits, sample_weight=WEIGHTS)))
    want = (WEIGHTS * reference(name, logits, teacher, 2.0)).sum() / WEIGHTS.sum()
    assert got == pytest.approx(want, rel=1e-5)


def test_cross_entropy_is_the_weighted_mean_over_tokens():
    _, logits = pair()
    got = float(numpy(TokenCrossEntropy()(ids(), logits, sample_weight=WEIGHTS)))
    assert got == pytest.approx((WEIGHTS * cross_entropy(logits, ids())).sum() / WEIGHTS.sum(), rel=1e-5)


@pytest.mark.parametrize(
    "reduction, expected",
    [
        ("mean_with_sample_weight", lambda v: (WEIGHTS * v).sum() / WEIGHTS.sum()),
        ("sum_over_batch_size", lambda v: (WEIGHTS * v).sum() / (B * L)),
        ("mean", lambda v: (WEIGHTS * v).sum() / (B * L)),
        ("sum", lambda v: (WEIGHTS * v).sum()),
        ("none", lambda v: WEIGHTS * v),
        (None, lambda v: WEIGHTS * v),
    ],
)
def test_reduction_divides_by_what_its_name_says(reduction, expected):
    teacher, logits = pair()
    got = numpy(TeacherDivergence(reduction=reduction)(teacher, logits, sample_weight=WEIGHTS))
    np.testing.assert_allclose(got, expected(reference("forward_kl", logits, teacher)), rtol=1e-5, atol=1e-7)


def test_default_divides_by_the_weights_where_keras_divides_by_the_batch_size():
    p, q = np.log([[0.9, 0.1], [0.5, 0.5]]), np.log([[0.5, 0.5], [0.9, 0.1]])
    weights = np.array([1.0, 0.25])
    values = np.array([0.368064, 0.510826])
    assert float(numpy(TeacherDivergence()(p, q, sample_weight=weights))) == pytest.approx((weights * values).sum() / 1.25, abs=1e-6)
    keras_default = keras.losses.KLDivergence()(np.exp(p), np.exp(q), sample_weight=weights)
    assert float(numpy(keras_default)) == pytest.approx((weights * values).sum() / 2, abs=1e-5)


@pytest.mark.parametrize("shape", [(B,), (B, 1), (B, L)])
def test_weights_of_fewer_axes_broadcast_from_the_left(shape):
    teacher, logits = pair()
    weights = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype("float32")
    full = np.broadcast_to(weights.reshape(shape + (1,) * (2 - len(shape))), (B, L))
    got = float(numpy(TeacherDivergence()(teacher, logits, sample_weight=weights)))
    assert got == pytest.approx((full * reference("forward_kl", logits, teacher)).sum() / full.sum(), rel=1e-5)


def test_without_weights_every_token_counts_once():
    teacher, logits = pair()
    got = float(numpy(TeacherDivergence()(teacher, logits)))
    assert got == pytest.approx(reference("forward_kl", logits, teacher).mean(), rel=1e-5)


def test_weights_that_are_all_zero_give_zero_and_no_gradient():
    nan = np.full((B, L, V), np.nan, "float32")
    value, gradient = value_and_grad(lambda s: TeacherDivergence()(nan, s, sample_weight=np.zeros((B, L))), nan)
    assert value == 0.0 and not gradient.any()


@pytest.mark.parametrize("loss", [TeacherDivergence(), TokenCrossEntropy()], ids=lambda x: x.name)
def test_garbage_at_weight_zero_changes_neither_value_nor_gradient_by_a_bit(loss):
    results = []
    for dirty in (False, True):
        teacher, logits = pair()
        y = teacher if isinstance(loss, TeacherDivergence) else ids()
        if dirty:
            logits[WEIGHTS == 0] = np.nan
            y[WEIGHTS == 0] = np.inf if y.dtype == "float32" else -1
        results.append(value_and_grad(lambda s, y=y: loss(y, s, sample_weight=WEIGHTS), logits))
    assert results[0][0] == results[1][0] and np.isfinite(results[0][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_mask_of_the_student_silences_positions_and_leaves_the_denominator():
    teacher, logits = pair()
    masked = tensor(logits)
    masked._keras_mask = ops.convert_to_tensor(np.array([[True, True, False], [True, False, False]]))
    got = float(numpy(TeacherDivergence()(teacher, masked)))
    assert got == pytest.approx(reference("forward_kl", logits, teacher)[[0, 0, 1], [0, 1, 0]].mean(), rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_value_of_half_precision_logits_is_float32(dtype):
    teacher, logits = pair()
    value = TeacherDivergence(dtype=dtype)(tensor(teacher, dtype), tensor(logits, dtype))
    wide = reference("forward_kl", numpy(tensor(logits, dtype)), numpy(tensor(teacher, dtype))).mean()
    assert keras.backend.standardize_dtype(value.dtype) == "float32"
    assert float(numpy(value)) == pytest.approx(wide, rel=1e-5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"divergence": "kl"}, "`divergence` must be one of"),
        ({"temperature": 0.0}, "`temperature` must be positive"),
        ({"temperature": np.nan}, "`temperature` must be a finite real scalar"),
        ({"divergence": "jsd", "beta": 1.0}, "`beta` must lie strictly between 0 and 1"),
    ],
)
def test_setting_out_of_range_is_refused_at_construction(arguments, words):
    with pytest.raises(ValueError, match=words):
        TeacherDivergence(**arguments)


@pytest.mark.parametrize("loss", [TeacherDivergence("jsd", 2.0, 0.3, reduction="sum", name="x"), TokenCrossEntropy(reduction="none", name="y")], ids=["divergence", "cross-entropy"])
def test_config_round_trip_and_serialisation(loss):
    back = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert type(back) is type(loss) and back.get_config() == loss.get_config()
    assert type(loss).from_config(loss.get_config()).get_config() == loss.get_config()


# ---- in a plain model.compile ------------------------------------------------------------------------------------


def test_fit_lowers_the_divergence_and_evaluate_reports_the_weighted_mean():
    model = compiled_student(TeacherDivergence())
    x, (teacher, _) = ids(), pair()
    history = model.fit(x, teacher, sample_weight=WEIGHTS, epochs=5, batch_size=B, verbose=0).history["loss"]
    assert history[-1] < 0.9 * history[0]
    want = (WEIGHTS * reference("forward_kl", numpy(model(x)), teacher)).sum() / WEIGHTS.sum()
    assert model.evaluate(x, teacher, sample_weight=WEIGHTS, verbose=0) == pytest.approx(want, rel=1e-5)


def test_fit_with_garbage_at_weight_zero_gives_the_same_weights_bit_for_bit():
    trained = []
    for value in (0.0, np.nan):
        model = compiled_student(TeacherDivergence())
        teacher, _ = pair()
        teacher[WEIGHTS == 0] = value
        model.fit(ids(), teacher, sample_weight=WEIGHTS, epochs=2, verbose=0)
        trained.append(model.get_weights())
    for clean, dirty in zip(*trained, strict=True):
        np.testing.assert_array_equal(clean, dirty)


def test_fit_with_weights_that_are_all_zero_moves_nothing():
    model = compiled_student(TeacherDivergence())
    before = model.get_weights()
    history = model.fit(ids(), pair()[0], sample_weight=np.zeros((B, L)), verbose=0).history
    assert history["loss"] == [0.0]
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_ids_above_256_survive_a_bfloat16_model():
    model = compiled_student(TokenCrossEntropy(), vocabulary=300, policy="bfloat16")
    y = np.full((B, L), 257, "int32")
    model.layers[-1].bias.assign(np.where(np.arange(300) == 257, 8.0, 0.0))
    loss = model.evaluate(ids(), y, verbose=0)
    # bfloat16(257) is 256: that id would cost 8 nats more.
    assert loss == pytest.approx(cross_entropy(numpy(model(ids())), y).mean(), rel=1e-2)
    assert loss < 1.0


def test_mask_of_an_embedding_reaches_the_loss_in_fit():
    x = np.array([[1, 2, 0], [3, 0, 0]], "int32")
    model = compiled_student(TokenCrossEntropy(), mask_zero=True)
    y = np.where(x == 0, -1, x)
    values = cross_entropy(numpy(model(x)), np.maximum(y, 0))
    assert model.evaluate(x, y, verbose=0) == pytest.approx(values[x > 0].mean(), rel=1e-5)
    assert np.isfinite(model.fit(x, y, verbose=0).history["loss"]).all()


def test_compiled_model_is_saved_and_loaded_with_its_loss(tmp_path):
    model = compiled_student(TeacherDivergence("reverse_kl", temperature=2.0))
    model.save(tmp_path / "student.keras")
    back = keras.saving.load_model(tmp_path / "student.keras")
    assert isinstance(back.loss, TeacherDivergence) and back.loss.get_config() == model.loss.get_config()
    x, (teacher, _) = ids(), pair()
    assert back.evaluate(x, teacher, verbose=0) == pytest.approx(model.evaluate(x, teacher, verbose=0), rel=1e-6)
