"""A LayoutMap shards the variables of a bank; eight virtual devices give what one gives."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest

ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import json, keras, numpy as np
from keras_diffusion_opd.adapters import AdapterBank
from tests.adapters.tools import mlp, random_adapter

x = np.random.default_rng(0).normal(size=(8, 5, 6)).astype("float32")
stacks = [None, "a", "b", {"a": 0.5, "b": -1.0}] * 2

def outputs():
    model = mlp()
    bank = AdapterBank(model, ".*", slots=3, max_rank=4, max_stack=2)
    for name in ("a", "b"):
        bank.add(random_adapter(name, model))

    def forward(x, selection):
        with bank.scope(selection):
            return model(x, training=False)

    compiled = bank.compiled(forward)
    first = np.array(compiled(x, bank.select(stacks)))
    bank.add(random_adapter("b", model, seed=5), replace=True)  # a swap keeps the layout
    return bank, [first, np.array(compiled(x, bank.select(stacks)))]

_, alone = outputs()
mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
layout = keras.distribution.LayoutMap(mesh)
layout["hidden/kernel"] = (None, "model")
layout["hidden/b$"] = (None, None, "model")
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))
bank, spread = outputs()
site = bank.banked[bank.paths.index("hidden")]
print("REPORT" + json.dumps({
    "devices": len(keras.distribution.list_devices()),
    "path": site.b.path,
    "sharding": str(site.b.value.sharding.spec),
    "pieces": len({str(piece.index) for piece in site.b.value.addressable_shards}),
    "difference": [float(np.abs(a - b).max()) for a, b in zip(alone, spread)],
    "swap": float(np.abs(alone[0] - alone[1]).max()),
}))
"""


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution works on JAX only")
def test_bank_is_sharded_and_computes_what_one_device_computes() -> None:
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.split("REPORT")[1])
    assert report["devices"] == 8 and "model" in report["sharding"] and report["pieces"] == 4, report
    # Partial sums of float32.
    assert max(report["difference"]) < 2e-6 and report["swap"] > 1e-2, report
