"""`Adapter`: one adapter, immutable, known by its digest."""

import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from keras_diffusion_opd.adapters.adapter_part import AdapterPart
from keras_diffusion_opd.adapters.attribute_paths import chosen_paths, layer_paths, layers_by_path
from keras_diffusion_opd.adapters.stack import adapter_name
from keras_diffusion_opd.layers.site_geometry import geometry_of
from keras_diffusion_opd.provenance import Recipe, check_digest, digest
from keras_diffusion_opd.validation import positive_int

KeyMap = Mapping[str, str] | Callable[[str], str | None] | None


class Adapter:
    """Low-rank changes to some layers of a model, by the path of the layer. It never changes.

    Made by `from_arrays`, `initial` or `load`, or by training (`AdaptedModel.adapter`). Its identity is `digest`,
    of its arrays and scales, not of its name: two adapters of one name and other content are two.

    Args:
        name: letters, digits, `.`, `_`, `-`.
        parts: path of a layer -> `AdapterPart`.
        base_digest: digest of the model that it belongs to, or None where nobody knows.
        recipe: how it was made, or None.
        unused_keys: keys of the file that were not used, where it was loaded with `strict=False`.

    Raises:
        ValueError: no parts, or a name or digest that cannot be one.

    Example:

    ```python
    import keras, numpy as np
    import keras_diffusion_opd as kdo

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
    a, b = np.ones((3, 1), "float32"), np.ones((1, 2), "float32")
    adapter = kdo.adapters.Adapter.from_arrays("style", model, {"layers.0": (a, b)}, alpha=2.0)
    adapter.save("style")
    loaded = kdo.adapters.Adapter.load("style", model)
    assert loaded.digest == adapter.digest and loaded.base_digest == kdo.provenance.digest(model)
    ```
    """

    def __init__(
        self,
        name: str,
        parts: Mapping[str, AdapterPart],
        *,
        base_digest: str | None = None,
        recipe: Recipe | None = None,
        unused_keys: tuple[str, ...] = (),
    ) -> None:
        self.name = adapter_name(name)
        if not parts or not all(isinstance(part, AdapterPart) for part in parts.values()):
            raise ValueError(f"`parts` must hold an AdapterPart for at least one layer. Received {parts!r:.200}.")
        self.parts: Mapping[str, AdapterPart] = MappingProxyType(dict(sorted(parts.items())))
        self.base_digest = None if base_digest is None else check_digest(base_digest, "base_digest")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"`recipe` must be a Recipe or None. Received {type(recipe).__name__}.")
        self.recipe = recipe
        self.unused_keys = tuple(unused_keys)

    @classmethod
    def from_arrays(
        cls,
        name: str,
        model: keras.layers.Layer,
        arrays: Mapping[Any, tuple[Any, Any]],
        *,
        alpha: float | Mapping[Any, float] | None = None,
        rslora: bool = False,
        magnitude: Mapping[Any, Any] | None = None,
        recipe: Recipe | None = None,
    ) -> "Adapter":
        """An adapter of `model` from arrays.

        Args:
            name: of the adapter.
            model: the base, built.
            arrays: layer, or its path -> (A, B): float (in, r) and (r, out). Kernel axes are flattened: an
                EinsumDense of kernel (32, 2, 16) that sums over the first axis has A (32, r) and B (r, 32).
            alpha: one for all layers, or one by layer; None for the rank of each layer, a scale of 1.
            rslora: whether the scale is alpha / sqrt(r) in place of alpha / r.
            magnitude: layer or path -> float (out,): these layers are DoRA.
            recipe: how it was made.

        Returns:
            The adapter, with the digest of `model` as its `base_digest`.

        Raises:
            ValueError: a layer that the model does not have, or arrays that do not fit it.
        """
        paths = _Paths(model)
        alphas = {paths.of(key): value for key, value in alpha.items()} if isinstance(alpha, Mapping) else None
        lengths = {paths.of(key): value for key, value in (magnitude or {}).items()}
        parts = {}
        for key, (a, b) in arrays.items():
            path = paths.of(key)
            a, b = np.asarray(a), np.asarray(b)
            given: Any = alphas.get(path) if alphas is not None else alpha
            given = a.shape[-1] if given is None else given
            with _naming(path):
                parts[path] = AdapterPart(
                    a.reshape(-1, a.shape[-1]), b, given, rslora, lengths.pop(path, None), paths.form(path)
                )
        unmatched = sorted([*lengths, *(set(alphas or {}) - set(parts))])
        if unmatched:
            raise ValueError(f"`alpha` and `magnitude` name layers without arrays: {unmatched}.")
        adapter = cls(name, parts, base_digest=digest(model), recipe=recipe)
        adapter.check_fits(model)
        return adapter

    @classmethod
    def initial(
        cls,
        name: str,
        model: keras.layers.Layer,
        targets: Any,
        *,
        rank: int = 8,
        alpha: float | None = None,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        rslora: bool = False,
        dora: bool = False,
        seed: int = 0,
    ) -> "Adapter":
        """A fresh adapter, to be trained: A random, B zero, so that it changes nothing yet.

        Args:
            name: of the adapter.
            model: the base, built.
            targets: as for `AdapterBank`.
            rank: of every layer that `rank_pattern` does not name.
            alpha: None for the rank of each layer.
            rank_pattern, alpha_pattern: path of a layer, or its ending -> value.
            rslora: whether the scale is alpha / sqrt(r).
            dora: whether magnitudes are trained too; they begin as the length of the base's columns.
            seed: of A.

        Returns:
            The adapter.

        Raises:
            ValueError: nothing is chosen, or a pattern chooses no layer of the adapter.
        """
        layers = layers_by_path(model)
        paths = chosen_paths(model, targets)
        ranks = _by_pattern("rank_pattern", rank_pattern, paths)
        alphas = _by_pattern("alpha_pattern", alpha_pattern, paths)
        generator = np.random.default_rng(seed)
        parts = {}
        for path in paths:
            geometry = geometry_of(layers[path])
            r = positive_int("rank", ranks.get(path, rank))
            limit = np.sqrt(3.0 / geometry.in_features)  # Kaiming's uniform with a = sqrt(5), as PEFT
            a = generator.uniform(-limit, limit, (geometry.in_features, r)).astype("float32")
            b = np.zeros((r, geometry.out_features), "float32")
            given = alphas.get(path, r if alpha is None else alpha)
            length = None
            if dora:
                from keras_diffusion_opd.adapters.base_matrix import base_matrix

                length = np.linalg.norm(base_matrix(layers[path], geometry), axis=0).astype("float32")
            parts[path] = AdapterPart(a, b, given, rslora, length, geometry.form)
        return cls(name, parts, base_digest=digest(model))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: keras.layers.Layer,
        *,
        name: str | None = None,
        format: str = "auto",
        key_map: KeyMap = None,
        strict: bool = True,
        max_rank: int = 128,
        max_bytes: int | None = None,
    ) -> "Adapter":
        """An adapter from a file, checked before anything of its size is allocated.

        Args:
            path: a directory (PEFT: `adapter_config.json` and `adapter_model.safetensors`; diffusers:
                `pytorch_lora_weights.safetensors`) or a `.safetensors` file (diffusers, kohya). Nothing in it is run.
            model: the base that it is for, built.
            name: of the adapter; None for the name in the file, or that of the file.
            format: "auto", "peft", "diffusers" or "kohya".
            key_map: module names of the file -> paths of the model, as a mapping or a function. None for the names
                that are known for KerasHub's models, and for paths of the model itself.
            strict: whether a key that is not used is an error. Otherwise `unused_keys` has them.
            max_rank: a larger rank is refused.
            max_bytes: a larger file is refused; None for 2 GiB.

        Returns:
            The adapter; `base_digest` and `recipe` are those that the file tells, else None.

        Raises:
            ValueError: a file that is not sound, has numbers that are not finite, does not fit the model, or asks
                for what is not supported (named).
            OSError: it cannot be read.
        """
        from keras_diffusion_opd.adapters.formats import load_adapter

        return load_adapter(
            path,
            model,
            name=name,
            format=format,
            key_map=key_map,
            strict=strict,
            max_rank=max_rank,
            max_bytes=max_bytes,
        )

    def save(
        self, path: str | os.PathLike[str], *, format: str = "peft", model: Any = None, key_map: KeyMap = None
    ) -> None:
        """Write the adapter so that others read it, in full or not at all.

        Args:
            path: a new directory, for "peft"; a `.safetensors` file for "diffusers" and "kohya".
            format: "peft", "diffusers" or "kohya".
            model: the base: needed for the names of "diffusers" and "kohya", and for those of "peft" if modules shall
                have Hugging Face's names. None: modules have the paths of the Keras model.
            key_map: module names of the file -> paths of the model, as for `load`.

        Raises:
            ValueError: a format that cannot say what the adapter is, such as DoRA in kohya's.
            FileExistsError: the directory exists.
        """
        from keras_diffusion_opd.adapters.formats import save_adapter

        save_adapter(self, Path(path), format=format, model=model, key_map=key_map)

    @cached_property
    def digest(self) -> str:
        """The identity: of paths, arrays, alphas; 64 hexadecimal digits."""
        return digest({path: part.content() for path, part in self.parts.items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(part.nbytes for part in self.parts.values())

    def check_fits(self, model: keras.layers.Layer) -> None:
        """Raise ValueError unless every part belongs to a layer of `model` and has its shape."""
        layers = layers_by_path(model)
        for path, part in self.parts.items():
            if path not in layers:
                raise ValueError(f"`{self.name}` has a part for {path!r}, which the model does not have.")
            geometry = geometry_of(layers[path])
            expected = (geometry.in_features, geometry.out_features)
            received = (part.a.shape[0], part.b.shape[1])
            if received != expected:
                raise ValueError(
                    f"`{self.name}` does not fit {path!r}: A must be ({expected[0]}, r) and B (r, {expected[1]}). "
                    f"Received A {part.a.shape} and B {part.b.shape}."
                )
            if part.magnitude is not None and geometry.looks_up:
                raise ValueError(f"`{self.name}` has DoRA on the embedding {path!r}, which is not supported.")

    def renamed(self, name: str) -> "Adapter":
        """The same adapter by another name; the digest stays."""
        return Adapter(name, self.parts, base_digest=self.base_digest, recipe=self.recipe)

    def __repr__(self) -> str:
        return f"<Adapter {self.name!r}, {len(self.parts)} layers, digest {self.digest[:12]}>"


class _Paths:
    """First paths of layers that are given as layers or by any of their paths."""

    def __init__(self, model: Any) -> None:
        self._first = {alias: first for first, aliases in layer_paths(model).items() for alias in aliases}
        self._by_path = layers_by_path(model)
        self._layers = {id(layer): path for path, layer in self._by_path.items()}

    def of(self, key: Any) -> str:
        found = self._first.get(key) if isinstance(key, str) else self._layers.get(id(key))
        if found is None:
            raise ValueError(
                f"{key if isinstance(key, str) else getattr(key, 'name', key)!r} is no adaptable layer of the model. "
                f"It has {', '.join(list(self._layers.values())[:6]) or 'none'}, ..."
            )
        return found

    def form(self, path: str) -> str:
        return geometry_of(self._by_path[path]).form


class _naming:  # noqa: N801
    """Adds the path of the layer to an error."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self._path}: {error}") from error


def _by_pattern(argument: str, pattern: Mapping[str, Any] | None, paths: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in (pattern or {}).items():
        matches = [path for path in paths if path == name or path.endswith(f".{name}")]
        if not matches:
            raise ValueError(f"`{argument}` must name layers of the adapter. {name!r} is none of {paths[:6]}.")
        found.update(dict.fromkeys(matches, value))
    return found
