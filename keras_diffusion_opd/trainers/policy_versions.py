"""The policy that is trained, the old one that draws samples, and the one that training started from."""

from typing import Any

import keras
from keras import ops

from keras_diffusion_opd.adapters.adapted_model import AdaptedModel
from keras_diffusion_opd.models.copies import copy_model


class PolicyVersions:
    """Three versions of one model. For a policy that is an adapter they share the base: nothing large is copied.

    Args:
        policy: a built `keras.Model`, or an `AdaptedModel` from `AdapterBank.trainable`.

    Attributes:
        policy, old, reference: the models; the last two are frozen, and equal to the policy now.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        if isinstance(policy, AdaptedModel):
            name = policy._beginning.name if policy._beginning is not None else None
            if name is None:
                raise ValueError(
                    "`policy` has no adapter in training, so nothing could learn. Make it with bank.trainable(name)."
                )
            self.old = policy.bank.trainable(name)
            self.reference = policy.bank.trainable(name)
            for model in (self.old, self.reference):
                model.trainable = False
            self.blend(0.0)
            for kept, now in zip(_sites(self.reference), _sites(policy), strict=True):
                kept.assign(ops.copy(now.value))
        else:
            self.old, self.reference = copy_model(policy), copy_model(policy)
        if not policy.trainable_variables:
            raise ValueError("`policy` has no trainable variables, so nothing could learn. Is `trainable` False?")

    def blend(self, decay: float) -> None:
        """`old <- decay old + (1 - decay) policy`, variable by variable."""
        for old, new in self.pairs():
            if decay == 0.0 or "float" not in keras.backend.standardize_dtype(new.dtype):
                old.assign(ops.copy(new.value))  # on JAX a buffer of its own
            else:
                old.assign(ops.cast(decay, old.dtype) * old.value + ops.cast(1.0 - decay, old.dtype) * new.value)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Variables of the old policy and of the policy that belong together; of adapters those in training."""
        if isinstance(self.policy, AdaptedModel):
            return list(zip(_sites(self.old), _sites(self.policy), strict=True))
        return list(zip(self.old.variables, self.policy.variables, strict=True))


def _sites(model: Any) -> list[Any]:
    return [v for site in model.trained_sites for v in (site.a, site.b, site.magnitude) if v is not None]
