"""A teacher at k ids: what it is made of, how exact its tail is, and what is wrong with wrong ones."""

import json

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import PreparedBatch, TeacherTargets, TopKTargets, concatenate_batches, violations
from tests.batches import fields
from tests.oracles import compiled, float64_scope, numpy, softmax, tensor

IDS = np.zeros((2, 3), "int32")
INF = np.inf


def made(k=2, vocabulary=6, seed=0, **settings):
    logits = np.random.default_rng(seed).normal(size=(2, 3, vocabulary))
    return TopKTargets.from_logits(tensor(3 * logits), k, **settings)


def changed(name, value, **settings):
    """Sound NumPy targets (2, 3, 2) with `value` at row 1, position 2 of an array."""
    arrays = {key: numpy(array).copy() for key, array in made().arrays().items()}
    arrays[name][1, 2] = value
    return TopKTargets.from_arrays(arrays, settings)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_logits_give_the_likeliest_ids_and_their_log_probabilities(temperature):
    logits = 3 * np.random.default_rng(1).normal(size=(2, 3, 9)).astype("float32")
    targets = TopKTargets.from_logits(tensor(logits), 4, temperature=temperature)
    p = softmax(logits, temperature)
    ids = np.argsort(-logits, -1)[..., :4]
    assert np.array_equal(numpy(targets.ids), ids) and numpy(targets.ids).dtype == "int32"
    chosen = np.take_along_axis(p, ids, -1)
    np.testing.assert_allclose(numpy(targets.log_probs), np.log(chosen), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(numpy(targets.log_tail), np.log(1 - chosen.sum(-1)), rtol=1e-5)
    np.testing.assert_allclose(numpy(targets.retained_mass()), chosen.sum(-1), rtol=1e-6)
    assert targets.temperature == temperature and not numpy(targets.invalid()).any()


@pytest.mark.parametrize("mass", [1e-3, 1e-8, 1e-16, 1e-30, 1e-36])
def test_tail_of_logits_is_exact_however_small(mass):
    logits = np.array([[[0.0, -0.5, *[np.log(mass)] * 6]]])
    targets = TopKTargets.from_logits(tensor(logits), 2)
    p = softmax(numpy(tensor(logits)))[0, 0]
    # A log of -83 rounds to 4e-6 in float32, and so does its exponential relative to itself.
    assert np.exp(float(numpy(targets.tail_log_mass())[0, 0])) == pytest.approx(p[2:].sum(), rel=1e-5)


@pytest.mark.parametrize("first", [0.5, 1 - 1e-6, 1 - 1e-12])
def test_tail_of_one_log_probability_has_all_its_digits(first):
    targets = TopKTargets(np.zeros((1, 1, 1), "int32"), np.full((1, 1, 1), np.log1p(first - 1), "float32"))
    log_p = float(targets.log_probs[0, 0, 0])
    assert float(targets.tail_log_mass()[0, 0]) == pytest.approx(np.log(-np.expm1(log_p)), rel=1e-6)


def test_tail_of_several_log_probabilities_is_the_rest_and_nothing_below_their_rounding():
    p = np.array([[[0.7, 0.2, 0.06], [0.999, 8e-4, 1e-4], [0.5, 0.3, 0.2], [0.9, 0.1, 0.0]]])
    with np.errstate(divide="ignore"):
        for array in (np.log(p).astype("float32"), tensor(np.log(p))):
            tail = numpy(TopKTargets(np.arange(12).reshape(1, 4, 3), array).tail_log_mass())[0]
            # Three probabilities of 24 bits: 1e-7 of 4e-2, and of 1e-4 what 1 - 0.999 leaves.
            np.testing.assert_allclose(np.exp(tail[:2]), [0.04, 1e-4], rtol=3e-3)
            assert np.exp(tail[0]) == pytest.approx(0.04, rel=1e-5)
            assert np.all(tail[2:] == -INF)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tail_of_half_precision_is_nothing_below_its_rounding(dtype):
    log_probs = tensor(np.log([[[0.55, 0.3, 0.1, 0.05]]]), dtype)
    targets = TopKTargets(np.arange(4)[None, None], log_probs)
    assert numpy(targets.tail_log_mass())[0, 0] == -INF and not numpy(targets.invalid()).any()


def test_float64_logits_stay_float64():
    with float64_scope():
        targets = TopKTargets.from_logits(tensor(np.zeros((1, 1, 4)), "float64"), 3)
        assert numpy(targets.log_probs).dtype == numpy(targets.log_tail).dtype == "float64"
        assert numpy(targets.tail_log_mass())[0, 0] == pytest.approx(np.log(0.25), rel=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_give_float32(dtype):
    targets = TopKTargets.from_logits(tensor(np.zeros((1, 1, 4)), dtype), 3)
    assert numpy(targets.log_probs).dtype == "float32"


def test_tag_carries_temperature_and_tail_and_the_round_trip_gives_the_same():
    batch = PreparedBatch.create(**fields(teacher=made(temperature=2.0, tail="renormalize")))
    x, y, weights = batch.as_fit()
    (tag,) = y["teacher"]
    assert tag.startswith("top_k ")
    assert json.loads(tag.partition(" ")[2]) == {"temperature": 2.0, "tail": "renormalize"}
    back = PreparedBatch.from_fit(x, y, weights).teacher
    assert (type(back), back.settings()) == (TopKTargets, batch.teacher.settings())
    assert back.ids is batch.teacher.ids and back.log_tail is batch.teacher.log_tail


def test_targets_pass_through_a_compiled_function_with_and_without_a_tail():
    exact = made(temperature=2.0)
    for targets in (exact, TopKTargets(exact.ids, exact.log_probs, temperature=2.0)):
        batch = PreparedBatch.create(**fields(teacher=targets)).map(ops.convert_to_tensor)
        program = compiled(lambda x, y, w: PreparedBatch.from_fit(x, y, w).map(lambda a: a + a).as_fit())
        doubled = PreparedBatch.from_fit(*program(*batch.as_fit())).teacher
        assert doubled.settings() == targets.settings() and set(doubled.arrays()) == set(targets.arrays())
        np.testing.assert_array_equal(numpy(doubled.ids), 2 * numpy(targets.ids))


def test_batches_of_one_kind_join_and_of_another_temperature_do_not():
    a, b, other = (PreparedBatch.create(**fields(teacher=made(seed=i, temperature=t))) for i, t in enumerate([1, 1, 2]))
    whole = concatenate_batches([a, b]).teacher
    assert tuple(whole.ids.shape) == (4, 3, 2) and tuple(whole.log_tail.shape) == (4, 3)
    with pytest.raises(ValueError, match="same pytree structure"):
        concatenate_batches([a, other])


FAULTS = [
    ("log_probs", [np.nan, -1.0], "top_k_numbers"),
    ("log_probs", [INF, -1.0], "top_k_numbers"),
    ("log_probs", [-INF, -INF], "top_k_numbers"),
    ("log_tail", np.nan, "top_k_numbers"),
    ("log_tail", INF, "top_k_numbers"),
    ("log_probs", [0.5, -9.0], "top_k_log_probs"),
    ("log_probs", np.log([0.8, 0.3]), "top_k_sum"),
    ("log_tail", -0.01, "top_k_sum"),
    ("ids", [-1, 2], "top_k_vocabulary"),
    ("ids", [0, 6], "top_k_vocabulary"),
    ("ids", [4, 4], "top_k_repeated"),
]


@pytest.mark.parametrize("kind", ["numpy", "tensor"])
@pytest.mark.parametrize(("name", "value", "what"), FAULTS, ids=lambda x: str(x)[:20])
def test_faults_are_found_where_they_are_and_named(name, value, what, kind):
    targets = changed(name, value)
    if kind == "tensor":
        targets = targets.map(ops.convert_to_tensor)
    found = {key: numpy(where) for key, where in targets.faults(6).items()}
    assert set(found) == set(TopKTargets.FAULTS)
    assert found[what][1, 2] and found[what].sum() == 1
    assert sum(where.sum() for where in found.values()) == found_at(found)


def found_at(found):
    """How many faults there are at row 1, position 2: all there should be."""
    return sum(int(where[1, 2]) for where in found.values())


def checks(ids, log_probs, log_tail, weights):
    made = TopKTargets(ids, log_probs, log_tail=log_tail)
    batch = PreparedBatch(weights, weights, weights, made)
    return violations(batch.map(ops.convert_to_tensor), ops.zeros((2, 3, 6)), ops.zeros(()))


CHECKS = compiled(checks)


@pytest.mark.parametrize(("name", "value", "what"), FAULTS, ids=lambda x: str(x)[:20])
def test_faults_of_active_positions_are_named_inside_a_compiled_step(name, value, what):
    arrays = [ops.convert_to_tensor(array) for array in changed(name, value).arrays().values()]
    for weight in (0.0, 1.0):
        weights = np.ones((2, 3), "float32")
        weights[1, 2] = weight
        found = numpy(CHECKS(*arrays, tensor(weights))[what])
        assert found.sum() == found[1, 2] == weight


def test_vocabulary_is_not_known_and_ids_beyond_it_are_wrong_only_where_it_is():
    targets = changed("ids", [0, 6])
    assert targets.vocabulary_size() is None
    assert not numpy(targets.invalid()).any()


def test_half_of_the_log_probabilities_is_no_other_temperature():
    log_p = np.log(softmax([[[2.0, 0.0, -1.0]]])).astype("float32")
    targets = TopKTargets(np.arange(3)[None, None], log_p / 2)
    assert targets.retained_mass()[0, 0] == pytest.approx(1.461474, abs=1e-6)
    assert targets.invalid().all()


def replaced(**arrays):
    return TopKTargets.from_arrays({**{k: numpy(a) for k, a in made().arrays().items()}, **arrays}, {})


def test_log_probability_of_a_target_is_given_or_at_most_that_of_the_least():
    logits = np.log([[[0.5, 0.3, 0.15, 0.05]] * 4])
    targets = TopKTargets.from_logits(tensor(logits), 2)
    got = np.exp(numpy(targets.target_log_probs(np.array([[0, 1, 2, 3]]))))
    np.testing.assert_allclose(got, [[0.5, 0.3, 0.2, 0.2]], rtol=1e-5)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"ids": np.zeros((2, 3), "int32")}, ValueError, r"top-k ids` must have shape \(2, 3, k\).*Received \(2, 3\)"),
        ({"ids": np.zeros((2, 4, 2), "int32")}, ValueError, r"nothing is shifted"),
        ({"ids": np.zeros((2, 3, 0), "int32")}, ValueError, r"at least one id"),
        ({"log_probs": np.zeros((2, 3, 3), "float32")}, ValueError, r"log_probs` must have the shape \(2, 3, 2\)"),
        ({"log_tail": np.zeros((2, 3, 1), "float32")}, ValueError, r"one number a position, shape \(2, 3\)"),
        ({"ids": np.zeros((2, 3, 2), "float32")}, TypeError, r"integer dtype. Received float32"),
        ({"log_probs": np.zeros((2, 3, 2), "int32")}, TypeError, r"floating-point dtype. Received int32"),
        ({"log_tail": np.zeros((2, 3), "int32")}, TypeError, r"log_tail` must have a floating-point dtype"),
        ({"ids": [[[0]]]}, TypeError, r"`top-k ids` must be a NumPy array.*Received list"),
    ],
    ids=lambda x: str(x)[:12],
)
def test_what_does_not_fit_is_refused(arrays, error, message):
    with pytest.raises(error, match=message):
        replaced(**arrays).validate(IDS)


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"`temperature` must be positive. Received 0.0"):
        made(temperature=0.0)
    with pytest.raises(ValueError, match=r"`tail` must be 'bucket' .* or 'renormalize'.*Received 'drop'"):
        made(tail="drop")
    with pytest.raises(ValueError, match=r"`k` must be at most the vocabulary size 6. Received 7"):
        made(k=7)
    with pytest.raises(ValueError, match=r"`k` must be a whole number of at least 1. Received 0"):
        made(k=0)
    with pytest.raises(TypeError, match=r"`logits` must have a floating-point dtype. Received int32"):
        TopKTargets.from_logits(np.zeros((1, 1, 3), "int32"), 1)


def test_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"kind 'top-k'. Known kinds: .*'top_k'"):
        TeacherTargets.from_tagged({"top-k": {}})
