"""What to watch with a teacher of any kind, sparse ones too."""

import abc
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.data.log_space import EXCLUDED, log_probabilities
from keras_diffusion_opd.data.sampled_targets import SampledTargets
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets
from keras_diffusion_opd.losses.distillation import active_only
from keras_diffusion_opd.losses.sampled import sampled_divergence
from keras_diffusion_opd.metrics.weighted_ratio import WeightedRatio


class TargetsMetric(WeightedRatio, abc.ABC):
    """A value per token from the teacher's targets and the student's logits, averaged with the token weights.

    In `PreparedTrainer.compile(metrics=[...])` it receives the batch's targets by itself. A subclass implements
    `values`.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.
    """

    @abc.abstractmethod
    def values(self, targets: TeacherTargets, student_logits: Any) -> Any:
        """Targets of (B, L) positions and float (B, L, V) -> float (B, L)."""

    # Keras metrics differ in what they are updated with.
    def update_state(  # type: ignore[override]
        self, targets: TeacherTargets | None, student_logits: Any, sample_weight: Any = None
    ) -> None:
        """Add the values at every position; positions of weight 0 may hold NaN."""
        if not isinstance(targets, TeacherTargets):
            raise TypeError(
                f"The metric {self.name!r} needs a batch with a teacher. Received {type(targets).__name__}. Remove the "
                "metric, or pass teacher=... to PreparedBatch.create."
            )
        student_logits = ops.convert_to_tensor(student_logits)
        if sample_weight is None:
            sample_weight = ops.ones_like(student_logits[..., 0], dtype="float32")
        active = ops.not_equal(ops.convert_to_tensor(sample_weight), 0)
        silent = targets.map(lambda array: active_only(active, array))
        super().update_state(self.values(silent, active_only(active, student_logits)), sample_weight)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class RetainedMass(TargetsMetric):
    """How much of the teacher's probability reaches the student id by id, in [0, 1] for all kinds but one.

    1 for dense targets, the mass of the k ids for top-k ones. For sampled ones it is the sum of the weights, 1 on
    average: by how far single tokens are off shows what the importance weights cost.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import TopKTargets
    from keras_diffusion_opd.metrics import RetainedMass

    metric = RetainedMass()
    logits = np.log([[[0.5, 0.3, 0.15, 0.05]]]).astype("float32")
    metric.update_state(TopKTargets.from_logits(logits, k=2), logits)
    assert abs(float(metric.result()) - 0.8) < 1e-6
    ```
    """

    def __init__(self, name: str = "distill/retained_mass", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def values(self, targets: TeacherTargets, student_logits: Any) -> Any:
        """See `TargetsMetric.values`."""
        return ops.convert_to_tensor(targets.retained_mass())


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TeacherCrossEntropy(TargetsMetric):
    """`-sum(p log q)` of teacher p and student q, in nats per token, unbiased for sampled targets.

    The KL plus the teacher's entropy: what the soft loss of `SampledTargets` without entropies is, and the one
    number in which runs on dense and on sampled targets compare. Top-k targets do not know it.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets
    from keras_diffusion_opd.metrics import TeacherCrossEntropy

    metric = TeacherCrossEntropy()
    metric.update_state(DenseTargets(np.log([[[0.9, 0.1]]])), np.log([[[0.5, 0.5]]]))
    assert abs(float(metric.result()) - np.log(2)) < 1e-6
    ```
    """

    def __init__(self, name: str = "distill/cross_entropy", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def values(self, targets: TeacherTargets, student_logits: Any) -> Any:
        """See `TargetsMetric.values`."""
        if isinstance(targets, SampledTargets):
            t = targets.temperature
            drawn = SampledTargets(targets.ids, targets.counts, temperature=t)
            return sampled_divergence(student_logits, drawn, temperature=t) / t**2
        if isinstance(targets, DenseTargets):
            log_p = log_probabilities(ops.convert_to_tensor(targets.logits))
            log_q = log_probabilities(student_logits)
            values = -ops.sum(ops.exp(log_p) * log_q, axis=-1)
            lost = ops.any(ops.logical_and(ops.exp(log_p) > 0, log_q <= EXCLUDED), axis=-1)
            return ops.where(lost, ops.full_like(values, float("inf")), values)
        raise TypeError(
            f"The metric {self.name!r} needs DenseTargets or SampledTargets. Received {type(targets).__name__}, which "
            "do not give the teacher's probability of every id. Watch distill/soft_loss and RetainedMass."
        )
