"""Bounds on the likelihood, against likelihoods that can be written down or enumerated."""

import itertools
import math

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.data import BlockCorruption, MaskedCorruption, UniformCorruption
from keras_diffusion_opd.metrics import LikelihoodBound, masked_likelihood_bound
from tests.denoisers import LENGTH, MASK, V, transformer

MODEL = transformer()

IDS = np.random.default_rng(3).integers(0, V, (5, LENGTH)).astype("int32")
TABLE = np.random.default_rng(4).normal(size=(LENGTH, V)).astype("float32")
LOG_P = TABLE - np.log(np.exp(TABLE.astype("float64")).sum(axis=1, keepdims=True))


def factorised(inputs):
    """Its answer depends on the place alone."""
    return ops.broadcast_to(ops.convert_to_tensor(TABLE), (ops.shape(inputs["token_ids"])[0], LENGTH, V))


def nll_of(ids):
    return -np.take_along_axis(LOG_P[None], ids[..., None], axis=2).sum(axis=(1, 2))


def corruption(block_size=None, **arguments):
    return (
        BlockCorruption(MASK, block_size=block_size, **arguments) if block_size else MaskedCorruption(MASK, **arguments)
    )


sizes = pytest.mark.parametrize("block_size", [None, 1, 2, 4])


@sizes
def test_the_bound_of_a_factorised_model_is_its_negative_log_likelihood(block_size):
    bound = masked_likelihood_bound(factorised, IDS, corruption(block_size), samples=None)
    np.testing.assert_allclose(bound.nats, nll_of(IDS), rtol=1e-6)  # float32 cross-entropies
    assert bound.nats_per_token == pytest.approx(nll_of(IDS).mean() / LENGTH, rel=1e-6)
    assert bound.exact and bound.sampling_error == 0


@pytest.mark.parametrize("times", ["low_discrepancy", "antithetic", "independent"])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "geometric"])
def test_drawn_bounds_of_a_factorised_model_are_right_within_their_sampling_error(schedule, times):
    made = corruption(2, schedule=schedule, times=times)
    bound = masked_likelihood_bound(factorised, IDS, made, samples=160)
    exact = nll_of(IDS).mean() / LENGTH
    assert 0 < bound.sampling_error < 0.3
    assert abs(bound.nats_per_token - exact) < 5 * bound.sampling_error


@sizes
def test_drawn_bounds_agree_with_the_sum_over_all_subsets(block_size):
    made = corruption(block_size)
    exact = masked_likelihood_bound(MODEL, IDS, made, samples=None)
    drawn = masked_likelihood_bound(MODEL, IDS, made, samples=60, seed=1)
    assert abs(drawn.nats_per_token - exact.nats_per_token) < 5 * drawn.sampling_error


def autoregressive_nll(ids):
    """Token after token under a causal mask: one pass for each place."""
    total = np.zeros(len(ids))
    causal = np.tile(np.tril(np.ones((LENGTH, LENGTH), bool)), (len(ids), 1, 1))
    for i in range(LENGTH):
        tokens = ids.copy()
        tokens[:, i:] = MASK
        logits = ops.convert_to_numpy(MODEL({"token_ids": tokens, "attention_mask": causal}))[:, i].astype("float64")
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total -= log_p[np.arange(len(ids)), ids[:, i]]
    return total


def test_blocks_of_one_token_give_the_autoregressive_likelihood():
    bound = masked_likelihood_bound(MODEL, IDS, corruption(1), samples=None)
    np.testing.assert_allclose(bound.nats, autoregressive_nll(IDS), rtol=1e-5)


def conditionals(joint, disturbed):
    """A denoiser of three coins that knows their joint distribution; `disturbed`: with errors of its own."""
    logits = np.zeros((3**3, 3, 2))
    for index, seen in enumerate(itertools.product(range(3), repeat=3)):
        for place in range(3):
            for value in range(2):
                fits = [
                    p
                    for x, p in np.ndenumerate(joint)
                    if x[place] == value and all(s in (2, x[j]) for j, s in enumerate(seen) if j != place)
                ]
                logits[index, place, value] = math.log(sum(fits))
    return (logits + disturbed * np.random.default_rng(1).normal(size=logits.shape)).astype("float32")


