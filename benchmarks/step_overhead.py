"""PreparedTrainer's compiled step against the same step written by hand in JAX.

    KERAS_BACKEND=jax python benchmarks/step_overhead.py

Same model, data, loss and optimizer; both sides in one process, in turns. Reported per update: the ratio of
times (of the compiled step, and of `fit` against a bare loop), the ratio of peak memory (what XLA plans for
the compiled programs, and what a process of its own is seen to hold). Before anything is timed, both sides
must have reached the same weights. Resident memory is read from /proc, on Linux.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
from _common import RESULTS, alternate, machine, ratios, spread, table, versions, write_json
from _hand_written import HandWritten
from _masked_lm import LENGTH, ROWS, SIZES, batches, build

from keras_diffusion_opd.data import PreparedDataset
from keras_diffusion_opd.losses import DistillationLoss
from keras_diffusion_opd.trainers import PreparedTrainer

LOSS = {"temperature": 2.0, "soft_weight": 0.75, "hard_weight": 0.25}
ADAMW = {"learning_rate": 1e-4, "weight_decay": 0.01}
SIDES = ("ours", "hand-written")
UPDATES = 2  # per turn, and before the weights are compared
TOLERANCE = 1e-5  # relative, of all weights together: float32, and Adam divides small gradients by small roots


class Ours:
    """`update(window)` through the train function that `fit` calls, with the state that `fit` hands it."""

    def __init__(self, size: str, k: int) -> None:
        self.trainer = PreparedTrainer(build(size), DistillationLoss(**LOSS))
        self.trainer.compile(keras.optimizers.AdamW(**ADAMW), accumulation_steps=k)
        self.trainer.optimizer.build(self.trainer.trainable_variables)
        self.trainer.make_train_function()
        self.groups = (
            self.trainer.trainable_variables,
            self.trainer.non_trainable_variables,
            self.trainer.optimizer.variables,
            self.trainer.metrics_variables,
        )
        # Not copied: the first update is given the variables' own buffers, as in `fit`.
        self.state: Any = tuple([v.value for v in group] for group in self.groups)

    def update(self, window: list[Any]) -> None:
        _, self.state = self.trainer.train_function(self.state, iter(window))

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def weights(self) -> list[Any]:
        return self.state[0]

    def give_back(self) -> None:
        """Put the state into the variables, for `fit`."""
        for group, values in zip(self.groups, self.state, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)

    def programs(self, window: list[Any]) -> dict[str, Any]:
        """The compiled programs of one update, by name."""
        trainer, (tv, ntv, ov, mv) = self.trainer, self.state
        if len(window) == 1:
            return {"single": jax.jit(trainer._single, donate_argnums=0).lower(self.state, window[0])}
        sums, weight, counts = trainer._zero_sums(tv), jnp.zeros(()), _no_violations()
        carry = (sums, weight, counts, ntv, mv)
        return {
            "micro": jax.jit(trainer._micro, donate_argnums=0).lower(carry, (tv, ov), window[0], 0),
            "apply": jax.jit(trainer._apply, donate_argnums=0).lower(self.state, sums, weight, counts),
        }


class ByHand(HandWritten):
    """The hand-written step with the settings of this benchmark."""

    def __init__(self, size: str, k: int) -> None:
        del k
        names = {"soft": "soft_weight", "hard": "hard_weight", "temperature": "temperature"}
        super().__init__(build(size), **{ours: LOSS[theirs] for ours, theirs in names.items()}, **ADAMW)

    def weights(self) -> list[Any]:
        return self.state.trainable

    def programs(self, window: list[Any]) -> dict[str, Any]:
        """The compiled programs of one update, by name."""
        if len(window) == 1:
            return {"single": self.single.lower(self.state, window[0])}
        sums = self.zeros(self.state.trainable)
        carry = (sums, jnp.zeros(()), jnp.zeros(()), self.state.non_trainable)
        return {
            "micro": self.micro.lower(carry, self.state.trainable, window[0]),
            "apply": self.apply.lower(self.state, sums, jnp.zeros(()), jnp.zeros(())),
        }


def _no_violations() -> Any:
    from keras_diffusion_opd.data.violations import messages
    from keras_diffusion_opd.trainers.checks import no_violations

    return no_violations(messages())


def make(side: str, size: str, k: int) -> Any:
    return {"ours": Ours, "hand-written": ByHand}[side](size, k)


def planned_bytes(side: Any, window: list[Any]) -> int:
    """Peak of one update: state, gradient sums and one batch, and the most that a program adds to them."""
    held = sum(x.nbytes for x in jax.tree.leaves((side.state, window[0])))
    if len(window) > 1:
        held += sum(v.nbytes for v in side.weights())
    added = 0
    for lowered in side.programs(window).values():
        plan = lowered.compile().memory_analysis()
        fresh = max(plan.output_size_in_bytes - plan.alias_size_in_bytes, 0)
        added = max(added, plan.temp_size_in_bytes + fresh)
    return held + added


def distance(a: list[Any], b: list[Any]) -> float:
    """Relative Euclidean distance of all weights together."""
    pairs = [(np.asarray(x, "float64"), np.asarray(y, "float64")) for x, y in zip(a, b, strict=True)]
    return float(np.sqrt(sum(((x - y) ** 2).sum() for x, y in pairs) / sum((y**2).sum() for _, y in pairs)))


def compare(size: str, k: int, rounds: int) -> dict[str, Any]:
    """Times, planned memory and equality of the two sides."""
    data = batches(size, 4)
    window = [b.as_fit() for b in data[:k]]
    sides = {name: make(name, size, k) for name in SIDES}
    start = [np.array(v) for v in sides["ours"].weights()]
    turns = {name: lambda side=side: _turn(side, window) for name, side in sides.items()}
    for turn in turns.values():
        turn()
    ours, hand = (sides[name].weights() for name in SIDES)
    apart, moved = distance(ours, hand), distance(ours, start)
    if not apart <= TOLERANCE or not moved > 10 * apart:
        raise AssertionError(f"After {UPDATES} updates the sides differ by {apart:.1e} (they moved by {moved:.1e}).")
    times = alternate(turns, rounds)

    planned = {name: planned_bytes(side, window) for name, side in sides.items()}
    sides["ours"].give_back()
    dataset = PreparedDataset([data[i % k] for i in range(UPDATES * k)])
    fit = {
        "ours": lambda: sides["ours"].trainer.fit(dataset, verbose=0),
        "hand-written": turns["hand-written"],
    }
    fit["ours"]()
    fit_times = alternate(fit, rounds)
    return {
        "size": size,
        "accumulation_steps": k,
        "parameters": sum(int(np.prod(v.shape)) for v in ours),
        "time_ratio": ratios(*(times[name].wall for name in SIDES)),
        "processor_time_ratio": ratios(*(times[name].processor for name in SIDES)),
        "fit_time_ratio": ratios(*(fit_times[name].wall for name in SIDES)),
        "fit_processor_time_ratio": ratios(*(fit_times[name].processor for name in SIDES)),
        "seconds_per_update": {name: spread([s / UPDATES for s in times[name].wall]) for name in SIDES},
        "planned_bytes": planned,
        "planned_memory_ratio": planned["ours"] / planned["hand-written"],
        "weights_differ_by": apart,
        "weights_moved_by": moved,
    }


def _turn(side: Any, window: list[Any]) -> None:
    for _ in range(UPDATES):
        side.update(window)
    side.wait()


def resident_bytes(side: str, size: str, k: int) -> int:
    """Most memory that a process of its own holds while it updates, above what it held before the model.

    Read after compilation, which takes more than training does.
    """
    command = [sys.executable, __file__, "--resident", side, "--sizes", size, "--steps", str(k)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def measure_resident(name: str, size: str, k: int) -> int:
    before = _status("VmRSS")
    window = [b.as_fit() for b in batches(size, k)]
    side = make(name, size, k)
    _turn(side, window)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # heap that the compiler has left behind
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    _turn(side, window)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 4], help="accumulation steps")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "step_overhead.json")
    parser.add_argument("--resident", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if keras.backend.backend() != "jax":
        parser.error("the hand-written step is in JAX: set KERAS_BACKEND=jax")
    if options.resident:
        print(measure_resident(options.resident, options.sizes[0], options.steps[0]))
        return
    results = []
    for size in options.sizes:
        for k in options.steps:
            result = compare(size, k, options.rounds)
            held = {name: resident_bytes(name, size, k) for name in SIDES}
            result["resident_bytes"] = held
            result["resident_memory_ratio"] = held["ours"] / held["hand-written"]
            results.append(result)
            print(f"{size}, k = {k}: time ratio {result['time_ratio']['median']:.3f}", flush=True)
    headers = [
        "model",
        "k",
        "time",
        "CPU time",
        "fit",
        "fit, CPU time",
        "XLA memory",
        "resident",
        "ms per update",
    ]
    print(table(headers, [_row(result) for result in results]))
    settings = {"loss": LOSS, "adamw": ADAMW, "rows": ROWS, "length": LENGTH, "updates_per_turn": UPDATES}
    named = versions("keras", "jax", "jaxlib", "numpy", "keras-hub")
    write_json(options.output, {"settings": settings, "machine": machine(), "versions": named, "results": results})


def _row(result: dict[str, Any]) -> list[str]:
    names = ("time_ratio", "processor_time_ratio", "fit_time_ratio", "fit_processor_time_ratio")
    found = [result[name] for name in names]
    return [
        f"{result['size']} ({result['parameters'] / 1e6:.1f}M)",
        str(result["accumulation_steps"]),
        *(f"{r['median']:.3f} ({r['lower_quartile']:.3f} to {r['upper_quartile']:.3f})" for r in found),
        f"{result['planned_memory_ratio']:.3f}",
        f"{result['resident_memory_ratio']:.3f}",
        f"{1e3 * result['seconds_per_update']['ours']['median']:.1f}",
    ]


if __name__ == "__main__":
    main()
