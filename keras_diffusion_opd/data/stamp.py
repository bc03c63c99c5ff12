"""What a batch of rollouts came from."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from keras_diffusion_opd.provenance import plain_json


@dataclass(frozen=True)
class Stamp:
    """Where a prepared batch came from: what freshness is checked against.

    A batch that was rolled out from a student is on-policy only for that student. Arrays cannot show
    it, so the batch carries the fact, and `PreparedDataset(max_staleness=...)` refuses what is too old.

    Args:
        policy_version: int >= 0, number of updates of the student that generated the batch.
        policy_digest: SHA-256 of the student's weights (64 hex digits), or "" where not known.
        teacher_digest: SHA-256 of the teacher's weights, or "".
        sampler: mapping of JSON values: name and settings of the sampler. Sampling temperature,
            top-p and the like change the distribution that "on-policy" refers to.
        seed: int, of the sampler or the corruption.

    Raises:
        TypeError, ValueError: a field has the wrong type or is out of range.

    Example:

    ```python
    from keras_diffusion_opd.data import Stamp

    stamp = Stamp(policy_version=300, sampler={"name": "MaskedSampler", "steps": 32}, seed=7)
    assert stamp.staleness(current_version=310) == 10
    ```
    """

    policy_version: int = 0
    policy_digest: str = ""
    teacher_digest: str = ""
    sampler: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("policy_version", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"`{name}` must be an int. Received {value!r} of type {type(value).__name__}.")
        if self.policy_version < 0:
            raise ValueError(f"`policy_version` must be at least 0. Received {self.policy_version}.")
        for name in ("policy_digest", "teacher_digest"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"`{name}` must be a string of hex digits. Received {getattr(self, name)!r}.")
        if not isinstance(self.sampler, dict):
            raise TypeError(f"`sampler` must be a dict of JSON values. Received {type(self.sampler).__name__}.")
        object.__setattr__(self, "sampler", plain_json(self.sampler, name="sampler"))

    def __hash__(self) -> int:
        return hash((self.policy_version, self.policy_digest, self.teacher_digest, self.seed))

    def staleness(self, current_version: int) -> int:
        """Updates that the student has made since it generated this batch."""
        return current_version - self.policy_version

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; `Stamp(**d)` gives the stamp back."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Stamp":
        """The stamp that `to_json` wrote. Unknown keys raise ValueError."""
        unknown = set(value) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"A stamp has no field {sorted(unknown)}. Its fields are {[f.name for f in fields(cls)]}.")
        return cls(**value)
