"""Adapters within a KerasHub preset: a directory that stock `from_preset` reads as before.

They lie under `adapters/<name>/`, as PEFT directories. KerasHub looks at its own files only.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_diffusion_opd.adapters.adapter import Adapter, KeyMap
from keras_diffusion_opd.adapters.formats import read_note, verify_file
from keras_diffusion_opd.adapters.formats.archive import file_inside, read_tensors
from keras_diffusion_opd.adapters.formats.peft import TENSORS
from keras_diffusion_opd.adapters.stack import adapter_name
from keras_diffusion_opd.provenance import digest

FOLDER = "adapters"


def save_to_preset(directory: str | os.PathLike[str], adapters: Sequence[Adapter]) -> None:
    """Put adapters into the directory of a preset, beside what `save_to_preset` of KerasHub wrote.

    Args:
        directory: of the preset; it must exist.
        adapters: none of a name that is there already.

    Raises:
        FileNotFoundError: no such directory.
        FileExistsError: an adapter of that name is there. Nothing has been written then.

    Example:

    ```python
    from pathlib import Path
    import keras
    import keras_diffusion_opd as kdo

    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    Path("preset").mkdir()
    style = kdo.adapters.Adapter.initial("style", base, ".*", rank=1)
    kdo.adapters.save_to_preset("preset", [style])
    assert kdo.adapters.list_preset("preset") == {"style": style.digest}
    ```
    """
    directory = _existing(directory)
    taken = [a.name for a in adapters if (directory / FOLDER / a.name).exists()]
    if taken or len({a.name for a in adapters}) < len(adapters):
        raise FileExistsError(f"Adapters of a preset must have names of their own. There already: {taken}.")
    (directory / FOLDER).mkdir(exist_ok=True)
    for adapter in adapters:
        adapter.save(directory / FOLDER / adapter.name)


def list_preset(directory: str | os.PathLike[str]) -> dict[str, str | None]:
    """The adapters of a preset: name -> digest, as noted in the file; None where nothing is.

    Args:
        directory: of the preset.

    Returns:
        An empty dict for a preset without adapters.

    Raises:
        FileNotFoundError: no such directory.
        ValueError: a file that is not sound.

    Example:

    ```python
    from pathlib import Path
    import keras_diffusion_opd as kdo

    Path("stock").mkdir()
    assert kdo.adapters.list_preset("stock") == {}
    ```
    """
    found: dict[str, str | None] = {}
    for path in _folders(_existing(directory)):
        note = read_note(read_tensors(file_inside(path, TENSORS))[1])
        found[path.name] = note["digest"] if note else None
    return found


def load_from_preset(
    directory: str | os.PathLike[str],
    model: Any,
    names: Sequence[str] | None = None,
    *,
    key_map: KeyMap = None,
    max_rank: int = 128,
    max_bytes: int | None = None,
) -> list[Adapter]:
    """The adapters of a preset, for `AdapterBank.add`.

    Args:
        directory: of the preset.
        model: the base, loaded from it or from another one.
        names: of the adapters; None for all.
        key_map, max_rank, max_bytes: as for `Adapter.load`.

    Returns:
        In order of `names`, or of the alphabet.

    Raises:
        KeyError: a name that the preset does not have.
        ValueError: a file that is not sound, or does not fit the model.

    Example:

    ```python
    from pathlib import Path
    import keras
    import keras_diffusion_opd as kdo

    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    Path("with_style").mkdir()
    kdo.adapters.save_to_preset("with_style", [kdo.adapters.Adapter.initial("style", base, ".*")])
    bank = kdo.adapters.AdapterBank(base, ".*")
    for adapter in kdo.adapters.load_from_preset("with_style", base):
        bank.add(adapter)
    assert bank.names == ["style"]
    ```
    """
    there = {path.name: path for path in _folders(_existing(directory))}
    chosen = sorted(there) if names is None else [adapter_name(name) for name in names]
    missing = [name for name in chosen if name not in there]
    if missing:
        raise KeyError(f"The preset has no adapters {missing}. It has {sorted(there)}.")
    limits: dict[str, Any] = {"max_rank": max_rank, "max_bytes": max_bytes, "key_map": key_map}
    return [Adapter.load(there[name], model, name=name, format="peft", **limits) for name in chosen]


def verify_preset(directory: str | os.PathLike[str], model: Any = None) -> list[str]:
    """Everything that does not hold for the adapters of a preset: content against what is noted, and the base.

    Args:
        directory: of the preset.
        model: None, or the base, whose digest is held against that of each adapter.

    Returns:
        One sentence for each thing; empty if all holds.

    Raises:
        FileNotFoundError: no such directory.

    Example:

    ```python
    from pathlib import Path
    import keras
    import keras_diffusion_opd as kdo

    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    Path("checked").mkdir()
    kdo.adapters.save_to_preset("checked", [kdo.adapters.Adapter.initial("style", base, ".*")])
    assert kdo.adapters.verify_preset("checked", base) == []
    base.layers[0].bias.assign([1.0, 1.0])
    assert "another base" in kdo.adapters.verify_preset("checked", base)[0]
    ```
    """
    problems = []
    known = None if model is None else digest(model)
    for path in _folders(_existing(directory)):
        try:
            tensors = file_inside(path, TENSORS)
            found = verify_file(tensors)
            note = None if found else read_note(read_tensors(tensors)[1])
        except (ValueError, OSError) as error:
            found, note = [str(error)], None
        problems += [f"`{path.name}`: {problem}" for problem in found]
        if note and known is not None and note["base_digest"] not in (None, known):
            problems.append(
                f"`{path.name}`: it was made for another base, {note['base_digest'][:12]}; this one is {known[:12]}."
            )
    return problems


def _existing(directory: str | os.PathLike[str]) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise FileNotFoundError(f"`directory` must be the directory of a preset. There is none at {path}.")
    return path


def _folders(directory: Path) -> list[Path]:
    """The folders of adapters; a ValueError for one that could not be an adapter's name, or leads elsewhere."""
    folder = directory / FOLDER
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for path in found:
        adapter_name(path.name)
        if not path.resolve().is_relative_to(directory.resolve()):
            raise ValueError(f"{path.name!r} is a link out of the preset.")
    return found