def as_denoiser(table):
    def denoiser(inputs):
        tokens = ops.cast(inputs["token_ids"], "int32")
        return ops.take(ops.convert_to_tensor(table), 9 * tokens[:, 0] + 3 * tokens[:, 1] + tokens[:, 2], axis=0)

    return denoiser


ALL = np.array(list(itertools.product(range(2), repeat=3)), "int32")
JOINT = np.random.default_rng(0).dirichlet(np.full(8, 0.5)).reshape(2, 2, 2)


def test_the_bound_of_a_model_that_knows_the_joint_distribution_is_its_likelihood():
    denoiser = as_denoiser(conditionals(JOINT, 0.0))
    bound = masked_likelihood_bound(denoiser, ALL, MaskedCorruption(2), samples=None)
    np.testing.assert_allclose(bound.nats, -np.log(JOINT.ravel()), rtol=1e-5)  # every order says the same


def test_the_bound_is_above_the_likelihood_of_the_model_over_all_orders():
    table = conditionals(JOINT, 0.7)
    log_p = table - np.log(np.exp(table.astype("float64")).sum(axis=-1, keepdims=True))
    nll = np.zeros(8)
    for row, x in enumerate(ALL):
        paths = []
        for order in itertools.permutations(range(3)):
            seen, path = np.full(3, 2), 0.0
            for place in order:
                path += log_p[9 * seen[0] + 3 * seen[1] + seen[2], place, x[place]]
                seen[place] = x[place]
            paths.append(path)
        nll[row] = -np.log(np.mean(np.exp(paths)))
    bound = masked_likelihood_bound(as_denoiser(table), ALL, MaskedCorruption(2), samples=None)
    assert np.all(bound.nats >= nll - 1e-6)
    assert bound.nats.sum() > nll.sum() + 0.01  # and the orders do disagree
    assert np.exp(-nll).sum() == pytest.approx(1.0)


def test_prompts_and_padding_are_not_scored():
    frozen = np.zeros(IDS.shape, bool)
    frozen[:, :2] = True
    frozen[0, 4:] = True
    kept = np.where(frozen, 0.0, -np.take_along_axis(LOG_P[None], IDS[..., None], axis=2)[..., 0])
    for block_size in (None, 2, 4):
        bound = masked_likelihood_bound(factorised, IDS, corruption(block_size), samples=None, frozen=frozen)
        np.testing.assert_allclose(bound.nats, kept.sum(axis=1), rtol=1e-6)
        assert bound.tokens.tolist() == [2, 4, 4, 4, 4]


def test_rows_at_once_and_a_mask_that_is_scored_change_nothing():
    whole = masked_likelihood_bound(MODEL, IDS, corruption(2), samples=4)
    parts = masked_likelihood_bound(MODEL, IDS, corruption(2), samples=4, batch_size=2)
    np.testing.assert_allclose(parts.nats, whole.nats, rtol=1e-5)

    def scores_the_mask(inputs):
        logits = factorised(inputs)
        return ops.concatenate([logits, 9 + ops.zeros_like(logits[..., :1])], axis=-1)

    bound = masked_likelihood_bound(scores_the_mask, IDS, corruption(), samples=None)
    np.testing.assert_allclose(bound.nats, nll_of(IDS), rtol=1e-6)


def test_an_antithetic_pair_counts_as_one_draw_and_spreads_less():
    pairs = masked_likelihood_bound(factorised, IDS, corruption(times="antithetic"), samples=64)
    single = masked_likelihood_bound(factorised, IDS, corruption(), samples=64)
    assert len(pairs.draws) == 32 and len(single.draws) == 64
    assert pairs.nats_per_token == pytest.approx(np.mean(pairs.draws))
    assert pairs.standard_error < single.standard_error


