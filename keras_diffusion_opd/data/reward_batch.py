"""`RewardBatch`: samples of a flow policy, each with how good it is among its group."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from keras_diffusion_opd import backend
from keras_diffusion_opd.data.arrays import map_leaves, shape_of
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.data.training_batch import TrainingBatch


@dataclass(frozen=True)
class RewardBatch(TrainingBatch):
    """What reinforcement learning on the forward process trains on, as `trainers.DiffusionNFTTrainer` takes it.

    Args:
        samples: float (B, ...), x0, samples of the policy.
        noise: float (B, ...), what they are corrupted with.
        times: float (B,), in [0, 1], how far: 0 = data, 1 = noise.
        rewards: float (B,), in [0, 1], the probability that the sample is good: `losses.reward_weights`.
        loss_weights: float (B,), at least 0. A row of weight 0 may hold anything.
        conditions: dict of arrays (B, ...): the other inputs of the policy by name.
        stamp: None, or what policy drew the samples.

    Raises:
        TypeError, ValueError: by `create` and `validate`: shapes that differ, values out of range in rows that count.

    Example:

    ```python
    import numpy as np
    from keras_diffusion_opd.data import RewardBatch

    x0 = np.zeros((4, 2), "float32")
    batch = RewardBatch.create(samples=x0, noise=x0 + 1, times=np.full(4, 0.5), rewards=np.array([0.0, 1.0, 0.5, 0.5]))
    assert batch.rows == 4 and batch.loss_weights.tolist() == [1.0] * 4
    ```
    """

    samples: Any
    noise: Any
    times: Any
    rewards: Any
    loss_weights: Any
    conditions: Any
    stamp: Stamp | None = None

    @classmethod
    def create(
        cls,
        *,
        samples: Any,
        noise: Any,
        times: Any,
        rewards: Any,
        loss_weights: Any = None,
        conditions: dict[str, Any] | None = None,
        stamp: Stamp | None = None,
    ) -> Self:
        """A validated batch, float32; `loss_weights` are 1 where not given."""
        x0, noise, times, rewards = (np.asarray(a, "float32") for a in (samples, noise, times, rewards))
        ones = np.ones(x0.shape[:1], "float32")
        weights = ones if loss_weights is None else np.asarray(loss_weights, "float32")
        named = {name: np.asarray(value) for name, value in (conditions or {}).items()}
        return cls(x0, noise, times, rewards, weights, named, stamp).validate()

    def validate(self) -> Self:
        """See the class."""
        shape = shape_of(self.samples)
        if len(shape) < 2:
            raise ValueError(f"`samples` must have shape (B, ...), rows of values. Received {shape}.")
        expected = {"noise": shape, **dict.fromkeys(("times", "rewards", "loss_weights"), shape[:1])}
        for name, wanted in expected.items():
            if shape_of(getattr(self, name)) != wanted:
                raise ValueError(f"`{name}` must have shape {wanted}. Received {shape_of(getattr(self, name))}.")
        if not isinstance(self.conditions, dict):
            raise TypeError(f"`conditions` must be a dict of arrays. Received {type(self.conditions).__name__}.")
        for name, value in self.conditions.items():
            if shape_of(value)[:1] != shape[:1]:
                raise ValueError(f"`conditions[{name!r}]` must have {shape[0]} rows. Received {shape_of(value)}.")
        self._validate_values()
        return self

    def _validate_values(self) -> None:
        weights = backend.concrete(self.loss_weights)
        if weights is None:
            return
        if not (np.all(np.isfinite(weights)) and np.all(weights >= 0)):
            raise ValueError("`loss_weights` must be finite and at least 0.")
        active = weights > 0
        for name in ("samples", "noise", "times", "rewards"):
            values = backend.concrete(getattr(self, name))
            if values is None:
                continue
            bad = ~np.all(np.isfinite(values).reshape(len(values), -1), axis=1)
            if name in ("times", "rewards"):
                bad |= ~((values >= 0) & (values <= 1))
            if np.any(bad & active):
                row = int(np.argmax(bad & active))
                rule = "lie in [0, 1]" if name in ("times", "rewards") else "be finite"
                raise ValueError(f"`{name}` must {rule} in rows of positive weight. Row {row} does not.")

    def as_fit(self) -> tuple[Any, dict[str, Any], Any]:
        """`(x, y, sample_weight)`."""
        x = {"samples": self.samples, "noise": self.noise, "times": self.times, "conditions": dict(self.conditions)}
        if not self.conditions:
            del x["conditions"]
        return x, {"rewards": self.rewards}, self.loss_weights

    @classmethod
    def from_fit(cls, x: Any, y: Any, sample_weight: Any, stamp: Stamp | None = None) -> Self:
        """The inverse of `as_fit`, but for the stamp."""
        names = {"samples", "noise", "times"}
        if not (isinstance(x, dict) and names <= set(x) <= {*names, "conditions"} and isinstance(y, dict)):
            raise ValueError(
                "The data must be RewardBatch objects or what their as_fit() gives. Received x "
                f"{sorted(x) if isinstance(x, dict) else type(x).__name__}. Make them with RewardBatch.create()."
            )
        if sample_weight is None:
            raise ValueError("`sample_weight` must be the loss weights (B,). Received None.")
        return cls(x["samples"], x["noise"], x["times"], y["rewards"], sample_weight, x.get("conditions", {}), stamp)

    def map(self, function: Any) -> Self:
        """The same batch with `function` applied to every array."""
        x, y, weights = map_leaves(function, list(self.as_fit()))
        return type(self).from_fit(x, y, weights, self.stamp)

    @property
    def rows(self) -> int | None:
        """Number of rows B."""
        rows: int | None = shape_of(self.samples)[0]
        return rows
