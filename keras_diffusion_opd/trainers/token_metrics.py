"""Metrics that look at tokens: what `compile(metrics=...)` of a token trainer takes."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.targets import DenseTargets
from keras_diffusion_opd.losses.weighted_sum import WeightedSum
from keras_diffusion_opd.metrics.distillation import TokenMetric
from keras_diffusion_opd.metrics.targets import TargetsMetric
from keras_diffusion_opd.trainers.metric_set import MetricSet


def as_metric(metric: Any) -> Any:
    """A `keras.metrics.Metric` from one, from a name, or from a function `(y_true, y_pred) -> values`."""
    if isinstance(metric, keras.metrics.Metric):
        return metric
    if isinstance(metric, type):
        raise TypeError(
            f"`metrics` must hold metrics, not their classes. Received the class {metric.__name__}: write "
            f"{metric.__name__}()."
        )
    if metric in ("accuracy", "acc"):
        return keras.metrics.SparseCategoricalAccuracy(name=metric)
    if isinstance(metric, str):
        metric = keras.metrics.get(metric)
        return metric if isinstance(metric, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(metric)
    if callable(metric):
        return keras.metrics.MeanMetricWrapper(metric, name=getattr(metric, "__name__", "metric"))
    raise TypeError(
        "`metrics` must hold Keras metrics, names or functions (y_true, y_pred) -> values. Received "
        f"{metric!r} of type {type(metric).__name__}."
    )


def _update_keras_metric(metric: Any, ids: Any, logits: Any, weights: Any) -> None:
    try:
        metric.update_state(ids, logits, sample_weight=weights)
    except Exception as error:
        raise ValueError(
            f"The metric {metric.name!r} cannot compare ids with logits: it is called with y_true ids "
            f"{tuple(ids.shape)}, y_pred logits {tuple(logits.shape)} and a weight per token. Use one for sparse "
            f"classes (keras.metrics.SparseCategoricalCrossentropy(from_logits=True)). It raised "
            f"{type(error).__name__}: {error}"
        ) from error


class TokenMetricSet(MetricSet):
    """`loss`, the metrics that the loss itself reports, and those given to `compile`.

    Keras metrics given to `compile` see tokens as rows: `update_state(ids (B * L,), logits (B * L, V),
    sample_weight (B * L,))`, so that no average is taken before the end. Token metrics see the teacher.
    """

    def __init__(self, loss_metric_names: Sequence[str], extra: Sequence[Any]) -> None:
        super().__init__(loss_metric_names, [as_metric(metric) for metric in extra])

    def update(self, primary: WeightedSum, reported: Mapping[str, Any], batch: PreparedBatch, logits: Any) -> None:
        """Add one micro-batch."""
        self.add(primary, reported)
        if self.extra:
            self._update_extra(batch, ops.stop_gradient(logits))

    def _update_extra(self, batch: PreparedBatch, logits: Any) -> None:
        weights = ops.cast(batch.loss_weights, "float32")
        active = ops.not_equal(weights, 0)
        flat_weights = ops.reshape(weights, (-1,))
        ids = ops.reshape(ops.where(active, batch.target_ids, ops.zeros_like(batch.target_ids)), (-1,))
        flat_logits = ops.where(ops.expand_dims(active, -1), logits, ops.zeros_like(logits))
        flat_logits = ops.reshape(flat_logits, (-1, logits.shape[-1]))
        for metric in self.extra:
            if isinstance(metric, TargetsMetric):
                metric.update_state(batch.teacher, logits, sample_weight=weights)
            elif isinstance(metric, TokenMetric):
                metric.update_state(self._teacher_logits(metric, batch), logits, sample_weight=weights)
            else:
                _update_keras_metric(metric, ids, flat_logits, flat_weights)

    @staticmethod
    def _teacher_logits(metric: TokenMetric, batch: PreparedBatch) -> Any:
        if isinstance(batch.teacher, DenseTargets):
            return ops.convert_to_tensor(batch.teacher.logits)
        if metric.needs_teacher:
            raise ValueError(
                f"The metric {metric.name!r} compares with the teacher's dense logits, and the batch has "
                f"{'no teacher' if batch.teacher is None else type(batch.teacher).__name__}. Remove the metric, or "
                "give the batch teacher=DenseTargets(logits)."
            )
        return batch.target_ids
