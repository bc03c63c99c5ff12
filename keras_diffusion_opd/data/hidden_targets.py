"""A teacher that gives hidden states, and the head that would turn them into logits."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.data import shared_arrays
from keras_diffusion_opd.data.arrays import dtype_of, is_floating, require_array, same_shape, shape_of
from keras_diffusion_opd.data.output_head import OutputHead
from keras_diffusion_opd.data.targets import DenseTargets, TeacherTargets


@dataclass(frozen=True)
class HiddenTargets(TeacherTargets):
    """The teacher's hidden states at every position, and its head: D numbers a position in place of V.

    `losses.chunked_distillation` makes the logits of a few positions at a time; every divergence and temperature
    is exact. `losses.DistillationLoss` takes these targets too, and makes all logits at once.

    Rows are cut, joined and sharded as those of any targets: of the hidden states. The head is not of a row. In
    what `fit` receives it is named by its digest and held once in this process, until
    `HiddenTargets.forget_heads()`; trainers hand it to the compiled step beside the batch. Give all batches the
    same array objects: they are digested once. Arrays must not be written to afterwards.

    Args:
        hidden: float (B, L, D), any float dtype: what the teacher's head is given. Position i scores target i.
        head: float (D, V), or (V, D) with `transposed`.
        bias: float (V,) or None. -inf excludes an id.
        softcap: > 0 or None: logits are `softcap * tanh(logits / softcap)`.
        transposed: whether `head` is (V, D), as an embedding is that also reads out.
        vocabulary: None, or how many of the columns are ids; the others are padding.

    Inactive positions may hold anything. Wrong values at active ones raise where loss and trainer see them.

    Raises:
        TypeError, ValueError: a head whose shapes do not fit; in `validate`, hidden states that do not.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import HiddenTargets

    targets = HiddenTargets(np.ones((2, 3, 4), "float32"), np.ones((4, 9), "float32"))
    targets.validate(np.zeros((2, 3), "int32"))
    assert targets.vocabulary_size() == 9
    ```
    """

    hidden: Any
    head: Any
    bias: Any = field(default=None, kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    vocabulary: int | None = field(default=None, kw_only=True)
    kind: ClassVar[str] = "hidden"
    FAULTS: ClassVar[dict[str, str]] = {
        "hidden_finite": (
            "teacher hidden must be finite, and its head too (a bias of -inf may exclude single ids). Received NaN or "
            "an infinity"
        )
    }

    def __post_init__(self) -> None:
        self.output_head()

    def output_head(self) -> OutputHead:
        """The head as one object; no gradient flows into it."""
        return OutputHead(
            self.head,
            bias=self.bias,
            softcap=self.softcap,
            transposed=self.transposed,
            vocabulary_size=self.vocabulary,
            trainable=False,
        )

    def arrays(self) -> dict[str, Any]:
        """`{"hidden": (B, L, D)}`: what has rows."""
        return {"hidden": self.hidden}

    def shared(self) -> dict[str, Any]:
        """What has none: `{"head": ...}` and, where there is one, `"bias"`."""
        return {"head": self.head} if self.bias is None else {"head": self.head, "bias": self.bias}

    def settings(self) -> dict[str, Any]:
        """Softcap, whether the head is transposed, size of the vocabulary."""
        return {"softcap": self.softcap, "transposed": self.transposed, "vocabulary": self.vocabulary}

    def tag(self) -> str:
        """Kind, settings, and the digest of the head, which is held from now on."""
        return self.tag_of({**self.settings(), "shared": shared_arrays.hold(self.shared())})

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any], settings: dict[str, Any]) -> "HiddenTargets":
        """The inverse of `tag` and `arrays`: the head is in `arrays`, or held under the digest in `settings`."""
        settings = dict(settings)
        key = settings.pop("shared", None)
        if "head" not in arrays:
            arrays = {**arrays, **shared_arrays.held(str(key))}
        return cls(**arrays, **settings)

    def map(self, function: Any) -> "HiddenTargets":
        """The same targets with `function` applied to the hidden states; the head has no rows."""
        return self.from_arrays({"hidden": function(self.hidden), **self.shared()}, self.settings())

    def concrete(self) -> "HiddenTargets | None":
        """See `TeacherTargets.concrete`; the head is read too."""
        arrays = {name: backend.concrete(x) for name, x in {**self.arrays(), **self.shared()}.items()}
        return None if any(x is None for x in arrays.values()) else self.from_arrays(arrays, self.settings())

    @staticmethod
    def forget_heads() -> None:
        """Give back the memory of all heads held for `fit`. Batches made before hold theirs anew when used."""
        shared_arrays.forget_all()

    def vocabulary_size(self) -> int:
        """V, without padding."""
        return self.output_head().ids

    def logits(self) -> Any:
        """float32 or float64 (B, L, V): all logits at once, without gradient."""
        return ops.stop_gradient(self.output_head().logits(self.hidden))

    def validate(self, target_ids: Any) -> None:
        """Shape (B, L, D) with the batch's B and L and the head's D; a floating dtype."""
        require_array("teacher hidden", self.hidden)
        shape, expected, width = shape_of(self.hidden), shape_of(target_ids), self.output_head().width
        if len(shape) != 3 or not same_shape(shape, (*expected, width)):
            raise ValueError(
                f"`teacher hidden` must have shape ({expected[0]}, {expected[1]}, {width}) to align with target_ids "
                f"and the teacher's head. Received {shape}. Score every position: position i scores target i."
            )
        if not is_floating(self.hidden):
            raise TypeError(f"`teacher hidden` must have a floating-point dtype. Received {dtype_of(self.hidden)}.")

    def invalid(self) -> Any:
        """bool (B, L): hidden states that are not finite; all positions where the head has NaN or +inf."""
        xp = np if all(isinstance(x, np.ndarray) for x in (self.hidden, *self.shared().values())) else ops
        wrong = xp.any(xp.logical_not(xp.isfinite(self.hidden)), axis=-1)
        below = [xp.all(xp.isfinite(self.head))]
        if self.bias is not None:
            # -inf excludes an id. Comparisons with NaN are false.
            below.append(xp.all(xp.logical_or(xp.isfinite(self.bias), self.bias < 0)))
        sound = below[0] if len(below) == 1 else xp.logical_and(*below)
        return xp.logical_or(wrong, xp.logical_not(sound))

    def faults(self, vocabulary: int | None = None) -> dict[str, Any]:
        """See `TeacherTargets.faults`; `vocabulary` changes nothing."""
        return {"hidden_finite": self.invalid()}

    def scores(self) -> Any:
        """The logits, all at once."""
        return self.logits()

    def target_log_probs(self, ids: Any) -> Any:
        """See `TeacherTargets.target_log_probs`; makes all logits at once."""
        return DenseTargets(self.logits()).target_log_probs(ids)


def _flatten(targets: HiddenTargets) -> tuple[list[tuple[str, Any]], Any]:
    arrays = {**targets.arrays(), **targets.shared()}
    return list(arrays.items()), (tuple(arrays), tuple(targets.settings().items()))


def _unflatten(static: Any, children: Any) -> HiddenTargets:
    names, settings = static
    return _bare({**dict(zip(names, children, strict=True)), **dict(settings)})


def _bare(fields: dict[str, Any]) -> HiddenTargets:
    """Rebuilt without checks: a tree is also rebuilt of what is no array (shardings, axes, None)."""
    targets = object.__new__(HiddenTargets)
    for name, value in {"bias": None, **fields}.items():
        object.__setattr__(targets, name, value)
    return targets


backend.register_pytree(HiddenTargets, _flatten, _unflatten)
