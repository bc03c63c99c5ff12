"""One update from a window of uneven micro-batches: who takes the step that the formula asks for?

    python benchmarks/exactness.py                      every backend that is installed
    KERAS_BACKEND=torch python benchmarks/exactness.py --here

The loss is `sum(weights * T^2 KL(teacher || student)) / sum(weights)` over all micro-batches of the window.
Its gradient is worked out in NumPy, in float64, and compared with the step that SGD (learning rate 1) makes:

- direction error: 1 - cosine of the angle between the step and the true one;
- size error: length of the step over the length of the true one, - 1, without its sign.

The last window has NaN as the teacher's logits where the weight is 0, as padding that was never scored may
have. `Distiller` calls its teacher itself, so that it meets none; it does not use the weights either.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
from _common import RESULTS, machine, spread, table, versions, write_json
from keras import ops

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, PreparedDataset
from keras_diffusion_opd.losses import DistillationLoss
from keras_diffusion_opd.trainers import PreparedTrainer

BACKENDS = ("jax", "tensorflow", "torch")
VOCABULARY, WIDTH, ROWS, STEPS, TEMPERATURE, SEEDS = 13, 8, 4, 4, 2.0, 5
SCENARIOS = {
    "equal lengths and weights": {"lengths": (6, 6, 6, 6), "masked": None, "scales": (1, 1, 1, 1)},
    "lengths 2 to 12": {"lengths": (2, 12, 4, 6), "masked": None, "scales": (1, 1, 1, 1)},
    "masked 10 to 90 %": {"lengths": (8, 8, 8, 8), "masked": (0.1, 0.9, 0.3, 0.6), "scales": (1, 1, 1, 1)},
    "weights 1/t, lengths 2 to 12": {
        "lengths": (2, 12, 4, 6),
        "masked": (0.9, 0.1, 0.5, 0.3),
        "scales": (1.1, 10, 2, 3.3),
    },
    "the same, NaN where inactive": {
        "lengths": (2, 12, 4, 6),
        "masked": (0.9, 0.1, 0.5, 0.3),
        "scales": (1.1, 10, 2, 3.3),
        "nan": True,
    },
}


def window(scenario: dict[str, Any], seed: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Micro-batches (ids (B, L), teacher logits (B, L, V), weights (B, L))."""
    rng = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(scenario["lengths"]):
        ids = rng.integers(0, VOCABULARY, (ROWS, length)).astype("int32")
        weights = np.full((ROWS, length), scenario["scales"][index], "float32")
        if scenario["masked"]:
            active = rng.random((ROWS, length)) < scenario["masked"][index]
            active[0, 0] = True
            weights = np.where(active, weights, 0).astype("float32")
        teacher = table_of_teacher(seed)[ids]
        if scenario.get("nan"):
            teacher = np.where(weights[..., None] == 0, np.float32(np.nan), teacher)
        made.append((ids, teacher, weights))
    return made


def table_of_teacher(seed: int) -> np.ndarray:
    """float32 (V, V): the teacher's logits for every id, so that a model can give them too."""
    return 3 * np.random.default_rng(1000 + seed).standard_normal((VOCABULARY, VOCABULARY)).astype("float32")


def student() -> Any:
    """Embedding, tanh, logits: the smallest model with a layer that the loss does not touch directly."""
    ids = keras.Input((None,), dtype="int32")
    hidden = keras.layers.Dense(WIDTH, activation="tanh")(keras.layers.Embedding(VOCABULARY, WIDTH)(ids))
    return keras.Model(ids, keras.layers.Dense(VOCABULARY)(hidden))


