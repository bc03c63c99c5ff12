"""Whether an adapter may enter a bank, and what then lies in its slot."""

from typing import Any

import numpy as np
from keras import ops

from keras_diffusion_opd.adapters.adapter import Adapter
from keras_diffusion_opd.adapters.base_matrix import base_matrix
from keras_diffusion_opd.adapters.scope import Site


def check_admission(bank: Any, adapter: Adapter, check_base: bool) -> None:
    """ValueError unless `adapter` fits the targets, slots and base of `bank`; nothing is allocated."""
    outside = sorted(set(adapter.parts) - set(bank.paths))
    if outside:
        raise ValueError(f"{adapter.name!r} adapts layers that are no targets of this bank: {outside[:6]}.")
    adapter.check_fits(bank.model)
    for path, part in adapter.parts.items():
        if part.rank > bank.max_rank:
            need, limit = ((part.a.shape[0] + part.b.shape[1]) * r * 4 for r in (part.rank, bank.max_rank))
            raise ValueError(
                f"{adapter.name!r} has rank {part.rank} at {path!r}, and a slot has room for {bank.max_rank} "
                f"(`max_rank`): {need} bytes are needed, {limit} are there."
            )
        if part.magnitude is not None and not bank.dora:
            raise ValueError(f"{adapter.name!r} is DoRA at {path!r}. Make the bank with `dora=True`.")
    if check_base and adapter.base_digest not in (None, bank.base_digest):
        raise ValueError(
            f"{adapter.name!r} belongs to a base of digest {str(adapter.base_digest)[:12]}, and this one has "
            f"{bank.base_digest[:12]}. If that is meant (a quantised copy, say) pass check_base=False."
        )


def slot_content(site: Site, adapter: Adapter) -> tuple[Any, ...]:
    """(A, scaled B, gain) as they lie in a slot."""
    part = adapter.parts.get(site.path)
    if part is None:
        geometry = site.geometry
        return np.zeros((geometry.in_features, 0), "float32"), np.zeros((0, geometry.out_features), "float32")
    b, gain = part.b.astype("float64") * part.scale, None
    if part.magnitude is not None:
        factor = part.column_factor(base_matrix(site.layer, site.geometry))
        assert factor is not None
        b, gain = b * factor, (factor - 1.0).astype("float32")
    a, b = part.a.astype("float32"), b.astype("float32")
    dtype = site.banked.variable_dtype
    for value in (a, b):
        if not bool(ops.all(ops.isfinite(ops.cast(ops.convert_to_tensor(value), dtype)))):
            raise ValueError(f"{adapter.name!r} at {site.path!r}, scaled by {part.scale}, is not finite in {dtype}.")
    return a, b, gain
