"""A preset of KerasHub that carries adapters: stock KerasHub reads it, and so do we."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras import ops

from keras_diffusion_opd.adapters import (
    AdapterBank,
    list_preset,
    load_from_preset,
    save_to_preset,
    verify_preset,
)
from tests.adapters.hub_models import build, keras_hub
from tests.adapters.tools import random_adapter, same_bits


@pytest.fixture(scope="module")
def preset(tmp_path_factory: Any) -> Any:
    model, inputs, _ = build("bert")
    folder = tmp_path_factory.mktemp("presets") / "bert"
    model.save_to_preset(str(folder))
    adapters = [random_adapter(name, model, [r"query_dense", "value_dense"], seed=3) for name in ("math", "code")]
    save_to_preset(folder, adapters)
    return folder, model, inputs, adapters


def test_stock_from_preset_reads_it_and_adapters_come_back(preset: Any) -> None:
    folder, model, inputs, adapters = preset
    stock = keras_hub.models.Backbone.from_preset(str(folder))
    x = {key: ops.convert_to_tensor(value) for key, value in inputs.items()}
    y, z = (ops.convert_to_numpy(m(x)["sequence_output"]) for m in (model, stock))
    np.testing.assert_allclose(z, y, atol=1e-6)  # KerasHub's own weights, another model object
    assert list_preset(folder) == {a.name: a.digest for a in adapters}
    assert verify_preset(folder, stock) == []
    loaded = load_from_preset(folder, stock)
    assert {a.digest for a in loaded} == {a.digest for a in adapters}
    bank = AdapterBank(stock, ["query_dense", "value_dense"], slots=2, max_rank=2, max_stack=1)
    for adapter in loaded:
        bank.add(adapter)  # of the same base: the digest of a model that was saved and loaded is that of the model
    with bank.scope(["math", "code", None, "math"]):
        adapted = ops.convert_to_numpy(stock(x)["sequence_output"])
    assert np.abs(adapted[:2] - z[:2]).max() > 1e-3 and same_bits([adapted[2]], [z[2]])
    assert load_from_preset(folder, stock, ["code"])[0].name == "code"


def test_what_does_not_hold_is_named(preset: Any, tmp_path: Path) -> None:
    folder, model, _, adapters = preset
    with pytest.raises(KeyError, match="nobody"):
        load_from_preset(folder, model, ["nobody"])
    with pytest.raises(FileExistsError, match="math"):
        save_to_preset(folder, [random_adapter("new", model, ["query_dense"]), adapters[0]])
    assert sorted(list_preset(folder)) == ["code", "math"]
    with pytest.raises(FileNotFoundError, match="no"):
        list_preset(tmp_path / "nothing")
    other, _, _ = build("bert")
    other.pooled_dense.bias.assign(np.ones(16))
    assert all("another base" in problem for problem in verify_preset(folder, other)) and verify_preset(folder, other)
    path = folder / "adapters" / "code" / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "`code`" in verify_preset(folder)[0]
    path.write_bytes(data)
