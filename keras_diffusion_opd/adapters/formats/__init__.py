"""Files of adapters: PEFT's, those of diffusers and of kohya's scripts."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from keras_diffusion_opd.adapters.adapter import Adapter
from keras_diffusion_opd.adapters.adapter_part import AdapterPart
from keras_diffusion_opd.adapters.formats import diffusers, kohya, peft
from keras_diffusion_opd.adapters.formats.archive import file_inside, read_tensors, write_tensors
from keras_diffusion_opd.adapters.formats.module_names import ModuleNames
from keras_diffusion_opd.adapters.formats.modules import Module, joined, split
from keras_diffusion_opd.provenance import Recipe, digest, new_directory, write_json
from keras_diffusion_opd.provenance.records import header, open_record
from keras_diffusion_opd.validation import positive_int

FORMATS = ("peft", "diffusers", "kohya")
_NOTE = "keras_diffusion_opd"
_NOTE_KEYS = ("name", "content", "digest", "base_digest", "recipe")


def load_adapter(
    path: Any,
    model: Any,
    *,
    name: str | None,
    format: str,
    key_map: Any,
    strict: bool,
    max_rank: int,
    max_bytes: int | None,
) -> Adapter:
    """See `Adapter.load`."""
    path = Path(path)
    kind = _format_of(path, max_bytes) if format == "auto" else format
    if kind not in FORMATS:
        raise ValueError(f"`format` must be 'auto' or one of {FORMATS}. Received {format!r}.")
    positive_int("max_rank", max_rank)
    names = ModuleNames(model, kind, key_map)
    if kind == "peft":
        modules, keys, metadata = peft.read_peft(path, max_bytes)
    else:
        file = file_inside(path, diffusers.FILE) if path.is_dir() else path
        if kind == "diffusers":
            modules, keys, metadata = diffusers.read_diffusers(file, max_bytes)
        else:
            modules, keys, metadata = kohya.read_kohya(file, names, max_bytes)
    parts, unused = _parts(modules, keys, names, max_rank)
    if unused and strict:
        raise ValueError(
            f"{len(unused)} of {sum(map(len, keys.values()))} keys of {path.name} belong to no layer of the model: "
            f"{unused[:4]}. Pass a `key_map`, or strict=False to leave them out."
        )
    if not parts:
        raise ValueError(f"No key of {path.name} belongs to a layer of the model: {unused[:4]}. Pass a `key_map`.")
    note = read_note(metadata)
    adapter = Adapter(
        name or (note["name"] if note else _name_of(path)),
        parts,
        base_digest=note["base_digest"] if note else None,
        recipe=Recipe.from_json(note["recipe"]) if note and note["recipe"] is not None else None,
        unused_keys=tuple(unused),
    )
    adapter.check_fits(model)
    return adapter


def save_adapter(adapter: Adapter, path: Path, *, format: str, model: Any, key_map: Any) -> None:
    """See `Adapter.save`."""
    if format not in FORMATS:
        raise ValueError(f"`format` must be one of {FORMATS}. Received {format!r}.")
    if model is None and (format != "peft" or key_map is not None):
        raise ValueError(f"`model` is needed for the names of modules ({format}).")
    names = None if model is None else ModuleNames(model, format, key_map)
    if format == "kohya":
        assert names is not None
        tensors = kohya.kohya_file(dict(adapter.parts), names)
        write_tensors(path, tensors, _note(adapter, tensors))
        return
    modules = _modules(adapter, names)
    if format == "diffusers":
        tensors, extra = diffusers.diffusers_file(modules)
        write_tensors(path, tensors, {"format": "pt", **extra, **_note(adapter, tensors)})
        return
    tensors, config = peft.peft_files(modules)
    with new_directory(path) as folder:
        write_tensors(folder / peft.TENSORS, tensors, {"format": "pt", **_note(adapter, tensors)})
        write_json(folder / peft.CONFIG, config)


def read_note(metadata: dict[str, str]) -> dict[str, Any] | None:
    """What this library has noted in a file, or None; a ValueError if it does not read."""
    if _NOTE not in metadata:
        return None
    try:
        value = json.loads(metadata[_NOTE])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The metadata `{_NOTE}` do not read: {error}.") from error
    return open_record(value, "adapter", _NOTE_KEYS)


def verify_file(path: Path, max_bytes: int | None = None) -> list[str]:
    """What does not hold in a file of tensors that this library wrote: one sentence for each thing."""
    try:
        arrays, metadata = read_tensors(path, max_bytes)
        note = read_note(metadata)
    except (ValueError, OSError) as error:
        return [str(error)]
    if note is None:
        return [f"{path.name} says nothing of its content: it was not written by this library."]
    found = digest(arrays)
    if found != note["content"]:
        return [f"{path.name} has tensors of digest {found[:12]}, and {str(note['content'])[:12]} is noted."]
    return []


def _note(adapter: Adapter, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    recipe = None if adapter.recipe is None else adapter.recipe.to_json()
    said = {"name": adapter.name, "content": digest(tensors), "digest": adapter.digest}
    note = {**header("adapter"), **said, "base_digest": adapter.base_digest, "recipe": recipe}
    return {_NOTE: json.dumps(note, sort_keys=True)}


def _parts(
    modules: dict[str, Module], keys: dict[str, list[str]], names: ModuleNames, max_rank: int
) -> tuple[dict[str, AdapterPart], list[str]]:
    """Parts by path, and the keys that belong to none."""
    pieces: dict[str, dict[int, AdapterPart]] = {}
    targets: dict[str, Any] = {}
    used: set[str] = set()
    for name, module in modules.items():
        found = names.find(name)
        if found is None:
            continue
        target, index = found
        rank = 0 if module.a is None or not module.a.ndim else module.a.shape[0]
        if rank > max_rank:
            raise ValueError(f"{name!r} has rank {rank}, and `max_rank` allows {max_rank}.")
        if index in pieces.setdefault(target.path, {}):
            raise ValueError(f"Two modules of the file belong to {target.path!r}; one is {name!r}.")
        pieces[target.path][index] = module.part(name, names.geometries[target.path].form)
        targets[target.path] = target
        used.add(name)
    parts = {}
    for path, found_pieces in pieces.items():
        target = targets[path]
        if len(target.modules) == 1:
            parts[path] = found_pieces[0]
            continue
        try:
            parts[path] = joined([found_pieces.get(i) for i in range(len(target.modules))], list(target.widths))
        except ValueError as error:
            raise ValueError(f"{path!r}: {error}") from error
    return parts, sorted(key for name, found in keys.items() if name not in used for key in found)


def _modules(adapter: Adapter, names: ModuleNames | None) -> dict[str, Module]:
    """Modules by name, in the pieces that the format has."""
    modules = {}
    for path, part in adapter.parts.items():
        target = None if names is None else names.target_of(path)
        if target is None or len(target.modules) == 1:
            modules[path if target is None else target.modules[0]] = Module.of(part, path)
            continue
        for name, piece in zip(target.modules, split(part, list(target.widths)), strict=True):
            modules[name] = Module.of(piece, path)
    return modules


def _format_of(path: Path, max_bytes: int | None) -> str:
    if path.is_dir():
        if (path / peft.CONFIG).exists():
            return "peft"
        if (path / diffusers.FILE).exists():
            return "diffusers"
        raise ValueError(f"{path} holds neither {peft.CONFIG} nor {diffusers.FILE}.")
    if not path.exists():
        raise FileNotFoundError(f"There is no adapter at {path}.")
    arrays, _ = read_tensors(path, max_bytes)
    return "kohya" if any(key.startswith("lora_unet_") for key in arrays) else "diffusers"


def _name_of(path: Path) -> str:
    """A name from that of the file."""
    stem = path.parent.name if path.name == diffusers.FILE else path.name.removesuffix(".safetensors")
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-_") or "adapter"
