"""What a sparse teacher costs: the error of the gradient against bytes a token, for every kind.

    KERAS_BACKEND=jax python benchmarks/sparse_teachers.py

Teachers are Zipf-like over a vocabulary of 32,768 ids, another order of ids at each position; students are an early
one (one Zipf law for all positions, as after a few steps) and a nearly converged one (the teacher with noise on its
logits). Gradients with respect to the student's logits come from `DistillationLoss`, and are compared with those of
the dense teacher. Of sampled teachers the draws are repeated: bias is what their mean is off, spread what one
position's draws are off from the mean. Averaged over m draws, or over m positions whose gradients agree, the spread
goes down by the root of m; a bias does not. Everything is seeded; no number depends on the speed of the machine.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import numpy as np
from _common import RESULTS, machine, table, versions, write_json

from keras_diffusion_opd.data import DenseTargets, PreparedBatch, SampledTargets, TopKTargets
from keras_diffusion_opd.losses import DistillationLoss

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "sparse_teachers.png"
SIZES = (4, 8, 16, 32, 64, 128, 256)
AVERAGED = 1000  # positions that a batch's gradient is averaged over, at least
KINDS: dict[str, dict[str, Any]] = {
    "top-k, tail as one event": {"tail": "bucket"},
    "top-k, renormalised": {"tail": "renormalize"},
    "drawn, independent": {"draws": "independent"},
    "drawn, systematic": {"draws": "systematic"},
    "drawn at temperature 1.5": {"draws": "independent", "proposal_temperature": 1.5},
}


def teachers(positions: int, vocabulary: int, seed: int) -> np.ndarray:
    """float32 (1, positions, vocabulary): logits of Zipf laws with exponents from 0.9 to 1.6, ids in random order."""
    rng = np.random.default_rng(seed)
    exponents = np.linspace(0.9, 1.6, positions)[:, None]
    ranked = -exponents * np.log(np.arange(1, vocabulary + 1))
    return np.stack([row[rng.permutation(vocabulary)] for row in ranked])[None].astype("float32")


def students(teacher: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Logits (1, positions, vocabulary) of the two students."""
    rng = np.random.default_rng(seed + 1)
    vocabulary = teacher.shape[-1]
    unigram = -np.log(np.arange(1, vocabulary + 1))[rng.permutation(vocabulary)].astype("float32")
    near = teacher + 0.1 * rng.normal(size=teacher.shape).astype("float32")
    return {"early": np.broadcast_to(unigram, teacher.shape).copy(), "nearly converged": near}


def gradient(student: np.ndarray, targets: Any) -> np.ndarray:
    """float64 (positions, vocabulary): of the soft loss, position by position."""
    ids = np.zeros(student.shape[:2], "int32")
    batch = PreparedBatch(ids, ids, np.ones(ids.shape, "float32"), targets)
    loss = DistillationLoss()
    return np.asarray(jax.grad(lambda s: loss(s, batch).primary.total)(student)[0], "float64")


def compared(estimate: np.ndarray, exact: np.ndarray) -> dict[str, float]:
    """Cosine, ratio of lengths and relative error of one gradient, over all positions together."""
    lengths = np.linalg.norm(estimate), np.linalg.norm(exact)
    return {
        "cosine": float((estimate * exact).sum() / (lengths[0] * lengths[1])),
        "length": float(lengths[0] / lengths[1]),
        "error": float(np.linalg.norm(estimate - exact) / lengths[1]),
    }


def top_k(logits: np.ndarray, k: int, settings: dict[str, Any], both: dict[str, np.ndarray]) -> dict[str, Any]:
    """Bias of a top-k teacher for both students; it has no spread."""
    targets = TopKTargets.from_logits(logits, k, **settings)
    found = {}
    for name, student in both.items():
        bias = compared(gradient(student, targets), gradient(student, DenseTargets(logits)))
        found[name] = {"single": bias, "averaged": bias, "bias": bias["error"], "noise_of_bias": 0.0, "spread": 0.0}
    entries = float(k)
    return {"entries": entries, "bytes": 8 * entries + 4, "students": found}


