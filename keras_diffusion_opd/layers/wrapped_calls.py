"""Methods of a layer wrapped on the instance, and what is in force while they run.

This is how adapters and control branches act within models that they do not change: no layer is replaced, other
instances of the class know nothing of it, and outside of what is in force a layer does what it did before.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

# (owner, value), the innermost last; of this thread and task alone.
_in_force: contextvars.ContextVar[tuple[tuple[Any, Any], ...]] = contextvars.ContextVar("in_force", default=())


@contextlib.contextmanager
def in_force(owner: Any, value: Any) -> Iterator[Any]:
    """Within it `value` is what `innermost(owner)` gives, for this thread and task alone."""
    token = _in_force.set((*_in_force.get(), (owner, value)))
    try:
        yield value
    finally:
        _in_force.reset(token)


def innermost(owner: Any) -> Any:
    """What is in force for `owner`, or None."""
    return next((value for who, value in reversed(_in_force.get()) if who is owner), None)


class WrappedCalls:
    """Methods of one layer, wrapped on the instance until `detach`.

    Args:
        layer: whose methods.
        around: `around(original, args, kwargs)` runs in place of each.
        methods: names of methods; those that the layer does not have are left out.
    """

    def __init__(
        self, layer: Any, around: Callable[[Callable[..., Any], Any, Any], Any], methods: tuple[str, ...] = ("call",)
    ) -> None:
        self._layer, self._around = layer, around
        self._wrapped: dict[str, Any] = {}
        self.attached = True
        for method in methods:
            original = getattr(layer, method, None)
            if original is not None:
                wrapper = self._wrapper(original)
                self._wrapped[method] = (wrapper, vars(layer).get(method))
                setattr(layer, method, wrapper)

    def detach(self) -> None:
        """Give the layer its own methods back; where another has wrapped them since, this wrapper does nothing."""
        self.attached = False
        for method, (wrapper, before) in self._wrapped.items():
            if vars(self._layer).get(method) is wrapper:
                if before is None:
                    delattr(self._layer, method)
                else:
                    setattr(self._layer, method, before)

    def _wrapper(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return self._around(original, args, kwargs) if self.attached else original(*args, **kwargs)

        return wrapped
