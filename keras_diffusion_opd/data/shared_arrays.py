"""Arrays that belong to a teacher and not to a row: held once for the process, and named by their content."""

from typing import Any

from keras import ops

from keras_diffusion_opd.provenance.digests import digest

# By content, the tensors; by identity of the arrays that were given, the content. Both hold what they name: an
# identity is that of one object only as long as the object lives.
_TENSORS: dict[str, dict[str, Any]] = {}
_KNOWN: dict[tuple[tuple[str, int], ...], tuple[str, dict[str, Any]]] = {}


def hold(arrays: dict[str, Any]) -> str:
    """Keep `arrays` until `forget_all`, as tensors of the backend.

    Args:
        arrays: by name; NumPy or tensors that are really there. The same objects are digested once.

    Returns:
        Their digest, 64 hexadecimal digits: what `held` takes.
    """
    identity = tuple((name, id(array)) for name, array in sorted(arrays.items()))
    if identity not in _KNOWN:
        key = digest(arrays)
        if key not in _TENSORS:
            _TENSORS[key] = {name: ops.convert_to_tensor(array) for name, array in arrays.items()}
        _KNOWN[identity] = (key, arrays)
    key = _KNOWN[identity][0]
    return key


def held(key: str) -> dict[str, Any]:
    """The tensors behind a digest.

    Raises:
        ValueError: nobody in this process has held them.
    """
    if key not in _TENSORS:
        raise ValueError(
            f"The teacher's head {key[:12]}... is not held in this process. HiddenTargets holds it where a batch is "
            "turned into fit's arguments: make the batches in the process that trains, not in a worker of a loader, "
            "and anew after HiddenTargets.forget_heads()."
        )
    return _TENSORS[key]


def forget_all() -> None:
    """Let go of everything that is held."""
    _TENSORS.clear()
    _KNOWN.clear()
