"""Distillation and cross-entropy of a prepared batch, as sums that carry their weight."""

from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.hidden_targets import HiddenTargets
from keras_diffusion_opd.data.log_space import computation_dtype
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.sampled_targets import SampledTargets
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets, fault_message
from keras_diffusion_opd.data.top_k_targets import TopKTargets
from keras_diffusion_opd.losses.closed_gradients import select_active
from keras_diffusion_opd.losses.divergences import resolve_divergence, token_cross_entropy, token_divergence
from keras_diffusion_opd.losses.sampled import sampled_divergence
from keras_diffusion_opd.losses.top_k import top_k_divergence
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum
from keras_diffusion_opd.validation import finite_real, positive_temperature


def active_only(active: Any, values: Any) -> Any:
    """`values` (B, L, ...) with zeros where `active` (B, L) is False: selected, so NaN there is gone."""
    values = ops.convert_to_tensor(values)
    for _ in range(len(values.shape) - len(active.shape)):
        active = ops.expand_dims(active, -1)
    return ops.where(active, values, ops.zeros_like(values))


def weighted_sum(values: Any, weights: Any) -> Any:
    """`sum(weights * values)` over all positions; a value where the weight is 0 does not enter, even infinite."""
    return ops.sum(weights * ops.where(ops.not_equal(weights, 0), values, ops.zeros_like(values)))


def prepare(student_logits: Any, batch: PreparedBatch) -> tuple[Any, Any, Any, Any]:
    """Validate, and silence inactive positions before anything is computed from them.

    Returns:
        logits (B, L, V) in their own dtype, ids int (B, L), active bool (B, L), weights (B, L) in float32
        or float64.
    """
    if not isinstance(batch, PreparedBatch):
        raise TypeError(
            f"`batch` must be a PreparedBatch. Received {type(batch).__name__}. Build one with PreparedBatch.create."
        )
    batch.validate()
    batch.validate_logits(student_logits)
    weights = ops.cast(batch.loss_weights, computation_dtype(student_logits))
    active = ops.not_equal(weights, 0)
    logits = select_active(active, student_logits)
    return logits, active_only(active, batch.target_ids), active, weights


def soft_values(logits: Any, batch: PreparedBatch, active: Any, divergence: str, temperature: float, beta: Any) -> Any:
    """The divergence from the batch's teacher, whatever its kind, float (B, L), times `temperature ** 2`.

    Args:
        logits: float (B, L, V), silenced where inactive.
        batch: with a teacher; any of its values where inactive.
        active: bool (B, L).
        divergence: a name from `token_divergence`.
        temperature: > 0.
        beta: in (0, 1) or None.
    """
    teacher = batch.teacher
    if teacher is None:
        raise ValueError(
            "Distillation needs a teacher, and this batch has none. Pass teacher=DenseTargets(logits) to "
            "PreparedBatch.create, or train on hard labels alone with TokenCrossEntropyLoss."
        )
    refuse_teacher(teacher, divergence, temperature)
    refuse_unusable_teacher(teacher, batch.loss_weights, logits.shape[-1])
    silent = teacher.map(lambda array: ops.stop_gradient(active_only(active, array)))
    return teacher_divergence(logits, silent, divergence=divergence, temperature=temperature, beta=beta)


def teacher_divergence(logits: Any, teacher: TeacherTargets, **settings: Any) -> Any:
    """The divergence from a teacher of any kind, float (...), times `temperature ** 2`: the dense and the chunked way.

    Args:
        logits: float (..., V).
        teacher: its arrays (..., n), silenced where inactive.
        **settings: divergence, temperature and beta of `token_divergence`.
    """
    if isinstance(teacher, HiddenTargets):
        teacher = DenseTargets(teacher.logits())
    if isinstance(teacher, DenseTargets):
        refuse_other_vocabulary(teacher, logits)
        return token_divergence(logits, teacher.logits, **settings)
    if isinstance(teacher, SampledTargets):
        return sampled_divergence(logits, teacher, temperature=settings["temperature"])
    assert isinstance(teacher, TopKTargets)
    return top_k_divergence(logits, teacher, **settings)


