"""A distillation step in plain JAX, as one would write it for one job without any trainer.

The forward pass is the Keras model's own (`stateless_call`), so that what is compared is the step around it:
loss, gradient, accumulation and AdamW.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


class State(NamedTuple):
    """Everything an update changes."""

    trainable: list[Any]
    non_trainable: list[Any]
    first: list[Any]
    second: list[Any]
    count: Any


class HandWritten:
    """`update(window)`: one AdamW update from the micro-batches `(x, y, weights)` of `window`.

    The loss is `sum(weights * (soft * T^2 KL(teacher || student) + hard * cross-entropy)) / sum(weights)`.
    """

    def __init__(
        self,
        model: Any,
        *,
        soft: float,
        hard: float,
        temperature: float,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        self.model = model
        self.soft, self.hard, self.temperature = soft, hard, temperature
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        trainable = [v.value for v in model.trainable_variables]
        self.state = State(
            trainable,
            [v.value for v in model.non_trainable_variables],
            [jnp.zeros_like(v) for v in trainable],
            [jnp.zeros_like(v) for v in trainable],
            jnp.zeros((), "int32"),
        )
        self.loss: Any = None
        self.single = jax.jit(self._single, donate_argnums=0)
        self.micro = jax.jit(self._micro, donate_argnums=0)
        self.apply = jax.jit(self._apply, donate_argnums=0)
        self.zeros = jax.jit(lambda trainable: [jnp.zeros_like(v) for v in trainable])

    def update(self, window: Sequence[Any]) -> None:
        """One update."""
        if len(window) == 1:
            self.loss, self.state = self.single(self.state, window[0])
            return
        carry = (self.zeros(self.state.trainable), jnp.zeros(()), jnp.zeros(()), self.state.non_trainable)
        for batch in window:
            carry = self.micro(carry, self.state.trainable, batch)
        gradients, total, weight, non_trainable = carry
        self.loss, self.state = self.apply(self.state._replace(non_trainable=non_trainable), gradients, total, weight)

    def wait(self) -> None:
        """Until the device has finished."""
        jax.block_until_ready(self.state)

    def _sums(self, trainable: Any, non_trainable: Any, batch: Any) -> Any:
        x, y, weights = batch
        logits, non_trainable = self.model.stateless_call(trainable, non_trainable, x, training=True)
        logits = logits.astype("float32")
        teacher = jax.nn.log_softmax(y["teacher"]["dense"]["logits"] / self.temperature)
        student = jax.nn.log_softmax(logits / self.temperature)
        soft = jnp.sum(jnp.exp(teacher) * (teacher - student), -1) * self.temperature**2
        log_probabilities = jax.nn.log_softmax(logits)
        hard = -jnp.take_along_axis(log_probabilities, y["target_ids"][..., None], -1)[..., 0]
        return jnp.sum(weights * (self.soft * soft + self.hard * hard)), (jnp.sum(weights), non_trainable)

    def _single(self, state: State, batch: Any) -> Any:
        (total, (weight, non_trainable)), gradients = jax.value_and_grad(self._sums, has_aux=True)(
            state.trainable, state.non_trainable, batch
        )
        return self._apply(state._replace(non_trainable=non_trainable), gradients, total, weight)

    def _micro(self, carry: Any, trainable: Any, batch: Any) -> Any:
        sums, total, weight, non_trainable = carry
        (added, (more, non_trainable)), gradients = jax.value_and_grad(self._sums, has_aux=True)(
            trainable, non_trainable, batch
        )
        return (
            [a + b for a, b in zip(sums, gradients, strict=True)],
            total + added,
            weight + more,
            non_trainable,
        )

    def _apply(self, state: State, gradients: Any, total: Any, weight: Any) -> Any:
        count = state.count + 1
        rate = self.learning_rate * jnp.sqrt(1 - BETA_2**count) / (1 - BETA_1**count)
        trainable, first, second = [], [], []
        for p, m, v, gradient in zip(state.trainable, state.first, state.second, gradients, strict=True):
            g = gradient / weight
            m = m + (g - m) * (1 - BETA_1)
            v = v + (g * g - v) * (1 - BETA_2)
            p = p - p * self.weight_decay * self.learning_rate
            trainable.append(p - m * rate / (jnp.sqrt(v) + EPSILON))
            first.append(m)
            second.append(v)
        return total / weight, State(trainable, state.non_trainable, first, second, count)
