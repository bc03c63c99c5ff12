"""Adapters on KerasHub's models as they are."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.adapters import Adapter, AdapterBank, Stack
from keras_diffusion_opd.adapters.attribute_paths import layers_by_path
from tests.adapters.hub_models import ROWS, build
from tests.adapters.tools import merged, plain, random_adapter, run, same_bits, values

NAMES = ("bert", "roberta", "llama3", "gemma3", "mmdit", "flux")
# How many layers can be adapted: none is missed.
COUNTS = {"bert": 9, "roberta": 7, "llama3": 8, "gemma3": 8, "mmdit": 27, "flux": 23}
PATHS = {
    "bert": "transformer_layers.0._self_attention_layer.query_dense",
    "roberta": "token_embedding",
    "llama3": "transformer_layers.0._self_attention_layer._query_dense",
    "gemma3": "transformer_layers.0.attention.query_dense",
    "mmdit": "joint_blocks.0.x_block.attention_qkv2",
    "flux": "double_blocks.0.image_mlp.layers.2",
}


def outputs(y: Any) -> Any:
    return y["sequence_output"] if isinstance(y, dict) else y


class Single(keras.Model):
    """A model with one output, so that the tools can look at it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, inputs: Any, training: Any = None) -> Any:
        return outputs(self.inner(inputs))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_mixed_batch_equal_merged_kernels_and_the_base_keeps_its_bits(name: str) -> None:
    inner, inputs, _ = build(name)
    x = {key: ops.convert_to_tensor(value) for key, value in inputs.items()}
    assert len(layers_by_path(inner)) == COUNTS[name] and PATHS[name] in layers_by_path(inner)
    model = Single(inner)
    model.built = True
    before, base = values(inner), plain(model, x)
    bank = AdapterBank(model, lambda path, layer: True, slots=3, max_rank=3, max_stack=2)
    assert len(bank.paths) == COUNTS[name]
    bank.add(Adapter.initial("fresh", model, [*bank.paths], rank=3))
    assert same_bits([run(bank, x, ["fresh"] * ROWS)], [base])
    adapters = {"a": random_adapter("a", model, rank=1), "b": random_adapter("b", model, rank=3, rslora=True, size=0.1)}
    for adapter in adapters.values():
        bank.add(adapter)
    stacks = [None, "a", "b", Stack(a=0.5, b=-1.0)]
    y = run(bank, x, stacks)
    assert same_bits([y[0]], [base[0]])
    for row, stack in enumerate((Stack("a"), Stack("b"), Stack(a=0.5, b=-1.0)), start=1):
        wanted = merged(model, adapters, stack, x)[row]
        assert np.abs(wanted - base[row]).max() > 1e-3
        # Ten and more layers of float32.
        np.testing.assert_allclose(y[row], wanted, atol=1e-5 * max(1.0, np.abs(wanted).max()))
    bank.remove("fresh")
    assert same_bits([run(bank, x, [None] * ROWS)], [base]) and same_bits(values(inner), before)


def test_compiled_denoiser_sees_a_swap_and_its_neighbours_do_not() -> None:
    model, inputs, _ = build("mmdit")
    bank = AdapterBank(model, r".*(qkv|proj|dense\d)", slots=2, max_rank=2, max_stack=1)
    bank.add(random_adapter("a", model, [*bank.paths]))
    bank.add(random_adapter("b", model, [*bank.paths]))
    traces = []

    def forward(x: Any, selection: Any) -> Any:
        traces.append(1)
        with bank.scope(selection):
            return model(x, training=False)

    compiled = bank.compiled(forward)
    stacks = [None, "a", "b", None]
    first = np.array(compiled(inputs, bank.select(stacks)))
    count = len(traces)
    bank.add(random_adapter("b", model, [bank.paths[0]], rank=1, seed=4), replace=True)
    second = np.array(compiled(inputs, bank.select(stacks)))
    assert same_bits([first[[0, 1, 3]]], [second[[0, 1, 3]]]) and not same_bits([first[2]], [second[2]])
    assert keras.backend.backend() == "torch" or len(traces) == count


def test_keras_hubs_own_lora_adapts_nothing_here_and_ours_does() -> None:
    model, _, _ = build("mmdit")
    model.enable_lora(4)
    assert not any(getattr(layer, "lora_enabled", False) for layer in layers_by_path(model).values())
    assert len(AdapterBank(model, r".*attention_qkv\d?").paths) == 5


def test_layer_with_keras_own_lora_is_refused() -> None:
    x = keras.Input((6,))
    model = keras.Model(x, keras.layers.Dense(3, name="d")(x))
    model.get_layer("d").enable_lora(2)
    with pytest.raises(ValueError, match="Keras's own LoRA"):
        AdapterBank(model, ".*")
