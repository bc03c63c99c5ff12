"""The selection that is in force, and the calls of layers that read it."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from keras import ops

from keras_diffusion_opd import backend
from keras_diffusion_opd.adapters.selection import Selection
from keras_diffusion_opd.layers.banked_site import BankedSite
from keras_diffusion_opd.layers.site_geometry import EmbeddingGeometry, SiteGeometry
from keras_diffusion_opd.layers.trained_site import TrainedSite
from keras_diffusion_opd.layers.wrapped_calls import WrappedCalls, innermost


@dataclasses.dataclass
class Scope:
    """What is in force while a model runs.

    Args:
        bank: whose scope it is.
        slots, weights: (batch, stack); slots of weight 0 are 0.
        active: bool (batch,), rows that are not the base.
        all_active: whether it is known here, outside of a program, that no row is the base.
        argument: whether the selection was an argument of the program that is being compiled.
        own: whether variables are arguments of the program already, since a Keras model holds them.
        trained: path -> site of the adapter in training.
        trained_weights: float (batch,), or None.
        training: whether dropout acts.
        read: whether a site has read it.
    """

    bank: Any
    slots: Any
    weights: Any
    active: Any
    argument: bool = True
    all_active: bool = False
    own: bool = False
    trained: dict[str, TrainedSite] = dataclasses.field(default_factory=dict)
    trained_weights: Any = None
    training: bool = False
    read: bool = False


def scope_of(bank: Any, selection: Selection, copies: int = 1, **more: Any) -> Scope:
    """The scope of a selection. What has weight 0 is read from slot 0, whatever lies in its own."""
    argument = backend.is_traced(selection.slots) and backend.is_traced(selection.weights)
    slots = ops.cast(ops.convert_to_tensor(selection.slots), "int32")
    weights = ops.cast(ops.convert_to_tensor(selection.weights), "float32")
    if copies > 1:
        slots, weights = ops.tile(slots, (copies, 1)), ops.tile(weights, (copies, 1))
    used = ops.not_equal(weights, 0)
    scope = Scope(bank, ops.where(used, slots, ops.zeros_like(slots)), weights, ops.any(used, axis=1), argument, **more)
    if scope.trained_weights is not None:
        scope.active = ops.logical_or(scope.active, ops.not_equal(scope.trained_weights, 0))
    active = backend.concrete(scope.active)
    scope.all_active = active is not None and bool(active.all())
    return scope


@dataclasses.dataclass
class Site:
    """A layer with its place in a bank.

    Args:
        bank: whose it is.
        path: of the layer.
        layer: the layer, whose `call` is wrapped.
        geometry: how it is a matrix.
        banked: the factors of all adapters.
    """

    bank: Any
    path: str
    layer: Any
    geometry: SiteGeometry
    banked: BankedSite
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    _calls: WrappedCalls | None = None

    def attach(self) -> None:
        """Wrap `call`, and `quantized_call` where there is one, on the instance."""
        self._calls = WrappedCalls(self.layer, self._around, ("call", "quantized_call"))

    def detach(self) -> None:
        """Give the layer its own methods back."""
        if self._calls is not None:
            self._calls.detach()

    def _around(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        scope = innermost(self.bank)
        return original(*args, **kwargs) if scope is None else self._adapted(scope, original, args, kwargs)

    def _adapted(self, scope: Scope, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        x = args[0] if args else kwargs["inputs"]
        x = ops.convert_to_tensor(x)
        reverse = bool(kwargs.get("reverse", args[1] if len(args) > 1 and self.geometry.looks_up else False))
        self._check(scope, x)
        scope.read = True
        with self.lock, _without(self.layer, "logit_soft_cap" if reverse else "activation") as last:
            y = original(*args, **kwargs)
        if reverse and not getattr(self.layer, "tie_weights", True):
            return y if last is None else _soft_cap(y, last)
        delta, shape = self._delta(scope, x, reverse)
        result = y + ops.cast(self._restore(delta, shape, reverse), y.dtype)
        if not reverse:
            result = self._rescaled(scope, result, y, delta, shape)
        if not scope.all_active:  # a base row keeps its bits, whatever it holds
            active = ops.reshape(scope.active, (-1, *(1 for _ in result.shape[1:])))
            result = ops.where(active, result, y)
        if last is None:
            return result
        return _soft_cap(result, last) if reverse else last(result)

    def _delta(self, scope: Scope, x: Any, reverse: bool) -> tuple[Any, tuple[Any, ...]]:
        trained = scope.trained.get(self.path)
        if reverse:
            assert isinstance(self.geometry, EmbeddingGeometry)
            rows, shape = self.geometry.reversed_rows(x)
            delta = self.banked.reversed(rows, scope.slots, scope.weights)
            if trained is not None:
                delta = delta + ops.cast(trained.reversed(rows, scope.trained_weights), delta.dtype)
            return delta, shape
        rows, shape = self.geometry.rows(x)
        # `call` and not the layer itself: nothing here is to be cast or traced a second time.
        delta = self.banked.call(rows, scope.slots, scope.weights)
        if trained is not None:
            added = trained.call(rows, scope.trained_weights, training=scope.training)
            if trained.dora:
                added = added * ops.cast(self._trained_factor(trained), added.dtype)
            delta = delta + ops.cast(added, delta.dtype)
        return delta, shape

    def _restore(self, rows: Any, shape: tuple[Any, ...], reverse: bool) -> Any:
        if reverse:
            return ops.reshape(rows, (ops.shape(rows)[0], *shape, self.geometry.in_features))
        return self.geometry.restore(rows, shape)

    def _rescaled(self, scope: Scope, result: Any, y: Any, delta: Any, shape: tuple[Any, ...]) -> Any:
        """DoRA: the layer's own product, without its bias, times the factor of the column less 1."""
        trained = scope.trained.get(self.path)
        gain = self.banked.gain_of(scope.slots, scope.weights, delta.dtype) if self.banked.dora else None
        if trained is not None and trained.dora:
            weights = ops.reshape(scope.trained_weights, (-1, 1, 1))
            own = weights * ops.reshape(self._trained_factor(trained) - 1.0, (1, 1, -1))
            own = ops.cast(own, delta.dtype)
            gain = own if gain is None else gain + own
        if gain is None:
            return result
        wide = self.geometry.restore(ops.zeros_like(delta) + gain, shape)
        bias = getattr(self.layer, "bias", None)
        product = y if bias is None else y - ops.cast(self.geometry.bias(bias.value), y.dtype)
        return result + ops.cast(wide, y.dtype) * product

    def _trained_factor(self, trained: TrainedSite) -> Any:
        kernel = ops.cast(self.layer.kernel, "float32")
        return trained.column_factor(self.geometry.matrix_of(kernel))

    def _check(self, scope: Scope, x: Any) -> None:
        rows, chosen = x.shape[0], scope.slots.shape[0]
        if rows is not None and chosen is not None and rows != chosen:
            raise ValueError(
                f"The layer {self.path!r} has {rows} rows, and the selection has {chosen}. Where a model "
                "doubles the batch (classifier-free guidance) pass `copies=2` to `scope`. A layer that sees no batch "
                "must be left out of `targets`."
            )
        if scope.own or not backend.is_traced(x):
            return
        if not scope.argument or not backend.is_argument(self.banked.b):
            raise ValueError(
                "The selection or the adapters would become constants of the program that is being compiled: the next "
                "request would be served with those of this one. Pass the selection as an argument and the bank's "
                "variables as state, for example with `bank.compiled(function)` or `bank.adapted()`."
            )


@contextlib.contextmanager
def _without(layer: Any, attribute: str) -> Iterator[Any]:
    """The layer without its last function, which is yielded: adapters act before it.

    Past Keras's and torch's own bookkeeping of attributes, and only as long as the lock of the site is held.
    """
    function = getattr(layer, attribute, None)
    if function is None or getattr(function, "__name__", "") == "linear":
        yield None
        return
    values = vars(layer)
    there = attribute in values
    values[attribute] = None
    try:
        yield function
    finally:
        if there:
            values[attribute] = function
        else:
            del values[attribute]


def _soft_cap(logits: Any, cap: float) -> Any:
    return ops.tanh(logits / cap) * cap
