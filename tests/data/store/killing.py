"""A program: writers of a store that are killed by SIGKILL, and started again until they end.

It imports once and forks every writer. Twenty are killed at random moments; one is killed at every single step
to the disk (write, fsync, rename) in turn.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from keras_diffusion_opd.provenance import file_digest, files
from tests.stores import batches, content, write

GIVEN = batches(8, rows=4, length=60, k=32, stamped=True)
WHOLE = "whole"


def child(folder: Path, *, slow: float = 0.0, die_at: int | None = None) -> int:
    """Start a writer; it dies by its own hand at a step to the disk, if that is asked for."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _count_steps(die_at)
        write(folder, _slowly(slow), rows_per_shard=8)
    except BaseException as error:
        print(f"writer: {error!r}", file=sys.stderr)
        os._exit(3)
    os._exit(0)


class _slowly(list):  # noqa: N801
    """The batches, with a pause before each."""

    def __init__(self, seconds: float) -> None:
        super().__init__(GIVEN)
        self.seconds = seconds

    def __iter__(self):
        for batch in GIVEN:
            time.sleep(self.seconds)
            yield batch


def _count_steps(die_at: int | None) -> None:
    steps = 0

    def counted(function):
        def call(*arguments):
            nonlocal steps
            steps += 1
            if steps == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    if die_at is not None:
        files.os.fsync, files.os.replace = counted(os.fsync), counted(os.replace)


def ended(pid: int) -> bool:
    """Whether a writer came to its end, rather than to ours."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        raise SystemExit("a writer failed")
    return True


def main(folder: Path) -> None:
    """Kill, start again, compare; prints one line of JSON."""
    start = time.monotonic()
    whole = write(folder / WHOLE, GIVEN, rows_per_shard=8)
    ended(child(folder / "timing", slow=0.004))
    span = time.monotonic() - start
    expected, chance = content(folder / WHOLE), random.Random(0)
    different, problems, early, inside = [], [], 0, 0

    def settle(path: Path) -> None:
        nonlocal early, inside
        names = [p.name for p in path.iterdir()] if path.exists() else []
        early += "store.json" not in names
        inside += any(name.startswith(".shard") for name in names)
        ended(child(path))
        if content(path) != expected:
            different.append(path.name)

    for number in range(20):
        path = folder / f"random-{number}"
        pid = child(path, slow=0.004)
        time.sleep(chance.uniform(0.0, 0.7 * span))
        os.kill(pid, signal.SIGKILL)
        ended(pid)
        settle(path)
    at = 0
    while True:
        path, at = folder / f"step-{at}", at + 1
        if ended(child(path, die_at=at)):
            break
        settle(path)
    from keras_diffusion_opd.data import TeacherStore

    problems += whole.verify() + TeacherStore.open(folder / "random-0").verify()
    print(
        json.dumps(
            {
                "random kills": 20,
                "kills at a step": at - 1,
                "kills before the end": early,
                "inside a shard": inside,
                "shards": len(list((folder / WHOLE).glob("*.safetensors"))),
                "different": different,
                "problems": problems,
                "manifest": file_digest(folder / WHOLE / "store.json"),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
