"""What a chunk of positions adds to the loss, as a function of its product with the head."""

from typing import Any, NamedTuple

from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.hidden_targets import HiddenTargets
from keras_diffusion_opd.data.output_head import OutputHead
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets, fault_messages, no_distribution
from keras_diffusion_opd.losses.distillation import active_only, teacher_divergence, weighted_sum
from keras_diffusion_opd.losses.divergences import token_cross_entropy

# Of a chunk's part of the weight's gradient, which is made and added piece by piece: bytes of a piece.
_SLAB_BYTES = 2**24
# Of a chunk, where its formula is worked out block by block: bytes of one array of a block.
_BLOCK_BYTES = 2**21


class PerToken(NamedTuple):
    """Of each position, float (N,): both losses, 1.0 where the student holds no distribution, the teacher's fault.

    The fault is its number among `fault_messages()`, from 1; 0 for none, the last where there are several.
    """

    soft: Any
    hard: Any
    student_invalid: Any
    teacher_fault: Any


def faults_by_name(fault: Any) -> dict[str, Any]:
    """For every fault of any teacher a bool (...), from its numbers."""
    return {name: ops.equal(fault, number) for number, name in enumerate(fault_messages(), 1)}


class Objective(NamedTuple):
    """The loss of a chunk, but for its arrays: what is the same for all chunks and known before the loop.

    Args:
        head: the student's `OutputHead`; its arrays are not read, they come as arguments.
        teacher: `TeacherTargets` or None, as a recipe: its arrays are not read either.
        settings: divergence, temperature and beta.
        soft_weight: >= 0.
        hard_weight: >= 0.
    """

    head: OutputHead
    teacher: TeacherTargets | None
    settings: dict[str, Any]
    soft_weight: float
    hard_weight: float

    def terms(self, raw: Any, rows: dict[str, Any], shared: dict[str, Any]) -> tuple[Any, PerToken]:
        """The chunk's part of the sum to be differentiated, and what each position adds.

        Args:
            raw: float (C, columns), the products with the student's head; finite where inactive.
            rows: `"ids"` (C,), `"weights"` (C,) and the teacher's arrays (C, ...), anything where inactive.
            shared: the teacher's arrays without rows.
        """
        rows, weights = self.expanded(rows, shared), rows["weights"]
        active = ops.not_equal(weights, 0)
        logits = self.head.finish(raw)
        zeros = ops.zeros_like(weights)
        soft = hard = teacher_fault = zeros
        if self.teacher is not None:
            teacher, teacher_fault = self._teacher(rows, shared, active)
            if self.soft_weight:
                soft = ops.cast(teacher_divergence(logits, teacher, **self.settings), weights.dtype)
        if self.hard_weight:
            hard = ops.cast(token_cross_entropy(logits, active_only(active, rows["ids"])), weights.dtype)
        parts = [(self.soft_weight, soft), (self.hard_weight, hard)]
        total = sum(factor * weighted_sum(part, weights) for factor, part in parts if factor)
        wrong = ops.logical_and(active, no_distribution(ops.stop_gradient(logits)))
        return total, PerToken(soft, hard, ops.cast(wrong, weights.dtype), ops.cast(teacher_fault, weights.dtype))

    def expanded(self, rows: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
        """The rows of a chunk, with the teacher's logits where it gave hidden states and they are needed."""
        if not (self.soft_weight and "teacher/hidden" in rows and isinstance(self.teacher, HiddenTargets)):
            return rows
        active = ops.not_equal(rows["weights"], 0)
        hidden = ops.stop_gradient(active_only(active, rows["teacher/hidden"]))
        teacher = self.teacher.from_arrays({"hidden": hidden, **shared}, self.teacher.settings())
        kept = {name: x for name, x in rows.items() if name != "teacher/hidden"}
        return {**kept, "teacher/logits": teacher.logits()}

    def _teacher(self, rows: dict[str, Any], shared: dict[str, Any], active: Any) -> tuple[TeacherTargets, Any]:
        """The targets of a chunk, silenced where inactive, and where they are none. Hidden ones become dense."""
        assert self.teacher is not None
        prefix = "teacher/"
        arrays = {name.removeprefix(prefix): x for name, x in rows.items() if name.startswith(prefix)}
        arrays = {name: ops.stop_gradient(active_only(active, array)) for name, array in arrays.items()}
        if "logits" in arrays:
            teacher: TeacherTargets = DenseTargets(arrays["logits"][..., : self.head.ids])
        else:
            teacher = self.teacher.from_arrays({**arrays, **shared}, self.teacher.settings())
        fault = ops.zeros_like(active, "int32")
        names = list(fault_messages())
        for name, where in teacher.faults(self.head.ids).items():
            if isinstance(self.teacher, HiddenTargets):
                name = "hidden_finite"  # what the logits were made from is what is wrong
            number = 1 + names.index(name if name in names else "teacher_finite")
            fault = ops.where(ops.logical_and(active, where), number, fault)
        return teacher, fault

    def total(self, tokens: PerToken, weights: Any) -> Any:
        """The whole sum from what each position adds: the order of its terms does not depend on the chunks."""
        parts = [(self.soft_weight, tokens.soft), (self.hard_weight, tokens.hard)]
        return sum(factor * weighted_sum(part, weights) for factor, part in parts if factor)

    # ---- gradients -------------------------------------------------------------------------------------

    def gradient_names(self, tensors: dict[str, Any]) -> list[str]:
        """Which of the head's tensors get a gradient."""
        return [name for name in tensors if self.head.trainable or name.startswith("low_")]

    def gradients(self, hidden: Any, tensors: dict[str, Any], g: Any) -> dict[str, Any]:
        """Of a chunk: all but the weight's, which is too large to be made in one piece.

        Args:
            hidden: float (C, D), 0 where inactive.
            tensors: the head's.
            g: float (C, columns), the gradient of the sum with respect to the products.

        Returns:
            `"hidden"` (C, D) and, where they are wanted, `"bias"`, `"low_a"`, `"low_b"`.
        """
        found = {}
        g_low = self.operand(g, tensors["weight"])
        found["hidden"] = backend.wide_product(g_low, tensors["weight"], transpose_b=not self.head.transposed)
        if "bias" in tensors and self.head.trainable:
            found["bias"] = ops.sum(g, axis=0)
        if "low_a" in tensors:
            inner = backend.wide_product(hidden, tensors["low_a"])
            back = backend.wide_product(g, tensors["low_b"], transpose_b=True)
            found["low_a"] = backend.wide_product(hidden, back, transpose_a=True)
            found["low_b"] = backend.wide_product(inner, g, transpose_a=True)
            found["hidden"] = found["hidden"] + backend.wide_product(back, tensors["low_a"], transpose_b=True)
        return found

    def weight_gradient(self, hidden: Any, g: Any) -> Any:
        """`hidden (C, D)` and `g (C, n)` -> (D, n), or (n, D) for a transposed head."""
        a, b = (g, hidden) if self.head.transposed else (hidden, g)
        return backend.wide_product(a, b, transpose_a=True)

    @staticmethod
    def operand(g: Any, other: Any) -> Any:
        """`g` as one side of a product with `other`: bfloat16 beside bfloat16, so that no copy of `other` is made."""
        return ops.cast(g, "bfloat16") if "bfloat16" in str(other.dtype) else g

    def block_size(self) -> int:
        """Positions whose formula is worked out at a time.

        A formula of thirty operations walks as often over its arrays, and holds several: small ones stay in the
        cache. The products with the head want many positions at once.
        """
        return max(1, _BLOCK_BYTES // (4 * self.head.columns))

    def slab_size(self) -> int:
        """Columns in which the weight's gradient is added up at a time, small beside the whole."""
        return min(self.head.columns, max(1, _SLAB_BYTES // (4 * self.head.width)))
