"""A digest is equal for equal content on every backend, and different for anything else."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers, ops

from keras_diffusion_opd.provenance import digest, digest_of_leaves, leaf_digests

X = np.linspace(-1, 1, 8, dtype="float32").reshape(2, 4)


@keras.saving.register_keras_serializable(package="digest_tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.last = layers.Dense(4)
        self.blocks = [layers.Dense(4) for _ in range(12)]
        self.norm = layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x, training=training))


def functional() -> keras.Model:
    x = inputs = keras.Input((4,))
    for _ in range(12):  # more than ten, so that names sort otherwise than they count
        x = layers.Dense(4)(x)
    return keras.Model(inputs, layers.Dropout(0.5)(x))


def nested() -> keras.Model:
    inputs = keras.Input((4,))
    inner = keras.Sequential([layers.Dense(4), layers.LayerNormalization()])
    return keras.Model(inputs, inner(functional()(layers.Dense(4)(inputs))))


def sequential() -> keras.Model:
    return keras.Sequential([layers.Dense(4), layers.BatchNormalization(), layers.Dense(4)])


FACTORIES = [functional, sequential, Subclassed, nested]


def built(factory: Callable[[], Any], seed: int = 0) -> Any:
    model = factory()
    model(X)
    random = np.random.default_rng(seed)
    model.set_weights([random.normal(size=w.shape) for w in model.weights])
    return model


# The definition, written out a second time.


def by_hand(arrays: list[np.ndarray]) -> str:
    leaves = [
        [[i], x.dtype.name, list(x.shape), sha256(x.astype(x.dtype.newbyteorder("<")).tobytes())]
        for i, x in enumerate(arrays)
    ]
    text = json.dumps(
        {"scheme": "keras_diffusion_opd/digest/1", "leaves": leaves}, sort_keys=True, separators=(",", ":")
    )
    return sha256(text.encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_definition() -> None:
    arrays = [X, np.arange(3), np.array(2.5), np.zeros((0, 3), "int8"), np.array([True, False])]
    assert digest(arrays) == by_hand(arrays)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", "7793f69a2b47bcc5"),
        ("float16", "87d63597bb675404"),
        ("bfloat16", "76835dbfc069c2bd"),
        ("int32", "4714d284a4445f27"),
        ("uint8", "87efc5399f3c1d64"),
        ("bool", "a21b54001fef9a20"),
    ],
)
def test_tensors_of_the_backend_have_the_digest_written_here(dtype: str, expected: str) -> None:
    """The same constants on JAX, TensorFlow and PyTorch."""
    values = np.array([[0.0, 1.0, 3.0], [0.0, 7.0, 1.0]], "float32")
    tensor = ops.cast(ops.convert_to_tensor(values), dtype)
    assert digest({"x": tensor})[:16] == expected
    (leaf,) = leaf_digests(tensor)
    assert (leaf.dtype, leaf.shape) == (dtype, (2, 3))
    bits = (values.view("uint32") >> 16).astype("<u2") if dtype == "bfloat16" else values.astype(dtype)
    assert leaf.sha256 == sha256(bits.tobytes())


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_model_is_the_list_of_its_weights(policy: str) -> None:
    model = keras.Sequential([layers.Dense(3, dtype=policy), layers.LayerNormalization(dtype=policy)])
    model(X)
    assert digest(model) == digest(list(model.weights)) == digest([w.value for w in model.weights])
    assert {leaf.dtype for leaf in leaf_digests(model)} == {policy}
    if policy == "float32":
        assert digest(model) == digest(model.get_weights()) == by_hand(model.get_weights())


@pytest.mark.parametrize("factory", FACTORIES)
def test_model_built_twice_in_one_process_is_equal_iff_its_weights_are(factory: Callable[[], Any]) -> None:
    first, second = built(factory), built(factory)
    assert [w.path for w in first.weights] != [w.path for w in second.weights]  # the counters moved on
    assert digest(first) == digest(second)
    weight = second.weights[3]
    weight.assign(weight + 1e-3)
    assert digest(first) != digest(second)


@pytest.mark.parametrize("factory", FACTORIES)
def test_swapped_weights_of_one_shape_are_noticed(factory: Callable[[], Any]) -> None:
    model = built(factory)
    before = digest(model)
    one, other = [w for w in model.weights if tuple(w.shape) == (4, 4)][:2]
    a, b = ops.convert_to_numpy(one), ops.convert_to_numpy(other)
    one.assign(np.array(b))
    other.assign(np.array(a))
    assert digest(model) != before
    pairs = zip(leaf_digests(model), leaf_digests(built(factory)), strict=True)
    assert sum(new.sha256 != old.sha256 for new, old in pairs) == 2


@pytest.mark.parametrize("factory", FACTORIES)
def test_saved_and_loaded_model_is_equal(factory: Callable[[], Any], tmp_path: Path) -> None:
    model = built(factory)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert digest(loaded) == digest(model)
    other = built(factory, seed=1)
    model.save_weights(tmp_path / "m.weights.h5")
    other.load_weights(tmp_path / "m.weights.h5")
    assert digest(other) == digest(model)


def test_what_is_no_weight_does_not_count() -> None:
    model = built(lambda: keras.Sequential([layers.Dense(4), layers.Dropout(0.5)]))
    before = digest(model)
    model.trainable = False
    assert digest(model) == before
    model.trainable = True
    model(X, training=True)  # moves the seed of the dropout
    model.compile("sgd", "mse", metrics=["mae"])
    model.evaluate(X, X, verbose=0)
    assert digest(model) == before
    model.fit(X, X + 1, verbose=0)
    assert digest(model) != before


def test_optimizer_is_the_list_of_its_variables() -> None:
    def trained() -> Any:
        model = built(sequential)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(X, X, verbose=0)
        return model.optimizer

    keras.utils.set_random_seed(0)
    first = trained()
    keras.utils.set_random_seed(0)
    second = trained()
    assert digest(first) == digest(second) == digest(list(first.variables))


def test_byte_order_and_memory_layout_do_not_count() -> None:
    for other in (X.astype(">f4"), np.asfortranarray(X), np.repeat(X, 2, axis=0)[::2]):
        assert digest(other) == digest(X)


@pytest.mark.parametrize(
    "other",
    [
        {"a": X, "c": X},
        {"a": X},
        {"a": X, "b": X, "c": X},
        {"a": X, "b": X.reshape(4, 2)},
        {"a": X, "b": X.reshape(-1)},
        {"a": X, "b": X.astype("float64")},
        {"a": X, "b": X.view("int32")},
        {"a": X, "b": np.nextafter(X, np.float32(2))},
        {"a": X, "b": [X]},
        {"a": X, "b": {"x": X}},
        {"a": {"b": X}, "b": X},
        {"a": X, "b": None},
        {"a": X, "b": {}},
        {"a": X, "b": []},
        [X, X],
    ],
)
def test_names_shapes_dtypes_and_values_count(other: Any) -> None:
    assert digest(other) != digest({"a": X, "b": X})


def test_signed_zero_and_nan_payload_count() -> None:
    assert digest(np.array(0.0)) != digest(np.array(-0.0))
    nans = np.array([0x7FC00000, 0x7FC00001], "uint32").view("float32")
    assert digest(nans[0]) != digest(nans[1]) and digest(nans[0]) == digest(nans[0].copy())


def test_keys_with_slashes_do_not_collide() -> None:
    assert digest({"a/b": X}) != digest({"a": {"b": X}})
    assert digest({"0": X}) != digest([X])


def test_tuples_count_as_lists_and_order_of_keys_does_not() -> None:
    assert digest((X, (X, 1))) == digest([X, [X, 1]])
    assert digest({"a": X, "b": 1}) == digest({"b": 1, "a": X})


def test_dataclass_is_the_mapping_of_its_fields() -> None:
    @dataclasses.dataclass
    class Batch:
        ids: Any
        teacher: Any = None
        name: str = "n"

    assert digest(Batch(X)) == digest({"ids": X, "teacher": None, "name": "n"})


def test_leaves_say_which_array_changed() -> None:
    model, other = built(functional), built(functional)
    other.weights[5].assign(other.weights[5] + 1)
    pairs = zip(leaf_digests(model), leaf_digests(other), strict=True)
    changed = [new for old, new in pairs if new.sha256 != old.sha256]
    assert [leaf.label for leaf in changed] == [other.weights[5].path]
    assert digest_of_leaves(leaf_digests(model)) == digest(model)


NESTS = st.recursive(
    st.integers(0, 3).map(lambda n: np.arange(n, dtype="int16")) | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def as_text(value: Any) -> str:
    """An injective text of a nest, by other means than the digest's."""
    if isinstance(value, np.ndarray):
        return f"array{value.tolist()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k!r}:{as_text(value[k])}" for k in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_text, value)) + "]"
    return repr(value)