def test_errors_are_those_of_their_formulas():
    bound = LikelihoodBound(
        np.array([2.0, 8.0]), np.array([2, 4]), np.array([1.0, 2.0, 3.0]), byte_counts=np.array([5, 5])
    )
    # Residuals from the ratio 10 / 6: 2 - 20 / 6 and its opposite; over the mean weight 3.
    assert bound.standard_error == pytest.approx(np.std([-4 / 3, 4 / 3], ddof=1) / (3 * math.sqrt(2)))
    assert bound.sampling_error == pytest.approx(1 / math.sqrt(3))
    assert bound.bits_per_dimension == pytest.approx(10 / 6 / math.log(2))
    assert bound.bits_per_byte == pytest.approx(1 / math.log(2))
    assert bound.bits_per_byte_error == pytest.approx(np.std([2, 8], ddof=1) / math.log(2) / (5 * math.sqrt(2)))
    alone = LikelihoodBound(np.ones(1), np.ones(1, int), np.ones(1))
    assert math.isnan(alone.standard_error) and math.isnan(alone.sampling_error)
    with pytest.raises(ValueError, match="need `byte_counts`"):
        _ = alone.bits_per_byte


def test_the_standard_error_is_that_of_repeated_data_sets():
    rng, found, errors = np.random.default_rng(0), [], []
    p = np.exp(LOG_P)
    for seed in range(30):
        draws = [rng.choice(V, size=20, p=p[i] / p[i].sum()) for i in range(LENGTH)]
        made = corruption(2, times="independent")
        bound = masked_likelihood_bound(factorised, np.stack(draws, axis=1).astype("int32"), made, samples=2, seed=seed)
        found.append(bound.nats_per_token)
        errors.append(bound.standard_error)
    # The spread of 30 estimates is known to 13 %.
    assert np.mean(errors) == pytest.approx(np.std(found, ddof=1), rel=0.4)


def test_uniform_replacements_bound_a_factorised_model_too():
    made = UniformCorruption(V, weights="replaced")
    bound = masked_likelihood_bound(factorised, IDS, made, samples=160)
    assert abs(bound.nats_per_token - nll_of(IDS).mean() / LENGTH) < 5 * bound.sampling_error


def test_progress_is_told_of_every_corruption():
    seen = []
    masked_likelihood_bound(factorised, IDS, corruption(2), samples=3, progress=lambda *x: seen.append(x))
    masked_likelihood_bound(factorised, IDS, corruption(2), samples=None, progress=lambda *x: seen.append(x))
    assert seen == [(1, 3), (2, 3), (3, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"corruption": "mask"}, TypeError, "`corruption` must be a MaskedCorruption"),
        ({"corruption": UniformCorruption(V)}, ValueError, "must have the weights of a bound.*weights='replaced'"),
        (
            {"corruption": corruption(schedule="log_linear")},
            ValueError,
            r"mask everything at t = 1.*alpha\(1\) = 0.001",
        ),
        ({"samples": 0}, ValueError, "`samples` must be a whole number"),
        ({"samples": 3, "corruption": corruption(times="antithetic")}, ValueError, "`samples` must be even"),
        ({"samples": None, "corruption": UniformCorruption(V, weights="replaced")}, ValueError, "only masks can be"),
        ({"progress": 1}, TypeError, "`progress` must be None or a function"),
        ({"denoiser": "model"}, TypeError, "`denoiser` must be a Keras model"),
        ({"denoiser": lambda x: ops.zeros((5, 3, V))}, ValueError, "`denoiser` must give logits of shape"),
        ({"frozen": np.ones(IDS.shape, bool)}, ValueError, "`frozen` must leave at least one.*0 in row 0"),
        ({"byte_counts": np.ones(4, int)}, ValueError, "`byte_counts` must leave at least one in each of the 5 rows"),
        ({"conditions": {"class_ids": np.zeros(4)}}, ValueError, r"`conditions\['class_ids'\]` must have 5 rows"),
        ({"ids": np.full((5, LENGTH), MASK)}, ValueError, "`tokens` must not hold the mask id"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, error, words):
    arguments = {"denoiser": factorised, "ids": IDS, "corruption": corruption(), "samples": 2, **arguments}
    first = [arguments.pop(name) for name in ("denoiser", "ids", "corruption")]
    with pytest.raises(error, match=words):
        masked_likelihood_bound(*first, **arguments)


def test_too_many_tokens_to_enumerate_are_refused_with_the_number_of_passes():
    with pytest.raises(ValueError, match=r"at most 12 tokens. Received 13 in one: 2\^13 - 1 passes"):
        masked_likelihood_bound(lambda x: ops.zeros((1, 13, V)), np.zeros((1, 13), "int32"), corruption(), samples=None)
