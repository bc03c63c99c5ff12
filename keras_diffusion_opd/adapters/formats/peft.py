"""PEFT's directories: `adapter_config.json` and `adapter_model.safetensors`."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.adapters.formats.archive import file_inside, read_tensors
from keras_diffusion_opd.adapters.formats.modules import Module
from keras_diffusion_opd.provenance import read_json
from keras_diffusion_opd.validation import finite_real

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDINGS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}
# What decides nothing that is not in the tensors, besides the keys that are read below.
_HARMLESS = frozenset(
    [
        "peft_type",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "bias",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "peft_version",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
        "qalora_group_size",
        "ensure_weight_tying",
        "megatron_core",
    ]
)
_BEGINNINGS = (True, False, None, "gaussian", "orthogonal", "eva")


def read_peft(path: Path, max_bytes: int | None) -> tuple[dict[str, Module], dict[str, list[str]], dict[str, str]]:
    """Modules of a PEFT directory, the keys of each, and the metadata of its tensors.

    Raises:
        ValueError: what is not supported, by name, or a file that is not sound.
    """
    config = read_json(file_inside(path, CONFIG))
    settings = _Settings(config)
    arrays, metadata = read_tensors(file_inside(path, TENSORS), max_bytes)
    modules: dict[str, Module] = {}
    keys: dict[str, list[str]] = {}
    for key, array in arrays.items():
        ending = next((e for e in _ENDINGS if key.endswith(e)), None)
        name = key[: -len(ending)].removeprefix(_PREFIX) if ending else key
        keys.setdefault(name, []).append(key)
        if ending is None:
            continue
        module = modules.setdefault(name, Module())
        lookup = ending.startswith(".lora_embedding")
        module.lookup = module.lookup or lookup
        setattr(module, _ENDINGS[ending], array)
    for name, module in modules.items():
        module.alpha, module.rslora = settings.alpha(name), settings.rslora
        if module.a is not None and module.a.ndim and settings.rank(name) not in (None, module.a.shape[0]):
            raise ValueError(
                f"{CONFIG} gives {name!r} the rank {settings.rank(name)}, and its A has {module.a.shape[0]} rows."
            )
        if (module.magnitude is not None) != settings.dora and not module.lookup:
            raise ValueError(
                f"`use_dora` is {settings.dora}, and {name!r} has {'a' if not settings.dora else 'no'} magnitude."
            )
    return modules, keys, metadata


def peft_files(modules: dict[str, Module]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and configuration of a PEFT directory.

    Raises:
        ValueError: layers that differ in what PEFT has once for all: rslora and DoRA.
    """
    kinds = {module.rslora for module in modules.values()}
    dora = {module.magnitude is not None for module in modules.values() if not module.lookup}
    if len(kinds) > 1 or len(dora) > 1:
        raise ValueError("PEFT has one `use_rslora` and one `use_dora` for all layers, and here layers differ.")
    tensors: dict[str, np.ndarray] = {}
    for name, module in modules.items():
        at = f"{_PREFIX}{name}"
        if module.lookup:
            tensors[f"{at}.lora_embedding_A"], tensors[f"{at}.lora_embedding_B"] = module.a, module.b
        else:
            tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"] = module.a, module.b
        if module.magnitude is not None:
            length = np.asarray(module.magnitude)
            tensors[f"{at}.lora_magnitude_vector"] = (
                length.reshape(1, -1, *(1 for _ in module.a.shape[2:])) if (module.a.ndim > 2) else length
            )
    ranks = {name: int(module.a.shape[0]) for name, module in modules.items()}
    alphas = {name: float(module.alpha or 0.0) for name, module in modules.items()}
    return tensors, {**config_of(ranks, alphas), "use_rslora": kinds.pop(), "use_dora": bool(dora) and dora.pop()}


def config_of(ranks: dict[str, int], alphas: dict[str, float]) -> dict[str, Any]:
    """What `peft.LoraConfig` is made of: the commonest rank and alpha, and patterns for the others."""
    rank = Counter(sorted(ranks.values())).most_common(1)[0][0]
    alpha = Counter(sorted(alphas.values())).most_common(1)[0][0]

    def others(values: dict[str, Any], common: Any) -> dict[str, Any]:
        return {f"^{re.escape(name)}": _whole(value) for name, value in sorted(values.items()) if value != common}

    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": _whole(alpha),
        "rank_pattern": others(ranks, rank),
        "alpha_pattern": others(alphas, alpha),
        "target_modules": sorted(ranks),
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "task_type": None,
        "base_model_name_or_path": None,
    }


class _Settings:
    """What `adapter_config.json` says, as far as it is supported."""

    def __init__(self, config: Any) -> None:
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            found = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
            raise ValueError(f"{CONFIG} must be of `peft_type` 'LORA'. Received {found!r}.")
        unsupported = sorted(key for key, value in config.items() if key not in _HARMLESS and value)
        if config.get("bias", "none") != "none":
            unsupported.append(f"bias={config['bias']!r}")
        if not any(
            config.get("init_lora_weights", True) is x or config.get("init_lora_weights") == x for x in _BEGINNINGS
        ):
            unsupported.append(f"init_lora_weights={config['init_lora_weights']!r}, which changes the base")
        if unsupported:
            raise ValueError(f"{CONFIG} asks for what is not supported: {', '.join(unsupported)}.")
        self.rslora, self.dora = (_flag(config, key) for key in ("use_rslora", "use_dora"))
        self._alpha, self._rank = config.get("lora_alpha"), config.get("r")
        self._alphas, self._ranks = (_patterns(config, key) for key in ("alpha_pattern", "rank_pattern"))
        for value in (*self._alphas.values(), *([] if self._alpha is None else [self._alpha])):
            try:
                finite_real("lora_alpha", value)
            except OverflowError as error:
                raise ValueError(f"{CONFIG}: `lora_alpha` is too large a number.") from error

    def alpha(self, module: str) -> float | None:
        """The alpha of a module."""
        value = _matched(self._alphas, module, self._alpha)
        return None if value is None else float(value)

    def rank(self, module: str) -> Any:
        """The rank of a module."""
        return _matched(self._ranks, module, self._rank)


def _flag(config: dict[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if value not in (True, False, None):
        raise ValueError(f"{CONFIG}: `{key}` must be true or false. Received {value!r}.")
    return bool(value)


def _patterns(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict) or len(found) > 4096:
        raise ValueError(f"{CONFIG}: `{key}` must be an object with at most 4096 patterns.")
    for pattern in found:
        # No group may repeat, and few characters: a pattern of strangers must end in time.
        repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
        if len(pattern) > 256 or repeats > 3 or re.search(r"\)[*+?{]", pattern):
            raise ValueError(f"{CONFIG}: the pattern {pattern[:80]!r} of `{key}` is too involved to be matched.")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{CONFIG}: the pattern {pattern[:80]!r} of `{key}` does not read: {error}.") from error
    return found


def _matched(patterns: dict[str, Any], module: str, otherwise: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module[:512]):
            return value
    return otherwise


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value
