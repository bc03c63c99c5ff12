"""Counter-based bits: the published vectors, equality of host and device, uniformity."""

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.counter_random import split_words, splitmix, threefry2x32, uniform32, uniform64


def word(value):
    return np.array([value], "uint32").view("int32")


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_vectors_on_host_and_device(key, counter, expected):
    key, counter = tuple(map(word, key)), tuple(map(word, counter))
    host = threefry2x32(np, key, counter)
    device = threefry2x32(ops, tuple(map(ops.convert_to_tensor, key)), tuple(map(ops.convert_to_tensor, counter)))
    assert [int(w.view("uint32")[0]) for w in host] == list(expected)
    assert [int(ops.convert_to_numpy(w).view("uint32")[0]) for w in device] == list(expected)


def test_host_and_device_give_the_same_bits_and_the_same_uniforms():
    zero = np.zeros((1,), "int32")
    start, stride = threefry2x32(np, (zero, zero), (np.arange(64, dtype="int32"), zero))
    index = np.arange(33, dtype="int32")[None]
    host = splitmix(np, start[:, None], stride[:, None], index)
    device = splitmix(ops, *map(ops.convert_to_tensor, (start[:, None], stride[:, None], index)))
    assert host.dtype == np.int32
    assert np.array_equal(host, ops.convert_to_numpy(device))
    assert np.array_equal(uniform32(np, host), ops.convert_to_numpy(uniform32(ops, device)))


def test_uniforms_have_the_moments_of_the_uniform_distribution():
    zero = np.zeros((1,), "int32")
    n = 200_000
    start, stride = threefry2x32(np, (zero, zero), (np.arange(n, dtype="int32"), zero))
    for u in (uniform32(np, splitmix(np, start, stride, np.int32(5))), uniform64(start, stride)):
        u = u.astype("float64")
        assert abs(u.mean() - 1 / 2) < 5 / np.sqrt(12 * n)  # five standard errors
        assert abs((u**2).mean() - 1 / 3) < 5 * np.sqrt(4 / 45 / n)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / np.sqrt(n)
        assert np.histogram(u, 16, (0, 1))[0].min() > n / 16 - 5 * np.sqrt(n / 16)


def test_a_float32_uniform_is_above_zero_and_resolves_small_values():
    u = uniform32(np, np.array([0, 1, 256], "int32"))
    assert u.tolist() == [2.0**-33, 1.5 * 2.0**-32, 2.0**-24 + 2.0**-33]


def test_words_of_negative_and_large_numbers_differ():
    low, high = split_words(np.array([-1, 2**32, 5]))
    assert low.tolist() == [-1, 0, 5]
    assert high.tolist() == [-1, 1, 0]
