"""The nest of a batch's inputs as JSON, and the nest anew from its arrays."""

from collections.abc import Iterator
from typing import Any

from keras_diffusion_opd.provenance.row_shard import StoreError

_DEEPEST = 16


def describe_nest(tree: Any, depth: int = 0) -> Any:
    """Dicts, lists, tuples and None as JSON; an array is its place in the order of `leaves_with_paths`."""
    counter = iter(range(2**31))

    def walk(node: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError(f"`model_inputs` must be nested at most {_DEEPEST} deep to be stored.")
        if isinstance(node, dict):
            if not all(isinstance(key, str) for key in node):
                raise TypeError(f"`model_inputs` must have strings as keys to be stored. Received {list(node)[:9]}.")
            return {"dict": [[key, walk(node[key], depth + 1)] for key in node]}
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            raise TypeError(
                f"`model_inputs` must be dicts, lists and tuples to be stored. Received {type(node).__name__}."
            )
        if isinstance(node, list | tuple):
            return {"list" if isinstance(node, list) else "tuple": [walk(child, depth + 1) for child in node]}
        return None if node is None else next(counter)

    return walk(tree, 0)


def build_nest(form: Any, leaves: list[Any]) -> Any:
    """The nest that `describe_nest` described, with `leaves` in it.

    Raises:
        StoreError: the form is none, or takes other leaves than these in their order.
    """
    rest = iter(range(len(leaves)))

    def walk(node: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise StoreError("the inputs of the store are nested too deep.")
        if node is None:
            return None
        if type(node) is int and next(rest, None) == node:
            return leaves[node]
        ((kind, children),) = node.items() if isinstance(node, dict) and len(node) == 1 else (("", None),)
        if kind in ("list", "tuple") and isinstance(children, list):
            built = [walk(child, depth + 1) for child in children]
            return built if kind == "list" else tuple(built)
        if kind == "dict" and isinstance(children, list) and all(_is_pair(pair) for pair in children):
            return {key: walk(child, depth + 1) for key, child in children}
        raise StoreError("the inputs of the store do not read as a nest of arrays.")

    built = walk(form, 0)
    if next(rest, None) is not None:
        raise StoreError("the inputs of the store are more than its nest holds.")
    return built


def leaf_paths(form: Any) -> list[str]:
    """A name for each array of the nest: its keys and places, joined by `/`; empty for a single array."""

    def walk(node: Any, path: str) -> Iterator[str]:
        if isinstance(node, dict):
            ((kind, children),) = node.items()
            pairs = children if kind == "dict" else list(enumerate(children))
            for key, child in pairs:
                yield from walk(child, f"{path}/{key}" if path else str(key))
        elif node is not None:
            yield path

    return list(walk(form, ""))


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
