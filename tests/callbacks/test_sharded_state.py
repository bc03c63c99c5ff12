"""A trainer spread over eight virtual devices is saved, and put back in another process, exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import keras_diffusion_opd as kdo

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, keras
import keras_diffusion_opd as kdo
from tests.students import make_batches, make_student, make_trainer, weights_of, optimizer_state

directory, format, part = sys.argv[1:]
mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"), keras.distribution.list_devices())
layout = keras.distribution.LayoutMap(mesh)
layout[".*hidden/kernel"] = (None, "model")
layout[".*embedding/embeddings"] = (None, "model")
keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"))

def make(seed):
    return make_trainer(make_student(seed=seed), optimizer="adam", accumulation_steps=2, jit_compile=True)

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        checkpoint.stop()

def fit(trainer, epoch, *callbacks):
    dataset = kdo.data.PreparedDataset(make_batches([(8, 6)] * 4), shuffle=True)
    trainer.fit(dataset, epochs=2, initial_epoch=epoch, verbose=0, callbacks=[*callbacks, checkpoint])

def report(trainer):
    kernel = trainer.student.get_layer("hidden").kernel
    digest = kdo.provenance.digest([*weights_of(trainer), *optimizer_state(trainer)])
    print("REPORT" + json.dumps({"digest": digest, "kernel": str(kernel.value.sharding.spec)}))

if part == "save":
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(directory, every=1, format=format)
    try:
        fit(make(1), 0, Stop())
    except SystemExit:
        pass
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(directory + "-whole", format=format)
    trainer = make(1)
    fit(trainer, 0)
else:
    checkpoint = kdo.callbacks.ProvenanceCheckpoint(directory, every=1, format=format)
    trainer = make(5)
    state = kdo.callbacks.resume(trainer, directory)
    assert (state.epoch, state.batch) == (0, 2), state
    fit(trainer, 0)
report(trainer)
"""


def process(*arguments):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    flags = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.split("REPORT")[1])


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution spreads a model on JAX only")
def test_sharded_state_is_saved_by_orbax_put_back_on_its_devices_by_another_process_and_verified(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    whole = process(tmp_path / "run", "orbax", "save")
    resumed = process(tmp_path / "run", "orbax", "resume")
    assert whole == resumed
    assert "model" in whole["kernel"]
    path = max((tmp_path / "run").glob("step-*"))
    (found,) = kdo.provenance.verify_path(path)
    assert found.problems == []
    data = max((file for file in (path / "sharded").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    (found,) = kdo.provenance.verify_path(path)
    assert found.problems == [f"{data.relative_to(path).as_posix()}: its content is not the one recorded"]
