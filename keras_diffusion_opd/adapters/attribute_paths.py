"""Layers of a model by the attributes that lead to them, such as `joint_blocks.0.x_block.attention_qkv`.

Names of layers are numbered by what the process has built before; attributes are the model's own. In a functional
model without attributes of its own, layers go by their names.
"""

import difflib
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_diffusion_opd.layers.site_geometry import ADAPTABLE

# Where Keras, TensorFlow (`_self_unconditional...`) and torch keep what is found by its own attribute anyway.
_INTERNAL = frozenset(
    [
        "_layers",
        "_modules",
        "_metrics",
        "_losses",
        "_operations",
        "_nodes",
        "_nodes_by_depth",
        "_operations_by_depth",
        "_functional",
        "_tracker",
        "_inbound_nodes",
        "_outbound_nodes",
        "_parameters",
        "_buffers",
        "_seed_generators",
        "_trainable_variables",
        "_non_trainable_variables",
        "_input_layers",
        "_output_layers",
        "_layer_checkpoint_dependencies",
        "operations",
    ]
)


def layer_paths(model: keras.layers.Layer) -> dict[str, list[str]]:
    """Every path that leads to an adaptable layer.

    Args:
        model: built.

    Returns:
        The first path (the shortest, then the first in the alphabet) -> all paths of the same layer.
    """
    paths: dict[int, list[str]] = {}
    for path, layer in _walk(model):
        if isinstance(layer, ADAPTABLE):
            paths.setdefault(id(layer), []).append(path)
    return {found[0]: found for found in paths.values()}


def layers_by_path(model: keras.layers.Layer) -> dict[str, Any]:
    """Adaptable layers by their first path, in order of it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for path, layer in _walk(model):
        if isinstance(layer, ADAPTABLE) and id(layer) not in seen:
            seen.add(id(layer))
            found[path] = layer
    return dict(sorted(found.items()))


def chosen_paths(model: keras.layers.Layer, targets: Any) -> list[str]:
    """The paths that `targets` chooses; see `AdapterBank`.

    Raises:
        ValueError: nothing, or nothing for one of several names, is chosen; the message has the nearest names.
        TypeError: `targets` is of another kind.
    """
    layers = layers_by_path(model)
    if isinstance(targets, str):
        found = [path for path in layers if re.fullmatch(targets, path)]
        if not found:
            _refuse(targets, layers)
        return found
    if callable(targets):
        found = [path for path, layer in layers.items() if targets(path, layer)]
        if not found:
            _refuse("the predicate", layers)
        return found
    if not isinstance(targets, Sequence) or not targets or not all(isinstance(x, str) for x in targets):
        raise TypeError(
            f"`targets` must be a pattern, a list of names, or a predicate (path, layer) -> bool. Received {targets!r}."
        )
    chosen: set[str] = set()
    for name in targets:
        matches = [path for path in layers if path == name or path.endswith(f".{name}")]
        if not matches:
            _refuse(name, layers)
        chosen.update(matches)
    return sorted(chosen)


def _refuse(target: str, layers: dict[str, Any]) -> None:
    endings = {path.rsplit(".", 1)[-1] for path in layers}
    plain = re.sub(r"[^\w.]", "", target).strip(".")
    near = difflib.get_close_matches(plain, [*layers, *endings], n=5, cutoff=0.4) or sorted(endings)[:8]
    raise ValueError(
        f"`targets` must choose at least one Dense, EinsumDense, Conv or Embedding layer. {target!r} chooses none of "
        f"{len(layers)}. The nearest names are {', '.join(near) or 'none: the model has no such layers'}. "
        "A pattern must match a whole path, as '.*attention_qkv' does."
    )


def _walk(model: Any) -> Iterator[tuple[str, Any]]:
    """(path, layer), breadth first; a layer is entered once, and named by each way that leads to it."""
    queue: deque[tuple[str, Any]] = deque([("", model)])
    entered = {id(model)}
    while queue:
        path, layer = queue.popleft()
        for name, child in _children(layer):
            where = f"{path}.{name}" if path else name
            yield where, child
            if id(child) not in entered:
                entered.add(id(child))
                queue.append((where, child))


def _children(layer: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(layer, keras.Sequential):
        for index, child in enumerate(layer.layers):
            yield f"layers.{index}", child
        return
    named = {**getattr(layer, "_modules", {}), **vars(layer)}
    reached: set[int] = set()
    for attribute in sorted(named, key=lambda name: (name.startswith("_"), name)):
        if attribute in _INTERNAL or attribute.startswith("_self_unconditional"):
            continue
        for path, child in _layers_in(named[attribute], _public(layer, attribute, named[attribute])):
            reached.add(id(child))
            yield path, child
    if isinstance(layer, keras.Model):
        inner = {id(x) for child in layer.layers for _, x in _nested(child)}
        for child in layer.layers:
            if id(child) not in reached | inner and not isinstance(child, keras.layers.InputLayer):
                yield child.name, child


def _public(layer: Any, attribute: str, value: Any) -> str:
    """The name without its underscore, where the class has a property of that name that gives the same."""
    plain = attribute.lstrip("_")
    if plain == attribute or not isinstance(getattr(type(layer), plain, None), property):
        return attribute
    return plain if getattr(layer, plain, None) is value else attribute


def _nested(layer: Any) -> Iterator[tuple[str, Any]]:
    for child in layer._flatten_layers(include_self=False):
        yield child.name, child


def _layers_in(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, keras.layers.Layer):
        yield path, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _layers_in(item, f"{path}.{index}")
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _layers_in(value[key], f"{path}.{key}")