def drawn(
    logits: np.ndarray, n: int, settings: dict[str, Any], both: dict[str, np.ndarray], repeats: int
) -> dict[str, Any]:
    """Bias and spread of a drawn teacher for both students."""
    sums = {name: np.zeros(logits.shape[1:]) for name in both}
    squares, cosines = dict.fromkeys(both, 0.0), {name: list[dict[str, float]]() for name in both}
    exact = {name: gradient(student, DenseTargets(logits)) for name, student in both.items()}
    entries = 0.0
    for seed in range(repeats):
        targets = SampledTargets.from_logits(logits, n, seed=seed, **settings)
        entries += float((targets.counts > 0).sum(axis=-1).mean()) / repeats
        for name, student in both.items():
            found = gradient(student, targets)
            sums[name] += found
            squares[name] += float((found**2).sum())
            cosines[name].append(compared(found, exact[name]))
    result = {}
    for name in both:
        mean, length = sums[name] / repeats, float((exact[name] ** 2).sum())
        variance = (squares[name] - repeats * float((mean**2).sum())) / (repeats - 1) / length
        off = float(((mean - exact[name]) ** 2).sum()) / length
        single = {key: float(np.mean([c[key] for c in cosines[name]])) for key in cosines[name][0]}
        # What the mean of finitely many draws is off by itself is no bias.
        bias = float(np.sqrt(max(off - variance / repeats, 0.0)))
        left = variance / AVERAGED
        averaged = {"cosine": (1 + left) ** -0.5, "length": (1 + left) ** 0.5, "error": left**0.5}
        spread, noise = float(np.sqrt(variance)), float(np.sqrt(variance / repeats))
        result[name] = {"single": single, "averaged": averaged, "bias": bias, "noise_of_bias": noise, "spread": spread}
    return {"entries": entries, "bytes": 8 * entries + 4, "students": result}


def measure(positions: int, vocabulary: int, sizes: tuple[int, ...], repeats: int, seed: int) -> list[dict[str, Any]]:
    """One record for every kind and size."""
    logits = teachers(positions, vocabulary, seed)
    both = students(logits, seed)
    records = []
    for kind, settings in KINDS.items():
        for size in sizes:
            if "tail" in settings:
                found = top_k(logits, size, settings, both)
            else:
                found = drawn(logits, size, settings, both, repeats)
            records.append({"kind": kind, "size": size, **found})
            print(f"{kind}, {size}", flush=True)
    return records


def summary(records: list[dict[str, Any]], student: str) -> str:
    """The table of one student."""
    headers = ["teacher", "k or n", "bytes", "bias", "spread", f"error over {AVERAGED}", "cosine", "length"]
    rows = []
    for record in records:
        found = record["students"][student]
        # Below the noise of the mean of the draws nothing can be told from 0.
        bias = "none seen" if 0 < found["noise_of_bias"] > found["bias"] else f"{found['bias']:.3f}"
        averaged = [f"{found['averaged'][name]:.3f}" for name in ("error", "cosine", "length")]
        rows.append(
            [record["kind"], record["size"], f"{record['bytes']:.0f}", bias, f"{found['spread']:.3f}", *averaged]
        )
    return table(headers, rows)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Error of a gradient averaged over many positions, against bytes a token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(records[0]["students"])
    figure, axes = pyplot.subplots(1, len(names), figsize=(11, 4.8), sharex=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for index, kind in enumerate(KINDS):
            mine = [record for record in records if record["kind"] == kind]
            errors = [record["students"][name]["averaged"]["error"] for record in mine]
            style = "o-" if kind.startswith("top") else "s--"
            axis.loglog([r["bytes"] for r in mine], errors, style, color=f"C{index}", label=kind, markersize=4)
        axis.set_title(f"student: {name}")
        axis.set_xlabel("bytes a token")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel(f"relative error of the gradient,\naveraged over {AVERAGED:,} positions")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--positions", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=16, help="draws of every sampled teacher")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS / "sparse_teachers.json")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    sizes = tuple(arguments.sizes)
    records = measure(arguments.positions, arguments.vocabulary, sizes, arguments.repeats, arguments.seed)
    for student in records[0]["students"]:
        print(f"\nstudent: {student}\n{summary(records, student)}")
    settings = {key: value for key, value in vars(arguments).items() if key not in ("output", "picture")}
    record = {
        "benchmark": "sparse_teachers",
        "settings": {**settings, "averaged_over": AVERAGED},
        "machine": machine(),
        "versions": versions("keras", "jax", "numpy"),
        "records": records,
    }
    write_json(arguments.output, record)
    draw(records, arguments.picture)


if __name__ == "__main__":
    main()
