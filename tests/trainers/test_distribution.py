"""Eight virtual devices give what one device gives."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest

# Eight devices take long to compile for: a window of one micro-batch is tried on one mesh only.
CASES = ["data k=3", "2x4 k=1", "2x4 k=3", "8x1 k=3", "1x8 k=3"]
ROOT = pathlib.Path(__file__).parents[2]

SCRIPT = """
import json, keras, numpy as np
import keras_diffusion_opd as kdo
from tests.students import fit, largest_difference, make_batches, make_trainer, weights_of

batches = make_batches([(8, 6)] * 4)
held_out = make_batches([(8, 6)] * 2, seed=9)

def train(k):
    trainer = make_trainer(
        optimizer=keras.optimizers.AdamW(1e-2, weight_decay=0.01, global_clipnorm=1.0),
        accumulation_steps=k, metrics=[kdo.metrics.TeacherKL()], jit_compile=True,
    )
    history = fit(trainer, batches, epochs=1).history
    return trainer, history, trainer.evaluate(held_out, verbose=0, return_dict=True) if k == 3 else {}

def meshes():
    yield "data", keras.distribution.DataParallel()
    for shape in ((2, 4), (8, 1), (1, 8)):
        mesh = keras.distribution.DeviceMesh(shape, ("batch", "model"), keras.distribution.list_devices())
        layout = keras.distribution.LayoutMap(mesh)
        layout[".*hidden/kernel"] = (None, "model")
        layout[".*hidden/bias"] = ("model",)
        layout[".*embedding/embeddings"] = (None, "model")
        yield "x".join(map(str, shape)), keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")

one = {k: train(k) for k in (1, 3)}
report = {"devices": len(keras.distribution.list_devices())}
for name, distribution in meshes():
    keras.distribution.set_distribution(distribution)
    for k, (alone, history, evaluated) in one.items():
        if f"{name} k={k}" not in %CASES%:
            continue
        trainer, spread_history, spread_evaluated = train(k)
        kernel = trainer.student.get_layer("hidden").kernel
        moments = [v for v in trainer.optimizer.variables if "hidden_kernel_momentum" in v.path]
        report[f"{name} k={k}"] = {
            "weights": largest_difference(weights_of(alone.student), weights_of(trainer.student)),
            "history": max(abs(history[n][0] - spread_history[n][0]) for n in history),
            "evaluate": max([0.0, *(abs(evaluated[n] - spread_evaluated[n]) for n in evaluated)]),
            "kernel": str(kernel.value.sharding.spec),
            "moment": str(moments[0].value.sharding.spec),
        }
        if name == "2x4" and k == 1:
            try:
                trainer.fit(kdo.data.PreparedDataset(make_batches([(5, 6)])), verbose=0)
                report["indivisible"] = "no error"
            except Exception as error:
                report["indivisible"] = f"{type(error).__name__}: {error}"
    keras.distribution.set_distribution(None)
print("REPORT" + json.dumps(report))
"""


@pytest.fixture(scope="module")
def report():
    environment = {
        **os.environ,
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    script = SCRIPT.replace("%CASES%", repr(CASES))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("REPORT")[1])


pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution works on JAX only")


@pytest.mark.parametrize("case", CASES)
def test_every_mesh_equals_one_device(report, case):
    assert report["devices"] == 8
    got = report[case]
    # Sums of partial sums in float32, through four AdamW updates.
    assert got["weights"] < 5e-6
    assert got["history"] < 1e-5 and got["evaluate"] < 1e-5


def test_layouts_are_kept_and_moments_inherit_them(report):
    assert "model" in report["2x4 k=3"]["kernel"]
    assert report["2x4 k=3"]["kernel"] == report["2x4 k=3"]["moment"]


def test_batch_that_the_mesh_does_not_divide_is_refused_by_name(report):
    assert "divi" in report["indivisible"]
    assert "5" in report["indivisible"]
