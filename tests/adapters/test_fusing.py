"""Adapters inside of the kernels, and kernels that come back as they were."""

from typing import Any

import keras
import numpy as np
import pytest

from keras_diffusion_opd.adapters import AdapterBank, Stack
from keras_diffusion_opd.adapters.base_matrix import to_numpy
from keras_diffusion_opd.provenance import digest
from tests.adapters.tools import mlp, plain, random_adapter, run, same_bits, values

X = np.random.default_rng(1).normal(size=(4, 5, 6)).astype("float32")


def bank_of(model: Any, **arguments: Any) -> AdapterBank:
    bank = AdapterBank(model, ".*", slots=3, max_rank=2, max_stack=2, **arguments)
    bank.add(random_adapter("a", model, alpha=9.0))
    bank.add(random_adapter("b", model, seed=2, targets=["head"]))
    return bank


def test_fused_equals_unfused() -> None:
    model = mlp()
    bank = bank_of(model)
    stack = Stack("a", b=-0.5)
    unfused, base = run(bank, X, [stack] * 4), plain(model, X)
    bank.fuse(stack)
    assert bank.fused == stack
    np.testing.assert_allclose(plain(model, X), unfused, atol=5e-6)  # float32 around 3, three layers
    bank.unfuse()
    assert bank.fused is None and same_bits([plain(model, X)], [base])


def test_100_cycles_in_bfloat16_change_no_bit() -> None:
    model = mlp(dtype="bfloat16")
    bank = bank_of(model)
    before = digest(model)
    for _ in range(100):
        bank.fuse("a")
        bank.unfuse()
    assert digest(model) == before


def test_fused_and_for_each_row_do_not_mix() -> None:
    model = mlp()
    bank = bank_of(model)
    student = bank.trainable("a")
    with pytest.raises(RuntimeError, match="leased"):
        bank.fuse("a")
    student.close()
    bank.fuse("a")
    for refused in (
        lambda: run(bank, X, ["b"] * 4),
        lambda: bank.lease("b"),
        lambda: bank.fuse("b"),
        lambda: bank.remove("a"),
        lambda: bank.add(random_adapter("c", model)),
        lambda: student(X),
        bank.refresh,
        bank.detach,
    ):
        with pytest.raises(RuntimeError, match="fused"):
            refused()
    bank.unfuse()
    with pytest.raises(RuntimeError, match="Nothing is fused"):
        bank.unfuse()
    with pytest.raises(ValueError, match="empty stack"):
        bank.fuse(None)


def test_kernel_that_was_changed_while_fused_is_not_overwritten() -> None:
    model = mlp()
    bank = bank_of(model)
    bank.fuse("a")
    head = model.get_layer("head")
    head.kernel.assign(to_numpy(head.kernel.value) + 1.0)
    changed = values(model)
    with pytest.raises(RuntimeError, match="'head'"):
        bank.unfuse()
    assert same_bits(values(model), changed)


def test_table_that_others_read_past_its_call_is_not_fused() -> None:
    keras_hub = pytest.importorskip("keras_hub")
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=11, num_layers=1, num_heads=1, hidden_dim=4, intermediate_dim=4, max_sequence_length=4
    )
    task = keras_hub.models.BertMaskedLM(backbone)
    bank = AdapterBank(task, ["token_embedding"], slots=1, max_rank=1, max_stack=1)
    bank.add(random_adapter("a", task, ["token_embedding"], rank=1))
    before = values(task)
    with pytest.raises(ValueError, match="also read at"):
        bank.fuse("a")
    assert same_bits(values(task), before)


def test_refresh_takes_columns_of_a_changed_base_anew() -> None:
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3, name="d")(x))
    bank = AdapterBank(model, ".*", slots=1, max_rank=2, max_stack=1, dora=True)
    adapter = random_adapter("a", model, dora=True)
    bank.add(adapter)
    old = bank.base_digest
    layer = model.get_layer("d")
    layer.kernel.assign(2.0 * to_numpy(layer.kernel.value))
    bank.refresh()
    assert bank.base_digest != old
    kernel = to_numpy(layer.kernel.value)
    whole = kernel + adapter.parts["d"].delta()
    expected = X[:, 0] @ (whole / np.linalg.norm(whole, axis=0) * adapter.parts["d"].magnitude)
    np.testing.assert_allclose(run(bank, X[:, 0], ["a"] * 4), expected, atol=3e-6)
