"""TensorFlow: differentiate with a tape, compile with `tf.function`. See `window.py`."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_diffusion_opd.data.targets import attach_shared
from keras_diffusion_opd.trainers.checks import add_violations, no_violations, raise_violations, sound


class BackendWindow:
    """The TensorFlow half of `WindowTrainer`."""

    # The rest of the trainer, as this half sees it.
    micro_batch: Any
    updated: Any
    violation_messages: Any
    gradient_scale: Any
    mean_gradients: Any
    sum_dtype: Any
    weight_dtype: Any
    optimizer: Any
    trainable_variables: Any
    get_metrics_result: Any
    distribute_strategy: Any
    on_empty: str
    steps_per_execution: int
    jit_compile: bool
    run_eagerly: bool
    window_done: Any

    def _micro(self, sums: list[Any], weight: Any, table: Any, data: Any, index: Any) -> Any:
        """One micro-batch added to the window's sums."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            primary, found = self.micro_batch(x, y, sample_weight, True)
            scale = self.gradient_scale(primary.weight)
            objective = self.optimizer.scale_loss(primary.total * scale)
        gradients = tape.gradient(objective, [v.value for v in self.trainable_variables])
        # The gradient of an embedding is sparse (IndexedSlices): made dense to be added.
        sums = [
            a if g is None else a + tf.cast(tf.convert_to_tensor(g), a.dtype) / scale
            for a, g in zip(sums, gradients, strict=True)
        ]
        table = add_violations(self.violation_messages(), table, found, index)
        return sums, weight + tf.cast(primary.weight, weight.dtype), table

    def _apply(self, sums: list[Any], weight: Any, table: Any) -> Any:
        """The update of the window: divided once, applied once, or not at all."""
        gradients = self.mean_gradients(sums, weight)
        moved = tf.logical_and(sound(table), tf.logical_or(weight > 0, self.on_empty == "zero_grad"))

        def update() -> Any:
            self.optimizer.apply(gradients, self.trainable_variables)
            self.updated()
            return tf.constant(0)

        tf.cond(moved, update, lambda: tf.constant(0))
        return self.get_metrics_result(), moved, table

    def _start(self) -> Any:
        sums = [tf.zeros(v.shape, self.sum_dtype(v)) for v in self.trainable_variables]
        return sums, tf.zeros((), self.weight_dtype()), no_violations(self.violation_messages())

    def _single(self, data: Any) -> Any:
        """A window of one micro-batch in one graph."""
        sums, weight, table = self._start()
        return self._apply(*self._micro(sums, weight, table, data, 0))

    def _evaluate_batch(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        _, found = self.micro_batch(x, y, sample_weight, False)
        checks = self.violation_messages()
        return self.get_metrics_result(), add_violations(checks, no_violations(checks), found, 0)

    def _graph(self, function: Any) -> Any:
        if self.run_eagerly:
            return function
        plain = tf.autograph.experimental.do_not_convert(function)
        return tf.function(plain, reduce_retracing=True, jit_compile=self.jit_compile)

    def _refuse_replicas(self) -> None:
        replicas = self.distribute_strategy.num_replicas_in_sync
        if replicas > 1:
            raise ValueError(
                f"tf.distribute with {replicas} replicas is not supported: Keras clips gradients before they are "
                "reduced, which is another update. Use one replica, or the JAX backend with keras.distribution."
            )

    def _build_on(self, data: Any) -> None:
        """Create the variables of student and optimizer outside of any graph."""
        if not all(layer.built for layer in self._flatten_layers()):  # type: ignore[attr-defined]
            self(keras.utils.unpack_x_y_sample_weight(data)[0], training=False)  # type: ignore[operator]
        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)

    def make_train_function(self, force: bool = False) -> None:
        """Build `train_function(iterator) -> logs`, one window per call."""
        if getattr(self, "train_function", None) is not None and not force:
            return
        self._refuse_replicas()
        single, micro = self._graph(self._single), self._graph(self._micro)
        apply, start = self._graph(self._apply), self._graph(self._start)
        k = self.steps_per_execution

        def train_function(iterator: Any) -> Any:
            batches = _draw(iterator)
            data = next(batches)
            self._build_on(data)
            if k == 1:
                return self._finish(single(data))
            sums = micro(*start(), data, tf.constant(0))
            for index in range(1, k):
                data = next(batches, None)
                if data is None:
                    break  # the epoch's last window is short
                sums = micro(*sums, data, tf.constant(index))
            return self._finish(apply(*sums))

        self.train_function = train_function

    def _finish(self, result: Any) -> Any:
        logs, moved, table = result
        raise_violations(self.violation_messages(), table.numpy())
        self.window_done(bool(moved.numpy()))
        return logs

    def pass_over(self, logs: Any, iterator: Any) -> Any:
        """In place of `train_function` for a window that was done before: draws its batches, nothing else."""
        batches = _draw(iterator)
        for _ in range(self.steps_per_execution):
            next(batches, None)
        return logs

    def make_test_function(self, force: bool = False) -> None:
        """Build `test_function(iterator) -> logs`."""
        if getattr(self, "test_function", None) is not None and not force:
            return
        self._refuse_replicas()
        step = self._graph(self._evaluate_batch)
        k = self.steps_per_execution

        def test_function(iterator: Any) -> Any:
            batches = _draw(iterator)
            data, logs = next(batches), None
            for index in range(k):
                if index:
                    data = next(batches, None)
                if data is None:
                    break
                logs, table = step(data)
                raise_violations(self.violation_messages(), table.numpy(), evaluating=True)
            return logs

        self.test_function = test_function


def _draw(iterator: Any) -> Iterator[Any]:
    """Batches of a `tf.data` iterator as a Python iterator that ends with StopIteration."""
    return _Drawn(iter(iterator))


class _Drawn:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator

    def __iter__(self) -> "_Drawn":
        return self

    def __next__(self) -> Any:
        try:
            data = next(self.iterator)
        except tf.errors.OutOfRangeError as error:
            raise StopIteration from error
        # Keras marks a missing part of a batch as an empty Optional.
        data = keras.tree.map_structure(lambda i: None if isinstance(i, tf.experimental.Optional) else i, data)
        return attach_shared(data)


def relaxed_dataset(dataset: keras.utils.PyDataset) -> tf.data.Dataset:
    """A PyDataset as a `tf.data.Dataset` in which only ranks are fixed, drawn without reading ahead.

    Keras would derive the signature from the first two batches, and refuse a third of another length;
    and it would prefetch, which makes rollouts stale that are generated when they are drawn.
    """
    count = dataset.num_batches
    if not count:
        raise ValueError("The dataset is empty: there is nothing to train on.")
    signature = keras.tree.map_structure(
        lambda a: tf.TensorSpec([None] * len(a.shape), keras.backend.standardize_dtype(a.dtype)),
        _tuples(dataset[0]),
    )

    def walk() -> Iterator[Any]:
        for index in range(count):
            yield _tuples(dataset[index])
        dataset.on_epoch_end()

    walked = tf.data.Dataset.from_generator(walk, output_signature=signature)
    return walked.apply(tf.data.experimental.assert_cardinality(count))


def _tuples(tree: Any) -> Any:
    """The same nest with tuples for lists: `tf.data` takes a list for a tensor."""
    if isinstance(tree, dict):
        return {key: _tuples(child) for key, child in tree.items()}
    return tuple(_tuples(child) for child in tree) if isinstance(tree, list | tuple) else tree
