"""What datasets, `fit` and checkpoints need of a batch, whatever it holds."""

import abc
from typing import Any, Self

from keras_diffusion_opd.data.stamp import Stamp


class TrainingBatch(abc.ABC):
    """Rows to train on: checked when they are made, and known to `fit` as `(x, y, sample_weight)`.

    `PreparedBatch` (tokens) and `FlowBatch` (samples of a flow) are the two kinds. Every array of a batch
    has its rows first.
    """

    stamp: Stamp | None

    @abc.abstractmethod
    def validate(self) -> Self:
        """The batch itself; TypeError or ValueError where structure, shapes, dtypes or values are wrong."""

    @abc.abstractmethod
    def as_fit(self) -> tuple[Any, dict[str, Any], Any]:
        """`(x, y, sample_weight)` as `keras.Model.fit` takes them; `from_fit` is the inverse but for the stamp."""

    @classmethod
    @abc.abstractmethod
    def from_fit(cls, x: Any, y: Any, sample_weight: Any, stamp: Stamp | None = None) -> Self:
        """The batch behind `(x, y, sample_weight)`; ValueError where `as_fit` gave nothing of the kind."""

    @abc.abstractmethod
    def map(self, function: Any) -> Self:
        """The same batch with `function` applied to every array. Does not validate."""

    @property
    @abc.abstractmethod
    def rows(self) -> int | None:
        """Number of rows B, None where it is not known statically."""
