"""PyTorch: a Python loop that adds in place, inside one `autograd.Function`. See `loss_of_chunks`."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from keras_diffusion_opd import backend
from keras_diffusion_opd.losses.chunked.objective import Objective, PerToken

_BLOCK_BYTES = 2**21


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
    found = []
    for start in range(0, hidden.shape[0], chunk_size):
        part = {name: x[start : start + chunk_size] for name, x in rows.items()}
        active = (part["weights"] != 0)[:, None]
        h = torch.where(active, hidden[start : start + chunk_size], 0).to(weights.dtype)
        raw = objective.head.products(h, tensors)
        part = objective.expanded(part, shared)
        found += _terms_of_blocks(objective, raw, part, shared, differentiate)
        if differentiate:
            _add(gradients, objective, h, tensors, raw, start)
    tokens = PerToken(*(torch.cat(column) for column in zip(*found, strict=True)))
    return objective.total(tokens, weights), tokens, gradients


def _terms_of_blocks(
    objective: Objective, raw: Any, part: dict[str, Any], shared: dict[str, Any], differentiate: bool
) -> list[PerToken]:
    """What each position of a chunk adds, a few positions at a time; their gradients take the place of `raw`.

    A formula of thirty operations walks thirty times over its arrays, and holds several: small ones stay in the
    cache. The products want many positions at once.
    """
    size = max(1, _BLOCK_BYTES // (raw.element_size() * raw.shape[1]))
    found = []
    for low in range(0, len(raw), size):
        block = {name: x[low : low + size] for name, x in part.items()}
        if not differentiate:
            found.append(objective.terms(raw[low : low + size], block, shared)[1])
            continue
        with torch.enable_grad():
            leaf = raw[low : low + size].detach().requires_grad_()
            total, tokens = objective.terms(leaf, block, shared)
            (g,) = torch.autograd.grad(total, leaf)
        found.append(PerToken(*(x.detach() for x in tokens)))
        raw[low : low + size] = g
    return found


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
