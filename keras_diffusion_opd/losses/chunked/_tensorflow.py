"""TensorFlow: a `tf.while_loop` inside a `tf.custom_gradient`. See `loss_of_chunks`."""

import itertools
from typing import Any

import tensorflow as tf

from keras_diffusion_opd import backend
from keras_diffusion_opd.losses.chunked.objective import Objective, PerToken


def loss_of_chunks(
    objective: Objective,
    hidden: Any,
    tensors: dict[str, Any],
    rows: dict[str, Any],
    shared: dict[str, Any],
    chunk_size: int,
) -> tuple[Any, PerToken]:
    """The whole sum, which can be differentiated, and what each position adds, which cannot.

    Args:
        objective: of a chunk.
        hidden: float (N, D), the student's; anything where the weight is 0.
        tensors: of the head, by name.
        rows: arrays (N, ...): `"weights"`, `"ids"`, the teacher's.
        shared: the teacher's arrays without rows.
        chunk_size: rows whose logits exist at one time.
    """
    # A variable is read here, outside: `tf.custom_gradient` would take it for one that its function uses.
    tensors = {name: tf.convert_to_tensor(x) for name, x in tensors.items()}
    names = ("hidden", *tensors)
    dtypes = {name: x.dtype for name, x in {"hidden": hidden, **tensors}.items()}

    @tf.custom_gradient
    def run(*arrays: Any) -> Any:
        # What is not watched is not recorded: the loop is not walked back.
        inputs = {name: tf.stop_gradient(x) for name, x in zip(names, arrays, strict=True)}
        total, tokens, gradients = _walk(objective, inputs, rows, shared, chunk_size)

        def backward(upstream: Any, *_: Any) -> list[Any]:
            return [tf.cast(upstream * gradients[name], dtypes[name]) if name in gradients else None for name in names]

        return (total, *tokens), backward

    total, *tokens = run(hidden, *tensors.values())
    return total, PerToken(*(tf.stop_gradient(x) for x in tokens))


def _walk(
    objective: Objective, inputs: dict[str, Any], rows: dict[str, Any], shared: dict[str, Any], chunk_size: int
) -> tuple[Any, PerToken, dict[str, Any]]:
    """Sum, per-token values and gradients with respect to hidden states and head."""
    hidden = inputs["hidden"]
    tensors = {name: backend.product_operand(x) for name, x in inputs.items() if name != "hidden"}
    if "head" in shared:
        shared = {name: backend.product_operand(x) for name, x in shared.items()}
    weights = rows["weights"]
    count = tf.shape(hidden)[0]
    size = tf.minimum(chunk_size, count)
    steps = -(-count // size)
    edges = [*range(0, objective.head.columns, objective.slab_size()), objective.head.columns]
    slabs = list(itertools.pairwise(edges))
    wanted = objective.gradient_names(tensors)

    def step(i: Any, written: Any, sums: Any, slab_sums: Any) -> Any:
        # The last chunk begins earlier than it should rather than end beyond: what was done before weighs 0 now.
        start = tf.minimum(i * size, count - size)
        part = {name: _rows(x, start, size) for name, x in rows.items()}
        fresh = start + tf.range(size) >= i * size
        part["weights"] = tf.where(fresh, part["weights"], 0)
        active = tf.expand_dims(tf.not_equal(part["weights"], 0), -1)
        h = _rows(hidden, start, size)
        h = tf.cast(tf.where(active, h, tf.zeros_like(h)), weights.dtype)
        raw = objective.head.products(h, tensors)
        with tf.GradientTape() as tape:
            tape.watch(raw)
            total, tokens = objective.terms(raw, part, shared)
        g = tape.gradient(total, raw)
        found = objective.gradients(h, tensors, g)
        written = [a.write(i, x) for a, x in zip(written, (*tokens, found["hidden"]), strict=True)]
        sums = {name: total + found[name] for name, total in sums.items()}
        slab_sums = [
            total + objective.weight_gradient(h, g[:, low:high])
            for total, (low, high) in zip(slab_sums, slabs, strict=bool(slab_sums))
        ]
        return i + 1, written, sums, slab_sums

    def places(*shape: int) -> Any:
        return tf.TensorArray(weights.dtype, size=steps, element_shape=[None, *shape])

    start = [places() for _ in PerToken._fields] + [places(objective.head.width)]
    sums = {name: tf.zeros_like(tensors[name], weights.dtype) for name in wanted if name != "weight"}
    slab_sums = [tf.zeros(_slab_shape(objective, high - low), weights.dtype) for low, high in slabs]
    slab_sums = slab_sums if "weight" in wanted else []
    _, written, sums, slab_sums = tf.while_loop(
        lambda i, *_: i < steps, step, (tf.constant(0), start, sums, slab_sums), parallel_iterations=1
    )
    *columns, dh = (_joined(x, count, size, steps) for x in written)
    gradients = {"hidden": dh, **sums}
    if slab_sums:
        gradients["weight"] = tf.concat(slab_sums, axis=0 if objective.head.transposed else 1)
    tokens = PerToken(*columns)
    return objective.total(tokens, weights), tokens, gradients


def _slab_shape(objective: Objective, columns: int) -> tuple[int, int]:
    width = objective.head.width
    return (columns, width) if objective.head.transposed else (width, columns)


def _rows(x: Any, start: Any, size: Any) -> Any:
    part = tf.slice(x, [start] + [0] * (len(x.shape) - 1), [size] + [-1] * (len(x.shape) - 1))
    return tf.ensure_shape(part, [None, *x.shape[1:]])


def _joined(chunks: Any, count: Any, size: Any, steps: Any) -> Any:
    """The chunks' rows in order; the last chunk's first rows are those of the one before it."""
    rows = chunks.stack()
    rows = tf.reshape(rows, tf.concat([[steps * size], tf.shape(rows)[2:]], axis=0))
    before = (steps - 1) * size
    return tf.concat([rows[:before], rows[steps * size - (count - before) :]], axis=0)
