"""Table, picture, words and record of a run."""

import dataclasses
import importlib
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.demos.tokens.digits import CLASSES, SIDE, Scans, one_of_each
from keras_diffusion_opd.demos.tokens.evaluation import Scores, mean_and_error
from keras_diffusion_opd.demos.tokens.settings import Settings
from keras_diffusion_opd.provenance import RunRecord, write_bytes

# Heading, how a row is shown in it.
_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("model", lambda r: r["model"]),
    ("parameters", lambda r: f"{r['parameters']:,}"),
    ("bits per pixel", lambda r: f"{r['bits_per_pixel']:.4f} ± {r['bits_error']:.4f}"),
    ("gain over hard", lambda r: f"{r['gain_over_hard']:+.4f} ± {r['gain_error']:.4f}"),
    ("KL held-out", lambda r: f"{r['kl_held_out']:.4f} ± {r['kl_held_out_error']:.4f}"),
    ("KL own", lambda r: f"{r['kl_own_samples']:.4f} ± {r['kl_own_samples_error']:.4f}"),
    ("agreement", lambda r: f"{r['agreement']:.3f}"),
    ("sample distance", lambda r: f"{r['sample_distance']:.3f}"),
    ("read", lambda r: f"{r['read']:.3f}"),
    ("seconds", lambda r: f"{r['seconds']:.0f}"),
)

# Unit, and what a positive and a negative difference is called.
_BITS = ("bits per pixel", "better", "worse")
_NATS = ("nats", "closer to the teacher", "farther from it")

_LEGEND = """\
- **bits per pixel**: upper bound on the negative log-likelihood of the held-out scans, with its standard error
  over scans. **gain over hard**: how much lower it is than the hard-label student's, paired scan by scan on the
  same masks; its error is that of the difference.
- **KL held-out, KL own**: divergence of the student from the teacher, nats per masked token, on held-out scans and
  on the student's own samples. **agreement**: masked tokens at which both put the same level first.
- **sample distance**: sliced Wasserstein distance within classes, in grey levels, from as many samples as there
  are training scans to the held-out scans. The row of the real scans is the floor: training scans against
  held-out ones.
- **read**: share that a support vector machine, trained on the training scans, reads as the intended digit.
- **seconds**: of training, with rollouts and the teacher's scores."""


@dataclasses.dataclass
class Results:
    """What a run has found.

    Args:
        rows: a dict of numbers for each model, in the order of the table.
        pictures: what to show of each model.
        curves: of each student, `(updates, held-out KL)`.
        bits: of each student, bound on every held-out scan, bits per pixel.
        own: scores of each student on its own samples.
    """

    rows: list[dict[str, Any]]
    pictures: dict[str, Scans]
    curves: dict[str, list[tuple[int, float]]] = dataclasses.field(default_factory=dict)
    bits: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    own: dict[str, Scores] = dataclasses.field(default_factory=dict)

    def add(self, name: str, picture: Scans, row: dict[str, Any]) -> None:
        """One model more."""
        self.rows.append({"model": name, **row})
        self.pictures[name] = picture

    def gain(self, name: str, other: str) -> tuple[float, float]:
        """Bits per pixel that `name` is below `other`, paired scan by scan, and the standard error."""
        return mean_and_error(self.bits[other] - self.bits[name])

    def closer(self, name: str, other: str) -> tuple[float, float]:
        """Nats that `name` is closer to the teacher than `other`, each on its own samples; standard error."""
        ours, theirs = self.own[name], self.own[other]
        return theirs.kl - ours.kl, math.hypot(ours.kl_error, theirs.kl_error)


