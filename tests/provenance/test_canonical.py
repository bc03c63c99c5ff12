"""Canonical JSON depends on content alone, and refuses by name what JSON cannot hold."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_diffusion_opd.provenance import RESERVED_KEYS, canonical_json, check_digest, plain_json

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers() | FLOATS | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


@given(VALUES)
def test_reading_gives_the_value_back_and_writing_again_the_text(value: Any) -> None:
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text


@given(st.dictionaries(st.text(), SCALARS, min_size=2))
def test_order_of_keys_does_not_count(value: dict[str, Any]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, 2), "[1,2]"),
        ({"b": 1, "a": [True, None]}, '{"a":[true,null],"b":1}'),
        (np.float32(0.5), "0.5"),
        (np.int64(7), "7"),
        (np.bool_(True), "true"),
        (1.0, "1.0"),
        (1, "1"),
        (0.1, "0.1"),
        (-0.0, "-0.0"),
        ("ü\n", '"ü\\n"'),
    ],
)
def test_text_of(value: Any, text: str) -> None:
    assert canonical_json(value) == text


def test_lists_and_tuples_are_equal() -> None:
    assert plain_json({"shape": (1, (2, 3))}) == {"shape": [1, [2, 3]]}


def test_result_is_a_copy() -> None:
    value = {"a": [1]}
    copy = plain_json(value)
    value["a"].append(2)
    assert copy == {"a": [1]}


@pytest.mark.parametrize(
    ("value", "error", "phrase"),
    [
        ({"a": {"b": [0, float("nan")]}}, ValueError, r"`metadata\['a'\]\['b'\]\[1\]` must be finite.* nan"),
        ({"a": float("inf")}, ValueError, r"`metadata\['a'\]` must be finite.* inf"),
        ({"a": np.float32("inf")}, ValueError, "must be finite"),
        ({"a": {3: 1}}, TypeError, r"`metadata\['a'\]` must have strings as keys. Received 3 .*: use '3'"),
        ({None: 1}, TypeError, "`metadata` must have strings as keys. Received None"),
        ({"a": np.ones(2)}, TypeError, r"`metadata\['a'\]` must be a JSON value.*Received ndarray.*tolist"),
        ({"a": {1, 2}}, TypeError, "Received set"),
        ({"a": b"x"}, TypeError, "Received bytes"),
        ({"a": 1j}, TypeError, "Received complex"),
        ({"a": np.datetime64("2024-01-01")}, TypeError, "Received date"),
        ({"a": "\ud800"}, ValueError, r"`metadata\['a'\]` must be Unicode"),
        ({"\ud800": 1}, ValueError, "must be Unicode"),
        ({"digest": 1}, ValueError, r"must not use the reserved key 'digest'. Reserved are \["),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(value: Any, error: type, phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        plain_json(value, name="metadata", reserved=RESERVED_KEYS)


def test_reserved_keys_count_at_the_top_alone() -> None:
    assert plain_json({"a": {"digest": 1}}, reserved=RESERVED_KEYS) == {"a": {"digest": 1}}


def test_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match=r"deeper than 64 levels. Does it hold itself"):
        canonical_json(value)


@pytest.mark.parametrize("value", ["", "0" * 63, "A" * 64, "0" * 65, None, 0, "g" * 64, "0" * 64 + "\n"])
def test_what_is_no_digest_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="`teacher` must be a digest, 64 hexadecimal digits"):
        check_digest(value, "teacher")
