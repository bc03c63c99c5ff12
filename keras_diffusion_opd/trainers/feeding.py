"""Whatever a user has for data, as something that Keras's data adapters take."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import is_array
from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.data.training_batch import TrainingBatch
from keras_diffusion_opd.trainers.stateful_iterator import StatefulIterator, is_stateful


class Feed(NamedTuple):
    """Data ready for `keras.Model.fit`."""

    x: Any
    dataset: PreparedDataset | None = None  # that wants to know epoch and policy version
    ordered: bool = False  # it decides on its own order
    iterator: StatefulIterator | None = None  # that can be put back where it was


def feed(
    kind: type[TrainingBatch],
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    shuffle: Any = False,
) -> Feed:
    """Recognise the data; ValueError with what is taken for anything else.

    Rows that are given whole (a batch of the trainer's `kind`, or arrays) are cut into batches of `batch_size`, 32 by
    default as in Keras. Keras's own adapter for arrays refuses a weight per token next to a nested `y`.
    """
    if isinstance(x, TrainingBatch) or y is not None:
        rows = single(kind, x, y, sample_weight)
        x, y, sample_weight = (
            PreparedDataset(rows, batch_size=32 if batch_size is None else batch_size, shuffle=bool(shuffle)),
            None,
            None,
        )
    _alone(x, y, sample_weight)
    if isinstance(x, list | tuple) and x and all(isinstance(b, TrainingBatch) for b in x):
        x = PreparedDataset(list(x))
    if isinstance(x, PreparedDataset):
        return Feed(_relaxed(x), dataset=x, ordered=True)
    if isinstance(x, keras.utils.PyDataset):
        return Feed(_Unpacked(x))
    origin = type(x).__module__
    if origin.startswith("tensorflow"):
        return Feed(x)
    if origin.startswith("grain") and hasattr(x, "map"):
        return Feed(x.map(as_fit))
    if is_stateful(x):
        stateful = StatefulIterator(x, as_fit)
        return Feed((item for item in stateful), iterator=stateful)  # Keras takes generators, not iterators
    if isinstance(x, Iterator):
        return Feed(as_fit(item) for item in x)
    if isinstance(x, Iterable) and hasattr(x, "__len__") and not (isinstance(x, dict | str | Sequence) or is_array(x)):
        return Feed(_relaxed(_Passes(x)), ordered=True)
    if isinstance(x, Iterable) and origin.startswith("grain"):
        return Feed(as_fit(item) for item in x)
    raise ValueError(
        f"`x` must be a PreparedDataset, {kind.__name__} or list of them, a generator, keras.utils.PyDataset, "
        f"tf.data.Dataset, grain dataset or torch DataLoader that yields {kind.__name__} or batch.as_fit(); or arrays "
        f"together with `y` and `sample_weight`. Received {type(x).__name__}."
    )


def refuse_fit_arguments(x: Any, y: Any, arguments: dict[str, Any]) -> None:
    """ValueError for arguments of `fit` that would be ignored, or could not do what they say."""
    if arguments.get("class_weight") is not None:
        raise ValueError("`class_weight` has no meaning for tokens. Put the weights into `loss_weights`.")
    if arguments.get("validation_split"):
        raise ValueError(
            f"`validation_split` must be 0: rows are split before they are prepared, so that no sample is on both "
            f"sides. Received {arguments['validation_split']}. Pass validation_data=..."
        )
    whole = isinstance(x, TrainingBatch) or y is not None
    if arguments.get("batch_size") is not None and not whole:
        mend = "PreparedDataset(..., batch_size=...)" if isinstance(x, PreparedDataset | list) else "the source itself"
        raise ValueError(
            f"`batch_size` must be None for a {type(x).__name__}, which yields whole batches. Received "
            f"{arguments['batch_size']}. Set it in {mend}."
        )


def refuse_second_walk(x: Any, arguments: dict[str, Any]) -> None:
    """ValueError where a generator would have to be walked again for every epoch."""
    epochs = arguments.get("epochs", 1) - arguments.get("initial_epoch", 0)
    if isinstance(x, Iterator) and epochs > 1 and arguments.get("steps_per_epoch") is None:
        raise ValueError(
            f"A generator can be walked only once, and epochs={arguments['epochs']} were asked for. Pass "
            "steps_per_epoch=..., or a list of batches or PreparedDataset, which can be walked again."
        )


def single(kind: type[TrainingBatch], x: Any, y: Any, sample_weight: Any) -> TrainingBatch:
    """One validated batch from a batch or, of the kind that the trainer takes, from arrays."""
    if isinstance(x, TrainingBatch):
        _alone(x, y, sample_weight)
        return x.validate()
    return kind.from_fit(x, y, sample_weight).validate()


def as_fit(item: Any) -> Any:
    """`(x, y, sample_weight)` of a batch; anything else as it is."""
    return item.as_fit() if isinstance(item, TrainingBatch) else item


def _alone(x: Any, y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"`y` and `sample_weight` must be None when `x` is a {type(x).__name__}: the batches hold them already."
        )


def _relaxed(dataset: keras.utils.PyDataset) -> Any:
    """On TensorFlow a `tf.data.Dataset` whose batches may differ in shape; elsewhere the dataset itself."""
    if backend.BACKEND != "tensorflow":
        return dataset
    from keras_diffusion_opd.trainers._tensorflow import relaxed_dataset

    return relaxed_dataset(dataset)


class _Unpacked(keras.utils.PyDataset):
    """Another PyDataset, its items as `(x, y, sample_weight)`."""

    def __init__(self, inner: keras.utils.PyDataset) -> None:
        super().__init__(
            workers=inner.workers,
            use_multiprocessing=inner.use_multiprocessing,
            max_queue_size=inner.max_queue_size,
        )
        self.inner = inner

    @property
    def num_batches(self) -> int | None:
        return self.inner.num_batches

    def __getitem__(self, index: int) -> Any:
        return as_fit(self.inner[index])

    def on_epoch_begin(self) -> None:
        self.inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.inner.on_epoch_end()


class _Passes(keras.utils.PyDataset):
    """A sized iterable that is walked once per epoch, front to back (a torch DataLoader, say)."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self._walk: Iterator[Any] = iter(())

    @property
    def num_batches(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            self._walk = iter(self.source)
        return as_fit(next(self._walk))


class DatasetClock(keras.callbacks.Callback):
    """Tells a `PreparedDataset` which epoch it is and how many updates the student has made; logs its staleness."""

    def __init__(self, dataset: PreparedDataset) -> None:
        super().__init__()
        self.dataset = dataset

    def on_train_begin(self, logs: Any = None) -> None:
        """Tell the version."""
        self.dataset.policy_version = self.model.policy_version

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tell the epoch and the version."""
        self.dataset.set_epoch(epoch)
        self.dataset.policy_version = self.model.policy_version

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log how old the epoch's batches were, in updates, where they have stamps."""
        staleness = self.dataset.mean_staleness()
        if logs is not None and staleness is not None:
            logs["staleness"] = staleness

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the ages of the window's batches, and tell the new version."""
        self.dataset.used.trained(batch + 1, self.dataset.policy_version)
        self.dataset.policy_version = self.model.policy_version


class IteratorClock(keras.callbacks.Callback):
    """Tells a `StatefulIterator` how many of its items have been trained on."""

    def __init__(self, iterator: StatefulIterator) -> None:
        super().__init__()
        self.iterator, self._done = iterator, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from 0."""
        self._done = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The window has ended."""
        self.iterator.trained(batch + 1 - self._done)
        self._done = batch + 1

    def resume_at(self, batch: int) -> None:
        """`batch` items of this epoch were trained on in an earlier run."""
        self._done = batch