def _cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    def cell(show: Any, row: dict[str, Any]) -> str:
        try:
            return str(show(row))
        except KeyError:
            return ""

    return [[heading for heading, _ in _COLUMNS], *([cell(show, row) for _, show in _COLUMNS] for row in rows)]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned columns of text."""
    cells = _cells(rows)
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _markdown_table(rows: list[dict[str, Any]]) -> str:
    cells = _cells(rows)
    lines = ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join([lines[0], "|" + " --- |" * len(_COLUMNS), *lines[1:]])


def reading(results: Results) -> str:
    """The result in words, whatever it is."""
    gain, error = results.gain("distilled", "hard labels")
    words = ["Against hard labels, the distilled student is " + _difference(gain, error, _BITS) + "."]
    helped = []
    for name in ("on-policy", "mixture"):
        gain, error = results.gain(name, "distilled")
        closer, closer_error = results.closer(name, "distilled")
        helped += [gain > 2 * error]
        words.append(
            f"Against the distilled student, the {name} student is {_difference(gain, error, _BITS)} on held-out "
            f"scans, and {_difference(closer, closer_error, _NATS)} on its own samples."
        )
    if not any(helped):
        words.append(
            "So on-policy batches do not lower the bound here: there are many real scans, and masking them at random "
            "already shows the student every kind of state that a sampler in random order visits."
        )
    return " ".join(words)


def _difference(value: float, error: float, words: tuple[str, str, str]) -> str:
    """The difference with its size in standard errors; none where it is below two of them."""
    unit, more, less = words
    sure = abs(value) / error if error else math.inf
    if sure < 2:
        return f"no {more} or {less} within the error ({value:+.4f} ± {error:.4f} {unit})"
    return f"{abs(value):.4f} {unit} {more if value > 0 else less} ({sure:.1f} standard errors)"


def require_matplotlib() -> None:
    """ModuleNotFoundError at once, rather than after the training, where the picture cannot be drawn."""
    importlib.import_module("matplotlib")


def write_report(settings: Settings, record: RunRecord, results: Results, models: dict[str, keras.Model]) -> None:
    """Write models, report.png and report.md, then run.json with their digests; each in full or not at all."""
    for name, model in models.items():
        write_bytes(settings.out / f"{name}.keras", _archive(model))
    write_bytes(settings.out / "report.png", _picture(settings, results))
    warning = "\n*A quick run: the numbers mean nothing.*\n" if settings.quick else ""
    minutes = record.metadata["seconds"] / 60
    text = f"""# Digits as tokens: four ways to teach a small student
{warning}
{record.metadata["reading"]}

![Samples from the same seeds, and how the students approach the teacher](report.png)

*Samples are drawn from the same seeds at temperature {settings.picture_temperature:g}, one pixel at a time in random
order; those that are measured, at temperature 1.*

{_markdown_table(results.rows)}

{_LEGEND}

Seed {record.seed}, backend {record.metadata["backend"]}, {minutes:.1f} minutes in all. Settings, versions, machine and
the digests of data and models are in [run.json](run.json); `kdo verify` checks it.
"""
    write_bytes(settings.out / "report.md", text.encode())
    record.save(settings.out / "run.json", files=[*(f"{name}.keras" for name in models), "report.png", "report.md"])


def _archive(model: keras.Model) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        model.save(path)
        return path.read_bytes()


def _grid(scans: Scans, rows: int) -> np.ndarray:
    """`rows` digits of every class as one image, one white pixel between them."""
    digits = one_of_each(scans, rows).reshape(rows, CLASSES, SIDE, SIDE)
    padded = np.pad(digits, ((0, 0), (0, 0), (1, 1), (1, 1)))
    return padded.transpose(0, 2, 1, 3).reshape(rows * (SIDE + 2), CLASSES * (SIDE + 2))


def _picture(settings: Settings, results: Results) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [2 * (0.5 * settings.rows + 0.35), 3.0]
    figure = Figure(figsize=(15, sum(heights)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    upper, lower = parts
    by_name = {row["model"]: row for row in results.rows}
    panels = upper.subplots(2, 3, gridspec_kw={"wspace": 0.06})
    for axes, (name, scans) in zip(panels.ravel(), results.pictures.items(), strict=True):
        axes.imshow(_grid(scans, settings.rows), cmap="gray_r", vmin=0, vmax=16, interpolation="nearest")
        bits = by_name.get(name, {}).get("bits_per_pixel")
        axes.set_title(name if bits is None else f"{name}: {bits:.3f} bits per pixel", fontsize=11)
        axes.set_axis_off()
    left, right = lower.subplots(1, 2)
    for name, curve in results.curves.items():
        left.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
    left.set(xlabel="updates", ylabel="nats", yscale="log", title="KL to the teacher on held-out scans")
    left.yaxis.set_minor_formatter("{x:.2g}")
    left.yaxis.set_major_formatter("{x:.2g}")
    left.legend(frameon=False)
    names = list(results.curves)
    values = [by_name[name]["bits_per_pixel"] for name in names]
    errors = [by_name[name]["gain_error"] for name in names]
    for name, value, error in zip(names, values, errors, strict=True):
        right.errorbar(value, name, xerr=error, fmt="o", capsize=4)
    right.axvline(by_name["teacher"]["bits_per_pixel"], color="black", linestyle="--", linewidth=1, label="teacher")
    right.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.08, 1.0))
    right.set(title="bound on held-out scans (errors: of the difference to hard labels)", xlabel="bits per pixel")
    right.margins(0.1, 0.2)
    right.invert_yaxis()
    buffer = io.BytesIO()
    figure.set_dpi(100)
    canvas.print_png(buffer)
    return buffer.getvalue()
