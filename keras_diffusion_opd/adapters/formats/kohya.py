"""Files of kohya's scripts: `lora_unet_...` with points as underscores, `.alpha`, and fused projections."""

from pathlib import Path

import numpy as np

from keras_diffusion_opd.adapters.adapter_part import AdapterPart
from keras_diffusion_opd.adapters.formats.archive import read_tensors
from keras_diffusion_opd.adapters.formats.module_names import ModuleNames, fused_widths
from keras_diffusion_opd.adapters.formats.modules import Module, trained_rank

_PREFIX = "lora_unet_"
_ENDINGS = {".lora_down.weight": "a", ".lora_up.weight": "b", ".alpha": "alpha"}


def read_kohya(
    path: Path, names: ModuleNames, max_bytes: int | None
) -> tuple[dict[str, Module], dict[str, list[str]], dict[str, str]]:
    """Modules of a file by the paths of the model, the keys of each, and the file's metadata.

    The alpha of a fused projection belongs to the rank with which its parts were trained: where B is the block diagonal
    of three, a third of the rank of the file.
    """
    arrays, metadata = read_tensors(path, max_bytes)
    paths: dict[str, str] = {}
    for target in (names.target_of(p) for p in names.geometries):
        flat = target.modules[0].replace(".", "_")
        if flat in paths:
            raise ValueError(f"{flat!r} is the name of {paths[flat]!r} and of {target.path!r}: pass a `key_map`.")
        paths[flat] = target.path
    modules: dict[str, Module] = {}
    keys: dict[str, list[str]] = {}
    for key, array in arrays.items():
        ending = next((e for e in _ENDINGS if key.endswith(e)), None)
        ours = ending is not None and key.startswith(_PREFIX)
        name = paths.get(key[len(_PREFIX) : -len(ending)], key) if ours and ending else key
        keys.setdefault(name, []).append(key)
        if ending is None or name == key:
            continue
        module = modules.setdefault(name, Module())
        if ending == ".alpha":
            if array.size != 1:
                raise ValueError(f"{key!r} must be one number. Received shape {array.shape}.")
            module.alpha = float(array.astype("float64").reshape(()))
        else:
            setattr(module, _ENDINGS[ending], array)
    for name, module in modules.items():
        geometry = names.geometries[name]
        b = module.b
        if module.alpha is not None and b is not None and b.ndim == 2 and b.shape[0] == geometry.out_features:
            whole = b.shape[1]
            each = trained_rank(b.T, fused_widths(name, geometry)) if whole else whole
            module.alpha = module.alpha / each * whole if each != whole else module.alpha
    return modules, keys, metadata


def kohya_file(parts: dict[str, AdapterPart], names: ModuleNames) -> dict[str, np.ndarray]:
    """Tensors of a file; a ValueError for what the format does not have."""
    tensors: dict[str, np.ndarray] = {}
    for path, part in parts.items():
        if part.magnitude is not None or part.form == "embedding":
            raise ValueError(
                f"{path!r} is {'DoRA' if part.magnitude is not None else 'an embedding'}: not in this format."
            )
        module = Module.of(part, path)
        at = _PREFIX + names.target_of(path).modules[0].replace(".", "_")
        each = trained_rank(part.b, fused_widths(path, names.geometries[path]))
        alpha = np.float64(part.scale * each)
        exact = np.float32(alpha) == alpha
        tensors[f"{at}.lora_down.weight"], tensors[f"{at}.lora_up.weight"] = module.a, module.b
        tensors[f"{at}.alpha"] = np.array(alpha, "float32" if exact else "float64")
    return tensors
