"""Arguments of `kdo`, and which function answers each command."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from keras_diffusion_opd.cli import doctor, records
from keras_diffusion_opd.cli.backends import select_backend
from keras_diffusion_opd.version import __version__

# Name -> what it does. Each is a module of keras_diffusion_opd.demos with `main(arguments)`.
DEMOS = {"tokens": "distil a masked diffusion model of handwritten digits, and compare"}

# The packages that a demo may find missing, with the extra that installs them.
EXTRAS = {"sklearn": "demo", "matplotlib": "demo", "keras_hub": "hub"}

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kdo` with the arguments of the process, or those given, and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["demo"] and len(arguments) > 1 and arguments[1] in DEMOS:
            return _demo(arguments[1], arguments[2:])  # its arguments are its own
        options = _parser().parse_args(arguments)
        if options.command is None:
            _parser().print_help()
            return WRONG_USE
        status: int = options.run(options)
        return status
    except KeyboardInterrupt:
        print("kdo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `kdo card ... | head`
        sys.stderr.close()
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kdo", description="Post-train diffusion models in Keras 3: distillation, alignment, provenance."
    )
    parser.add_argument("--version", action="version", version=f"kdo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")

    command = commands.add_parser("doctor", help="what is installed and missing, which backend and devices")
    command.set_defaults(run=doctor.run)

    command = commands.add_parser("demo", help="train and compare on real data: " + ", ".join(DEMOS))
    listing = "; ".join(f"{name}: {text}" for name, text in DEMOS.items())
    command.add_argument("name", choices=list(DEMOS), help=f"{listing}. Its options: kdo demo NAME --help")

    _add_records(commands)
    return parser


def _add_records(commands: Any) -> None:
    where = "a record, a directory with run.json or lineage.json, a checkpoint or a directory of them, a teacher store"

    def add(name: str, text: str, statuses: str) -> Any:
        return commands.add_parser(name, help=text, epilog=f"Exit status: {statuses}")

    command = add(
        "verify",
        "recompute digests and say what does not hold",
        "0 everything holds; 1 something does not; 2 there is nothing to verify.",
    )
    command.add_argument("path", help=f"{where}, an adapter, or a preset that carries adapters")
    command.add_argument("--record", metavar="DIGEST", help="the newest record must have it; kept where none can forge")
    command.set_defaults(run=records.verify)

    holds = "0 printed; 1 the record does not hold; 2 there is no record, or the output cannot be written."
    command = add("card", "print the model card of a run, a lineage or a checkpoint", holds)
    command.add_argument("path", help=where)
    command.add_argument("--output", metavar="FILE", help="write the card there, such as README.md")
    command.set_defaults(run=records.card)

    command = add("lineage", "print the models that a model was made from, the first one first", holds)
    command.add_argument("path", help=where)
    command.set_defaults(run=records.lineage)

    command = add(
        "diff",
        "in which settings and weights two checkpoints differ, and by how much",
        "0 they are equal; 1 they differ; 2 they cannot be compared.",
    )
    for name in ("a", "b"):
        command.add_argument(name, help="a checkpoint, or a directory of them: the newest")
    command.set_defaults(run=records.diff)


def _demo(name: str, arguments: list[str]) -> int:
    problem = select_backend()
    if problem:
        print(f"kdo: {problem}", file=sys.stderr)
        return FAILED
    try:
        demo = importlib.import_module(f"keras_diffusion_opd.demos.{name}")
        return int(demo.main(arguments) or DONE)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in EXTRAS:
            raise
        extra = EXTRAS[package]
        print(
            f"kdo: the demo needs {package}, which is not installed. "
            f"Install it with: pip install 'keras-diffusion-opd[{extra}]'",
            file=sys.stderr,
        )
        return FAILED
