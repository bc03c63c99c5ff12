"""What is kept of a teacher's distribution in 300 bytes a token, and how far it is from what was given."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_diffusion_opd.data import PackedTopK
from keras_diffusion_opd.data.store.quantized import dequantize, normalized, quantize
from tests.stores import top_k

V, K = 128256, 64
ACTIVE = np.ones((1, 1), bool)


def zipf(exponent):
    return -exponent * np.log(np.arange(1, V + 1))


def language_model(spread, seed):
    """Logits of a scale that trained models have, with a heavy head."""
    rng = np.random.default_rng(seed)
    return rng.normal(0, spread, V) + 4 * rng.exponential(1, V) * (rng.random(V) < 1e-3)


DISTRIBUTIONS = {
    "zipf 1": zipf(1.0),
    "zipf 0.5": zipf(0.5),
    "zipf 2": zipf(2.0),
    "flat": np.zeros(V),
    "nearly flat": np.linspace(0, 0.5, V),
    "peaked": np.where(np.arange(V) == 77, 30.0, language_model(1.0, 0)),
    "very peaked": np.where(np.arange(V) == 77, 95.0, language_model(6.0, 0)),
    "two peaks, far apart from the rest": np.where(np.arange(V) < 2, 90.0, language_model(1.0, 1)),
    "model, hot": language_model(1.5, 2),
    "model, cold": language_model(4.0, 3),
    "steep": -1.5 * np.arange(V),
}


def kl(p_log, q_log):
    """float64 KL of the k + 1 events, in nats."""
    p_log, q_log = p_log.astype("float64"), q_log.astype("float64")
    p = np.exp(p_log)
    with np.errstate(invalid="ignore"):
        return float(np.sum(np.where(p > 0, p * (p_log - q_log), 0.0)))


def events(targets):
    return np.concatenate([targets.log_probs[0, 0], targets.log_tail[0]])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize(("log_probs", "most"), [("int8", 1e-3), ("float16", 1e-5), ("float32", 0.0)])
def test_round_trip_is_within_a_thousandth_of_a_nat_in_300_bytes(name, log_probs, most):
    packing = PackedTopK(K, V, log_probs)
    written = top_k(DISTRIBUTIONS[name][None, None], K)
    columns = packing.encode(written, ACTIVE)
    read = packing.decode(columns)
    assert sum(x.nbytes for x in columns.values()) == packing.token_bytes()
    assert packing.token_bytes() <= {"int8": 220, "float16": 280, "float32": 400}[log_probs]
    np.testing.assert_array_equal(read.ids, written.ids)
    # Both are float32 distributions: the written one sums to 1 only up to its rounding, some 1e-6.
    assert abs(kl(events(written), events(read))) <= most + 2e-6
    assert not np.any(list(read.faults(V).values())), "what is read is a distribution again"
    if log_probs == "float32":
        np.testing.assert_array_equal(events(read), events(written))


def test_smallest_tail_is_kept():
    logits = np.zeros((1, 1, 100))
    logits[0, 0, 4:] = -80.0  # a tail of 1e-33
    packing = PackedTopK(4, 100)
    read = packing.decode(packing.encode(top_k(logits, 4), ACTIVE))
    assert abs(read.log_tail[0, 0] - (np.log(96 / 4) - 80)) < 1e-4


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 80), st.floats(0.01, 100), st.integers(0, 2**32 - 1))
def test_bound_of_the_docstring_holds(k, spread, seed):
    """KL at most 4 r log(k) / (24 * 254^2), to second order; a factor 3 for the luck of the roundings and the rest."""
    rng = np.random.default_rng(seed)
    log_p = rng.normal(0, spread, k)
    log_p -= np.log(np.exp(log_p - log_p.max()).sum()) + log_p.max()
    codes, largest, width = quantize(log_p[None].astype("float32"))
    read, _ = normalized(dequantize(codes, largest, width), np.full(1, -np.inf))
    bound = 4 * float(width[0]) * np.log(k) / (24 * 254**2)
    assert kl(log_p, read[0]) <= 3 * bound + 1e-6  # float32


def test_probability_zero_stays_zero_and_equal_ones_stay_equal():
    log_p = np.log(np.array([[0.5, 0.25, 0.25, 1.0]], "float32"))
    log_p[0, 3] = -np.inf
    codes, largest, width = quantize(log_p)
    assert codes.tolist() == [[0, 254, 254, 255]]
    np.testing.assert_allclose(np.exp(dequantize(codes, largest, width)), [[0.5, 0.25, 0.25, 0.0]], rtol=1e-6)
    codes, largest, width = quantize(np.full((1, 4), np.log(0.25), "float32"))
    np.testing.assert_allclose(np.exp(dequantize(codes, largest, width)), 0.25, rtol=1e-6)


def test_inactive_positions_may_hold_anything_and_are_written_alike():
    packing = PackedTopK(4, 100)
    sound = top_k(np.random.default_rng(0).normal(size=(1, 2, 100)), 4)
    active = np.array([[True, False]])
    for broken in (np.nan, np.inf, 5.0):
        other = top_k(np.random.default_rng(0).normal(size=(1, 2, 100)), 4)
        other.log_probs[0, 1], other.ids[0, 1], other.log_tail[0, 1] = broken, -7, broken
        for name, array in packing.encode(sound, active).items():
            np.testing.assert_array_equal(packing.encode(other, active)[name], array)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "`k` must be a whole number of at least 1"),
        ({"k": 101}, "`vocabulary_size` must be k=101 to 2"),
        ({"log_probs": "int4"}, "`log_probs` must be one of 'int8', 'float16', 'float32'. Received 'int4'"),
        ({"tail": "none"}, "`tail` must be one of"),
        ({"temperature": 0.0}, "`temperature` must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PackedTopK(**{"k": 4, "vocabulary_size": 100, **arguments})
