"""Arguments of the demo."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from keras_diffusion_opd.demos.tokens.experiment import run
from keras_diffusion_opd.demos.tokens.report import table
from keras_diffusion_opd.demos.tokens.settings import Settings, quick


def main(arguments: Sequence[str] | None = None) -> int:
    """`kdo demo tokens ...`: run, print the table, and say where everything is."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: cannot make the directory {options.out}: {error.strerror}. Name another one.")
    settings = Settings(out=options.out, seed=options.seed)
    result = run(quick(settings) if options.quick else settings)
    print("\n" + table(result["rows"]) + "\n\n" + result["reading"])
    print(f"\n{settings.out}: report.png, report.md, run.json. Check them with: kdo verify {settings.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kdo demo tokens",
        description=(
            "Trains a masked diffusion model of scikit-learn's handwritten digits (64 tokens of 17 grey levels), "
            "then four students a tenth of its size with equal updates: on hard labels, distilled on corrupted "
            "scans, distilled on their own samples (on-policy), and on a mixture. Prints a table and writes "
            "report.png, report.md and run.json. About three minutes on two cores."
        ),
    )
    parser.add_argument(
        "--out", type=Path, default=Settings.out, metavar="DIR", help="where the results go (default: %(default)s)"
    )
    parser.add_argument("--seed", type=_seed, default=0, help="of weights, masks and samples (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the numbers mean nothing")
    return parser


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, not {text!r}")
    return int(text)
