"""Identity is a digest of content: SHA-256 of names, shapes, dtypes and little-endian data.

A digest has two steps, so that a difference can be told tensor by tensor:

1. Each array is a leaf: its path in the nest, its dtype, its shape, the SHA-256 of its data.
2. The digest is the SHA-256 of the canonical JSON of the scheme's name and of all leaves in order of path.

The data of an array are its bits in C order, little-endian, bfloat16 and float8 as they are: equal on every
backend and machine. -0.0 differs from 0.0, and float32 from float64.

A Keras model is the list of its weights, in its own order: `digest(model) == digest(model.get_weights())`.
Variable paths do not count. Keras numbers layers by what the process built before (`dense_3/kernel`),
and a model that is saved and loaded has other paths than the one that was saved
(`sequential/dense/kernel` becomes `dense/kernel`), while the order of `weights` is the model's own.
Random seeds and metric states are no weights and do not count either: they are the state of a run, and
their dtypes differ between backends.
"""

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from keras_diffusion_opd.provenance.canonical import canonical_json, plain_json

SCHEME = "keras_diffusion_opd/digest/1"
_DEEPEST = 64


@dataclasses.dataclass(frozen=True)
class LeafDigest:
    """The digest of one array of a nest.

    Args:
        path: where it is: keys of mappings and fields (str), positions in lists and among weights (int).
        label: the same to read; for a weight the variable's path. No part of any digest.
        dtype: such as "float32" or "bfloat16"; "json" for a scalar that is no array.
        shape: the shape.
        sha256: of the data.

    Example:
        >>> import numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> (leaf,) = kdo.provenance.leaf_digests({"kernel": np.zeros((2, 3), "float32")})
        >>> leaf.label, leaf.dtype, leaf.shape
        ('kernel', 'float32', (2, 3))
    """

    path: tuple[str | int, ...]
    label: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def to_json(self) -> list[Any]:
        """What the digest of the whole is taken of."""
        return [list(self.path), self.dtype, list(self.shape), self.sha256]


def digest(value: Any) -> str:
    """The identity of a model or of arrays.

    Args:
        value: a built Keras model or layer; an optimizer (its variables in order); an array of NumPy, JAX,
            TensorFlow or PyTorch; a Keras variable; or a mapping, list, tuple or dataclass of such, in which
            JSON scalars may stand too.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: something that is no array; the message names its place.
        ValueError: a model that is not built.

    Example:
        >>> import numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> weights = {"kernel": np.ones((2, 2), "float32"), "bias": np.zeros(2, "float32")}
        >>> kdo.provenance.digest(weights)[:12]
        'e2372c507706'
        >>> weights["bias"][0] = -0.0
        >>> kdo.provenance.digest(weights)[:12]
        '4f911848b7f8'
    """
    return digest_of_leaves(leaf_digests(value))


def leaf_digests(value: Any) -> list[LeafDigest]:
    """The digest of every array of `value`, in the order in which `digest` takes them.

    Args:
        value: as for `digest`.

    Returns:
        One entry for each array, scalar, or empty list or mapping.

    Raises:
        TypeError: something that is no array; the message names its place.
        ValueError: a model that is not built.

    Example:
        >>> import numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> before = {"a": np.zeros(2), "b": np.zeros(2)}
        >>> after = {"a": np.zeros(2), "b": np.ones(2)}
        >>> pairs = zip(kdo.provenance.leaf_digests(before), kdo.provenance.leaf_digests(after))
        >>> [new.label for old, new in pairs if new != old]
        ['b']
    """
    if _is_scalar(value):
        raise TypeError(
            f"`value` must be a model, an array or a nest of arrays. Received {value!r}. "
            "For the content of a file use `file_digest`, for settings `canonical_json`."
        )
    return list(_leaves(value, (), ""))


def digest_of_leaves(leaves: list[LeafDigest]) -> str:
    """The digest of the whole, from the leaves alone.

    Args:
        leaves: what `leaf_digests` gives.

    Returns:
        64 hexadecimal digits.

    Example:
        >>> import numpy as np
        >>> import keras_diffusion_opd as kdo
        >>> x = [np.arange(3), np.arange(4)]
        >>> kdo.provenance.digest_of_leaves(kdo.provenance.leaf_digests(x)) == kdo.provenance.digest(x)
        True
    """
    return text_digest(canonical_json({"scheme": SCHEME, "leaves": [leaf.to_json() for leaf in leaves]}))