def initial(seed: int) -> list[np.ndarray]:
    """Weights of the student: embedding, first kernel and bias, second kernel and bias."""
    rng = np.random.default_rng(2000 + seed)
    shapes = ((VOCABULARY, WIDTH), (WIDTH, WIDTH), (WIDTH,), (WIDTH, VOCABULARY), (VOCABULARY,))
    return [0.5 * rng.standard_normal(shape).astype("float32") for shape in shapes]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def true_gradient(weights: list[np.ndarray], batches: list[Any]) -> np.ndarray:
    """float64, by hand: the gradient of the window's loss, all variables in one vector."""
    embedding, w1, b1, w2, b2 = (w.astype("float64") for w in weights)
    sums = [np.zeros_like(w) for w in (embedding, w1, b1, w2, b2)]
    total = 0.0
    for ids, teacher, loss_weights in batches:
        active = loss_weights > 0
        x, t, w = ids[active], teacher[active].astype("float64"), loss_weights[active].astype("float64")
        total += w.sum()
        # 1. Forward.
        e = embedding[x]
        h = np.tanh(e @ w1 + b1)
        logits = h @ w2 + b2
        # 2. Backward: d/dlogits of T^2 KL(p || q) is T (q - p).
        d = w[:, None] * TEMPERATURE * (softmax(logits / TEMPERATURE) - softmax(t / TEMPERATURE))
        da = (d @ w2.T) * (1 - h**2)
        # 3. Add up.
        np.add.at(sums[0], x, da @ w1.T)
        for total_of, part in zip(sums[1:], (e.T @ da, da.sum(0), h.T @ d, d.sum(0)), strict=True):
            total_of += part
    return np.concatenate([s.ravel() for s in sums]) / total


class SoftTargets(keras.losses.Loss):
    """T^2 KL(teacher || student) from logits, reduced and weighted by Keras."""

    def call(self, teacher: Any, logits: Any) -> Any:
        teacher, logits = teacher / TEMPERATURE, logits / TEMPERATURE
        difference = ops.log_softmax(teacher) - ops.log_softmax(logits)
        return TEMPERATURE**2 * ops.sum(ops.softmax(teacher) * difference, axis=-1)


def built_in(reduction: str) -> Callable[[], Any]:
    """`model.fit` with sample weights and the optimizer's own accumulation."""

    def make() -> Any:
        model = student()
        optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=STEPS)
        model.compile(optimizer, loss=SoftTargets(reduction=reduction))
        return model, lambda batches, seed: model.fit(_Batches(batches), verbose=0, shuffle=False)

    return make


def distiller(divergence: Any) -> Callable[[], Any]:
    """`keras.distillation.Distiller` with a teacher that gives the same logits, and sample weights."""

    def make() -> Any:
        ids = keras.Input((None,), dtype="int32")
        teacher = keras.Model(ids, keras.layers.Embedding(VOCABULARY, VOCABULARY)(ids))
        model = student()
        loss = keras.distillation.LogitsDistillation(temperature=TEMPERATURE, loss=divergence)
        trainer = keras.distillation.Distiller(
            teacher=teacher, student=model, distillation_losses=loss, student_loss_weight=0.0
        )
        unused = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer.compile(keras.optimizers.SGD(1.0, gradient_accumulation_steps=STEPS), loss=unused)

        def fit(batches: list[Any], seed: int) -> None:
            teacher.set_weights([table_of_teacher(seed)])
            labelled = [(ids, ids, weights) for ids, _, weights in batches]
            trainer.fit(_Batches(labelled), verbose=0, shuffle=False)

        return model, fit

    return make


def ours() -> Any:
    """`PreparedTrainer` with `accumulation_steps`."""
    model = student()
    trainer = PreparedTrainer(model, DistillationLoss(temperature=TEMPERATURE))
    trainer.compile(keras.optimizers.SGD(1.0), accumulation_steps=STEPS)

    def fit(batches: list[Any], seed: int) -> None:
        prepared = [
            PreparedBatch.create(model_inputs=ids, target_ids=ids, loss_weights=w, teacher=DenseTargets(teacher))
            for ids, teacher, w in batches
        ]
        trainer.fit(PreparedDataset(prepared), verbose=0)

    return model, fit


