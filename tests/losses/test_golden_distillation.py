"""Reference values of the weighted loss in float64: sums, mean and gradient, 48 cases."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.oracles import float64_scope, numpy, tensor, value_and_grad

from keras_diffusion_opd.data import DenseTargets, PreparedBatch
from keras_diffusion_opd.losses import DistillationLoss

CASES = json.loads((Path(__file__).parents[1] / "golden" / "distillation.json").read_text())["cases"]


def name_of(case):
    return f"{case['divergence']}-T{case['temperature']}-beta{case['beta']}-{case['soft_weight']}-{case['hard_weight']}"


def compute(case, dtype):
    """Sums of loss and metrics, mean, and its gradient."""
    batch = PreparedBatch.create(
        model_inputs=np.zeros((2, 3), "int32"),
        target_ids=np.array(case["target_ids"]),
        loss_weights=tensor(case["weights"], dtype),
        teacher=DenseTargets(tensor(case["teacher_logits"], dtype)),
    )
    settings = {k: case[k] for k in ("divergence", "temperature", "beta", "soft_weight", "hard_weight")}
    loss = DistillationLoss(**settings)
    student = tensor(case["student_logits"], dtype)
    output = loss(student, batch)
    sums = [output.primary.total, output.primary.weight, *(output.metrics[k].total for k in DistillationLoss.metric_names)]
    mean, gradient = value_and_grad(lambda s: loss(s, batch).primary.mean(), student)
    return [*(numpy(x) for x in sums), mean], gradient


def expected(case):
    hard = case["hard_sum"] if case["hard_weight"] else 0.0
    return [case["total_sum"], case["weight_sum"], case["soft_sum"], hard, case["loss"]]


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{i}-{name_of(CASES[i])}")
def test_float32_value_and_gradient(index):
    values, gradient = compute(CASES[index], "float32")
    want = np.array(CASES[index]["grad_student_logits"])
    np.testing.assert_allclose(values, expected(CASES[index]), rtol=2e-5)
    # Relative to the largest entry. In one case the whole gradient is 3e-11 beside a loss of 48.
    np.testing.assert_allclose(gradient, want, rtol=2e-5, atol=2e-5 * np.abs(want).max() + 1e-13)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: f"{i}-{name_of(CASES[i])}")
def test_float64_value_and_gradient(index):
    with float64_scope():
        values, gradient = compute(CASES[index], "float64")
    want = np.array(CASES[index]["grad_student_logits"])
    assert gradient.dtype == "float64" and {v.dtype for v in values} == {np.dtype("float64")}
    np.testing.assert_allclose(values, expected(CASES[index]), rtol=1e-11)
    # The references themselves round: up to 2e-15 beside a loss of 48.
    np.testing.assert_allclose(gradient, want, rtol=1e-6, atol=1e-6 * np.abs(want).max() + 1e-14)
