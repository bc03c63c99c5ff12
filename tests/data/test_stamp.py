"""A stamp: where a batch came from, checked, and written as JSON."""

import json

import numpy as np
import pytest

from keras_diffusion_opd.data import Stamp

FULL = {
    "policy_version": 3,
    "policy_digest": "ab" * 32,
    "teacher_digest": "cd" * 32,
    "sampler": {"name": "MaskedSampler", "temperature": 0.7, "top_p": None, "steps": [1, 2]},
    "seed": 7,
}


def test_json_round_trip_keeps_the_sampler_settings_and_everything_else():
    stamp = Stamp(**FULL)
    assert Stamp.from_json(json.loads(json.dumps(stamp.to_json()))) == stamp
    assert stamp.to_json() == FULL


@pytest.mark.parametrize("current, age", [(3, 0), (10, 7)])
def test_staleness_counts_updates_since_the_rollout(current, age):
    assert Stamp(**FULL).staleness(current) == age


def test_equal_stamps_hash_alike():
    assert hash(Stamp(**FULL)) == hash(Stamp(**FULL)) and Stamp(**FULL) != Stamp(**{**FULL, "seed": 8})


@pytest.mark.parametrize("name", ["policy_version", "seed"])
@pytest.mark.parametrize("value", [1.0, True, "1", None, np.float32(2)])
def test_counts_that_are_not_int_are_refused(name, value):
    with pytest.raises(TypeError, match=f"`{name}` must be an int. Received .*of type {type(value).__name__}"):
        Stamp(**{name: value})


def test_negative_policy_version_is_refused():
    with pytest.raises(ValueError, match=r"`policy_version` must be at least 0. Received -1"):
        Stamp(policy_version=-1)


@pytest.mark.parametrize("name", ["policy_digest", "teacher_digest"])
def test_digest_that_is_no_string_is_refused(name):
    with pytest.raises(TypeError, match=f"`{name}` must be a string of hex digits. Received b'x'"):
        Stamp(**{name: b"x"})


@pytest.mark.parametrize(
    "sampler, error, words",
    [
        (["top_p"], TypeError, "`sampler` must be a dict of JSON values. Received list"),
        ({"top_p": float("nan")}, ValueError, r"`sampler\['top_p'\]` must be finite"),
        ({1: "a"}, TypeError, "`sampler` must have strings as keys. Received 1"),
        ({"deep": [{"x": object()}]}, TypeError, r"`sampler\['deep'\]\[0\]\['x'\]` must be a JSON value"),
    ],
)
def test_sampler_settings_that_json_cannot_hold_are_refused(sampler, error, words):
    with pytest.raises(error, match=words):
        Stamp(sampler=sampler)


def test_numpy_scalars_become_plain_numbers():
    stamp = Stamp(sampler={"top_p": np.float32(0.5)})
    assert type(stamp.sampler["top_p"]) is float and stamp.sampler["top_p"] == 0.5


def test_unknown_fields_are_refused_on_reading():
    with pytest.raises(ValueError, match=r"A stamp has no field \['student'\]. Its fields are.*policy_version"):
        Stamp.from_json({"student": 1})
