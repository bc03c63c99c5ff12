"""A teacher whose scores lie some positions away from its targets is found, and the shift named."""

import numpy as np
import pytest

from keras_diffusion_opd.data import (
    AlignmentError,
    DenseTargets,
    PreparedBatch,
    SampledTargets,
    TopKTargets,
    check_alignment,
    target_fit,
)
from tests.oracles import softmax, tensor

B, L, V = 4, 16, 11
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, V, (B, L))
# A teacher that gives every target about 2 nats more than the others.
KNOWING = (RANDOM.normal(size=(B, L, V)) + 2.0 * np.eye(V)[IDS]).astype("float32")


def batch_of(logits, weights=None, kind=DenseTargets):
    weights = np.ones((B, L), "float32") if weights is None else weights
    return PreparedBatch.create(model_inputs=IDS, target_ids=IDS, loss_weights=weights, teacher=kind(logits))


def top_k(logits):
    return TopKTargets.from_logits(tensor(logits), 4)


def shifted(logits, offset):
    """The scores of target i, at position i + offset."""
    return np.roll(logits, offset, axis=1)


def test_fit_is_the_mean_log_probability_of_targets_at_every_offset():
    log_p = np.log(softmax(KNOWING))
    found = target_fit(batch_of(KNOWING))
    assert sorted(found) == [-2, -1, 0, 1, 2] and found[0].gain == 0.0
    for offset, fit in found.items():
        places = [(b, i) for b in range(B) for i in range(L) if 0 <= i + offset < L]
        want = np.mean([log_p[b, i + offset, IDS[b, i]] for b, i in places])
        assert fit.positions == len(places) and fit.log_prob == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("kind", [DenseTargets, top_k])
@pytest.mark.parametrize("offset", [-2, -1, 1, 2])
def test_shift_is_named(offset, kind):
    with pytest.raises(AlignmentError, match=rf"nats more at position i [+]?{offset} .*shifted by {offset}\."):
        check_alignment(batch_of(shifted(KNOWING, offset), kind=kind))
    check_alignment(batch_of(KNOWING, kind=kind))


def test_autoregressive_scores_are_told_how_to_be_mended():
    with pytest.raises(AlignmentError, match=r"logits\[:, :-1\] for the targets \[:, 1:\]"):
        check_alignment(batch_of(shifted(KNOWING, -1)))


def test_teacher_that_knows_nothing_of_these_targets_is_not_said_to_be_shifted():
    check_alignment(batch_of(RANDOM.normal(size=(B, L, V)).astype("float32")))
    check_alignment(batch_of(np.zeros((B, L, V), "float32")))


def test_masked_targets_and_garbage_where_inactive():
    weights = (RANDOM.random((B, L)) < 0.5).astype("float32")
    logits = KNOWING.copy()
    logits[weights == 0] = np.nan
    found = target_fit(batch_of(logits, weights))
    assert found[0].positions == int(weights.sum())
    pairs = weights[:, :-1] * weights[:, 1:]
    assert found[1].positions == int(pairs.sum())
    check_alignment(batch_of(logits, weights))


def test_one_excluded_target_does_not_decide_the_mean():
    logits = KNOWING.copy()
    logits[0, 3, IDS[0, 3]] = -np.inf
    assert target_fit(batch_of(logits))[0].log_prob > -4.0
    check_alignment(batch_of(logits))


def test_what_cannot_be_told_is_refused():
    with pytest.raises(TypeError, match="do not give the probability of a single id"):
        target_fit(batch_of(KNOWING, kind=lambda x: SampledTargets.from_logits(x, 2, seed=0)))
    with pytest.raises(ValueError, match="must have a teacher"):
        target_fit(PreparedBatch(IDS, IDS, np.ones((B, L), "float32")))
    with pytest.raises(TypeError, match="must be a PreparedBatch"):
        target_fit(IDS)
    with pytest.raises(ValueError, match="`offsets` must be a whole number of at least 1"):
        target_fit(batch_of(KNOWING), offsets=0)
