"""`Stack`: which adapters, and how much of each."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from keras_diffusion_opd.validation import finite_real

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def adapter_name(name: Any) -> str:
    """`name`, if it can name an adapter: letters, digits, `.`, `_`, `-`; it is no path and never read as one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(
            f"`name` of an adapter must be letters, digits, '.', '_' and '-', not begin with a sign and not hold '..'. "
            f"Received {name!r}."
        )
    return name


class Stack:
    """Adapters with their weights, in one order: sorted by name, duplicates summed, zeros left out.

    Two stacks that mean the same are equal, hash alike and compute the same bits. `Stack()` is the base.

    Args:
        *names: of adapters, each with weight 1.
        **weights: weights by name, finite, negative ones too. For names that are no Python identifiers,
            `Stack.of({"my-style": 0.5})`.

    Attributes:
        items: tuple of (name, weight).

    Raises:
        ValueError: a name that cannot be one, or a weight that is not finite.

    Example:

    ```python
    from keras_diffusion_opd.adapters import Stack

    assert Stack("anime", pose=0.5) == Stack(pose=0.5, anime=1.0)
    assert Stack("anime", anime=-1.0) == Stack()
    ```
    """

    __slots__ = ("items",)

    items: tuple[tuple[str, float], ...]

    def __init__(self, *names: str, **weights: float) -> None:
        self._fill([*((name, 1.0) for name in names), *weights.items()])

    @classmethod
    def of(cls, weights: Mapping[str, float]) -> "Stack":
        """The stack of a mapping name -> weight."""
        stack = cls()
        stack._fill(list(weights.items()))
        return stack

    def _fill(self, pairs: list[tuple[str, Any]]) -> None:
        total: dict[str, float] = {}
        for name, weight in pairs:
            total[adapter_name(name)] = total.get(name, 0.0) + finite_real(f"weight of {name}", weight)
        items = sorted((name, finite_real(f"weight of {name}", weight)) for name, weight in total.items() if weight)
        object.__setattr__(self, "items", tuple(items))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("A Stack does not change. Make another one.")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stack) and self.items == other.items

    def __hash__(self) -> int:
        return hash(self.items)

    def __repr__(self) -> str:
        return f"Stack.of({dict(self.items)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Stack.of, (dict(self.items),)


def as_stack(value: Any) -> Stack:
    """A `Stack` from one, a name, a mapping of weights, or None for the base."""
    if value is None:
        return Stack()
    if isinstance(value, Stack):
        return value
    if isinstance(value, str):
        return Stack(value)
    if isinstance(value, Mapping):
        return Stack.of(value)
    raise TypeError(f"A stack must be a Stack, a name, a mapping name -> weight or None. Received {value!r}.")
