"""Hidden states, heads and teachers of every kind for tests, and gradients with respect to several arrays."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.data import DenseTargets, HiddenTargets, PreparedBatch, SampledTargets, TopKTargets
from tests.oracles import numpy, tensor

B, L, D, V, RANK = 2, 5, 6, 11, 2
WEIGHTS = np.array([[1.0, 0.0, 0.5, 2.0, 0.0], [0.0, 3.0, 0.0, 1.0, 0.25]], "float32")
OFF = WEIGHTS == 0


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    """float32 standard normal."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("float32")


HIDDEN, HEAD, BIAS, A, LOW_B = draw(B, L, D), draw(D, V), draw(V), draw(D, RANK), draw(RANK, V, seed=1)
IDS = np.random.default_rng(1).integers(0, V, (B, L)).astype("int32")
TEACHER_LOGITS = 2 * draw(B, L, V)


def teachers(temperature: float = 1.0) -> dict[str, Any]:
    """One of every kind, of V ids."""
    top = {name: TopKTargets.from_logits(TEACHER_LOGITS, 3, temperature=temperature, tail=name) for name in TAILS}
    hidden = HiddenTargets(draw(B, L, 4), draw(4, V, seed=2), bias=draw(V, seed=3), softcap=3.0)
    sampled = SampledTargets.from_logits(TEACHER_LOGITS, 5, seed=0, temperature=temperature)
    return {"dense": DenseTargets(TEACHER_LOGITS), "hidden": hidden, "sampled": sampled, **top}


TAILS = ("bucket", "renormalize")
KINDS = ("dense", "hidden", "sampled", *TAILS)
FORWARD_ONLY = ("sampled", "renormalize")  # kinds that give one divergence


def batch_of(teacher: Any, weights: Any = WEIGHTS, ids: Any = IDS) -> PreparedBatch:
    """A batch that is not validated."""
    return PreparedBatch(ids, ids, weights, teacher)


def value_and_grads(
    function: Callable[..., Any], *arrays: Any, compiled: bool = True
) -> tuple[float, list[np.ndarray]]:
    """Scalar `function(*arrays)` and its gradients with respect to each; None becomes zeros."""
    tensors = [x if not isinstance(x, np.ndarray) else tensor(x) for x in arrays]
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        program = jax.value_and_grad(function, argnums=tuple(range(len(tensors))))
        value, gradients = (jax.jit(program) if compiled else program)(*tensors)
    elif backend == "tensorflow":
        import tensorflow as tf

        def run(*tensors: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(*tensors)
            return value, tape.gradient(value, tensors)

        value, gradients = (tf.function(run) if compiled else run)(*tensors)
    else:
        import torch

        tensors = [x.detach().clone().requires_grad_(True) for x in tensors]
        value = function(*tensors)
        gradients = torch.autograd.grad(value, tensors, allow_unused=True)
    zeros = [np.zeros(tuple(x.shape), "float32") for x in tensors]
    return float(numpy(ops.stop_gradient(value))), [
        z if g is None else numpy(g) for g, z in zip(gradients, zeros, strict=True)
    ]


def relative(a: Any, b: Any) -> float:
    """Largest difference of two arrays, over the largest of the second."""
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
