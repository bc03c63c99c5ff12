"""What to watch while distilling: how far the student is from the teacher, and how sure both are."""

import abc
from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.losses.divergences import resolve_divergence, token_divergence
from keras_diffusion_opd.losses.token_scores import token_entropy
from keras_diffusion_opd.losses.token_weights import token_weights
from keras_diffusion_opd.metrics.weighted_ratio import WeightedRatio
from keras_diffusion_opd.validation import positive_temperature


class TokenMetric(WeightedRatio, abc.ABC):
    """A value per token from the teacher's and the student's logits, averaged with the token weights.

    As a Keras metric: `update_state(y_true=teacher_logits, y_pred=student_logits, sample_weight)`.
    In `PreparedTrainer.compile(metrics=[...])` it receives the batch's teacher by itself. A subclass
    implements `values`, and sets `needs_teacher = False` where it looks at the student alone.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.
    """

    needs_teacher = True

    @abc.abstractmethod
    def values(self, teacher_logits: Any, student_logits: Any) -> Any:
        """float (..., V) and (..., V) -> float (...)."""

    # Keras metrics differ in what they are updated with.
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Add the values at every position; positions of weight 0, or masked by Keras, may hold NaN."""
        weights = token_weights(y_pred, sample_weight)
        y_true, y_pred = ops.convert_to_tensor(y_true), ops.convert_to_tensor(y_pred)
        active = ops.expand_dims(ops.not_equal(weights, 0), -1)
        y_pred = ops.where(active, y_pred, ops.zeros_like(y_pred))
        if self.needs_teacher:
            y_true = ops.where(active, y_true, ops.zeros_like(y_true))
        super().update_state(self.values(y_true, y_pred), weights)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TeacherKL(TokenMetric):
    """A divergence of the student from the teacher at temperature 1, in nats per token.

    The loss at another temperature is not comparable between runs; this is.

    Args:
        divergence: a name from `keras_diffusion_opd.losses.token_divergence`.
        temperature: > 0.
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Raises:
        ValueError: unknown divergence or temperature out of range.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.metrics import TeacherKL

    metric = TeacherKL()
    metric.update_state(np.log([[[0.9, 0.1]]]), np.log([[[0.5, 0.5]]]))
    assert abs(float(metric.result()) - 0.368064) < 1e-6
    ```
    """

    def __init__(
        self,
        divergence: str = "forward_kl",
        temperature: float = 1.0,
        name: str = "distill/kl",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        resolve_divergence(divergence, None)
        self.divergence = divergence
        self.temperature = positive_temperature(temperature)

    def values(self, teacher_logits: Any, student_logits: Any) -> Any:
        """See `TokenMetric.values`."""
        return token_divergence(
            student_logits, teacher_logits, divergence=self.divergence, temperature=self.temperature
        )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "divergence": self.divergence, "temperature": self.temperature}


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TeacherEntropy(TokenMetric):
    """Entropy of the teacher, in nats per token.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.metrics import TeacherEntropy

    metric = TeacherEntropy()
    metric.update_state(np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), sample_weight=np.ones((1, 2)))
    assert abs(float(metric.result()) - np.log(4)) < 1e-6
    ```
    """

    def __init__(self, name: str = "distill/teacher_entropy", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def values(self, teacher_logits: Any, student_logits: Any) -> Any:
        """See `TokenMetric.values`."""
        return token_entropy(teacher_logits)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class StudentEntropy(TokenMetric):
    """Entropy of the student, in nats per token.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.metrics import StudentEntropy

    metric = StudentEntropy()
    metric.update_state(np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), sample_weight=np.ones((1, 2)))
    assert abs(float(metric.result()) - np.log(4)) < 1e-6
    ```
    """

    needs_teacher = False

    def __init__(self, name: str = "distill/student_entropy", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def values(self, teacher_logits: Any, student_logits: Any) -> Any:
        """See `TokenMetric.values`."""
        return token_entropy(student_logits)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TopOneAgreement(TokenMetric):
    """Share of tokens at which teacher and student put the same id first, in [0, 1].

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.metrics import TopOneAgreement

    metric = TopOneAgreement()
    metric.update_state(np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), sample_weight=np.ones((1, 2)))
    assert abs(float(metric.result()) - 1.0) < 1e-6
    ```
    """

    def __init__(self, name: str = "distill/top1_agreement", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def values(self, teacher_logits: Any, student_logits: Any) -> Any:
        """See `TokenMetric.values`."""
        same = ops.equal(ops.argmax(teacher_logits, axis=-1), ops.argmax(student_logits, axis=-1))
        return ops.cast(same, "float32")


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class Acceptance(TokenMetric):
    """`1 - total variation`, in [0, 1]: how often speculative decoding would accept the student's token.

    Args:
        name: of the metric.
        dtype: dtype policy; the sums are float32.

    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2022,
    arXiv:2211.17192.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.metrics import Acceptance

    metric = Acceptance()
    metric.update_state(np.zeros((1, 2, 4)), np.zeros((1, 2, 4)), sample_weight=np.ones((1, 2)))
    assert abs(float(metric.result()) - 1.0) < 1e-6
    ```
    """

    def __init__(self, name: str = "distill/acceptance", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)

    def values(self, teacher_logits: Any, student_logits: Any) -> Any:
        """See `TokenMetric.values`."""
        return 1.0 - token_divergence(student_logits, teacher_logits, divergence="total_variation")


def distillation_diagnostics() -> list[TokenMetric]:
    """All of them, fresh: KL at temperature 1, both entropies, top-1 agreement, acceptance.

    Returns:
        list of metrics for `PreparedTrainer.compile(metrics=...)`.

    Example:

    ```python
    from keras_diffusion_opd.metrics import distillation_diagnostics

    assert [metric.name for metric in distillation_diagnostics()][0] == "distill/kl"
    ```
    """
    return [TeacherKL(), TeacherEntropy(), StudentEntropy(), TopOneAgreement(), Acceptance()]