def refuse_teacher(teacher: TeacherTargets, divergence: str, temperature: float) -> None:
    """TypeError for a kind of targets that there is no way for, ValueError for what a kind cannot give."""
    if not isinstance(teacher, DenseTargets | TopKTargets | SampledTargets | HiddenTargets):
        raise TypeError(
            "This loss needs DenseTargets, TopKTargets, SampledTargets or HiddenTargets. Received "
            f"{type(teacher).__name__}."
        )
    if (reason := teacher.refusal(divergence, temperature)) is not None:
        raise ValueError(reason)


def refuse_other_vocabulary(teacher: DenseTargets, student_logits: Any) -> None:
    """ValueError unless the dense teacher's logits have the student's shape."""
    theirs, ours = tuple(teacher.logits.shape), tuple(student_logits.shape)
    if theirs != ours:
        raise ValueError(
            f"Student and teacher logits must have identical shapes. Received student {ours} and teacher "
            f"{theirs}. Bring the teacher to the student's vocabulary with keras_diffusion_opd.data.fit_vocabulary."
        )


def refuse_unusable_teacher(teacher: TeacherTargets, loss_weights: Any, vocabulary: int | None) -> None:
    """ValueError where the values can be read and the teacher has none, or wrong ones, at an active position."""
    values, weights = teacher.concrete(), backend.concrete(loss_weights)
    if weights is None or values is None:
        return
    for name, where in values.faults(vocabulary).items():
        wrong = (weights != 0) & where
        if np.any(wrong):
            row, position = np.argwhere(wrong)[0]
            message = fault_message(name, vocabulary)
            raise ValueError(f"active {message} at row {row}, position {position} and {int(wrong.sum()) - 1} more.")


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class DistillationLoss:
    """Soft loss towards the teacher plus hard loss towards the target ids, weighted per token.

    `primary` is `soft_weight * soft + hard_weight * hard`, both summed with the batch's token weights,
    over the sum of those weights. The soft loss carries the factor temperature ** 2; the hard loss is
    cross-entropy at temperature 1. A part whose weight is 0 is not evaluated and reported as 0.

    The teacher may be of any kind; what a kind cannot give is refused with the reason
    (`TeacherTargets.refusal`), and what the soft loss then says of the whole divergence is its `bound`.

    Args:
        divergence: a name from `token_divergence`.
        temperature: > 0, of both models in the soft loss.
        beta: in (0, 1), for divergences that have one; see `token_divergence`.
        soft_weight: >= 0.
        hard_weight: >= 0; not both 0.

    Returns:
        `loss(student_logits, batch) -> LossOutput` with metrics `"distill/soft_loss"` (with temperature
        ** 2, without soft_weight) and `"distill/hard_loss"`, in float32 (float64 where the logits are).

    Raises:
        ValueError, TypeError: a setting out of range; logits or batch that do not fit one another.

    Source: Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, arXiv:1503.02531; on
    rollouts of the student, Agarwal et al., "On-Policy Distillation of Language Models", 2023,
    arXiv:2306.13649.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets, PreparedBatch
    from keras_diffusion_opd.losses import DistillationLoss

    batch = PreparedBatch.create(
        model_inputs={"token_ids": np.zeros((1, 1), "int32")},
        target_ids=np.array([[1]]),
        loss_weights=np.ones((1, 1), "float32"),
        teacher=DenseTargets(np.array([[[2.0, 0.0, -1.0]]], "float32")),
    )
    output = DistillationLoss(temperature=2.0)(np.array([[[0.0, 1.0, 0.0]]], "float32"), batch)
    assert abs(float(output.primary.mean()) - 1.091222) < 1e-5
    ```
    """

    metric_names = ("distill/soft_loss", "distill/hard_loss")

    def __init__(
        self,
        *,
        divergence: str = "forward_kl",
        temperature: float = 1.0,
        beta: float | None = None,
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
    ) -> None:
        self.temperature = positive_temperature(temperature)
        resolve_divergence(divergence, beta)
        self.divergence = divergence
        self.beta = None if beta is None else finite_real("beta", beta)
        self.soft_weight = finite_real("soft_weight", soft_weight)
        self.hard_weight = finite_real("hard_weight", hard_weight)
        if self.soft_weight < 0 or self.hard_weight < 0:
            raise ValueError(
                "`soft_weight` and `hard_weight` must be nonnegative. Received "
                f"{self.soft_weight} and {self.hard_weight}."
            )
        if self.soft_weight == 0 and self.hard_weight == 0:
            raise ValueError("At least one of `soft_weight` and `hard_weight` must be positive. Received 0 and 0.")

    def __call__(self, student_logits: Any, batch: PreparedBatch) -> LossOutput:
        """See the class."""
        # 1. Silence inactive positions.
        logits, ids, active, weights = prepare(student_logits, batch)
        zero = ops.zeros((), weights.dtype)
        # 2. The soft loss, towards the teacher.
        soft = zero
        if self.soft_weight:
            per_token = soft_values(logits, batch, active, self.divergence, self.temperature, self.beta)
            soft = weighted_sum(ops.cast(per_token, weights.dtype), weights)
        # 3. The hard loss, towards the target ids.
        hard = weighted_sum(token_cross_entropy(logits, ids), weights) if self.hard_weight else zero
        # 4. Sums, with the weight that is to divide them.
        weight = ops.sum(weights)
        total = sum(
            (factor * part for factor, part in ((self.soft_weight, soft), (self.hard_weight, hard)) if factor), zero
        )
        metrics = {
            "distill/soft_loss": WeightedSum(soft, weight),
            "distill/hard_loss": WeightedSum(hard, weight),
        }
        return LossOutput(WeightedSum(total, weight), metrics)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        names = ("divergence", "temperature", "beta", "soft_weight", "hard_weight")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "DistillationLoss":
        """The inverse of `get_config`."""
        return cls(**config)


