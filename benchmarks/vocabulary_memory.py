"""Loss and gradient from hidden states and heads: all logits at once against a few positions at a time.

    python benchmarks/vocabulary_memory.py                      every backend that is installed
    python benchmarks/vocabulary_memory.py --backends jax --vocabularies 32768

Student and teacher are hidden states and heads, float32; the loss is T^2 KL(teacher || student); gradients are
those of the student's hidden states and head. "chunked" is `chunked_distillation`; "dense" is `DistillationLoss` of
`OutputHead.logits`; "plain" is the formula as one would write it down, on all logits at once: the leaner one of the
two, to which all ratios are. Every measurement is a process of its own, on as many threads as there are cores:

- resident: the most that the process holds during one turn, above what it held once the inputs existed. Read
  from /proc, on Linux, in a turn after the one that compiles, in a process that has run a small problem before.
- planned (JAX): temporary and output buffers of the compiled program, as XLA lays them out.
- seconds: of a turn, the median of `--rounds` after the first.

A side that needs more memory than is free is left out. Results of other backends and vocabularies that the
output file holds for the same settings are kept, so that one may measure piece by piece.

The floor is what has to exist at the end: the gradients. Before anything is measured, value and gradients of the
two sides are compared on a small problem.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from _common import RESULTS, machine, table, versions, write_json
from keras import ops

from keras_diffusion_opd.data import HiddenTargets, OutputHead, PreparedBatch
from keras_diffusion_opd.losses import DistillationLoss, chunked_distillation

BACKENDS = ("jax", "tensorflow", "torch")
SIDES = ("plain", "dense", "chunked")
TOKENS, WIDTH, TEMPERATURE = 2048, 256, 2.0
VOCABULARIES = (32768, 131072, 262144)
AIMS = {"jax": 15.0, "torch": 12.0, "tensorflow": 8.0}  # dense over chunked memory at 131,072 ids
SMALL = (48, 16, 1000)  # positions, width, ids: to load what is loaded once, and to compare the sides


def inputs(tokens: int, width: int, vocabulary: int) -> tuple[np.ndarray, ...]:
    """Hidden states and head of student and teacher, and the weights of the positions: a third of them 0."""
    rng = np.random.default_rng(0)
    shapes = ((tokens, width), (width, vocabulary), (tokens, width), (width, vocabulary))
    arrays = [0.3 * rng.standard_normal(shape, "float32") for shape in shapes]
    weights = rng.random(tokens, "float32")
    weights[::3] = 0
    return arrays[0][None], arrays[1], arrays[2][None], arrays[3], weights[None]


def total_of(side: str, chunk_size: int) -> Callable[..., Any]:
    """The loss as a function of the arrays."""

    def total(hidden: Any, head: Any, teacher_hidden: Any, teacher_head: Any, weights: Any) -> Any:
        teacher = HiddenTargets(teacher_hidden, teacher_head)
        ids = np.zeros(tuple(weights.shape), "int32")
        batch = PreparedBatch(ids, ids, weights, teacher)
        settings = {"divergence": "forward_kl", "temperature": TEMPERATURE}
        if side == "plain":
            return _plain(hidden @ head, teacher_hidden @ teacher_head, weights)
        if side == "dense":
            output = DistillationLoss(**settings)(OutputHead(head).logits(hidden), batch)
        else:
            output = chunked_distillation(hidden, head, batch, chunk_size=chunk_size, **settings)
        return output.primary.mean()

    return total


def _plain(student: Any, teacher: Any, weights: Any) -> Any:
    """The formula, without any of the care that this package takes."""
    log_q, log_p = (ops.log_softmax(x / TEMPERATURE, axis=-1) for x in (student, teacher))
    values = ops.sum(ops.exp(log_p) * (log_p - log_q), axis=-1)
    return TEMPERATURE**2 * ops.sum(weights * values) / ops.sum(weights)


def turn_of(side: str, chunk_size: int, arrays: tuple[Any, ...]) -> tuple[Callable[[], Any], int | None]:
    """One turn, compiled where the backend compiles: value and gradients. And what XLA plans for it."""
    function, backend = total_of(side, chunk_size), keras.backend.backend()
    if backend == "jax":
        import jax

        tensors = [jax.numpy.asarray(a) for a in arrays]
        program = jax.jit(jax.value_and_grad(function, argnums=(0, 1))).lower(*tensors).compile()
        plan = program.memory_analysis()
        return (
            lambda: jax.block_until_ready(program(*tensors)),
            plan.temp_size_in_bytes + plan.output_size_in_bytes,
        )
    if backend == "tensorflow":
        return _tensorflow_turn(function, arrays), None
    return _torch_turn(function, arrays), None


def _tensorflow_turn(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[[], Any]:
    import tensorflow as tf

    tensors = [tf.constant(a) for a in arrays]

    @tf.function(autograph=False)
    def program(*tensors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensors[:2])
            value = function(*tensors)
        return value, tape.gradient(value, tensors[:2])

    def turn() -> Any:
        value, gradients = program(*tensors)
        return value.numpy(), gradients

    return turn


def _torch_turn(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[[], Any]:
    import torch

    tensors = [torch.tensor(a) for a in arrays]
    for tensor in tensors[:2]:
        tensor.requires_grad_()

    def turn() -> Any:
        value = function(*tensors)
        return value.detach(), torch.autograd.grad(value, tensors[:2])

    return turn


def check(chunk_size: int) -> float:
    """The largest relative difference of value and gradients between the sides, on the small problem."""
    found = []
    for side in SIDES:
        value, gradients = turn_of(side, chunk_size, inputs(*SMALL))[0]()
        found.append([np.asarray(keras.ops.convert_to_numpy(x), "float64") for x in (value, *gradients)])
    pairs = [pair for side in found[:-1] for pair in zip(side, found[-1], strict=True)]
    apart = max(float(np.max(np.abs(a - b)) / np.max(np.abs(a))) for a, b in pairs)
    if not apart < 1e-5:
        raise AssertionError(f"The sides differ by {apart:.1e}")
    return apart


def measure(side: str, vocabulary: int, chunk_size: int, rounds: int) -> dict[str, Any]:
    """Memory and time of one side, in this process."""
    apart = check(chunk_size)
    arrays = inputs(TOKENS, WIDTH, vocabulary)
    turn, planned = turn_of(side, chunk_size, arrays)
    del arrays
    before = _status("VmRSS")
    turn()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        turn()
        seconds.append(time.perf_counter() - start)
    held = _status("VmHWM") - before
    return {
        "backend": keras.backend.backend(),
        "side": side,
        "vocabulary": vocabulary,
        "chunk_size": chunk_size if side == "chunked" else None,
        "resident_bytes": held,
        "planned_bytes": planned,
        "seconds": float(np.median(seconds)),
        "sides_differ_by": apart,
    }


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def elsewhere(backend: str, side: str, vocabulary: int, options: argparse.Namespace) -> dict[str, Any]:
    """`measure` in a process of its own."""
    settings = ["--side", side, "--vocabularies", vocabulary, "--chunk-size", options.chunk_size]
    command = [sys.executable, __file__, *map(str, [*settings, "--rounds", options.rounds])]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{backend}, {side}, {vocabulary}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def floor(vocabulary: int) -> int:
    """Bytes of the gradients of hidden states and head."""
    return 4 * WIDTH * (TOKENS + vocabulary)


def compared(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The ratios that matter; memory as XLA plans it where it does, else as it is seen."""
    chunked = sides["chunked"]
    memory = "planned_bytes" if chunked["planned_bytes"] else "resident_bytes"

    def ratio(a: str, b: str, what: str) -> float | None:
        return sides[a][what] / sides[b][what] if a in sides and b in sides else None

    return {
        "backend": chunked["backend"],
        "vocabulary": chunked["vocabulary"],
        "memory_ratio": ratio("plain", "chunked", memory),
        "resident_memory_ratio": ratio("plain", "chunked", "resident_bytes"),
        "over_floor": chunked[memory] / floor(chunked["vocabulary"]),
        "time_over_plain": ratio("chunked", "plain", "seconds"),
        "time_over_dense": ratio("chunked", "dense", "seconds"),
        "aim": AIMS[chunked["backend"]] if chunked["vocabulary"] == VOCABULARIES[1] else None,
        "sides": sides,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = [name for name in BACKENDS if importlib.util.find_spec(name)]
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=installed)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=list(VOCABULARIES))
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "vocabulary_memory.json")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.vocabularies[0], options.chunk_size, options.rounds)))
        return
    settings = {"tokens": TOKENS, "width": WIDTH, "temperature": TEMPERATURE, "chunk_size": options.chunk_size}
    found = {(r["backend"], r["vocabulary"]): r for r in earlier(options.output, settings)}
    for backend in options.backends:
        for vocabulary in options.vocabularies:
            sides = {side: elsewhere(backend, side, vocabulary, options) for side in SIDES if fits(side, vocabulary)}
            found[backend, vocabulary] = compared(sides)
    results = [found[key] for key in sorted(found)]
    headers = ["backend", "ids", "plain MB", "dense MB", "chunked MB", "times less", "aim", "over floor"]
    headers += ["time, plain", "time, dense", "seconds"]
    print(table(headers, [_row(result) for result in results]))
    named = versions("keras", "jax", "jaxlib", "tensorflow", "tensorflow-cpu", "torch", "numpy")
    write_json(options.output, {"settings": settings, "machine": machine(), "versions": named, "results": results})


