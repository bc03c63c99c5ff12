"""Where a student's hidden states and its head are, so that a loss can do without the logits."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import keras
from keras import ops

from keras_diffusion_opd.data.output_head import OutputHead


@runtime_checkable
class OffersHidden(Protocol):
    """A model of your own that says itself what its head is, and what the head is given.

    Example:

    ```python
    import keras
    from keras_diffusion_opd.data import OutputHead
    from keras_diffusion_opd.models import OffersHidden

    class Student(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = keras.layers.Embedding(9, 4)
            self.embedding.build()

        def hidden_states(self, inputs, training=None):
            return self.embedding(inputs)

        def output_head(self):
            return OutputHead(self.embedding.embeddings, transposed=True)

        def call(self, inputs):
            return self.output_head().logits(self.hidden_states(inputs))

    assert isinstance(Student(), OffersHidden)
    ```
    """

    def hidden_states(self, inputs: Any, training: bool | None = None) -> Any:
        """The model's inputs -> float (B, L, D)."""
        ...

    def output_head(self) -> OutputHead:
        """What turns them into the model's logits, as its variables are now."""
        ...


class HiddenRoute:
    """The two halves of a student. Not tracked by Keras: the student alone holds the variables.

    Args:
        hidden: function `(inputs, training) -> (B, L, D)`.
        head: function of nothing that reads the head's variables as they are now.

    Example:

    ```python
    import keras
    from keras_diffusion_opd.models import hidden_route

    ids = keras.Input((4,), dtype="int32")
    student = keras.Model(ids, keras.layers.Dense(6)(keras.layers.Embedding(6, 8)(ids)))
    route = hidden_route(student)
    assert tuple(route.hidden(keras.ops.zeros((2, 4), "int32"), False).shape) == (2, 4, 8)
    assert route.head().ids == 6
    ```
    """

    def __init__(self, hidden: Callable[[Any, bool | None], Any], head: Callable[[], OutputHead]) -> None:
        self.hidden = hidden
        self.head = head


def hidden_route(student: Any) -> HiddenRoute:
    """Find hidden states and head of a student, without changing it.

    | `student` | hidden states | head |
    |---|---|---|
    | a model with `hidden_states` and `output_head` (`OffersHidden`) | what it says | what it says |
    | `token_scorer(backbone)` of a tied embedding | the backbone's | its token embedding, in reverse |
    | a functional or sequential model that ends in a linear `Dense` | the layer's input | the layer, with LoRA |

    Args:
        student: see the table.

    Returns:
        `HiddenRoute`.

    Raises:
        ValueError: none of these, with the reason.

    Example:

    ```python
    import keras
    from keras_diffusion_opd.models import hidden_route

    ids = keras.Input((4,), dtype="int32")
    student = keras.Model(ids, keras.layers.Dense(6)(keras.layers.Embedding(6, 8)(ids)))
    assert hidden_route(student).head().width == 8
    ```
    """
    if isinstance(student, OffersHidden):
        return HiddenRoute(lambda x, training: student.hidden_states(x, training=training), student.output_head)
    last = _last_layer(student)
    if isinstance(last, OffersHidden):
        return HiddenRoute(lambda x, training: last.hidden_states(x, training=training), last.output_head)
    if isinstance(last, keras.layers.Dense):
        _check_dense(last)
        body = keras.Model(student.inputs if isinstance(student, keras.Sequential) else student.input, last.input)
        return HiddenRoute(lambda x, training: body(x, training=training), lambda: dense_head(last))
    raise ValueError(
        "ChunkedDistillationLoss needs the student's hidden states and head. Received "
        f"{type(student).__name__}{'' if last is None else f' that ends in {type(last).__name__}'}. Give a functional "
        "model that ends in a linear Dense layer, token_scorer(backbone) of a tied embedding, or a model with the "
        "methods hidden_states(inputs, training=None) and output_head(); or use DistillationLoss."
    )


def _last_layer(student: Any) -> Any:
    """The layer that gives the one output of a functional or sequential model; None where it cannot be told."""
    try:
        outputs = keras.tree.flatten(student.output)
    except (AttributeError, ValueError):
        return None
    if len(outputs) != 1:
        return None
    return next((layer for layer in student.layers if _gives(layer, outputs[0])), None)


def _gives(layer: Any, output: Any) -> bool:
    try:
        return layer.output is output
    except (AttributeError, ValueError):
        return False  # called several times, or never


def _check_dense(layer: keras.layers.Dense) -> None:
    if layer.activation not in (None, keras.activations.linear):
        raise ValueError(f"The head must be linear. Received Dense with activation {layer.activation!r}.")
    if layer.activity_regularizer is not None:
        raise ValueError(
            "The head has an activity regularizer, which looks at all logits: they do not exist in a chunked loss. "
            "Remove it, or use DistillationLoss."
        )
    if layer.quantization_mode is not None:
        raise ValueError(
            f"The head is quantised ({layer.quantization_mode}). A chunked loss needs its float weights: leave the "
            "head out of the quantisation, or use DistillationLoss."
        )


def dense_head(layer: keras.layers.Dense) -> OutputHead:
    """A `Dense` layer as it is now; its LoRA pair stays a pair."""
    low_rank = None
    kernel = layer.kernel if not layer.lora_enabled else layer._kernel  # `kernel` would be the sum with LoRA's product
    if layer.lora_enabled:
        scale = (layer.lora_alpha or layer.lora_rank) / layer.lora_rank
        low_rank = (ops.convert_to_tensor(layer.lora_kernel_a) * scale, ops.convert_to_tensor(layer.lora_kernel_b))
    trainable = any(v.trainable for v in (kernel, layer.bias) if v is not None)
    bias = None if layer.bias is None else ops.convert_to_tensor(layer.bias)
    return OutputHead(ops.convert_to_tensor(kernel), bias=bias, low_rank=low_rank, trainable=trainable)
