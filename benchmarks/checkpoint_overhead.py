"""What ProvenanceCheckpoint costs: training with a checkpoint every 50 windows against training without.

    KERAS_BACKEND=jax python benchmarks/checkpoint_overhead.py

One trainer of the model of about 20 million parameters, AdamW (240 MB of state), in turns with and without the
callback, so that a busy machine slows both alike. A turn with it makes the checkpoints that its updates call for,
those of its epoch's end excepted: the turn is a part of an epoch that goes on. The time until the last one is on
the disk is a part of the turn.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from _common import RESULTS, alternate, machine, ratios, spread, table, versions, write_json
from _masked_lm import LENGTH, ROWS, SIZES, batches, build

from keras_diffusion_opd.callbacks import ProvenanceCheckpoint
from keras_diffusion_opd.data import PreparedDataset
from keras_diffusion_opd.losses import DistillationLoss
from keras_diffusion_opd.trainers import PreparedTrainer


class Timed(ProvenanceCheckpoint):
    """Notes how long the training waits for each checkpoint, and leaves out the one of the epoch's end."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.waited: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        if self._trainer.policy_version == self._saved_updates:
            self.waited.append(time.perf_counter() - before)

    def _may_be_last(self) -> bool:
        return False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Nothing is saved here: what is measured are the checkpoints within the epoch."""

    def on_train_end(self, logs: Any = None) -> None:
        self._writer.join()


def measure(size: str, every: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Ratio of the times of `every` updates, with one checkpoint and with none."""
    trainer = PreparedTrainer(build(size), DistillationLoss(temperature=2.0))
    trainer.compile(keras.optimizers.AdamW(1e-4))
    data = batches(size, 4)
    dataset = PreparedDataset([data[i % len(data)] for i in range(every)], content_digest=False)
    trainer.fit(PreparedDataset(data), verbose=0)  # compiles
    waited: list[float] = []

    def with_checkpoints() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        trainer.optimizer.iterations.assign(every // 2)  # the checkpoint falls into the middle of the turn
        checkpoint = Timed(folder, every=every)
        trainer.fit(dataset, verbose=0, callbacks=[checkpoint])
        waited.extend(checkpoint.waited)

    turns = {"with": with_checkpoints, "without": lambda: trainer.fit(dataset, verbose=0)}
    times = alternate(turns, rounds)
    stored = sum(file.stat().st_size for path in folder.glob("step-*") for file in path.iterdir())
    return {
        "size": size,
        "parameters": trainer.student.count_params(),
        "every": every,
        "checkpoint_bytes": stored,
        "time_ratio": ratios(times["with"].wall, times["without"].wall),
        "processor_time_ratio": ratios(times["with"].processor, times["without"].processor),
        "seconds_per_update": spread([seconds / every for seconds in times["without"].wall]),
        "seconds_that_training_waits": spread(waited),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "checkpoint_overhead.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.size, options.every, options.rounds, Path(folder, "checkpoints"))
    ratio, waits = result["time_ratio"], result["seconds_that_training_waits"]
    headers = ["model", "checkpoint", "every", "ms per update", "training waits", "time ratio"]
    row = [
        f"{result['parameters'] / 1e6:.1f}M",
        f"{result['checkpoint_bytes'] / 1e6:.0f} MB",
        options.every,
        f"{1e3 * result['seconds_per_update']['median']:.0f}",
        f"{1e3 * waits['median']:.0f} ms",
        f"{ratio['median']:.3f} ({ratio['lower_quartile']:.3f} to {ratio['upper_quartile']:.3f})",
    ]
    print(table(headers, [row]))
    named = versions("keras", keras.backend.backend(), "numpy", "keras-hub")
    settings = {"rows": ROWS, "length": LENGTH, "rounds": options.rounds, "backend": keras.backend.backend()}
    write_json(options.output, {"settings": settings, "machine": machine(), "versions": named, "results": [result]})


if __name__ == "__main__":
    main()
