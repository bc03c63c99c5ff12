"""Small students, uneven prepared data, and a reference that trains on whole windows with Keras's optimizers."""

from typing import Any

import keras
import numpy as np
from keras import ops

import keras_diffusion_opd as kdo

V, D, L = 13, 16, 6


def make_batches(
    sizes: list[tuple[int, int]],
    seed: int = 0,
    zero: tuple[int, ...] = (),
    poison: bool = False,
    teacher: bool = True,
) -> list[kdo.data.PreparedBatch]:
    """Prepared batches of the given (rows, length); weights span four decades, about half are 0.

    Batches listed in `zero` weigh nothing at all. With `poison` inactive positions hold NaN and wrong ids.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for index, (rows, length) in enumerate(sizes):
        ids = rng.integers(0, V, (rows, length)).astype("int32")
        targets = rng.integers(0, V, (rows, length)).astype("int32")
        logits = (3 * rng.normal(size=(rows, length, V))).astype("float32")
        weights = rng.random((rows, length)) * (rng.random((rows, length)) < 0.5)
        weights = (weights * 10.0 ** rng.integers(-2, 2, (rows, 1))).astype("float32")
        if index in zero:
            weights[:] = 0
        if poison:
            logits[weights == 0] = np.nan
            targets[weights == 0] = -1
        batches.append(
            kdo.data.PreparedBatch.create(
                model_inputs={"token_ids": ids},
                target_ids=targets,
                loss_weights=weights,
                teacher=kdo.data.DenseTargets(logits) if teacher else None,
            )
        )
    return batches


def make_student(dtype: Any = None, seed: int = 1, dropout: float = 0.0, regularizer: Any = None) -> keras.Model:
    """Embedding, one hidden layer, head; any length."""
    keras.utils.set_random_seed(seed)
    ids = keras.Input((None,), dtype="int32", name="token_ids")
    h = keras.layers.Embedding(V, D, name="embedding", dtype=dtype)(ids)
    h = keras.layers.Dense(D, activation="tanh", name="hidden", dtype=dtype, kernel_regularizer=regularizer)(h)
    if dropout:
        h = keras.layers.Dropout(dropout, seed=3, dtype=dtype)(h)
    return keras.Model({"token_ids": ids}, keras.layers.Dense(V, name="head", dtype=dtype)(h), name="student")


def make_trainer(student: Any = None, loss: Any = None, optimizer: Any = None, **compile_arguments: Any) -> Any:
    """A `PreparedTrainer` with a mixed loss, eager unless told otherwise.

    Both ways run the same functions; compiling a fresh program for every test is what would take time.
    `test_compiled.py` and the golden windows hold compiled and eager runs to the same numbers.
    """
    if "jit_compile" not in compile_arguments:
        compile_arguments.setdefault("run_eagerly", True)
    student = make_student() if student is None else student
    loss = loss or kdo.losses.DistillationLoss(temperature=2.0, soft_weight=0.7, hard_weight=0.3)
    trainer = kdo.trainers.PreparedTrainer(student, loss)
    trainer.compile(keras.optimizers.SGD(0.1) if optimizer is None else optimizer, **compile_arguments)
    return trainer


def fit(trainer: Any, batches: list[kdo.data.PreparedBatch], **arguments: Any) -> Any:
    """`fit` in the given order, silently."""
    return trainer.fit(kdo.data.PreparedDataset(batches), verbose=0, **arguments)


def weights_of(model: Any) -> list[np.ndarray]:
    """Copies of the trainable weights in float32."""
    return [np.array(ops.convert_to_numpy(ops.cast(v.value, "float32"))) for v in model.trainable_variables]


def largest_difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    """Largest absolute difference between two lists of arrays."""
    return max(float(np.max(np.abs(x - y))) for x, y in zip(a, b, strict=True))


def same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    """Whether two lists of arrays are equal bit for bit."""
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def optimizer_state(trainer: Any) -> list[np.ndarray]:
    """Copies of every optimizer variable."""
    return [
        np.array(ops.convert_to_numpy(ops.cast(v.value, "float32") if "float" in v.dtype else v.value))
        for v in trainer.optimizer.variables
    ]


def reference_gradients(student: Any, loss: Any, batches: list[kdo.data.PreparedBatch]) -> tuple[float, list[Any]]:
    """Loss and gradients of the mean over all the batches together, by the backend's own autodiff."""

    def mean() -> Any:
        parts = [loss(student(b.model_inputs, training=True), b).primary for b in batches]
        return sum(parts[1:], parts[0]).mean()

    backend = keras.backend.backend()
    variables = student.trainable_variables
    if backend == "jax":
        import jax

        def pure(values: Any) -> Any:
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return mean()

        value, gradients = jax.jit(jax.value_and_grad(pure))([v.value for v in variables])
    elif backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = mean()
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(value, [v.value for v in variables])]
    else:
        import torch

        value = mean()
        gradients = list(torch.autograd.grad(value, [v.value for v in variables]))
        value = value.detach()
    return float(value), gradients


def train_reference(
    student: Any, loss: Any, optimizer: Any, windows: list[list[kdo.data.PreparedBatch]]
) -> list[float]:
    """One update of `optimizer` per window, from the gradient of the window as a whole."""
    optimizer.build(student.trainable_variables)
    losses = []
    for window in windows:
        value, gradients = reference_gradients(student, loss, window)
        if keras.backend.backend() == "torch":
            import torch

            with torch.no_grad():
                optimizer.apply(gradients, student.trainable_variables)
        else:
            optimizer.apply(gradients, student.trainable_variables)
        losses.append(value)
    return losses
