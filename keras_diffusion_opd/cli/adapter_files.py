"""Files of adapters, for `kdo verify`: a directory or file of one, or a preset that carries several."""

from pathlib import Path

from keras_diffusion_opd.cli.backends import select_backend
from keras_diffusion_opd.provenance.verify import Verified

_CONFIG, _DIFFUSERS = "adapter_config.json", "pytorch_lora_weights.safetensors"
_TENSORS, _FOLDER = "adapter_model.safetensors", "adapters"


def verify_adapters(path: Path) -> list[Verified]:
    """What holds of the adapters at `path`; nothing where there are none.

    Args:
        path: a `.safetensors` file, the directory of an adapter, or that of a preset with `adapters/<name>/`.

    Raises:
        OSError: Keras cannot be started, which reading adapters needs.
    """
    file = _file_of(path)
    folder = path / _FOLDER
    inside = sorted(x for x in folder.iterdir() if x.is_dir()) if folder.is_dir() else []
    is_preset = any((x / name).exists() for x in inside for name in (_CONFIG, _TENSORS))
    if file is None and not is_preset:
        return []
    problem = select_backend()
    if problem:
        raise OSError(problem)
    from keras_diffusion_opd.adapters import verify_preset
    from keras_diffusion_opd.adapters.formats import verify_file

    found = [] if file is None else [Verified(file, "adapter", None, verify_file(file))]
    if is_preset:
        try:
            problems = verify_preset(path)
        except ValueError as error:  # the name of a folder that could be none of ours, or a link out of the preset
            problems = [str(error)]
        found.append(Verified(folder, "adapters_of_a_preset", None, problems))
    return found


def _file_of(path: Path) -> Path | None:
    """The tensors of the one adapter at `path`, also where they are missing; None if there is none."""
    if path.is_file():
        return path if path.suffix == ".safetensors" else None
    if (path / _CONFIG).exists() or (path / _TENSORS).exists():
        return path / _TENSORS
    return path / _DIFFUSERS if (path / _DIFFUSERS).exists() else None