_NORMALIZATIONS = ("weights", "tokens")


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class TokenCrossEntropyLoss:
    """Weighted cross-entropy towards the target ids: supervised fine-tuning of a diffusion language model.

    With the weights of a corruption, 1 / t on masked positions, there are two estimators of nats per token:

    Args:
        normalization: what divides the weighted sum.
            "weights": the sum of the weights: a weighted mean. A model of constant cross-entropy h has loss h
                in every batch, whatever was masked; over batches of different times it is not exactly the
                bound. With weights 1 on masked positions it is the mean over masked tokens.
            "tokens": how many target ids are not negative, masked or not: the bound of Sahoo et al. itself,
                h on average over times but not in every batch. Give prompt and padding the id -1, or they
                count.

    Returns:
        `loss(student_logits, batch) -> LossOutput` without metrics, in float32 (float64 where the logits are).

    Raises:
        ValueError: `normalization` is neither.

    Source: Sahoo et al., "Simple and Effective Masked Diffusion Language Models", 2024, arXiv:2406.07524.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import PreparedBatch
    from keras_diffusion_opd.losses import TokenCrossEntropyLoss

    batch = PreparedBatch.create(
        model_inputs={"token_ids": np.zeros((1, 3), "int32")},
        target_ids=np.array([[1, 0, -1]]),
        loss_weights=np.array([[1.0, 0.0, 0.0]], "float32"),
    )
    logits = np.zeros((1, 3, 4), "float32")
    assert abs(float(TokenCrossEntropyLoss()(logits, batch).primary.mean()) - np.log(4)) < 1e-6
    halved = TokenCrossEntropyLoss(normalization="tokens")(logits, batch)    # one of two tokens was masked
    assert abs(float(halved.primary.mean()) - np.log(4) / 2) < 1e-6
    ```
    """

    metric_names: tuple[str, ...] = ()

    def __init__(self, *, normalization: str = "weights") -> None:
        if normalization not in _NORMALIZATIONS:
            raise ValueError(f"`normalization` must be one of {list(_NORMALIZATIONS)}. Received {normalization!r}.")
        self.normalization = normalization

    def __call__(self, student_logits: Any, batch: PreparedBatch) -> LossOutput:
        """See the class."""
        logits, ids, _, weights = prepare(student_logits, batch)
        total = weighted_sum(token_cross_entropy(logits, ids), weights)
        if self.normalization == "weights":
            return LossOutput(WeightedSum(total, ops.sum(weights)), {})
        counted = ops.cast(ops.convert_to_tensor(batch.target_ids) >= 0, weights.dtype)
        return LossOutput(WeightedSum(total, ops.sum(counted)), {})

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"normalization": self.normalization}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TokenCrossEntropyLoss":
        """The inverse of `get_config`."""
        return cls(**config)
