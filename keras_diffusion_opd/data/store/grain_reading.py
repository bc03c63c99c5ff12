"""A store read through grain, which is imported here alone."""

from typing import TYPE_CHECKING, Any

from keras_diffusion_opd.data.prepared_batch import PreparedBatch

if TYPE_CHECKING:
    from keras_diffusion_opd.data.store.teacher_store import TeacherStore


class RowDataSource:
    """The rows of a store, each a batch of one row; a grain RandomAccessDataSource."""

    def __init__(self, store: "TeacherStore") -> None:
        self.store = store

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> PreparedBatch:
        return self.store[int(index)]

    def __repr__(self) -> str:
        # grain keeps it with a position, and refuses the position for a source that says something else.
        return f"TeacherStore({self.store.digest})"


class _RowNumbers(RowDataSource):
    """The numbers of the rows: the rows of a batch are then read together, and padded to one length."""

    def __getitem__(self, index: int) -> Any:
        return int(index)


def data_loader(
    store: "TeacherStore",
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    num_epochs: int | None,
    shard_options: Any,
    drop_remainder: bool,
) -> Any:
    """See `TeacherStore.grain_loader`."""
    try:
        import grain.python as grain
    except ImportError as error:
        raise ImportError(
            "Reading through grain needs grain. Install it with: pip install 'keras-diffusion-opd[grain]'"
        ) from error
    sampler = grain.IndexSampler(
        num_records=len(store),
        shard_options=grain.NoSharding() if shard_options is None else shard_options,
        shuffle=shuffle,
        num_epochs=num_epochs,
        seed=seed,
    )
    batch = grain.Batch(batch_size=batch_size, drop_remainder=drop_remainder, batch_fn=store.batch)
    return grain.DataLoader(data_source=_RowNumbers(store), sampler=sampler, operations=[batch], worker_count=0)
