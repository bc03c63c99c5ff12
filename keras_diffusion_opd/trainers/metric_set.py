"""The metrics of a trainer, updated micro-batch by micro-batch."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_diffusion_opd.losses.weighted_sum import WeightedSum
from keras_diffusion_opd.metrics.weighted_ratio import WeightedRatio


def as_list(name: str, metrics: Any) -> list[Any]:
    """What was given to `compile` under `name`, as a list; TypeError unless it is one, a tuple or None."""
    if metrics is None:
        return []
    if isinstance(metrics, list | tuple):
        return list(metrics)
    raise TypeError(
        f"`{name}` must be a list of Keras metrics, names or functions. Received {metrics!r} of type "
        f"{type(metrics).__name__}. There is one output, so no dict: write {name}=[...]."
    )


class MetricSet:
    """`loss`, the metrics that the loss itself reports, and others that a trainer knows how to update."""

    def __init__(self, loss_metric_names: Sequence[str], extra: Sequence[Any] = ()) -> None:
        self.loss = WeightedRatio(name="loss")
        self.reported = {name: WeightedRatio(name=name) for name in loss_metric_names}
        self.extra = list(extra)
        names = [metric.name for metric in self.all]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"Metrics need different names. Received {twice} more than once; pass name=... to one.")

    @property
    def all(self) -> list[Any]:
        """Every metric, `loss` first."""
        return [self.loss, *self.reported.values(), *self.extra]

    def add(self, primary: WeightedSum, reported: Mapping[str, Any]) -> None:
        """Add the sums of one micro-batch."""
        self.loss.add_sum(primary)
        if set(reported) != set(self.reported):
            raise ValueError(
                f"The loss reports the metrics {sorted(reported)}, but declares {sorted(self.reported)}. Give the loss "
                "an attribute `metric_names` with a tuple of the names it always reports."
            )
        for name, value in reported.items():
            # A plain scalar counts once per micro-batch.
            self.reported[name].add_sum(value if isinstance(value, WeightedSum) else WeightedSum(value, 1.0))
