"""JAX: a `fori_loop` inside a `custom_vjp`. See `loss_of_chunks`."""

from typing import Any

import jax
import jax.numpy as jnp

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
    dtypes = {name: x.dtype for name, x in {"hidden": hidden, **tensors}.items()}

    @jax.custom_vjp
    def run(inputs: dict[str, Any], data: Any) -> tuple[Any, PerToken]:
        rows, shared = data
        return _walk(objective, inputs, rows, shared, chunk_size, False)[:2]

    def forward(inputs: dict[str, Any], data: Any) -> Any:
        rows, shared = data
        total, tokens, gradients = _walk(objective, inputs, rows, shared, chunk_size, True)
        return (total, tokens), gradients

    def backward(gradients: dict[str, Any], upstream: Any) -> Any:
        scaled = {name: (upstream[0] * g).astype(dtypes[name]) for name, g in gradients.items()}
        return {name: scaled.get(name) for name in dtypes}, None

    run.defvjp(forward, backward)
    return run({"hidden": hidden, **tensors}, (rows, shared))


def _walk(
    objective: Objective,
    inputs: dict[str, Any],
    rows: dict[str, Any],
    shared: dict[str, Any],
    chunk_size: int,
    differentiate: bool,
) -> tuple[Any, PerToken, dict[str, Any]]:
    """Sum, per-token values and, where wanted, gradients with respect to hidden states and head."""
    hidden, tensors = inputs["hidden"], {name: x for name, x in inputs.items() if name != "hidden"}
    weights = rows["weights"]
    count = hidden.shape[0]
    size = min(chunk_size, count)
    wanted = ["hidden", *objective.gradient_names(tensors)] if differentiate else []
    sums = {name: jnp.zeros(inputs[name].shape, weights.dtype) for name in wanted}

    def step(i: Any, carry: Any) -> Any:
        tokens, sums = carry
        # The last chunk begins earlier than it should rather than end beyond: what was done before weighs 0 now.
        start = jnp.minimum(i * size, count - size)
        fresh = start + jnp.arange(size) >= i * size
        part = {name: jax.lax.dynamic_slice_in_dim(x, start, size) for name, x in rows.items()}
        part["weights"] = jnp.where(fresh, part["weights"], 0)
        h = jax.lax.dynamic_slice_in_dim(hidden, start, size)
        h = jnp.where((part["weights"] != 0)[:, None], h, 0).astype(h.dtype)
        raw, found = _terms(objective, objective.head.products(h, tensors), part, shared, differentiate)
        if differentiate:
            sums = _add(sums, objective, h, tensors, raw, start)
        return PerToken(*(_write(a, b, start, fresh) for a, b in zip(tokens, found, strict=True))), sums

    tokens = PerToken(*(jnp.zeros((count,), weights.dtype) for _ in PerToken._fields))
    tokens, sums = jax.lax.fori_loop(0, -(-count // size), step, (tokens, sums))
    return objective.total(tokens, weights), tokens, sums


def _terms(
    objective: Objective, raw: Any, part: dict[str, Any], shared: dict[str, Any], differentiate: bool
) -> tuple[Any, PerToken]:
    """What each position of a chunk adds, block by block; the gradients take the place of `raw`."""
    part, count = objective.expanded(part, shared), len(raw)
    size = min(objective.block_size(), count)

    def step(i: Any, carry: Any) -> Any:
        raw, tokens = carry
        start = jnp.minimum(i * size, count - size)
        fresh = start + jnp.arange(size) >= i * size
        block = {name: jax.lax.dynamic_slice_in_dim(x, start, size) for name, x in part.items()}
        block["weights"] = jnp.where(fresh, block["weights"], 0)
        leaf = jax.lax.dynamic_slice_in_dim(raw, start, size)
        if differentiate:
            (_, found), g = jax.value_and_grad(objective.terms, has_aux=True)(leaf, block, shared)
            raw = _write(raw, g, start, fresh)
        else:
            _, found = objective.terms(leaf, block, shared)
        return raw, PerToken(*(_write(a, b, start, fresh) for a, b in zip(tokens, found, strict=True)))

    tokens = PerToken(*(jnp.zeros_like(part["weights"]) for _ in PerToken._fields))
    return jax.lax.fori_loop(0, -(-count // size), step, (raw, tokens))


def _write(whole: Any, part: Any, start: Any, fresh: Any) -> Any:
    old = jax.lax.dynamic_slice_in_dim(whole, start, len(fresh))
    fresh = fresh.reshape(-1, *(1 for _ in part.shape[1:]))
    return jax.lax.dynamic_update_slice_in_dim(whole, jnp.where(fresh, part, old), start, 0)


def _add(
    sums: dict[str, Any], objective: Objective, h: Any, tensors: dict[str, Any], g: Any, start: Any
) -> dict[str, Any]:
    """The sums with a chunk's gradients. Rows that were done before have gradient 0: all are added."""
    added = dict(sums)
    for name, x in objective.gradients(h, tensors, g).items():
        if name == "hidden":
            old = jax.lax.dynamic_slice_in_dim(sums[name], start, len(h))
            added[name] = jax.lax.dynamic_update_slice_in_dim(sums[name], old + x, start, 0)
        else:
            added[name] = sums[name] + x
    if "weight" in sums:
        added["weight"] = _add_weight(sums["weight"], objective, h, g)
    return added


def _add_weight(total: Any, objective: Objective, h: Any, g: Any) -> Any:
    """Slab by slab in a loop of its own: unrolled, XLA makes the products of all slabs before it adds one."""
    axis = 0 if objective.head.transposed else 1
    h, columns, size = h.astype(total.dtype), objective.head.columns, objective.slab_size()

    def add(start: Any, size: int, total: Any) -> Any:
        product = objective.weight_gradient(h, jax.lax.dynamic_slice_in_dim(g, start, size, axis=1))
        old = jax.lax.dynamic_slice_in_dim(total, start, size, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(total, old + product, start, axis)

    whole = columns // size
    total = jax.lax.fori_loop(0, whole, lambda i, total: add(i * size, size, total), total)
    return total if whole * size == columns else add(whole * size, columns - whole * size, total)
