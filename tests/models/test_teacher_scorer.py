"""A teacher in this process: any number of rows through one program, any kind of targets."""

import keras
import numpy as np
import pytest

from keras_diffusion_opd.data import DenseTargets, TopKTargets
from keras_diffusion_opd.models import TeacherScorer

V, L = 7, 5


def build(dropout=0.0):
    keras.utils.set_random_seed(3)
    ids, kinds = keras.Input((L,), dtype="int32", name="ids"), keras.Input((), dtype="int32", name="kinds")
    x = keras.layers.Embedding(V, 6)(ids) + keras.layers.Embedding(2, 6)(kinds)[:, None]
    x = keras.layers.Dropout(dropout)(x)
    return keras.Model({"ids": ids, "kinds": kinds}, keras.layers.Dense(V)(x))


def inputs(rows):
    rng = np.random.default_rng(rows)
    return {"ids": rng.integers(0, V, (rows, L)).astype("int32"), "kinds": (np.arange(rows) % 2).astype("int32")}


def test_any_number_of_rows_is_scored_by_one_program_to_the_same_bits():
    scorer = TeacherScorer(build(), batch_size=4)
    data = inputs(11)
    whole = scorer(data)
    assert isinstance(whole, DenseTargets) and whole.logits.shape == (11, L, V)
    part = scorer({name: value[4:9] for name, value in data.items()}).logits
    assert np.array_equal(part, whole.logits[4:9])
    expected = keras.ops.convert_to_numpy(scorer.model(data))
    np.testing.assert_allclose(whole.logits, expected, rtol=1e-5, atol=1e-6)  # float32, another batch size


def test_teacher_is_scored_without_dropout():
    scorer = TeacherScorer(build(dropout=0.5))
    assert np.array_equal(scorer(inputs(3)).logits, scorer(inputs(3)).logits)


def test_sparse_targets_are_taken_call_by_call_and_joined():
    scorer = TeacherScorer(build(), batch_size=3, targets=lambda logits: TopKTargets.from_logits(logits, 2))
    joined, whole = scorer(inputs(8)), TopKTargets.from_logits(keras.ops.convert_to_numpy(build()(inputs(8))), 2)
    assert isinstance(joined.ids, np.ndarray) and joined.ids.shape == (8, L, 2)
    np.testing.assert_allclose(joined.log_tail, keras.ops.convert_to_numpy(whole.log_tail), rtol=1e-4)


def test_digest_is_that_of_the_weights_as_they_are_now():
    scorer = TeacherScorer(build())
    before = scorer.digest
    scorer.model.set_weights([w + 1 for w in scorer.model.get_weights()])
    after = scorer.digest
    assert len(before) == 64 and before != after


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"model": lambda x: x}, TypeError, "`model` must be a Keras model"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be a whole number"),
        ({"targets": "dense"}, TypeError, "`targets` must be a function"),
    ],
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        TeacherScorer(**{"model": build(), **arguments})


def test_nothing_to_score_and_targets_of_another_kind_are_refused():
    with pytest.raises(ValueError, match="at least one row"):
        TeacherScorer(build())(inputs(0))
    with pytest.raises(TypeError, match="`targets` must give TeacherTargets"):
        TeacherScorer(build(), targets=lambda logits: logits)(inputs(2))
