"""An iterator that can say where it is, and be put there again: grain's, or one of your own."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

from keras_diffusion_opd.provenance import plain_json


def is_stateful(x: Any) -> bool:
    """Whether `x` is an iterator with `get_state` and `set_state`, as those of grain."""
    return isinstance(x, Iterator) and callable(getattr(x, "get_state", None)) and callable(getattr(x, "set_state", 0))


class StatefulIterator(Iterator[Any]):
    """Another iterator's items; knows the state that it had after every item that was trained on.

    Keras draws ahead of the window that it trains on, so that the iterator's own state is too far. A state is
    kept for every item that is drawn, until its window has ended.

    Args:
        inner: an iterator with `get_state()` and `set_state(state)`.
        convert: a function of an item.
    """

    def __init__(self, inner: Any, convert: Callable[[Any], Any]) -> None:
        self.inner, self._convert = inner, convert
        self._drawn = self._used = 0
        self._states = {0: inner.get_state()}
        self._pass, self._ahead = 0, None

    def __next__(self) -> Any:
        """The next item; while windows of an earlier run pass, the first that was not done, again and again."""
        if self._pass:
            if self._ahead is None:
                self._ahead = self._draw()
            self._pass -= 1
            return self._ahead
        item, self._ahead = (self._draw() if self._ahead is None else self._ahead), None
        return item

    def _draw(self) -> Any:
        item = self._convert(next(self.inner))
        self._drawn += 1
        self._states[self._drawn] = self.inner.get_state()
        return item

    def trained(self, count: int) -> None:
        """`count` more items have been trained on, or as many as there were."""
        before, self._used = self._used, min(self._used + count, self._drawn)
        for index in range(before, self._used):
            self._states.pop(index, None)

    def state(self) -> Any:
        """JSON values: the state from which the next item is the first that was not trained on."""
        return _to_json(self._states[self._used])

    def restore(self, state: Any, passing: int) -> None:
        """Go on from `state`, after `passing` items that are asked for and stand for those trained on before."""
        self.inner.set_state(_from_json(state))
        self._drawn = self._used = 0
        self._states = {0: self.inner.get_state()}
        self._pass, self._ahead = passing, None


def _to_json(state: Any) -> Any:
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"json": plain_json(state, name="get_state()")}


def _from_json(state: Any) -> Any:
    return base64.b64decode(state["base64"]) if "base64" in state else state["json"]
