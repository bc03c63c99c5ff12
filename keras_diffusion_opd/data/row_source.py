"""What a dataset needs of rows that are not in memory."""

import abc
from collections.abc import Sequence
from typing import Any

from keras_diffusion_opd.data.prepared_batch import PreparedBatch


class RowSource(abc.ABC):
    """Rows that can be read in any order, some at a time; `source[i]` is a batch of one row."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abc.abstractmethod
    def batch(self, indices: Sequence[int]) -> PreparedBatch:
        """The rows at `indices`, in that order, as one batch."""

    @abc.abstractmethod
    def oldest_policy_version(self) -> int | None:
        """The smallest policy version of any row's stamp; None where a row has no stamp."""

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """What names the rows by their content."""

    def __getitem__(self, index: int) -> PreparedBatch:
        """The row at `index` as a batch of one row; IndexError from `len` on."""
        if not 0 <= index < len(self):
            raise IndexError(f"Row {index} of {len(self)}.")
        return self.batch([index])

    def describe(self) -> dict[str, Any]:
        """What a record of a run says of the rows."""
        return {"rows": len(self), "digest": self.digest}
