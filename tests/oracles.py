"""What the tests compare with: formulas in NumPy float64, and gradients by the backend that runs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np
from keras import ops

BACKEND = keras.backend.backend()
DIVERGENCES = (
    "forward_kl",
    "reverse_kl",
    "jsd",
    "normalized_jsd",
    "skew_forward_kl",
    "skew_reverse_kl",
    "alpha",
    "total_variation",
)
WITH_BETA = ("jsd", "normalized_jsd", "skew_forward_kl", "skew_reverse_kl", "alpha")
DEFAULT_BETA = {"skew_forward_kl": 0.1, "skew_reverse_kl": 0.1}


# ---- the running backend ----------------------------------------------------------------------------


def tensor(values: Any, dtype: str = "float32") -> Any:
    """The backend's tensor of `values`, rounded to `dtype` by NumPy: the same numbers on every backend."""
    array = np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return ops.convert_to_tensor(array)


def numpy(x: Any) -> np.ndarray:
    """`x` as NumPy, bfloat16 widened to float32."""
    array = np.asarray(ops.convert_to_numpy(x))
    return array.astype("float32") if array.dtype == ml_dtypes.bfloat16 else array


def value_and_grad(function: Callable[..., Any], x: Any, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scalar `function(x, *rest)` and its gradient with respect to `x` (array or tensor); None becomes zeros."""
    x = ops.convert_to_tensor(x)
    if BACKEND == "jax":
        import jax

        value, gradient = jax.value_and_grad(function)(x, *rest)
    elif BACKEND == "tensorflow":
        value, gradient = _tape(function, x, *rest)
    else:
        x = x.detach().clone().requires_grad_(True)
        value = function(x, *rest)
        if value.requires_grad:
            value.backward()
        gradient = x.grad
    zeros = np.zeros(tuple(x.shape), "float32")
    return numpy(value), zeros if gradient is None else numpy(gradient)


def _tape(function: Callable[..., Any], x: Any, *rest: Any) -> tuple[Any, Any]:
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(x)
        value = function(x, *rest)
    return value, tape.gradient(value, x)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors under `jax.jit` or `tf.function`; eager on torch, which trains eagerly."""
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return function


def compiled_value_and_grad(function: Callable[..., Any]) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """`value_and_grad` of `function` as one program, compiled once for each shape (eager on torch).

    What is to be compared goes in as an argument: a constant that the function closes over would be folded by
    the compiler's own arithmetic, which rounds otherwise than the program.
    """
    if BACKEND == "torch":
        return lambda x, *rest: value_and_grad(function, x, *rest)
    if BACKEND == "jax":
        import jax

        program = jax.jit(jax.value_and_grad(function))
    else:
        import tensorflow as tf

        program = tf.function(lambda x, *rest: _tape(function, x, *rest))

    def call(x: Any, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = program(ops.convert_to_tensor(x), *rest)
        return numpy(value), numpy(gradient)

    return call


@contextlib.contextmanager
def float64_scope() -> Iterator[None]:
    """Within it float64 stays float64; JAX has to be told."""
    if BACKEND == "jax":
        import jax

        with jax.enable_x64(True):
            yield
    else:
        yield


# ---- formulas in float64 ------------------------------------------------------------------------------


def softmax(logits: Any, temperature: float = 1.0) -> np.ndarray:
    """float64 probabilities; -inf gives 0."""
    z = np.asarray(logits, "float64") / temperature
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """KL(a || b) over the last axis: 0 log 0 = 0, and infinite where b is 0 and a is not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a > 0, a * (np.log(a) - np.log(b)), 0.0).sum(-1)


def divergence_of(name: str, p: np.ndarray, q: np.ndarray, beta: float | None = None) -> np.ndarray:
    """A divergence by its definition, of teacher probabilities p and student probabilities q (..., V)."""
    beta = DEFAULT_BETA.get(name, 0.5) if beta is None else beta
    m = beta * p + (1 - beta) * q
    jsd = beta * kl(p, m) + (1 - beta) * kl(q, m)
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: jsd,
        "normalized_jsd": lambda: jsd / (beta * (1 - beta)),
        "skew_forward_kl": lambda: kl(p, m),
        "skew_reverse_kl": lambda: kl(q, beta * q + (1 - beta) * p),
        "alpha": lambda: (1 - (p**beta * q ** (1 - beta)).sum(-1)) / (beta * (1 - beta)),
        "total_variation": lambda: np.abs(p - q).sum(-1) / 2,
    }[name]()


def reference(name: str, student: Any, teacher: Any, temperature: float = 1.0, beta: float | None = None) -> np.ndarray:
    """The same from logits, times temperature squared."""
    p, q = softmax(teacher, temperature), softmax(student, temperature)
    return divergence_of(name, p, q, beta) * temperature**2


def numerical_gradient(function: Callable[[np.ndarray], Any], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of a scalar function of float64 `x`."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        moved = np.zeros_like(x)
        moved[index] = step
        gradient[index] = (function(x + moved) - function(x - moved)) / (2 * step)
    return gradient


def cross_entropy(logits: Any, ids: Any) -> np.ndarray:
    """-log softmax(logits)[ids], float64 (...)."""
    z = np.asarray(logits, "float64")
    z = z - z.max(-1, keepdims=True)
    log_q = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return -np.take_along_axis(log_q, np.asarray(ids)[..., None], -1)[..., 0]
