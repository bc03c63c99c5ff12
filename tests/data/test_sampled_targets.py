"""Ids drawn from a teacher: by what they are determined, that they are unbiased, what is wrong with wrong ones."""

import json

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, SampledTargets, TopKTargets
from tests.batches import fields
from tests.oracles import DIVERGENCES, numpy, softmax, tensor

IDS = np.zeros((2, 3), "int32")
P = np.array([0.5, 0.3, 0.15, 0.05])
LOGITS = (3 * np.random.default_rng(0).normal(size=(4, 3, 7))).astype("float32")
DRAWS = ("independent", "systematic")


def share(targets, vocabulary):
    """float64 (B, L, V): the weights, summed by id."""
    weights, ids = targets.weights(), targets.ids
    return np.stack([(weights * (ids == v)).sum(-1, dtype="float64") for v in range(vocabulary)], -1)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("n", [1, 5])
def test_counts_are_those_of_n_draws_and_distinct_ids_come_first(draws, n):
    targets = SampledTargets.from_logits(LOGITS, n, seed=3, draws=draws)
    assert targets.ids.shape == targets.counts.shape == (4, 3, n)
    assert targets.ids.dtype == targets.counts.dtype == "int32" and np.all(targets.counts.sum(-1) == n)
    drawn = targets.counts > 0
    assert np.all(drawn[..., :-1] >= drawn[..., 1:])
    assert np.all((np.diff(targets.ids, axis=-1) > 0) | ~drawn[..., 1:])
    assert np.all(targets.ids[~drawn] == 0) and not numpy(targets.invalid()).any()
    assert np.all(targets.retained_mass() == 1.0) and targets.bound == "unbiased"


@pytest.mark.parametrize("draws", DRAWS)
def test_draws_belong_to_seed_sample_and_position_and_to_no_batch(draws):
    ids = np.array([11, 2**40, -5, 7])
    whole = SampledTargets.from_logits(LOGITS, 6, seed=3, sample_ids=ids, draws=draws)
    for rows in ([2], [3, 0]):
        part = SampledTargets.from_logits(LOGITS[rows], 6, seed=3, sample_ids=ids[rows], draws=draws)
        assert np.array_equal(part.ids, whole.ids[rows]) and np.array_equal(part.counts, whole.counts[rows])
    short = SampledTargets.from_logits(LOGITS[:, :2], 6, seed=3, sample_ids=ids, draws=draws)
    assert np.array_equal(short.counts, whole.counts[:, :2])
    for changed in ({"seed": 4}, {"sample_ids": ids + 1}):
        other = SampledTargets.from_logits(LOGITS, 6, **{"seed": 3, "sample_ids": ids, "draws": draws, **changed})
        assert not np.array_equal(share(other, 7), share(whole, 7))


