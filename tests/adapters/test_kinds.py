"""Convolutions, embeddings, DoRA, precisions, quantised bases."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.adapters import AdapterBank, Stack
from tests.adapters.tools import merged, mlp, plain, random_adapter, run, same_bits, values

RNG = np.random.default_rng(3)
X = RNG.normal(size=(4, 5, 6)).astype("float32")
STACKS = [None, "a", "b", Stack(a=0.5, b=-1.0)]


def convolutional() -> keras.Model:
    x = keras.Input((6, 6, 4))
    h = keras.layers.Conv2D(8, 3, strides=2, padding="same", activation="gelu", name="strided")(x)
    if backend.BACKEND != "tensorflow":  # TensorFlow has no grouped convolution on a CPU but under XLA
        h = keras.layers.Conv2D(8, 2, groups=2, activation="relu", name="grouped")(h)
    h = keras.layers.Reshape((-1, 8))(h)
    return keras.Model(x, keras.layers.Conv1D(3, 2, padding="causal", name="causal")(h))


def tokens() -> keras.Model:
    ids = keras.Input((5,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(11, 6, name="table")
    h = keras.layers.Dense(6, activation="tanh", name="hidden")(table(ids))
    return keras.Model(ids, table(h, reverse=True))


def check_rows(model: Any, x: np.ndarray, *, dora: bool = False) -> None:
    """Every row of a mixed batch against merged kernels; base rows bit for bit."""
    bank = AdapterBank(model, ".*", slots=3, max_rank=3, max_stack=2, dora=dora)
    adapters = {
        "a": random_adapter("a", model, rank=1, alpha=2.0, dora=dora),
        "b": random_adapter("b", model, rank=3, rslora=True),
    }
    for adapter in adapters.values():
        bank.add(adapter)
    y, base = run(bank, x, STACKS), plain(model, x)
    assert same_bits([y[0]], [base[0]])
    for row, stack in enumerate(STACKS[1:], start=1):
        wanted = merged(model, adapters, Stack(stack) if isinstance(stack, str) else stack, x)[row]  # type: ignore[arg-type]
        np.testing.assert_allclose(y[row], wanted, atol=5e-6 * max(1, np.abs(wanted).max()))
        assert np.abs(y[row] - base[row]).max() > 1e-3
    bank.detach()


def test_convolutions_strided_grouped_and_causal() -> None:
    check_rows(convolutional(), RNG.normal(size=(4, 6, 6, 4)).astype("float32"))


def test_dora_and_lora_in_one_batch_of_dense_and_einsum() -> None:
    check_rows(mlp(), X, dora=True)


def test_dora_of_convolutions() -> None:
    check_rows(convolutional(), RNG.normal(size=(4, 6, 6, 4)).astype("float32"), dora=True)


def test_embedding_read_forwards_and_in_reverse() -> None:
    check_rows(tokens(), RNG.integers(0, 11, (4, 5)).astype("int32"))


def test_dora_on_an_embedding_is_refused() -> None:
    from keras_diffusion_opd.adapters import Adapter

    model = tokens()
    a, b = np.ones((11, 1), "float32"), np.ones((1, 6), "float32")
    with pytest.raises(ValueError, match="DoRA on the embedding"):
        Adapter.from_arrays("x", model, {"table": (a, b)}, magnitude={"table": np.ones(6, "float32")})


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16", "mixed_float16", "float64"])
def test_precision_of_the_base(dtype: str) -> None:
    if dtype == "float64" and not backend.float64_enabled():
        pytest.skip("JAX has no float64 here")
    model = mlp(dtype=dtype)
    bank = AdapterBank(model, ".*", slots=2, max_rank=2, max_stack=1)
    for name in "ab":
        bank.add(random_adapter(name, model, alpha=3.0))
    stacks = [None, "a", "b", None]
    with bank.scope(bank.select(stacks)):
        y = model(X, training=False)
    assert keras.backend.standardize_dtype(y.dtype) == keras.DTypePolicy(dtype).compute_dtype
    y = ops.convert_to_numpy(ops.cast(y, "float32"))
    assert same_bits([y[[0, 3]]], [ops.convert_to_numpy(ops.cast(model(X), "float32"))[[0, 3]]])
    wide = mlp()
    wide.set_weights([ops.convert_to_numpy(ops.cast(v.value, "float32")) for v in model.weights])
    adapters = {name: bank.get(name) for name in "ab"}
    wanted = merged(wide, adapters, Stack("a"), X)[1]
    # Three layers whose results are rounded to 8, or 11, bits.
    assert (
        np.abs(y[1] - wanted).max() <= {"mixed_float16": 0.01, "float64": 1e-5}.get(dtype, 0.08) * np.abs(wanted).max()
    )


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_quantised_base(mode: str) -> None:
    model = mlp(activation="gelu")
    adapters = {name: random_adapter(name, model, alpha=3.0) for name in "ab"}
    model.quantize(mode)
    bank = AdapterBank(model, ".*", slots=2, max_rank=2, max_stack=2, dora=True)
    with pytest.raises(ValueError, match="check_base=False"):
        bank.add(adapters["a"])
    for adapter in adapters.values():
        bank.add(adapter, check_base=False)
    y, base = run(bank, X, STACKS), plain(model, X)
    assert same_bits([y[0]], [base[0]])
    for row in (1, 2, 3):
        assert np.abs(y[row] - base[row]).max() > 1e-2
    # The last layer alone: its delta is added to what the quantised layer gives, unrounded.
    head = random_adapter("head", model, ["head"], alpha=2.0)
    bank.remove("b")
    bank.add(head)
    hidden = keras.Model(model.input, model.get_layer("mixed").output)
    part = head.parts["head"]
    wanted = base + ops.convert_to_numpy(hidden(X)) @ part.delta()
    np.testing.assert_allclose(run(bank, X, ["head"] * 4), wanted, atol=1e-5)
    before = values(model)
    with pytest.raises(ValueError, match=f"stored in {mode}"):
        bank.fuse("a")
    assert same_bits(values(model), before)


def test_requantised_kernels_hold_the_adapter_and_come_back_bit_for_bit() -> None:
    model = mlp()
    adapter = random_adapter("a", model, alpha=8.0)
    model.quantize("int8")
    bank = AdapterBank(model, ".*", slots=1, max_rank=2, max_stack=1)
    bank.add(adapter, check_base=False)
    unfused, before = run(bank, X, ["a"] * 4), values(model)
    bank.fuse("a", requantise=True)
    error = np.abs(plain(model, X) - unfused).max()
    assert error < 0.1 * np.abs(unfused).max()  # int8 kernels and activations, thrice
    bank.unfuse()
    assert same_bits(values(model), before)


def test_patterns_of_rank_and_alpha_scale_each_layer_by_itself() -> None:
    from keras_diffusion_opd.adapters import Adapter

    model = mlp()
    adapter = Adapter.initial(
        "a", model, ".*", rank=8, alpha=16, rank_pattern={"head": 4}, alpha_pattern={"head": 9, "mixed": 4}
    )
    assert {path: part.scale for path, part in adapter.parts.items()} == {"head": 2.25, "hidden": 2.0, "mixed": 0.5}
    with pytest.raises(ValueError, match="rank_pattern"):
        Adapter.initial("a", model, ["head"], rank_pattern={"hidden": 4})
