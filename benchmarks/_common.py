"""What every benchmark shares: the machine, versions, alternating timing, tables, result files."""

import contextlib
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores, memory, load and system of this machine, in words and numbers."""
    facts = dict(line.split(":", 1) for line in _read("/proc/cpuinfo").splitlines() if line.startswith("model name"))
    total = next((line for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal")), "")
    return {
        "processor": next(iter(facts.values()), platform.processor()).strip(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(total.split()[1]) / 2**20, 1) if total else None,
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def versions(*distributions: str) -> dict[str, str]:
    """Versions of those `distributions` that are installed."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record` to `path`: whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    print(f"written: {path}")


class Times(NamedTuple):
    """Seconds of the turns of one side: by the clock, and of processor time of this process."""

    wall: list[float]
    processor: list[float]


def alternate(turns: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """Times of every turn, `rounds` times; the order of the turns is reversed from round to round.

    A busy machine then slows all of them alike, and a drift cancels. Processor time does not count what other
    processes take.
    """
    times = {name: Times([], []) for name in turns}
    for index in range(rounds):
        for name in sorted(turns, reverse=bool(index % 2)):
            start, spent = time.perf_counter(), time.process_time()
            turns[name]()
            times[name].wall.append(time.perf_counter() - start)
            times[name].processor.append(time.process_time() - spent)
    return times


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(np.asarray(values, "float64"), [0.25, 0.5, 0.75])
    return {
        "median": float(middle),
        "lower_quartile": float(low),
        "upper_quartile": float(high),
        "count": len(values),
    }


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios of turns that were made in the same round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, its columns aligned."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""
