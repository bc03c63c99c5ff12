"""Adapters inside of the kernels, and the kernels as they were."""

from typing import Any

import numpy as np

from keras_diffusion_opd.adapters.adapter import Adapter
from keras_diffusion_opd.adapters.attribute_paths import layer_paths
from keras_diffusion_opd.adapters.base_matrix import base_matrix, is_quantised, kernel_variable, to_numpy
from keras_diffusion_opd.adapters.scope import Site
from keras_diffusion_opd.adapters.stack import Stack
from keras_diffusion_opd.layers.site_geometry import EinsumGeometry


class Fusion:
    """One stack, fused into the kernels of a model.

    Subtracting what was added would not give the kernels back: rounding loses bits in both directions. What was
    there is kept.

    Args:
        stack: what is fused.
        entries: (adapter, weight) of the stack.
        sites: of the bank.
        model: the base.
        requantise: whether quantised kernels may be written.

    Raises:
        ValueError: a kernel that must not be written. Nothing has changed then.
    """

    def __init__(
        self, stack: Stack, entries: list[tuple[Adapter, float]], sites: list[Site], model: Any, requantise: bool
    ) -> None:
        self.stack = stack
        aliases = layer_paths(model)
        self._written: list[tuple[str, Any, np.ndarray, np.ndarray]] = []  # path, variable, before, after
        for site in sites:
            parts = [(a.parts[site.path], weight) for a, weight in entries if site.path in a.parts]
            if not parts:
                continue
            if is_quantised(site.layer) and not requantise:
                raise ValueError(
                    f"The kernel of {site.path!r} is stored in {site.layer.quantization_mode}: rounding to its "
                    "grid may lose the adapter. Use `scope`, which adds it unrounded, or pass requantise=True."
                )
            if site.geometry.looks_up and len(aliases[site.path]) > 1:
                raise ValueError(
                    f"The table {site.path!r} is also read at {aliases[site.path][1:]}, where an adapter is not "
                    "applied otherwise. Leave the embedding out of the adapter, or use `scope`."
                )
            matrix = base_matrix(site.layer, site.geometry)
            whole = matrix.copy()
            for part, weight in parts:
                factor = part.column_factor(matrix)
                delta = part.delta()
                whole += weight * (delta if factor is None else (factor - 1.0) * matrix + factor * delta)
            self._plan(site, whole.astype("float32"))

    def _plan(self, site: Site, matrix: np.ndarray) -> None:
        kernel = site.geometry.kernel(matrix)
        if not np.isfinite(kernel).all():
            raise ValueError(f"The fused kernel of {site.path!r} is not finite.")
        if is_quantised(site.layer):
            pairs = _requantised(site, kernel)
        else:
            pairs = [(kernel_variable(site.layer), kernel)]
        for variable, after in pairs:
            self._written.append((site.path, variable, to_numpy(variable.value), after))

    def apply(self) -> None:
        """Write the fused kernels, and remember them as they were rounded."""
        for index, (path, variable, before, after) in enumerate(self._written):
            variable.assign(after)
            self._written[index] = (path, variable, before, to_numpy(variable.value))

    def undo(self) -> None:
        """Write the kernels from before; RuntimeError, and nothing is written, if one is not what `apply` wrote."""
        changed = {path for path, variable, _, after in self._written if not _same(to_numpy(variable.value), after)}
        if changed:
            raise RuntimeError(
                f"Kernels were changed while they were fused: {sorted(changed)}. Putting back what was saved would "
                "lose that. Load the base anew."
            )
        for _, variable, before, _ in self._written:
            variable.assign(before)


def _requantised(site: Site, kernel: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    """The variables of a quantised kernel with the values that Keras gives `kernel`."""
    layer = site.layer
    if site.geometry.looks_up or layer.quantization_mode not in ("int8", "int4"):
        raise ValueError(f"{site.path!r} cannot be quantised anew ({layer.quantization_mode}). Use `scope`.")
    config = {**layer.get_config(), "dtype": "float32", "name": None, "activation": None, "quantization_config": None}
    fresh = type(layer).from_config(config)
    geometry = site.geometry
    fresh.build(geometry.unit_inputs().shape if isinstance(geometry, EinsumGeometry) else (None, geometry.in_features))
    fresh._kernel.assign(kernel)
    fresh.quantize(layer.quantization_mode, config=getattr(layer, "quantization_config", None))
    pairs = []
    for name in ("_kernel", "kernel_scale", "kernel_zero"):
        variable = getattr(layer, name, None)
        if variable is not None:
            pairs.append((variable, to_numpy(getattr(fresh, name).value)))
    return pairs


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()
