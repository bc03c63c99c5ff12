"""`AdaptedModel`: a base with adapters as one Keras model, for `predict`, `fit` and the trainers."""

import dataclasses
import weakref
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_diffusion_opd.adapters.adapter import Adapter
from keras_diffusion_opd.adapters.bank import AdapterBank
from keras_diffusion_opd.adapters.base_matrix import to_numpy
from keras_diffusion_opd.adapters.selection import Selection
from keras_diffusion_opd.adapters.stack import Stack, as_stack
from keras_diffusion_opd.layers.trained_site import TrainedSite
from keras_diffusion_opd.provenance import Recipe
from keras_diffusion_opd.validation import finite_real

_MIXED = ("inputs", "slots", "weights")


@keras.saving.register_keras_serializable(package="keras_diffusion_opd")
class AdaptedModel(keras.Model):
    """The base of a bank with adapters. Made by `AdapterBank.adapted` and `AdapterBank.trainable`.

    Inputs are those of the base; every row then has `stack`. Or a dict of `inputs`, `slots` and `weights`, as
    `select` gives them: every row has its own. Its trainable variables are those of the adapter in training, or
    none: whatever flags the base's variables have, they are not trained, and its flags are not touched. The base runs
    as in inference (no dropout, no batch statistics), so that it stays what it is to the last bit.

    Args:
        bank: the bank.
        stack: of every row, where rows do not choose. It is leased until `close`.
        trained: None, or the adapter of `bank` at which training begins. Rows that choose its slot get the
            variables in training, and those that choose others get these as they lie in the bank.
        dropout: float in [0, 1).
        seed: int, of the dropout.
        name: of the model.

    Attributes:
        bank: the bank.
        base: its model.

    Example:

    ```python
    import keras, numpy as np
    import keras_diffusion_opd as kdo

    base = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    bank = kdo.adapters.AdapterBank(base, ".*", slots=2, max_rank=2)
    bank.add(kdo.adapters.Adapter.initial("mine", base, ".*", rank=2))
    student = bank.trainable("mine")
    student.compile(keras.optimizers.Adam(0.1), "mse")
    before = kdo.provenance.digest(base)
    student.fit(np.ones((4, 3)), np.zeros((4, 2)), verbose=0)
    bank.add(student.adapter(), replace=True)
    assert kdo.provenance.digest(base) == before
    ```
    """

    def __init__(
        self,
        bank: AdapterBank,
        stack: Any = None,
        *,
        trained: Adapter | None = None,
        dropout: float = 0.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, autocast=False)  # the base casts what it is given itself
        dropout = finite_real("dropout", dropout)
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"`dropout` must lie in [0, 1). Received {dropout}.")
        self.bank, self.base = bank, bank.model
        self.stack: Stack = as_stack(stack)
        self.dropout, self.seed = dropout, seed
        self._beginning = trained
        lease = bank.lease(self.stack)
        self.close = weakref.finalize(self, lease.release)
        chosen = bank.select([lease])
        self.slots = self.add_weight(name="slots", shape=(1, bank.max_stack), dtype="int32", trainable=False)
        self.weights_of_slots = self.add_weight(
            name="weights", shape=(1, bank.max_stack), dtype="float32", trainable=False, autocast=False
        )
        self.slots.assign(chosen.slots)
        self.weights_of_slots.assign(chosen.weights)
        self.trained_sites: list[TrainedSite] = []
        self._trained_slot = 0
        if trained is not None:
            self._trained_slot = int(chosen.slots[0][[name for name, _ in self.stack].index(trained.name)])
            self._make_trained(trained)
        self.built = True

    def _make_trained(self, adapter: Adapter) -> None:
        for index, (path, part) in enumerate(adapter.parts.items()):
            if part.magnitude is not None and self.dropout:
                raise ValueError("`dropout` is not defined for DoRA, whose columns are lengths of what is not dropped.")
            site = TrainedSite(
                part.a.shape[0],
                part.b.shape[1],
                part.rank,
                part.scale,
                dora=part.magnitude is not None,
                looks_up=self.bank._sites[self.bank.paths.index(path)].geometry.looks_up,
                dropout=self.dropout,
                seed=self.seed + index,
                name=path.replace(".", "-"),
                dtype="float32",
            )
            for variable, value in ((site.a, part.a), (site.b, part.b), (site.magnitude, part.magnitude)):
                if variable is not None:
                    variable.assign(np.asarray(value, "float32"))
            self.trained_sites.append(site)

    @property
    def trained_paths(self) -> list[str]:
        """Paths of the layers whose adapter is trained."""
        return [] if self._beginning is None else list(self._beginning.parts)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """See the class."""
        self.bank._refuse_if_fused("a call of an adapted model")
        mixed = isinstance(inputs, dict) and set(inputs) == set(_MIXED)
        if mixed:
            x, slots, weights = (inputs[key] for key in _MIXED)
            slots, weights = ops.cast(slots, "int32"), ops.cast(weights, "float32")
        else:
            x = inputs
            rows = ops.shape(keras.tree.flatten(x)[0])[0]
            shape = (rows, self.bank.max_stack)
            slots, weights = (ops.broadcast_to(v.value, shape) for v in (self.slots, self.weights_of_slots))
        more: dict[str, Any] = {"own": True, "training": bool(training)}
        if self.trained_sites:
            own = ops.logical_and(ops.equal(slots, self._trained_slot), ops.not_equal(weights, 0))
            more["trained_weights"] = ops.sum(ops.where(own, weights, ops.zeros_like(weights)), axis=1)
            weights = ops.where(own, ops.zeros_like(weights), weights)
            more["trained"] = dict(zip(self.trained_paths, self.trained_sites, strict=True))
        with self.bank._entered(Selection(slots, weights), **more):
            return self.base(x, training=False) if self.base._call_has_training_arg else self.base(x)

    def adapter(self, name: str | None = None, *, recipe: Recipe | None = None) -> Adapter:
        """The adapter as it is trained now.

        Args:
            name: None for the name with which training began.
            recipe: how it was trained.

        Returns:
            An adapter with the digest of the base.

        Raises:
            ValueError: nothing is trained here, or training has left numbers that are not finite.
        """
        if self._beginning is None:
            raise ValueError("Nothing is trained here. Make the model with `bank.trainable(name)`.")
        parts = {}
        for (path, part), site in zip(self._beginning.parts.items(), self.trained_sites, strict=True):
            length = None if site.magnitude is None else to_numpy(site.magnitude.value)
            a, b = to_numpy(site.a.value), to_numpy(site.b.value)
            parts[path] = dataclasses.replace(part, a=a, b=b, magnitude=length)
        return Adapter(name or self._beginning.name, parts, base_digest=self.bank.base_digest, recipe=recipe)

    # What the base's variables are marked as does not matter here.

    @property
    def trainable_variables(self) -> list[Any]:
        """Those of the adapter in training."""
        return [v for site in self.trained_sites for v in site.trainable_variables] if self.trainable else []

    @property
    def non_trainable_variables(self) -> list[Any]:
        """All others."""
        trained = {id(v) for v in self.trainable_variables}
        return [v for v in self.variables if id(v) not in trained]

    @property
    def trainable_weights(self) -> list[Any]:
        """Those of the adapter in training."""
        return self.trainable_variables

    @property
    def non_trainable_weights(self) -> list[Any]:
        """All others."""
        trained = {id(v) for v in self.trainable_variables}
        return [v for v in self.weights if id(v) not in trained]

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments; the adapters themselves are files of their own."""
        raise NotImplementedError(
            "An AdaptedModel is a view of a bank. Save the base as it is, and `.adapter()` with `Adapter.save`."
        )
