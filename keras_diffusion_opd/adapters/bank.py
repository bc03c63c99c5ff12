"""`AdapterBank`: many adapters over one resident base, chosen for each sample."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_diffusion_opd import backend
from keras_diffusion_opd.adapters.adapter import Adapter
from keras_diffusion_opd.adapters.admission import check_admission, slot_content
from keras_diffusion_opd.adapters.attribute_paths import chosen_paths, layers_by_path
from keras_diffusion_opd.adapters.choosing import Choosing
from keras_diffusion_opd.adapters.fusing import Fusion
from keras_diffusion_opd.adapters.scope import Scope, Site, scope_of
from keras_diffusion_opd.adapters.selection import Selection
from keras_diffusion_opd.adapters.slots import Resident, SlotTable
from keras_diffusion_opd.adapters.stack import Stack, as_stack
from keras_diffusion_opd.layers.banked_site import BankedSite
from keras_diffusion_opd.layers.site_geometry import geometry_of
from keras_diffusion_opd.layers.wrapped_calls import in_force
from keras_diffusion_opd.provenance import digest
from keras_diffusion_opd.validation import positive_int


class _Held:
    """Keeps the base out of Keras's tracking: the bank's variables are the adapters' alone."""

    def __init__(self, model: Any) -> None:
        self.model = model


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class AdapterBank(Choosing, keras.layers.Layer):
    """Adapters that lie ready in slots beside a model, which is not changed: no layer is replaced, no flag set.

    The `call` of each target layer is wrapped on the instance. Outside of `scope` it does what it did before.
    Within, row i of the batch gets the sum of the adapters of its stack, added before the layer's activation. A row
    whose stack is `Stack()` keeps the bits of the base. Adding, replacing and removing adapters of any rank up to
    `max_rank`, any alpha and any subset of the targets changes variables only: nothing is compiled again.

    Args:
        model: the base: a built Keras model or layer, or a KerasHub backbone or task. Quantised layers too.
        targets: which Dense, EinsumDense, Conv and Embedding layers: a pattern that must match the whole path
            (`r".*(query|value)_dense"`), a list of names (a path, or its ending), or a predicate `(path, layer)`.
        slots: adapters that are resident at once.
        max_rank: largest rank of an adapter.
        max_stack: most adapters of one sample. The cost grows with `max_rank * max_stack`, not with `slots`.
        dora: whether adapters may be DoRA.
        name: of the layer.
        dtype: of the bank's variables; None for float32.

    Attributes:
        model: the base.
        paths: list of the target layers' paths.
        names: sorted names of the resident adapters.

    Raises:
        ValueError: nothing is chosen (the message has the nearest names), or a layer cannot be adapted.

    Source: Hu et al., "LoRA", 2021, arXiv:2106.09685; Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA
    Adapters", 2023, arXiv:2311.03285.

    Example:

    ```python
    import keras, numpy as np
    from keras_diffusion_opd.adapters import Adapter, AdapterBank, Stack

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    bank = AdapterBank(model, ".*", slots=4, max_rank=2, max_stack=2)
    ones = (np.ones((3, 1), "float32"), np.ones((1, 2), "float32"))
    bank.add(Adapter.from_arrays("style", model, {"layers.0": ones}))

    x = np.ones((3, 3), "float32")
    run = bank.compiled(lambda x, selection: _run(x, selection))
    def _run(x, selection):
        with bank.scope(selection):
            return model(x)
    y = np.asarray(run(x, bank.select([Stack(), Stack("style"), Stack(style=-0.5)])))
    assert np.allclose(y - y[0], [[0, 0], [3, 3], [-1.5, -1.5]], atol=1e-5)
    ```
    """

    def __init__(
        self,
        model: keras.layers.Layer,
        targets: Any,
        *,
        slots: int = 16,
        max_rank: int = 32,
        max_stack: int = 4,
        dora: bool = False,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        if not isinstance(model, keras.layers.Layer):
            raise TypeError(f"`model` must be a built Keras model or layer. Received {type(model).__name__}.")
        self._held = _Held(model)
        self.targets = targets
        self.slots, self.max_rank = positive_int("slots", slots), positive_int("max_rank", max_rank)
        self.max_stack, self.dora = positive_int("max_stack", max_stack), bool(dora)
        layers = layers_by_path(model)
        self.paths = chosen_paths(model, targets)
        geometries = {path: _geometry(path, layers[path]) for path in self.paths}
        self.banked = [
            BankedSite(
                geometry.in_features,
                geometry.out_features,
                slots=self.slots,
                max_rank=self.max_rank,
                dora=self.dora and not geometry.looks_up,
                looks_up=geometry.looks_up,
                name=path.replace(".", "-"),
                dtype=dtype or "float32",
            )
            for path, geometry in geometries.items()
        ]
        self._sites = _Sites(
            Site(self, path, layers[path], geometries[path], banked)
            for path, banked in zip(self.paths, self.banked, strict=True)
        )
        self._table = SlotTable(self.slots)
        self._guard = threading.RLock()
        self._base_digest: str | None = None
        self._fusion: Fusion | None = None
        for site in self._sites:
            site.attach()
        self.built = True

    # ---- adapters -----------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The base."""
        return self._held.model

    @property
    def names(self) -> list[str]:
        """Names of the resident adapters, sorted."""
        return sorted(self._table.by_name)

    @property
    def base_digest(self) -> str:
        """Digest of the base, taken once; `refresh` takes it anew."""
        if self._base_digest is None:
            self._base_digest = digest(self.model)
        return self._base_digest

    def get(self, name: str) -> Adapter:
        """The resident adapter of a name; KeyError if there is none."""
        return self._table.find(name).adapter

    def add(self, adapter: Adapter, *, replace: bool = False, evict: bool = False, check_base: bool = True) -> None:
        """Put an adapter into a slot. Whoever leases a former adapter of that name keeps it until the release.

        Args:
            adapter: what to add. One that is there already (by digest) stays.
            replace: whether another adapter of the same name gives up its name.
            evict: whether, if all slots are taken, the one that was not used for the longest is removed. A leased
                one never is.
            check_base: whether an adapter of a base with another digest is refused.

        Raises:
            ValueError: it does not fit: targets, shapes, rank, DoRA, another base, a name that is taken, numbers
                that overflow. Nothing has changed then.
            RuntimeError: no slot is free, or adapters are fused.
        """
        if not isinstance(adapter, Adapter):
            raise TypeError(f"`adapter` must be an Adapter. Received {type(adapter).__name__}.")
        with self._guard:
            self._refuse_if_fused("add")
            check_admission(self, adapter, check_base)
            former = self._table.by_name.get(adapter.name)
            if former is not None and former.adapter.digest == adapter.digest:
                self._table.find(adapter.name)
                return
            if former is not None and not replace:
                raise ValueError(
                    f"The name {adapter.name!r} is taken by an adapter of digest {former.adapter.digest[:12]}. Pass "
                    "replace=True, or give this one another name with `renamed`."
                )
            contents = {site.path: slot_content(site, adapter) for site in self._sites}
            slot, leaving = self._table.room_for(adapter.name, evict)
            for site in self._sites:
                site.banked.write(slot, *contents[site.path])
            if former is not None and former is not leaving:
                self._vacate(self._table.retire(adapter.name))
            self._table.put(adapter, slot, leaving)

    def remove(self, name: str) -> None:
        """Take an adapter out. While it is leased only its name goes; the slot follows with the last release.

        Args:
            name: of a resident adapter.

        Raises:
            KeyError: there is none.
            RuntimeError: adapters are fused.
        """
        with self._guard:
            self._refuse_if_fused("remove")
            self._table.find(name)
            self._vacate(self._table.retire(name))

    def refresh(self) -> None:
        """After the base was changed (trained, loaded): take its digest anew, and DoRA's column lengths with it."""
        with self._guard:
            self._refuse_if_fused("refresh")
            self._base_digest = None
            for resident in self._table:
                for site in self._sites:
                    site.banked.write(resident.slot, *slot_content(site, resident.adapter))

    # ---- choosing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, selection: Any, *, copies: int = 1) -> Iterator[None]:
        """Within it, the model's rows have the adapters of the selection.

        Args:
            selection: what `select` gave, or a list of stacks.
            copies: how often the model repeats the batch as a whole; 2 for classifier-free guidance as
                `[conditional; unconditional]`.

        Raises:
            RuntimeError: adapters are fused; or no target layer ran within, since the function was compiled before.
        """
        self._refuse_if_fused("scope")
        if not isinstance(selection, Selection):
            selection = self.select(selection)
        with self._entered(selection, positive_int("copies", copies)) as scope:
            yield
        if not scope.read:
            raise RuntimeError(
                "No target layer of the bank ran inside of this scope: its adapters had no effect. A function that was "
                "compiled outside of it does not see it. Open the scope inside of the function, and pass the selection "
                "as an argument."
            )

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(*args)` compiled for inference; base and adapters are arguments of the program.

        Args:
            function: opens `scope` with a selection from its arguments and calls the model.

        Returns:
            The compiled function: it sees every later change of the adapters, and none compiles it again.
        """
        return backend.compiled(function, [self.model, self])

    def adapted(self, stack: Any = None) -> Any:
        """The base with one stack for all rows, as a Keras model; see `AdaptedModel`. It leases the stack."""
        from keras_diffusion_opd.adapters.adapted_model import AdaptedModel

        return AdaptedModel(self, stack)

    def trainable(self, name: str, *, dropout: float = 0.0, seed: int = 0) -> Any:
        """The base with one adapter for all rows, as a Keras model whose trainable variables are that adapter's.

        Args:
            name: of a resident adapter, where training begins. It stays as it is in the bank.
            dropout: share of each target layer's input features that the adapter does not see in training.
            seed: of the dropout.

        Returns:
            An `AdaptedModel`: for `fit`, or for the trainers of this library. `.adapter()` is the result.
        """
        from keras_diffusion_opd.adapters.adapted_model import AdaptedModel

        return AdaptedModel(self, name, trained=self.get(name), dropout=dropout, seed=seed)

    # ---- fusing -------------------------------------------------------------------------------------

    @property
    def fused(self) -> Stack | None:
        """The stack that the kernels hold now, or None."""
        return None if self._fusion is None else self._fusion.stack

    def fuse(self, stack: Any, *, requantise: bool = False) -> None:
        """Add a stack to the base's own kernels, for all rows, until `unfuse`: inference at the base's cost.

        Args:
            stack: what to fuse; not empty.
            requantise: whether quantised kernels are rounded to their grid anew, which may lose small changes.

        Raises:
            RuntimeError: something is fused or leased already.
            ValueError: a quantised kernel without `requantise`, or a table that other layers read past its `call`.
        """
        with self._guard:
            self._refuse_if_fused("fuse")
            if self._table.leased:
                raise RuntimeError(f"Adapters are leased: {self._table.leased}. Fusing is for all rows: release them.")
            chosen = as_stack(stack)
            if not chosen:
                raise ValueError("`stack` must hold an adapter. Received the empty stack, which is the base.")
            entries = [(r.adapter, weight) for r, weight in self._table.residents_of(chosen)]
            fusion = Fusion(chosen, entries, list(self._sites), self.model, requantise)
            fusion.apply()
            self._fusion = fusion

    def unfuse(self) -> None:
        """Put the saved kernels back, bit for bit.

        Raises:
            RuntimeError: nothing is fused, or a fused kernel was changed since.
        """
        with self._guard:
            if self._fusion is None:
                raise RuntimeError("Nothing is fused.")
            self._fusion.undo()
            self._fusion = None

    def detach(self) -> None:
        """Give the model's layers their own `call` back; the bank has no effect from then on."""
        self._refuse_if_fused("detach")
        for site in self._sites:
            site.detach()

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments. Adapters are no part of it: they are files of their own."""
        serialize = keras.saving.serialize_keras_object
        own = {key: getattr(self, key) for key in ("slots", "max_rank", "max_stack", "dora", "name")}
        named = {"model": serialize(self.model), "targets": serialize(self.targets)}
        return {**named, **own, "dtype": serialize(self.dtype_policy)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AdapterBank":
        """The inverse of `get_config`, with a new base and no adapters."""
        deserialize = keras.saving.deserialize_keras_object
        parts = {key: deserialize(config[key]) for key in ("model", "targets", "dtype")}
        return cls(**{**config, **parts})

    # ---- inside -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _entered(self, selection: Selection, copies: int = 1, **more: Any) -> Iterator[Scope]:
        scope = scope_of(self, selection, copies, **more)
        with in_force(self, scope):
            yield scope

    def _vacate(self, resident: Resident | None) -> None:
        if resident is not None:
            for site in self._sites:
                site.banked.clear(resident.slot)
            self._table.free(resident)

    def _refuse_if_fused(self, what: str) -> None:
        if self._fusion is not None:
            raise RuntimeError(
                f"`{what}` is not possible while {self._fusion.stack!r} is fused into the kernels: rows that "
                "choose for themselves would get both. Call `unfuse()` first."
            )


class _Sites(tuple[Site, ...]):
    """Keras makes lists and tuples that are attributes its own; this one it leaves alone."""


def _geometry(path: str, layer: Any) -> Any:
    if getattr(layer, "lora_enabled", False):
        raise ValueError(f"{path!r} has Keras's own LoRA, which this bank would not see. Leave it out of `targets`.")
    if getattr(layer, "mask_zero", False) and hasattr(layer, "tie_weights"):
        raise ValueError(f"{path!r} hands a mask on in a way that an adapter would lose. Leave it out of `targets`.")
    try:
        return geometry_of(layer)
    except ValueError as error:
        raise ValueError(f"{path!r}: {error}") from error
