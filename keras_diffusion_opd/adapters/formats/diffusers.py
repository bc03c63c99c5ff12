"""Files of diffusers: `pytorch_lora_weights.safetensors`, with the modules of the transformer."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.adapters.formats.archive import read_tensors
from keras_diffusion_opd.adapters.formats.modules import Module
from keras_diffusion_opd.adapters.formats.peft import _Settings, config_of

FILE = "pytorch_lora_weights.safetensors"
_PREFIX = "transformer."
_CONFIG = "lora_adapter_metadata"
_ENDINGS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".alpha": "alpha",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}


def read_diffusers(path: Path, max_bytes: int | None) -> tuple[dict[str, Module], dict[str, list[str]], dict[str, str]]:
    """Modules of a file, the keys of each, and the file's metadata."""
    arrays, metadata = read_tensors(path, max_bytes)
    settings = _settings(metadata)
    modules: dict[str, Module] = {}
    keys: dict[str, list[str]] = {}
    for key, array in arrays.items():
        ending = next((e for e in _ENDINGS if key.endswith(e)), None)
        ours = ending is not None and key.startswith(_PREFIX)
        name = key[len(_PREFIX) : -len(ending)] if ours and ending else key
        keys.setdefault(name, []).append(key)
        if ours and ending:
            module = modules.setdefault(name, Module())
            if ending == ".alpha":
                if array.size != 1:
                    raise ValueError(f"{key!r} must be one number. Received shape {array.shape}.")
                module.alpha = float(array.astype("float64").reshape(()))
            else:
                setattr(module, _ENDINGS[ending], array)
    if settings is not None:
        for name, module in modules.items():
            module.rslora = settings.rslora
            if module.alpha is None:
                module.alpha = settings.alpha(name)
    return modules, keys, metadata


def diffusers_file(modules: dict[str, Module]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata of a file. The metadata hold the alphas; where all scales are 1 none are needed."""
    tensors: dict[str, np.ndarray] = {}
    for name, module in modules.items():
        if module.lookup:
            raise ValueError(f"{name!r} is an embedding, which files of diffusers do not have.")
        tensors[f"{_PREFIX}{name}.lora_A.weight"], tensors[f"{_PREFIX}{name}.lora_B.weight"] = module.a, module.b
        if module.magnitude is not None:
            tensors[f"{_PREFIX}{name}.lora_magnitude_vector"] = np.asarray(module.magnitude)
    ranks = {name: int(module.a.shape[0]) for name, module in modules.items()}
    alphas = {name: _plain_alpha(module) for name, module in modules.items()}
    dora = any(module.magnitude is not None for module in modules.values())
    if alphas == ranks and not dora:
        return tensors, {}
    config = {**config_of(ranks, alphas), "use_rslora": False, "use_dora": dora}
    left_out = ("peft_type", "inference_mode", "task_type", "base_model_name_or_path", "fan_in_fan_out")
    named = {f"{_PREFIX}{key}": value for key, value in config.items() if key not in left_out}
    return tensors, {_CONFIG: json.dumps(named, sort_keys=True)}


def _plain_alpha(module: Module) -> float:
    """The alpha that gives the same scale as alpha / rank."""
    rank, alpha = module.a.shape[0], float(module.alpha or 0.0)
    return alpha * math.sqrt(rank) if module.rslora else alpha


def _settings(metadata: dict[str, str]) -> Any:
    """The configuration in the metadata, or None where there is none."""
    if _CONFIG not in metadata:
        return None
    try:
        found = json.loads(metadata[_CONFIG])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The metadata `{_CONFIG}` do not read: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"The metadata `{_CONFIG}` must be an object. Received {type(found).__name__}.")
    own = {key.removeprefix(_PREFIX): value for key, value in found.items() if key.startswith(_PREFIX)}
    return _Settings({"peft_type": "LORA", **own}) if own else None