def fits(side: str, vocabulary: int) -> bool:
    """Whether the machine has room now, by how many arrays of all logits a side has been seen to hold at most."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    most = {"plain": 7.5, "dense": 14, "chunked": 1}[side]
    return most * 4 * TOKENS * vocabulary < 1024 * int(line.split()[1])


def earlier(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Results in the file, if it was made with the same settings."""
    record = json.loads(path.read_text()) if path.exists() else {}
    return record["results"] if record.get("settings") == settings else []


def _row(result: dict[str, Any]) -> list[str]:
    sides = result["sides"]
    memory = "planned_bytes" if sides["chunked"]["planned_bytes"] else "resident_bytes"
    seconds = "/".join(f"{sides[side]['seconds']:.1f}" if side in sides else "-" for side in SIDES)
    over = ("-" if result[f"time_over_{side}"] is None else f"{result[f'time_over_{side}']:.2f}" for side in SIDES[:2])
    return [
        result["backend"],
        f"{result['vocabulary']:,}",
        *(f"{sides[side][memory] / 1e6:,.0f}" if side in sides else "no room" for side in SIDES),
        "-" if result["memory_ratio"] is None else f"{result['memory_ratio']:.1f}",
        "" if result["aim"] is None else f"{result['aim']:.0f}",
        f"{result['over_floor']:.2f}",
        *over,
        seconds,
    ]


if __name__ == "__main__":
    main()
