"""Small teacher stores for tests: batches whose targets are there already, so that nothing is compiled."""

from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.data import DenseTargets, PackedTopK, PreparedBatch, Stamp, TeacherStore, TopKTargets

VOCABULARY = 90
TEACHER = {"teacher": "1" * 64}


def top_k(logits: np.ndarray, k: int) -> TopKTargets:
    """Top-k targets in float64 NumPy, with the tail summed itself."""
    log_p = logits - logits.max(-1, keepdims=True)
    log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    order = np.argsort(-log_p, axis=-1, kind="stable")
    chosen = np.take_along_axis(log_p, order[..., :k], -1)
    rest = np.take_along_axis(log_p, order[..., k:], -1)
    with np.errstate(divide="ignore"):
        tail = np.log(np.exp(rest).sum(-1))
    return TopKTargets(order[..., :k].astype("int32"), chosen.astype("float32"), log_tail=tail.astype("float32"))


def batches(
    count: int = 4, rows: int = 3, length: int = 5, k: int = 8, *, seed: int = 0, stamped: bool = False
) -> list[PreparedBatch]:
    """`count` batches with top-k targets."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        ids = rng.integers(0, VOCABULARY, (rows, length)).astype("int32")
        weights = rng.integers(0, 3, (rows, length)).astype("float32")
        weights[:, 0] = 1.0
        made.append(
            PreparedBatch.create(
                model_inputs={"token_ids": np.where(weights > 0, VOCABULARY - 1, ids), "time": rng.random(rows)},
                target_ids=ids,
                loss_weights=weights,
                teacher=top_k(rng.normal(0, 3, (rows, length, VOCABULARY)), k),
                stamp=Stamp(policy_version=number + 2, seed=seed) if stamped else None,
            )
        )
    return made


def write(path: Any, given: list[PreparedBatch] | None = None, **options: Any) -> TeacherStore | None:
    """A store of `given` batches, four rows in a shard."""
    given = batches() if given is None else given
    settings = {"fingerprints": TEACHER, "rows_per_shard": 4, "progress": False, "metadata": {"corpus": "random"}}
    packing = PackedTopK(given[0].teacher.ids.shape[-1], VOCABULARY) if "targets" not in options else None
    return TeacherStore.write(path, given, **{"targets": packing, **settings, **options})


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a store, hidden ones too."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def dense(rows: int = 3, length: int = 5, vocabulary: int = 20) -> PreparedBatch:
    """One batch with a dense teacher."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, vocabulary, (rows, length)).astype("int32")
    logits = rng.normal(0, 2, (rows, length, vocabulary)).astype("float32")
    return PreparedBatch.create(
        model_inputs=ids, target_ids=ids, loss_weights=np.ones((rows, length), bool), teacher=DenseTargets(logits)
    )
