"""Windows of a linear student against kernels computed in float64 with NumPy."""

import json
import pathlib

import keras
import numpy as np
import pytest
from keras import ops

import keras_diffusion_opd as kdo

CASES = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "accumulation.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"k{c['accumulation_steps']}")
def test_kernel_after_every_window_and_losses_equal_float64(case):
    kernel = np.array(case["initial_kernel"], "float32")
    inputs = keras.Input((None, kernel.shape[0]))
    head = keras.layers.Dense(kernel.shape[1], use_bias=False)
    student = keras.Model(inputs, head(inputs))
    head.set_weights([kernel])
    trainer = kdo.trainers.PreparedTrainer(
        student,
        kdo.losses.DistillationLoss(
            temperature=case["temperature"], soft_weight=case["soft_weight"], hard_weight=case["hard_weight"]
        ),
    )
    trainer.compile(keras.optimizers.SGD(case["learning_rate"]), accumulation_steps=case["accumulation_steps"])
    batches = [
        kdo.data.PreparedBatch.create(
            model_inputs=np.array(micro["inputs"], "float32"),
            target_ids=np.array(micro["target_ids"]),
            loss_weights=np.array(micro["weights"], "float32"),
            teacher=kdo.data.DenseTargets(np.array(micro["teacher_logits"], "float32")),
        )
        for micro in case["micro_batches"]
    ]
    kernels, running = [], []

    def record(batch, logs):
        kernels.append(np.array(ops.convert_to_numpy(student.trainable_variables[0].value)))
        running.append(float(logs["loss"]))

    history = trainer.fit(
        kdo.data.PreparedDataset(batches),
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=record)],
    )
    expected = case["kernel_after_each_window"]
    assert len(kernels) == len(expected)
    for got, want in zip(kernels, expected, strict=True):
        # float32 forward and backward of a few hundred products: 2e-5 relative to the kernel's scale.
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    np.testing.assert_allclose(history.history["loss"][0], case["epoch_loss"], rtol=2e-5)
    # The epoch's running loss and the windows' own weights give back each window's loss.
    weights = [float(np.sum(m["weights"])) for m in case["micro_batches"]]
    k = case["accumulation_steps"]
    window_weights = [sum(weights[i : i + k]) for i in range(0, len(weights), k)]
    totals = np.cumsum([w * loss for w, loss in zip(window_weights, case["window_losses"], strict=True)])
    seen = np.cumsum(window_weights)
    want_running = np.divide(totals, seen, out=np.zeros_like(totals), where=seen > 0)
    np.testing.assert_allclose(running, want_running, rtol=2e-5, atol=1e-7)
