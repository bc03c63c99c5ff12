"""PyTorch: a Python loop that adds in place, inside one `autograd.Function`. See `loss_of_chunks`."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

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
    names = tuple(tensors)
    inputs = (hidden, *tensors.values())
    differentiate = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    total, *tokens = _Chunked.apply(objective, (names, rows, shared, chunk_size, differentiate), *inputs)
    return total, PerToken(*tokens)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, objective: Objective, data: Any, hidden: Any, *arrays: Any) -> Any:
        names, rows, shared, chunk_size, differentiate = data
        tensors = dict(zip(names, arrays, strict=True))
        total, tokens, gradients = _walk(objective, hidden, tensors, rows, shared, chunk_size, differentiate)
        ctx.gradients = gradients
        ctx.dtypes = {"hidden": hidden.dtype, **{name: x.dtype for name, x in tensors.items()}}
        ctx.mark_non_differentiable(*tokens)
        return total, *tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Any, *_: Any) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "The gradients of this chunked loss have been given away: they are scaled in place to spare a copy of "
                "the head. Compute the loss again instead of backward(retain_graph=True)."
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (gradients.get(name) for name in ctx.dtypes)
        dtypes = ctx.dtypes.values()
        return None, None, *(None if g is None else g.mul_(upstream).to(t) for g, t in zip(scaled, dtypes, strict=True))


def _walk(
    objective: Objective,
    hidden: Any,
    tensors: dict[str, Any],
    rows: dict[str, Any],
    shared: dict[str, Any],
    chunk_size: int,
    differentiate: bool,
) -> tuple[Any, PerToken, dict[str, Any]]:
    """Sum, per-token values and, where wanted, gradients with respect to hidden states and head."""
    weights = rows["weights"]
    gradients: dict[str, Any] = {}
    if differentiate:
        wanted = {"hidden": hidden, **{name: tensors[name] for name in objective.gradient_names(tensors)}}
        gradients = {name: torch.zeros(x.shape, dtype=weights.dtype, device=x.device) for name, x in wanted.items()}
    tensors = {name: backend.product_operand(x) for name, x in tensors.items()}
    if "head" in shared:
        shared = {name: backend.product_operand(x) for name, x in shared.items()}
    # Made once and written to: small results that outlive the loop's large ones would break up the memory.
    tokens = PerToken(*(torch.zeros_like(weights) for _ in PerToken._fields))
    for start in range(0, hidden.shape[0], chunk_size):
        here = slice(start, start + chunk_size)
        part = {name: x[here] for name, x in rows.items()}
        h = torch.where((part["weights"] != 0)[:, None], hidden[here], 0).to(weights.dtype)
        raw = objective.head.products(h, tensors)
        part = objective.expanded(part, shared)
        _terms_of_blocks(objective, raw, part, shared, [x[here] for x in tokens], differentiate)
        if differentiate:
            _add(gradients, objective, h, tensors, raw, start)
    return objective.total(tokens, weights), tokens, gradients


def _terms_of_blocks(
    objective: Objective,
    raw: Any,
    part: dict[str, Any],
    shared: dict[str, Any],
    tokens: list[Any],
    differentiate: bool,
) -> None:
    """Write what each position of a chunk adds, block by block; their gradients take the place of `raw`."""
    size = objective.block_size()
    for low in range(0, len(raw), size):
        here = slice(low, low + size)
        block = {name: x[here] for name, x in part.items()}
        with torch.set_grad_enabled(differentiate):
            leaf = raw[here].detach().requires_grad_(differentiate)
            total, found = objective.terms(leaf, block, shared)
        if differentiate:
            (raw[here],) = torch.autograd.grad(total, leaf)
        for whole, x in zip(tokens, found, strict=True):
            whole[here] = x.detach()


def _add(sums: dict[str, Any], objective: Objective, h: Any, tensors: dict[str, Any], g: Any, start: int) -> None:
    """A chunk's gradients into the sums, in place."""
    for name, x in objective.gradients(h, tensors, g).items():
        if name == "hidden":
            sums[name][start : start + len(h)] = x
        else:
            sums[name] += x
    if "weight" in sums:
        a, b = (g, h) if objective.head.transposed else (h, g)
        sums["weight"].addmm_(a.T, b)