@settings(max_examples=300)
@given(st.lists(NESTS, min_size=2, max_size=2))
def test_two_nests_have_one_digest_iff_they_are_equal(pair: list[Any]) -> None:
    one, other = ([value] for value in pair)  # a list, since a scalar alone has no digest
    assert (digest(one) == digest(other)) == (as_text(one) == as_text(other))


@pytest.mark.parametrize(
    ("value", "error", "phrase"),
    [
        ("model.keras", TypeError, "Received 'model.keras'. For the content of a file use `file_digest`"),
        (None, TypeError, "must be a model, an array"),
        ({"a": {1: X}}, TypeError, r"`a` must have strings as keys. Received 1 \(int\)"),
        ({"a": [X, object()]}, TypeError, "`a/1` must be an array, or a nest of arrays. Received object"),
        ({"a": np.array(["x"])}, TypeError, "`a` must hold numbers of a dtype.*Received dtype <U1"),
        ({"a": np.array([object()])}, TypeError, "Received dtype object"),
        (np.array("2024", "datetime64[Y]"), TypeError, "Received dtype datetime64"),
        ({"a": float("nan")}, ValueError, "`a` must be finite"),
        (keras.Sequential([layers.Dense(2)]), ValueError, r"\(Sequential\) has no weights yet. Build it"),
        ({"teacher": layers.Dense(2)}, ValueError, r"`teacher` \(Dense\) has no weights yet"),
        (keras.Sequential, TypeError, "Received "),
        (lambda: X, TypeError, "Received function"),
    ],
)
def test_what_has_no_digest_is_refused(value: Any, error: type, phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        digest(value)


def test_nest_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="Does it hold itself"):
        digest(value)
