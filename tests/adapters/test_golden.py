"""One Dense with a bank, a stack per row, in float64: plain, with an activation, DoRA; on every backend."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from keras_diffusion_opd.adapters import Adapter, AdapterBank, Stack
from tests.adapters.tools import plain, run

CASES = json.loads((Path(__file__).parents[1] / "golden" / "adapters.json").read_text())["cases"]


def dense(case: dict[str, Any], activation: str | None = None) -> keras.Model:
    kernel, bias = np.array(case["kernel"]), np.array(case["bias"])
    layer = keras.layers.Dense(kernel.shape[1], activation=activation, name="dense")
    x = keras.Input((None, kernel.shape[0]))
    model = keras.Model(x, layer(x))
    layer.set_weights([kernel, bias])
    return model


def adapter(model: Any, index: int, entry: dict[str, Any], **more: Any) -> Adapter:
    a, b = (np.array(entry[key], "float32") for key in "AB")
    arguments = {"alpha": entry["alpha"], "rslora": entry["rslora"], **more}
    return Adapter.from_arrays(f"a{index}", model, {"dense": (a, b)}, **arguments)


def close(received: np.ndarray, expected: Any) -> None:
    expected = np.array(expected)
    # float32 products of up to 6 + 9 terms whose size is that of the largest output.
    assert np.max(np.abs(received - expected)) <= 2e-6 * max(1.0, np.max(np.abs(expected)))


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize(("activation", "key"), [(None, "outputs"), ("relu", "relu_outputs")])
def test_stack_for_each_row_equals_float64(case: dict[str, Any], activation: str | None, key: str) -> None:
    model = dense(case, activation)
    bank = AdapterBank(model, ["dense"], slots=4, max_rank=4, max_stack=3)
    for index, entry in enumerate(case["bank"]):
        bank.add(adapter(model, index, entry))
    stacks = [Stack.of({f"a{i}": w for i, w in stack.items()}) for stack in case["stacks"]]
    close(run(bank, np.array(case["inputs"], "float32"), stacks), case[key])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_dora_equals_float64_unfused_and_fused(case: dict[str, Any]) -> None:
    model, told = dense(case), case["dora"]
    bank = AdapterBank(model, ["dense"], slots=2, max_rank=4, max_stack=1, dora=True)
    length = {"dense": np.array(told["magnitude"], "float32")}
    bank.add(adapter(model, 0, case["bank"][told["adapter"]], magnitude=length))
    x = np.array(case["inputs"], "float32")
    close(run(bank, x, ["a0"] * len(x)), told["outputs"])
    bank.fuse("a0")
    close(plain(model, x), told["outputs"])