METHODS: dict[str, Callable[[], Any]] = {
    "fit, accumulation, mean over tokens": built_in("sum_over_batch_size"),
    "fit, accumulation, mean over weights": built_in("mean_with_sample_weight"),
    "fit, accumulation, sum": built_in("sum"),
    "Distiller, default loss": distiller("kl_divergence"),
    "Distiller, KLDivergence()": distiller(keras.losses.KLDivergence()),
    "PreparedTrainer": ours,
}


class _Batches(keras.utils.PyDataset):
    """A list of batches of different shapes."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def step_of(model: Any, fit: Any, seed: int, batches: list[Any]) -> np.ndarray:
    """What one update subtracts from the weights, in one vector."""
    start = initial(seed)
    model.set_weights(start)
    fit(batches, seed)
    after = model.get_weights()
    return np.concatenate([(a.astype("float64") - b).ravel() for a, b in zip(start, after, strict=True)])


def errors(step: np.ndarray, truth: np.ndarray) -> tuple[float | None, float | None]:
    """(direction, size); None for a step that is not finite."""
    if not np.isfinite(step).all():
        return None, None
    length, true_length = np.linalg.norm(step), np.linalg.norm(truth)
    # 1 - cosine without cancellation: half the squared distance of the unit vectors.
    apart = step / length - truth / true_length
    return float(apart @ apart / 2), float(length / true_length - 1)


def measure() -> list[dict[str, Any]]:
    """Every method in every scenario on this backend."""
    results = []
    for scenario, settings in SCENARIOS.items():
        for name, method in METHODS.items():
            found = []
            model, fit = method()
            for seed in range(SEEDS):
                batches = window(settings, seed)
                step = step_of(model, fit, seed, batches)
                found.append(errors(step, true_gradient(initial(seed), batches)))
            finite = all(direction is not None for direction, _ in found)
            results.append(
                {
                    "scenario": scenario,
                    "method": name,
                    "finite": finite,
                    "direction_error": spread([d for d, _ in found]) if finite else None,
                    "size_error": spread([abs(s) for _, s in found]) if finite else None,
                }
            )
            print(f"{keras.backend.backend()}: {scenario}: {name}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = [name for name in BACKENDS if importlib.util.find_spec(name)]
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=installed)
    parser.add_argument("--output", type=Path, default=RESULTS / "exactness.json")
    parser.add_argument("--here", action="store_true", help="print this backend's results and write nothing")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure()))
        return
    results = {backend: _in_process(backend) for backend in options.backends}
    for backend, rows in results.items():
        print(f"\n{backend}: median of {SEEDS} seeds\n")
        print(table(["window", "method", "direction error", "size error"], [_row(row) for row in rows]))
    _check(results)
    named = versions("keras", "numpy", *options.backends, "tensorflow-cpu")
    write_json(options.output, {"machine": machine(), "versions": named, "seeds": SEEDS, "results": results})


def _in_process(backend: str) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, __file__, "--here"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _check(results: dict[str, list[dict[str, Any]]]) -> None:
    """Raise unless our steps are the true ones, as far as float32 goes."""
    for backend, rows in results.items():
        for row in (r for r in rows if r["method"] == "PreparedTrainer"):
            exact = row["finite"] and max(row[n]["upper_quartile"] for n in ("direction_error", "size_error")) < 1e-6
            if not exact:
                raise AssertionError(f"{backend}: PreparedTrainer is not exact in {row['scenario']!r}: {row}")


def _row(result: dict[str, Any]) -> list[str]:
    if not result["finite"]:
        return [result["scenario"], result["method"], "NaN", "NaN"]
    numbers = [result[name]["median"] for name in ("direction_error", "size_error")]
    return [result["scenario"], result["method"], *(f"{x:.1e}" for x in numbers)]


if __name__ == "__main__":
    main()
