"""`chunked_distillation`: the distillation loss from hidden states and a head, without the logits."""

from typing import Any, NamedTuple

import keras
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import dtype_of, is_floating, require_array, same_shape, shape_of
from keras_diffusion_opd.data.hidden_targets import HiddenTargets
from keras_diffusion_opd.data.log_space import computation_dtype
from keras_diffusion_opd.data.output_head import OutputHead
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.targets import DenseTargets
from keras_diffusion_opd.losses.chunked.objective import Objective, faults_by_name
from keras_diffusion_opd.losses.distillation import DistillationLoss, refuse_teacher, refuse_unusable_teacher
from keras_diffusion_opd.losses.weighted_sum import LossOutput, WeightedSum
from keras_diffusion_opd.validation import positive_int

if backend.BACKEND == "jax":
    from keras_diffusion_opd.losses.chunked._jax import loss_of_chunks
elif backend.BACKEND == "tensorflow":
    from keras_diffusion_opd.losses.chunked._tensorflow import loss_of_chunks
else:
    from keras_diffusion_opd.losses.chunked._torch import loss_of_chunks

DEFAULT_CHUNK_SIZE = 64


class HiddenScores(NamedTuple):
    """What a student offers in place of logits.

    Args:
        hidden: float (B, L, D): what the head is given. Position i scores target i.
        head: `OutputHead` of width D.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import OutputHead
    from keras_diffusion_opd.losses import HiddenScores

    scores = HiddenScores(np.zeros((1, 2, 4), "float32"), OutputHead(np.zeros((4, 9), "float32")))
    assert scores.head.ids == 9
    ```
    """

    hidden: Any
    head: OutputHead


class Examined(NamedTuple):
    """A loss, and of each position (B, L) whether something is wrong there, bool: of the teacher by fault."""

    output: LossOutput
    student_invalid: Any
    teacher_faults: dict[str, Any]
    infinite: Any


