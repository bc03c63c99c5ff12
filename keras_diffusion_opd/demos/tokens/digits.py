"""The scans, and the fixed split into training and held-out."""

import dataclasses

import numpy as np

LEVELS = 17
PIXELS = 64
SIDE = 8
CLASSES = 10
HELD_OUT_PER_CLASS = 36
# The split is part of the task: a seed of the run must not move scans between training and held-out.
_SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True)
class Scans:
    """Scans as tokens.

    Args:
        token_ids: int32 (N, 64), grey levels 0 to 16, row by row.
        class_ids: int32 (N,), 0 to 9.
    """

    token_ids: np.ndarray
    class_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.class_ids)


def load_scans() -> tuple[Scans, Scans]:
    """`(training, held_out)`: 1,437 scans and 360, 36 of each class; always the same ones."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.Generator(np.random.Philox(_SPLIT_SEED)).permutation(len(digits.target))
    tokens = digits.images.reshape(-1, PIXELS).astype("int32")[order]
    classes = digits.target.astype("int32")[order]
    held_out = np.zeros(len(classes), bool)
    for c in range(CLASSES):
        held_out[np.flatnonzero(classes == c)[:HELD_OUT_PER_CLASS]] = True
    return Scans(tokens[~held_out], classes[~held_out]), Scans(tokens[held_out], classes[held_out])


def one_of_each(scans: Scans, rows: int) -> np.ndarray:
    """The first `rows` scans of every class, int32 (rows * 10, 64), classes running fastest."""
    first = np.stack([np.flatnonzero(scans.class_ids == c)[:rows] for c in range(CLASSES)], axis=1)
    return scans.token_ids[first.ravel()]