def test_draws_are_the_same_on_every_backend_and_from_a_tensor():
    targets = SampledTargets.from_logits(LOGITS[:1, :1], 8, seed=1)
    # Noted once, on NumPy: the bits are integers, and the sums are in float64 on the host.
    assert targets.ids[0, 0, :4].tolist() == [6, 0, 0, 0] and targets.counts[0, 0, :4].tolist() == [8, 0, 0, 0]
    same = SampledTargets.from_logits(tensor(LOGITS[:1, :1]), 8, seed=1)
    assert np.array_equal(same.ids, targets.ids) and np.array_equal(same.counts, targets.counts)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("proposal", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_weights_are_the_teachers_probabilities_on_average(temperature, proposal, draws):
    logits = np.broadcast_to(np.log(P), (1, 20000, 4)).astype("float32")
    settings = {"temperature": temperature, "proposal_temperature": proposal, "draws": draws}
    targets = SampledTargets.from_logits(logits, 3, seed=0, **settings)
    shares = share(targets, 4)[0]
    error = shares.std(axis=0, ddof=1) / np.sqrt(len(shares))
    assert np.all(np.abs(shares.mean(axis=0) - softmax(np.log(P), temperature)) < 4 * error + 1e-6)
    p = softmax(np.log(P), temperature)
    np.testing.assert_allclose(targets.entropy, -(p * np.log(p)).sum(), rtol=1e-6)
    if proposal != 1.0:
        assert targets.counts.dtype == "float32" and targets.retained_mass().std() > 0.05


def test_systematic_draws_round_n_times_the_probability_and_vary_less():
    p = softmax(LOGITS)
    counts = share(SampledTargets.from_logits(LOGITS, 20, seed=0, draws="systematic"), 7) * 20
    assert np.all(np.abs(counts - 20 * p) < 1.0)
    logits = np.broadcast_to(np.log(P), (1, 2000, 4)).astype("float32")
    spread = [share(SampledTargets.from_logits(logits, 10, seed=0, draws=d), 4).var(axis=1).sum() for d in DRAWS]
    assert spread[1] < 0.5 * spread[0]


def test_excluded_ids_are_never_drawn_and_no_distribution_gives_no_draws():
    logits = np.array([[[-np.inf, 0.0, -np.inf, 0.0, -np.inf], [np.nan, 0, 0, 0, 0], [-np.inf] * 5]], "float32")
    targets = SampledTargets.from_logits(logits, 50, seed=0)
    assert set(targets.ids[0, 0][targets.counts[0, 0] > 0]) == {1, 3}
    assert np.all(targets.counts[0, 1:] == 0)
    assert numpy(targets.invalid()).tolist() == [[False, True, True]]


def test_integer_counts_are_divided_by_their_sum_and_floats_taken_as_they_are():
    ids = np.zeros((1, 1, 2), "int32")
    for dtype in ("int32", "uint8", "int64"):
        assert SampledTargets(ids, np.array([[[3, 1]]], dtype)).weights().tolist() == [[[0.75, 0.25]]]
    floats = SampledTargets(ids, np.array([[[0.5, 0.75]]], "float32"))
    assert floats.weights().tolist() == [[[0.5, 0.75]]] and floats.retained_mass().tolist() == [[1.25]]


def test_what_it_cannot_give_is_refused_with_reason_and_mend():
    targets = SampledTargets.from_logits(LOGITS, 2, seed=0, temperature=2.0)
    assert targets.refusal("forward_kl", 2.0) is None
    assert "Draw them anew" in targets.refusal("forward_kl", 1.0)
    for divergence in DIVERGENCES[1:]:
        assert "TopKTargets or DenseTargets" in targets.refusal(divergence, 2.0)
    dense = DenseTargets(LOGITS)
    assert dense.bound == "exact" and all(dense.refusal(d, 3.0) is None for d in DIVERGENCES)
    assert np.all(numpy(dense.retained_mass()) == np.ones((4, 3)))
    bucket, blind = (TopKTargets.from_logits(tensor(LOGITS), 2, tail=tail) for tail in ("bucket", "renormalize"))
    assert (bucket.bound, blind.bound) == ("lower", "none")
    assert all(bucket.refusal(d, 1.0) is None for d in DIVERGENCES)
    assert "k log-probabilities do not give" in bucket.refusal("forward_kl", 2.0)
    assert "student's probability" in blind.refusal("reverse_kl", 1.0)
    with pytest.raises(TypeError, match="SampledTargets do not give the probability of a single id"):
        targets.target_log_probs(IDS)


def test_round_trip_through_fit_keeps_temperature_and_entropy():
    targets = SampledTargets.from_logits(LOGITS[:2], 2, seed=0, temperature=2.0)
    batch = PreparedBatch.create(**fields(teacher=targets))
    x, y, weights = batch.as_fit()
    (tag,) = y["teacher"]
    assert tag.startswith("sampled ") and json.loads(tag.partition(" ")[2]) == {"temperature": 2.0}
    back = PreparedBatch.from_fit(x, y, weights).teacher
    assert back.ids is targets.ids and back.entropy is targets.entropy and back.temperature == 2.0


FAULTS = [
    ("counts", [np.nan, 1.0], "sampled_counts"),
    ("counts", [np.inf, 1.0], "sampled_counts"),
    ("counts", [-0.5, 1.5], "sampled_counts"),
    ("counts", [0.0, 0.0], "sampled_counts"),
    ("ids", [-1, 2], "sampled_vocabulary"),
    ("ids", [0, 7], "sampled_vocabulary"),
    ("entropy", np.nan, "sampled_entropy"),
    ("entropy", -0.1, "sampled_entropy"),
]


@pytest.mark.parametrize("kind", ["numpy", "tensor"])
@pytest.mark.parametrize(("name", "value", "what"), FAULTS, ids=lambda x: str(x)[:20])
def test_faults_are_found_where_they_are_and_named(name, value, what, kind):
    arrays = {
        "ids": np.tile(np.array([1, 2], "int32"), (2, 3, 1)),
        "counts": np.full((2, 3, 2), 0.5, "float32"),
        "entropy": np.ones((2, 3), "float32"),
    }
    arrays[name][1, 2] = value
    targets = SampledTargets(**arrays)
    if kind == "tensor":
        targets = targets.map(ops.convert_to_tensor)
    found = {key: np.argwhere(numpy(where)).tolist() for key, where in targets.faults(7).items()}
    assert found == {key: [[1, 2]] if key == what else [] for key in SampledTargets.FAULTS}


def test_id_of_count_zero_may_be_anything():
    targets = SampledTargets(np.array([[[1, -1]]]), np.array([[[4, 0]]]))
    assert not numpy(targets.invalid()).any()


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"ids": np.zeros((2, 3), "int32")}, ValueError, r"sampled ids` must have shape \(2, 3, n\)"),
        ({"ids": np.zeros((2, 4, 2), "int32")}, ValueError, r"nothing is shifted"),
        ({"ids": np.zeros((2, 3, 0), "int32")}, ValueError, r"n at least 1"),
        ({"counts": np.zeros((2, 3, 3), "int32")}, ValueError, r"counts` must have the shape \(2, 3, 2\)"),
        ({"entropy": np.zeros((2, 3, 1), "float32")}, ValueError, r"one number a position, shape \(2, 3\)"),
        ({"ids": np.zeros((2, 3, 2), "float32")}, TypeError, r"integer dtype. Received float32"),
        ({"counts": np.zeros((2, 3, 2), "bool")}, TypeError, r"integers, or floats that are weights. Received bool"),
        ({"entropy": np.zeros((2, 3), "int32")}, TypeError, r"floating-point dtype. Received int32"),
        ({"ids": np.full((2, 3, 2), 2**40)}, ValueError, r"must fit in int32"),
    ],
    ids=lambda x: str(x)[:12],
)
def test_what_does_not_fit_is_refused(arrays, error, message):
    sound = {"ids": np.zeros((2, 3, 2), "int32"), "counts": np.ones((2, 3, 2), "int32"), "entropy": None}
    with pytest.raises(error, match=message):
        SampledTargets(**{**sound, **arrays}).validate(IDS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"n": 0}, ValueError, "`n` must be a whole number of at least 1"),
        ({"draws": "random"}, ValueError, "`draws` must be one of 'independent', 'systematic'. Received 'random'"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be positive"),
        ({"proposal_temperature": -1.0}, ValueError, "must be positive"),
        ({"sample_ids": np.zeros(3, "int32")}, ValueError, r"`sample_ids` must be integers of shape \(4,\)"),
        ({"logits": np.zeros((4, 3, 7), "int32")}, TypeError, "`logits` must be floating"),
        ({"logits": np.zeros((3, 7), "float32")}, TypeError, "of shape"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_arguments_out_of_range_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        SampledTargets.from_logits(**{"logits": LOGITS, "n": 2, "seed": 0, **changes})