def chunked_distillation(
    hidden: Any,
    head: Any,
    batch: PreparedBatch,
    *,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    bias: Any = None,
    softcap: float | None = None,
    transposed: bool = False,
    vocabulary_size: int | None = None,
    low_rank: tuple[Any, Any] | None = None,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float | None = None,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
) -> LossOutput:
    """`DistillationLoss` of the logits `hidden @ head`, which never exist but for `chunk_size` positions at a time.

    Value and gradients (of hidden states, head, bias and low-rank pair) equal those of the dense loss; with
    `HiddenTargets` the teacher's logits do not exist either. The gradients are made in the same pass as the value
    and only scaled on the way back, so that the memory is that of the head's gradient and of a few chunks. First
    derivatives only. On torch the way back can be gone once: there is no `retain_graph`. On JAX call it inside of
    `jit`: outside, each call compiles its loop anew.

    Args:
        hidden: float (B, L, D), the student's; anything where the weight is 0.
        head: float (D, V): any tensor, or an `OutputHead`, which then holds the five arguments about the head.
        batch: `PreparedBatch` of B rows and L positions. Its teacher is of any kind, or None if `soft_weight` is 0.
        chunk_size: >= 1, positions whose logits exist at one time. It changes nothing but memory and time.
        bias: float (V,) or None.
        softcap: > 0 or None: logits are `softcap * tanh(logits / softcap)`.
        transposed: whether `head` is (V, D), as an embedding that also reads out.
        vocabulary_size: None, or how many of the columns are ids: the others, and a dense teacher's beyond, are
            padding and take no part.
        low_rank: None or (A, B), (D, r) and (r, V): `head + A @ B` is never formed.
        divergence: a name from `token_divergence`.
        temperature: > 0, of both models in the soft loss.
        beta: in (0, 1), for divergences that have one; see `token_divergence`.
        soft_weight: >= 0.
        hard_weight: >= 0; not both 0.

    Returns:
        `LossOutput` as that of `DistillationLoss`, in float32 (float64 where hidden states or head are).

    Raises:
        ValueError, TypeError: as `DistillationLoss`; shapes of hidden states and head that do not fit.

    Source: the loss is that of Hinton et al., "Distilling the Knowledge in a Neural Network", 2015,
    arXiv:1503.02531; gradients made in the forward pass, chunk by chunk, are from Hsu et al., "Liger Kernel:
    Efficient Triton Kernels for LLM Training", 2024, arXiv:2410.10989.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import HiddenTargets, PreparedBatch
    from keras_diffusion_opd.losses import chunked_distillation

    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=shape).astype("float32") for shape in ((1, 3, 4), (4, 50)))
    batch = PreparedBatch.create(
        model_inputs=np.zeros((1, 3), "int32"),
        target_ids=np.zeros((1, 3), "int32"),
        loss_weights=np.ones((1, 3), "float32"),
        teacher=HiddenTargets(hidden, head),
    )
    assert float(chunked_distillation(hidden, head, batch, chunk_size=2).primary.mean()) == 0.0
    ```
    """
    if not isinstance(head, OutputHead):
        head = OutputHead(
            head,
            bias=bias,
            softcap=softcap,
            transposed=transposed,
            vocabulary_size=vocabulary_size,
            low_rank=low_rank,
        )
    elif transposed or any(x is not None for x in (bias, softcap, vocabulary_size, low_rank)):
        raise ValueError("`head` is an OutputHead, which holds bias, softcap and the rest already: pass it alone.")
    loss = ChunkedDistillationLoss(
        chunk_size=chunk_size,
        divergence=divergence,
        temperature=temperature,
        beta=beta,
        soft_weight=soft_weight,
        hard_weight=hard_weight,
    )
    return loss(HiddenScores(hidden, head), batch)


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class ChunkedDistillationLoss(DistillationLoss):
    """`DistillationLoss` for students that offer hidden states and a head: the logits never exist all at once.

    For `PreparedTrainer`, with a student whose head it can find (`models.hidden_route` says which). Metrics that
    need logits cannot be had beside it; `distill/soft_loss` and `distill/hard_loss` are there.

    Args:
        chunk_size: >= 1, positions whose logits exist at one time. It changes nothing but memory and time.
        divergence: as for `DistillationLoss`, as are the other settings.
        temperature: > 0.
        beta: in (0, 1) or None.
        soft_weight: >= 0.
        hard_weight: >= 0; not both 0.

    Returns:
        `loss(HiddenScores, batch) -> LossOutput`, as `chunked_distillation`.

    Raises:
        ValueError, TypeError: a setting out of range; scores or batch that do not fit one another.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import DenseTargets, OutputHead, PreparedBatch
    from keras_diffusion_opd.losses import ChunkedDistillationLoss, HiddenScores

    batch = PreparedBatch.create(
        model_inputs=np.zeros((1, 1), "int32"),
        target_ids=np.array([[1]]),
        loss_weights=np.ones((1, 1), "float32"),
        teacher=DenseTargets(np.log([[[0.9, 0.1]]]).astype("float32")),
    )
    scores = HiddenScores(np.zeros((1, 1, 4), "float32"), OutputHead(np.ones((4, 2), "float32")))
    output = ChunkedDistillationLoss(chunk_size=8)(scores, batch)
    assert abs(float(output.primary.mean()) - 0.368064) < 1e-6
    ```
    """

    def __init__(
        self,
        *,
        chunk_size: int = DEFAULT_CHUNK_SIZE,
        divergence: str = "forward_kl",
        temperature: float = 1.0,
        beta: float | None = None,
        soft_weight: float = 1.0,
        hard_weight: float = 0.0,
    ) -> None:
        super().__init__(
            divergence=divergence,
            temperature=temperature,
            beta=beta,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
        )
        self.chunk_size = positive_int("chunk_size", chunk_size)

    def __call__(self, scores: Any, batch: PreparedBatch) -> LossOutput:
        """See the class."""
        return self.examine(scores, batch).output

    def examine(self, scores: HiddenScores, batch: PreparedBatch) -> Examined:
        """The loss, and where student or teacher hold no distribution or the loss is not finite."""
        # 1. What fits what.
        self._validate(scores, batch)
        hidden, head = ops.convert_to_tensor(scores.hidden), scores.head
        tensors = head.tensors()
        weights = ops.cast(batch.loss_weights, computation_dtype(hidden, *tensors.values()))
        teacher = batch.teacher
        if teacher is not None:
            refuse_unusable_teacher(teacher, batch.loss_weights, head.ids)
        # 2. Positions side by side.
        rows = {"ids": batch.target_ids, "weights": weights}
        if teacher is not None:
            rows |= {f"teacher/{name}": array for name, array in teacher.arrays().items()}
        rows = {name: _flat(ops.stop_gradient(ops.convert_to_tensor(x))) for name, x in rows.items()}
        shared = teacher.shared() if isinstance(teacher, HiddenTargets) else {}
        shared = {name: ops.stop_gradient(ops.convert_to_tensor(x)) for name, x in shared.items()}
        # 3. Chunk by chunk: values and gradients.
        settings = {"divergence": self.divergence, "temperature": self.temperature, "beta": self.beta}
        objective = Objective(head, teacher, settings, self.soft_weight, self.hard_weight)
        total, tokens = loss_of_chunks(objective, _flat(hidden), tensors, rows, shared, self.chunk_size)
        # 4. Sums, with the weight that is to divide them.
        return self._examined(total, tokens, rows["weights"], ops.shape(batch.target_ids))

    @staticmethod
    def _examined(total: Any, tokens: Any, weights: Any, shape: Any) -> Examined:
        weight, active = ops.sum(weights), ops.not_equal(weights, 0)
        metrics = {
            f"distill/{name}_loss": WeightedSum(ops.sum(weights * ops.where(active, x, ops.zeros_like(x))), weight)
            for name, x in (("soft", tokens.soft), ("hard", tokens.hard))
        }
        finite = ops.logical_and(ops.isfinite(tokens.soft), ops.isfinite(tokens.hard))
        infinite = ops.logical_and(active, ops.logical_not(finite))
        return Examined(
            LossOutput(WeightedSum(total, weight), metrics),
            ops.reshape(tokens.student_invalid > 0, shape),
            {name: ops.reshape(where, shape) for name, where in faults_by_name(tokens.teacher_fault).items()},
            ops.reshape(infinite, shape),
        )

    def _validate(self, scores: Any, batch: Any) -> None:
        """Structure, shapes and dtypes; values where they can be read."""
        if not isinstance(scores, HiddenScores) or not isinstance(scores.head, OutputHead):
            raise TypeError(
                f"ChunkedDistillationLoss takes HiddenScores(hidden, OutputHead(...)). Received "
                f"{type(scores).__name__}. For logits use DistillationLoss."
            )
        if not isinstance(batch, PreparedBatch):
            raise TypeError(
                f"`batch` must be a PreparedBatch. Received {type(batch).__name__}. Build one with "
                "PreparedBatch.create."
            )
        require_array("hidden", scores.hidden)
        batch.validate()
        shape, expected = shape_of(scores.hidden), (*shape_of(batch.target_ids), scores.head.width)
        if len(shape) != 3 or not same_shape(shape, expected):
            raise ValueError(
                f"`hidden` must align with target_ids and head: expected shape {expected}. Received {shape}. A head of "
                "shape (V, D), as an embedding, needs transposed=True."
            )
        if not is_floating(scores.hidden):
            raise TypeError(f"`hidden` must have a floating-point dtype. Received {dtype_of(scores.hidden)}.")
        batch.validate_vocabulary("the head", scores.head.ids)
        if self.soft_weight:
            self._validate_teacher(scores.head, batch)

    def _validate_teacher(self, head: OutputHead, batch: PreparedBatch) -> None:
        teacher = batch.teacher
        if teacher is None:
            raise ValueError(
                "Distillation needs a teacher, and this batch has none. Pass teacher=HiddenTargets(hidden, head) to "
                "PreparedBatch.create, or train on hard labels alone with soft_weight=0, hard_weight=1."
            )
        refuse_teacher(teacher, self.divergence, self.temperature)
        theirs = teacher.vocabulary_size()
        padded = head.vocabulary_size is not None and isinstance(teacher, DenseTargets | HiddenTargets)
        if theirs is not None and (theirs < head.ids or (theirs > head.ids and not padded)):
            raise ValueError(
                f"Student and teacher must score the same ids. Received a head of {head.ids} ids and a teacher of "
                f"{theirs}. Where the larger one is padded pass vocabulary_size, the number of real ids, to both."
            )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"chunk_size": self.chunk_size, **super().get_config()}


def _flat(x: Any) -> Any:
    """(B, L, ...) -> (B * L, ...)."""
    return ops.reshape(x, (-1, *x.shape[2:]))
