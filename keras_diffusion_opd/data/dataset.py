"""`PreparedDataset`: what `fit` takes."""

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.data.concatenation import concatenate_batches
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.row_source import RowSource
from keras_diffusion_opd.data.staleness import Staleness
from keras_diffusion_opd.data.teacher_checks import check_teacher
from keras_diffusion_opd.data.training_batch import TrainingBatch
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.provenance.differences import Difference, find_differences
from keras_diffusion_opd.validation import positive_int


class StaleBatchError(ValueError):
    """A batch was rolled out by a student that has since been updated more often than is allowed."""


class PreparedDataset(keras.utils.PyDataset):
    """Prepared batches in a deterministic order, refused when they are too old.

    The order is a function of (seed, epoch) alone: a resumed run continues with the same batches.

    Args:
        batches_or_store: a `PreparedBatch` (or `FlowBatch`), a list of them, or anything with `len()` and integer
            indexing that gives them (or raw objects, with `adapter`). Of a `TeacherStore` the rows of a batch are read
            when it is drawn; without `batch_size` every row is a batch.
        batch_size: rows per batch. None keeps the batches as they are; a number joins the rows of all
            batches (their lengths must agree) and cuts them anew, the last batch short.
        shuffle: whether to draw batches (or rows, with `batch_size`) in a new order every epoch.
        seed: int, of the order.
        max_staleness: None, or the number of updates that a student may have made since it generated a
            batch. Every batch then needs a stamp; `PreparedTrainer.fit` keeps count.
        adapter: None, or a function from a raw object of the source to a `PreparedBatch`: it owns
            corruption, alignment and the teacher's scores, and is called once for each batch drawn.
        check_teacher: whether to look, in the first batch drawn, for a teacher that says nothing: uniform
            everywhere, or everywhere the same, at 16 active positions or more. See
            `keras_diffusion_opd.data.check_teacher`.
        content_digest: whether checkpoints record a digest of the batches, so that a run is not resumed on
            others. It reads all of them once, at several hundred MB a second; of what is not in memory (a
            store without a `digest` of its own, an `adapter`) there is none.

    Raises:
        TypeError, ValueError: a source that cannot be indexed, is empty, or does not hold prepared batches.
        StaleBatchError: when a batch is drawn that is older than `max_staleness` updates.
        DegenerateTeacherError: when the first batch is drawn, of a teacher that says nothing.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import PreparedBatch, PreparedDataset

    rows = PreparedBatch.create(
        model_inputs={"token_ids": np.zeros((5, 3), "int32")},
        target_ids=np.zeros((5, 3), "int32"),
        loss_weights=np.ones((5, 3), "float32"),
    )
    dataset = PreparedDataset(rows, batch_size=2, shuffle=True, seed=1)
    assert len(dataset) == 3
    x, y, sample_weight = dataset[2]
    assert sample_weight.shape == (1, 3)
    ```
    """

    def __init__(
        self,
        batches_or_store: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        max_staleness: int | None = None,
        adapter: Callable[[Any], TrainingBatch] | None = None,
        check_teacher: bool = True,
        content_digest: bool = True,
    ) -> None:
        super().__init__()
        if max_staleness is not None and (not _is_whole(max_staleness) or max_staleness < 0):
            raise ValueError(f"`max_staleness` must be None or a whole number >= 0. Received {max_staleness!r}.")
        if not _is_whole(seed):
            raise TypeError(f"`seed` must be a whole number. Received {seed!r} of type {type(seed).__name__}.")
        if adapter is not None and not callable(adapter):
            raise TypeError(
                f"`adapter` must be None or a function from a raw item to a PreparedBatch. Received {adapter!r}."
            )
        self.batch_size = None if batch_size is None else positive_int("batch_size", batch_size)
        self.shuffle = shuffle
        self.seed = int(seed)
        self.max_staleness = max_staleness
        self.adapter = adapter
        self._unchecked = bool(check_teacher)
        self.policy_version = 0
        self.replacements = 0
        self.content_digest = bool(content_digest)
        self.on_policy = False  # a callback replaces the batches: who only makes the dataset again lacks them
        self.refresh_every: int | None = None  # epochs after which `RolloutRefresh` does
        self.used = Staleness()
        self._start = 0
        self._ahead: TrainingBatch | None = None
        self._epoch = 0
        self._prepared = False  # the source holds what an adapter has given
        self._digest: str | None = None
        self._source, self._rows = self._open(batches_or_store)

    def _open(self, source: Any) -> tuple[Any, TrainingBatch | None]:
        if isinstance(source, TrainingBatch):
            source = [source]
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise TypeError(
                "`batches_or_store` must be a PreparedBatch, a list of them or a store: something with len() and "
                f"integer indexing. Received {type(source).__name__}. A generator can go to fit() as it is."
            )
        if len(source) == 0:
            raise ValueError("`batches_or_store` is empty: there is nothing to train on.")
        if isinstance(source, RowSource) and self.adapter is not None:
            raise ValueError("`adapter` must be None for a store: its rows are prepared already.")
        if self.batch_size is None or isinstance(source, RowSource):
            return source, None
        rows = concatenate_batches([self._batch(source, index) for index in range(len(source))])
        return source, rows

    def _batch(self, source: Any, index: int) -> TrainingBatch:
        item = source[index]
        batch = item if self.adapter is None or self._prepared else self.adapter(item)
        if not isinstance(batch, TrainingBatch):
            whose = "`adapter` must return" if self.adapter is not None else "`batches_or_store` must hold"
            raise TypeError(
                f"{whose} PreparedBatch objects. Received {type(batch).__name__} for item {index}. "
                "Pass adapter=function from your raw items to PreparedBatch."
            )
        return batch.validate()

    def replace(self, batches_or_store: Any) -> None:
        """Put other batches in place of the present ones, as many as before: fresh rollouts.

        Raises:
            ValueError: another number of batches; Keras fixed the length of the epoch when `fit` began. Or an
                epoch that is resumed in its middle.
        """
        if self._start:
            raise ValueError(
                f"`replace` must wait for the next epoch: this one is resumed after {self._start} of its batches, and "
                "the rest of them belongs to it. Replace nothing where dataset.resumed_at is not 0."
            )
        self._put(batches_or_store, prepared=False)
        self.replacements += 1
        self.on_policy = True

    def _put(self, batches_or_store: Any, prepared: bool) -> None:
        before, was = len(self), self._prepared
        self._prepared = prepared
        try:
            source, rows = self._open(batches_or_store)
        except BaseException:
            self._prepared = was
            raise
        after = self._batches_of(source, rows)
        if after != before:
            self._prepared = was
            raise ValueError(f"`replace` must keep the number of batches, {before}. Received {after}.")
        self._source, self._rows = source, rows

    def held(self) -> list[TrainingBatch]:
        """The present batches, or their rows as one, in the order of the source: what `restore` takes."""
        if self._rows is not None:
            return [self._rows]
        return [self._batch(self._source, index) for index in range(len(self._source))]

    def held_for(self, epoch: int, batch: int) -> list[TrainingBatch]:
        """What a run that goes on at `batch` of `epoch` must be given: nothing where it rolls out anew, or owns all."""
        due = not batch and self.refresh_every and epoch % self.refresh_every == 0 and self.staleness() != 0
        return self.held() if self.on_policy and not due else []

    def restore(self, batches: list[TrainingBatch], replacements: int) -> None:
        """Put batches back that `held` gave in an earlier run, and the count of replacements before them."""
        self._put(batches, prepared=True)
        self.replacements, self.on_policy = int(replacements), True

    def settings(self) -> dict[str, Any]:
        """What decides order, length and content, as JSON values: for records and comparisons."""
        return {
            "digest": self.digest(),
            "batches": len(self),
            "rows": None if self._rows is None else self._rows.rows,
            **({"store": self._source.describe()} if isinstance(self._source, RowSource) else {}),
            "batch_size": self.batch_size,
            "shuffle": bool(self.shuffle),
            "seed": self.seed,
            "max_staleness": self.max_staleness,
            "replacements": self.replacements,
        }

    def differences(self, recorded: Mapping[str, Any]) -> list[Difference]:
        """In what `settings` of an earlier run differ; contents that a callback replaces are not compared."""
        leave_out = ["replacements"]
        if recorded.get("digest") is None or self.on_policy:
            leave_out.append("digest")
        return find_differences(recorded, self.settings(), "dataset", leave_out)

    def digest(self) -> str | None:
        """The identity of the batches; None where they are replaced as the student learns, or not in memory."""
        if not self.content_digest or self.on_policy:
            return None
        if self._digest is None:
            if self._rows is None and (self.adapter is not None or not isinstance(self._source, list | tuple)):
                known = getattr(self._source, "digest", None)
                return known if isinstance(known, str) else None
            self._digest = digest([list(batch.as_fit()) for batch in self.held()])
        return self._digest

    def set_epoch(self, epoch: int) -> None:
        """Choose the order: `PreparedTrainer.fit` calls it at the beginning of every epoch."""
        self._epoch = int(epoch)
        self.used.begin()

    def mean_staleness(self) -> float | None:
        """Updates between rollout and use, mean over the batches used in this epoch; None without stamps."""
        return self.used.mean()

    @property
    def resumed_at(self) -> int:
        """Batches of the present epoch that an earlier run has done; 0 where it began in this one."""
        return self._start

    def start_at(self, batch: int) -> None:
        """Where the present epoch begins, of which the batches before were trained on in an earlier run.

        Those are drawn, since Keras walks whole epochs, but not looked at: `dataset[index]` gives the batch
        at `batch` in their place, so that no adapter or teacher works for nothing.
        """
        self._start, self._ahead = batch, None

    def _order(self, count: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(count)
        return np.random.Generator(
            np.random.Philox(key=np.array([self.seed % 2**64, self._epoch], "uint64"))
        ).permutation(count)

    def _batches_of(self, source: Any, rows: TrainingBatch | None) -> int:
        count = len(source) if rows is None else int(rows.rows or 0)
        cut = self.batch_size is not None and (rows is not None or isinstance(source, RowSource))
        return -(-count // int(self.batch_size or 1)) if cut else count

    def __len__(self) -> int:
        return self._batches_of(self._source, self._rows)

    @property
    def num_batches(self) -> int:
        """Number of batches in an epoch."""
        return len(self)

    def batch(self, index: int) -> TrainingBatch:
        """The batch at position `index` of the present epoch's order; raises where it is too old."""
        if not 0 <= index < len(self):
            raise IndexError(f"Batch {index} of {len(self)}.")
        if isinstance(self._source, RowSource):
            batch: TrainingBatch = self._source.batch(self._chosen(index, len(self._source)).tolist()).validate()
        elif self._rows is None:
            batch = self._batch(self._source, int(self._order(len(self))[index]))
        else:
            chosen = self._chosen(index, int(self._rows.rows or 0))
            batch = self._rows.map(lambda array: _take_rows(array, chosen))
        self._refuse_stale(batch, index)
        if batch.stamp is not None:
            self.used.drawn(index, batch.stamp.policy_version)
        if self._unchecked and isinstance(batch, PreparedBatch):
            check_teacher(batch, least=16)
            self._unchecked = False
        return batch

    def _chosen(self, index: int, rows: int) -> np.ndarray:
        """int (batch_size,) or fewer: the rows of batch `index` of the present epoch."""
        size = self.batch_size or 1
        return self._order(rows)[index * size : (index + 1) * size]

    def __getitem__(self, index: int) -> tuple[Any, Any, Any]:
        """`(x, y, sample_weight)` of `batch(index)`."""
        if index > self._start or not self._start:
            return self.batch(index).as_fit()
        batch = self._ahead or self.batch(min(self._start, len(self) - 1))
        self._ahead = batch if index < self._start else None
        return batch.as_fit()

    def staleness(self) -> int | None:
        """Updates since the oldest batch was generated; None where a batch has no stamp."""
        if isinstance(self._source, RowSource):
            oldest = self._source.oldest_policy_version()
            return None if oldest is None else self.policy_version - oldest
        if self._rows is not None:
            stamps = [self._rows.stamp]
        else:
            stamps = [self._batch(self._source, index).stamp for index in range(len(self._source))]
        ages = [None if stamp is None else stamp.staleness(self.policy_version) for stamp in stamps]
        return None if None in ages else max(age for age in ages if age is not None)

    def _refuse_stale(self, batch: TrainingBatch, index: int) -> None:
        if self.max_staleness is None:
            return
        if batch.stamp is None:
            raise StaleBatchError(
                f"Batch {index} has no stamp, so its age cannot be told, and max_staleness={self.max_staleness} was "
                "asked for. Pass stamp=Stamp(policy_version=...) to PreparedBatch.create."
            )
        age = batch.stamp.staleness(self.policy_version)
        if age < 0:
            raise StaleBatchError(
                f"Batch {index} was generated by policy version {batch.stamp.policy_version}, and the student is at "
                f"{self.policy_version}: it comes from another run, or compile() began the count anew. Roll out again."
            )
        if age > self.max_staleness:
            raise StaleBatchError(
                f"Batch {index} was generated {age} updates ago (policy version {batch.stamp.policy_version}, now "
                f"{self.policy_version}); max_staleness is {self.max_staleness}. Roll out again, or allow more."
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _take_rows(array: Any, rows: np.ndarray) -> Any:
    return array[rows] if isinstance(array, np.ndarray) else keras.ops.take(array, rows, axis=0)