def text_digest(text: str) -> str:
    """SHA-256 of `text` in UTF-8, as 64 hexadecimal digits.

    Args:
        text: any text, such as canonical JSON.

    Returns:
        The digest.

    Example:
        >>> import keras_diffusion_opd as kdo
        >>> kdo.provenance.text_digest("{}")[:12]
        '44136fa355b3'
    """
    return hashlib.sha256(text.encode()).hexdigest()


def _leaves(value: Any, path: tuple[str | int, ...], label: str) -> Iterator[LeafDigest]:
    if len(path) > _DEEPEST:
        raise ValueError(f"`{label[:60]}...` is nested deeper than {_DEEPEST} levels. Does it hold itself?")
    children = _children(value, label)
    if children is not None:
        for key, name, child in children:
            yield from _leaves(child, (*path, key), name)
        if not children:
            yield LeafDigest(path, label, "json", (), text_digest("{}" if _is_mapping(value) else "[]"))
        return
    if _is_scalar(value):
        yield LeafDigest(path, label, "json", (), text_digest(canonical_json(plain_json(value, name=label))))
        return
    array, dtype = _to_numpy(value, label)
    yield LeafDigest(path, label, dtype, tuple(map(int, array.shape)), _data_digest(array))


def _is_scalar(value: Any) -> bool:
    return value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or dataclasses.is_dataclass(value)


def _children(value: Any, label: str) -> list[tuple[str | int, str, Any]] | None:
    """The parts of a nest or model, each with its key and its label; None for anything else."""

    def below(key: str | int) -> str:
        return f"{label}/{key}" if label else str(key)

    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                kind = type(key).__name__
                raise TypeError(f"`{label or 'value'}` must have strings as keys. Received {key!r} ({kind}).")
        return [(key, below(key), value[key]) for key in sorted(value)]
    if isinstance(value, list | tuple):
        return [(i, below(i), item) for i, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = sorted(field.name for field in dataclasses.fields(value))
        return [(name, below(name), getattr(value, name)) for name in names]
    if isinstance(value, type):
        return None
    variables = getattr(value, "weights", None)
    if not isinstance(variables, list):
        variables = getattr(value, "variables", None)
    if isinstance(variables, list | tuple):
        if not variables or not getattr(value, "built", True):
            raise ValueError(
                f"`{label or 'value'}` ({type(value).__name__}) has no weights yet. Build it, for example by "
                "calling it on an input."
            )
        return [(i, below(str(getattr(v, "path", i))), v) for i, v in enumerate(variables)]
    return None


def _to_numpy(value: Any, label: str) -> tuple[np.ndarray, str]:
    """The data as NumPy holds them, and the name of the dtype."""
    if hasattr(value, "value") and hasattr(value, "path"):  # a Keras variable
        value = value.value
    if type(value).__module__.split(".")[0] == "torch" or hasattr(value, "detach"):
        return _from_torch(value)
    if not (hasattr(value, "__array__") and hasattr(value, "dtype")):
        raise TypeError(f"`{label or 'value'}` must be an array, or a nest of arrays. Received {type(value).__name__}.")
    array = np.asarray(value)
    dtype = array.dtype
    portable = dtype.kind in "biufc" and dtype.char not in "gG"
    extended = dtype.kind == "V" and dtype.names is None and not dtype.name.startswith("void")
    if not (portable or extended):
        raise TypeError(
            f"`{label or 'value'}` must hold numbers of a dtype that is the same on every machine. "
            f"Received dtype {dtype}."
        )
    return array, dtype.name


def _from_torch(tensor: Any) -> tuple[np.ndarray, str]:
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().cpu().contiguous()
    try:
        return np.asarray(tensor.numpy()), name
    except TypeError:  # NumPy has no bfloat16 and float8: take their bits
        torch = sys.modules["torch"]
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return np.asarray(tensor.view(bits).numpy()), name


def _data_digest(array: np.ndarray) -> str:
    """SHA-256 of the bits in C order, little-endian."""
    flat = np.ascontiguousarray(array).reshape(-1)
    big = flat.dtype.byteorder == ">" or (flat.dtype.byteorder in "=|" and sys.byteorder == "big")
    if big and flat.dtype.itemsize > 1:
        flat = flat.byteswap()
    return hashlib.sha256(flat.view(np.uint8).data).hexdigest()
