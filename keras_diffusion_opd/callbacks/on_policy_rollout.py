"""`OnPolicyRollout`: what `RolloutRefresh` asks for an epoch of batches from the student's own samples."""

from typing import Any

import numpy as np

from keras_diffusion_opd.data.dataset import PreparedDataset
from keras_diffusion_opd.data.prepared_batch import PreparedBatch
from keras_diffusion_opd.data.stamp import Stamp
from keras_diffusion_opd.provenance import digest, plain_json
from keras_diffusion_opd.validation import finite_real, positive_int

_ROW_STREAM, _DEAL_STREAM = 1, 2


class OnPolicyRollout:
    """Samples from the present student, corrupts the samples, has the teacher score them, stamps every batch.

    A call is an epoch of batches: `rollout(student, policy_version) -> list[PreparedBatch]`. The result is a
    function of the student's weights, the version and the seed. `own_share` mixes rows of a corpus in.

    Rows are dealt so that every batch holds corruptions of all strengths: sorted by the number of active
    positions, each batch gets one of every `count` neighbours.

    Args:
        sampler: a token sampler: `sample(student, shape=, steps=, seed=, conditions=, tokens=, temperature=)`.
            None where `own_share` is 0.
        corruption: of the samples: `MaskedCorruption` or another with its `prepare`.
        teacher: a function from model inputs to `TeacherTargets`, such as `models.TeacherScorer`. None for
            batches without a teacher.
        shape: (rows, length) of one rollout. `rows` must be a multiple of `batch_size`.
        steps: int >= 1, of the sampler.
        batch_size: rows per batch.
        samples: None for a sample per own row, or how many to draw: each is then corrupted several times,
            differently, which costs the sampler less.
        conditions: other inputs of the student by name, each (P, ...), and
        tokens: None, or int (P, length), a prompt where it is not the mask id: a pool from which every rollout
            takes its rows, each equally often. Prompts are never masked and never learned.
        temperature: float >= 0, of the sampler. 1 samples the student itself; anything else is recorded in
            the stamp, for then the rollouts are not quite on-policy.
        corpus: None, or `{token_key: int (N, length), **conditions}`: rows that nobody has to sample.
        own_share: in [0, 1], the share of own samples in every rollout: GKD's lambda. The rest is corpus.
        seed: int.

    Raises:
        TypeError, ValueError: an argument is out of range; shapes that do not fit; a corpus without a share,
            or a share without a corpus.

    Source: Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
    2023, arXiv:2306.13649.

    Example:

    ```python
    import keras, numpy as np
    from keras_diffusion_opd.callbacks import OnPolicyRollout, RolloutRefresh
    from keras_diffusion_opd.data import MaskedCorruption
    from keras_diffusion_opd.models import TeacherScorer
    from keras_diffusion_opd.samplers import MaskedSampler

    def denoiser():
        ids = keras.Input((4,), dtype="int32", name="token_ids")
        return keras.Model({"token_ids": ids}, keras.layers.Dense(6)(keras.layers.Embedding(6, 8)(ids)))

    student, teacher = denoiser(), denoiser()
    rollout = OnPolicyRollout(
        MaskedSampler(mask_id=5),
        MaskedCorruption(mask_id=5),
        TeacherScorer(teacher),
        shape=(8, 4),
        steps=4,
        batch_size=4,
    )
    dataset = rollout.dataset(student, max_staleness=1)
    assert len(dataset) == 2 and dataset.staleness() == 0
    # trainer.fit(dataset, epochs=10, callbacks=[RolloutRefresh(dataset, rollout)])
    ```
    """

    def __init__(
        self,
        sampler: Any,
        corruption: Any,
        teacher: Any,
        *,
        shape: tuple[int, int],
        steps: int,
        batch_size: int,
        samples: int | None = None,
        conditions: dict[str, Any] | None = None,
        tokens: Any = None,
        temperature: float = 1.0,
        corpus: dict[str, Any] | None = None,
        own_share: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.own_share = finite_real("own_share", own_share)
        if not 0.0 <= self.own_share <= 1.0:
            raise ValueError(f"`own_share` must be between 0 and 1. Received {own_share}.")
        for name, value, method in (("sampler", sampler, "sample"), ("corruption", corruption, "prepare")):
            unused = value is None and name == "sampler" and self.own_share == 0.0
            if not unused and not callable(getattr(value, method, None)):
                raise TypeError(f"`{name}` must have a method `{method}`. Received {type(value).__name__}.")
        if teacher is not None and not callable(teacher):
            raise TypeError(f"`teacher` must be None or a function of model inputs. Received {type(teacher).__name__}.")
        self.sampler, self.corruption, self.teacher = sampler, corruption, teacher
        self.rows, self.length = (positive_int(f"shape[{i}]", n) for i, n in enumerate(_pair(shape)))
        self.steps = positive_int("steps", steps)
        self.batch_size = positive_int("batch_size", batch_size)
        if self.rows % self.batch_size:
            raise ValueError(
                f"`shape` must have a multiple of batch_size={batch_size} rows, for batches of one shape. Received "
                f"{self.rows} rows."
            )
        self.temperature = finite_real("temperature", temperature)
        self.seed = int(seed)
        self.own_rows = round(self.own_share * self.rows)
        self.samples = self.own_rows if samples is None else min(positive_int("samples", samples), self.own_rows)
        self.token_key = getattr(sampler, "token_key", None) or "token_ids"
        self.conditions = {name: np.asarray(value) for name, value in (conditions or {}).items()}
        self.tokens = None if tokens is None else np.asarray(tokens)
        _same_count("conditions", {**self.conditions, **({} if tokens is None else {"tokens": self.tokens})})
        self.corpus = self._checked_corpus(corpus)

    def _checked_corpus(self, corpus: dict[str, Any] | None) -> dict[str, np.ndarray]:
        if (corpus is None) != (self.own_rows == self.rows):
            raise ValueError(
                f"`corpus` and `own_share` must go together: {self.rows - self.own_rows} of {self.rows} rows come from "
                f"a corpus, and `corpus` is {'None' if corpus is None else 'given'}."
            )
        if corpus is None:
            return {}
        wanted = {self.token_key, *self.conditions}
        if not isinstance(corpus, dict) or (set(corpus) != wanted and (self.conditions or self.own_rows)):
            raise ValueError(
                f"`corpus` must be a dict of arrays with the names {sorted(wanted)}. Received "
                f"{sorted(corpus) if isinstance(corpus, dict) else type(corpus).__name__}."
            )
        arrays = {name: np.asarray(value) for name, value in corpus.items()}
        shape = arrays[self.token_key].shape
        if len(shape) != 2 or shape[1] != self.length:
            raise ValueError(f"`corpus[{self.token_key!r}]` must have shape (rows, {self.length}). Received {shape}.")
        _same_count("corpus", arrays)
        return arrays

    def dataset(
        self, student: Any, *, policy_version: int = 0, max_staleness: int | None = None, shuffle: bool = False
    ) -> PreparedDataset:
        """A first rollout as what `fit` takes; `RolloutRefresh(dataset, rollout)` keeps it fresh."""
        return PreparedDataset(
            self(student, policy_version), max_staleness=max_staleness, shuffle=shuffle, seed=self.seed
        )

    def __call__(self, student: Any, policy_version: int) -> list[PreparedBatch]:
        """An epoch of batches from `student` as it is now, each stamped with `policy_version`."""
        parts = [
            part for part in (self._own(student, policy_version), self._corpus(policy_version)) if part is not None
        ]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        tokens, frozen = whole.pop(self.token_key), whole.pop("frozen")
        prepared = self.corruption.prepare(
            self.seed,
            policy_version,
            np.arange(self.rows),
            tokens,
            conditions=whole,
            teacher=self.teacher,
            stamp=self._stamp(student, policy_version),
            frozen=frozen if frozen.any() else None,
            token_key=self.token_key,
        )
        return self._deal(prepared, policy_version)

    def _own(self, student: Any, version: int) -> dict[str, np.ndarray] | None:
        if not self.own_rows:
            return None
        arrays = dict(self.conditions)
        if self.tokens is not None:
            arrays["tokens"] = self.tokens
        pool = len(next(iter(arrays.values()))) if arrays else self.samples
        chosen = self._rows(pool, self.samples, version, 0)
        arrays = {name: value[chosen] for name, value in arrays.items()}
        prompts = arrays.pop("tokens", None)
        sampled = self.sampler.sample(
            student,
            shape=(self.samples, self.length),
            steps=self.steps,
            seed=_mixed(self.seed, version),
            conditions=arrays or None,
            tokens=prompts,
            temperature=self.temperature,
        )
        fixed = np.zeros(sampled.shape, bool) if prompts is None else prompts != self.sampler.mask_id
        again = np.arange(self.own_rows) % self.samples
        own = {self.token_key: sampled, "frozen": fixed, **arrays}
        return {name: value[again] for name, value in own.items()}

    def _corpus(self, version: int) -> dict[str, np.ndarray] | None:
        wanted = self.rows - self.own_rows
        if not wanted:
            return None
        chosen = self._rows(len(self.corpus[self.token_key]), wanted, version, 1)
        part = {name: value[chosen] for name, value in self.corpus.items()}
        return {**part, "frozen": np.zeros((wanted, self.length), bool)}

    def _rows(self, count: int, wanted: int, version: int, part: int) -> np.ndarray:
        """`wanted` of `count` rows in random order, none a second time before all were taken."""
        rng = self._generator(_ROW_STREAM + 2 * part, version)
        return np.concatenate([rng.permutation(count) for _ in range(-(-wanted // count))])[:wanted]

    def _deal(self, whole: PreparedBatch, version: int) -> list[PreparedBatch]:
        rng = self._generator(_DEAL_STREAM, version)
        active = np.sum(np.asarray(whole.loss_weights) > 0, axis=1)
        dealt = np.argsort(active + rng.random(self.rows), kind="stable").reshape(self.batch_size, -1)
        for stratum in dealt:
            rng.shuffle(stratum)
        return [whole.map(lambda array, chosen=chosen: array[chosen]) for chosen in dealt.T]

    def _generator(self, stream: int, version: int) -> np.random.Generator:
        key = np.array([self.seed % 2**64, (stream << 48) + version], "uint64")
        return np.random.Generator(np.random.Philox(key=key))

    def _stamp(self, student: Any, version: int) -> Stamp:
        config = self.sampler.get_config() if hasattr(self.sampler, "get_config") else {}
        return Stamp(
            policy_version=version,
            policy_digest=digest(student),
            teacher_digest=getattr(self.teacher, "digest", ""),
            sampler={
                "name": None if self.sampler is None else type(self.sampler).__name__,
                "config": plain_json(config, name="sampler.get_config()"),
                "steps": self.steps,
                "temperature": self.temperature,
                "own_share": self.own_share,
            },
            seed=self.seed,
        )


def _pair(shape: Any) -> tuple[Any, Any]:
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise ValueError(f"`shape` must be (rows, length). Received {shape!r}.")
    return shape[0], shape[1]


def _same_count(name: str, arrays: dict[str, Any]) -> None:
    counts = {key: len(value) for key, value in arrays.items()}
    if len(set(counts.values())) > 1 or 0 in counts.values():
        raise ValueError(f"`{name}` must hold arrays of one number of rows, at least 1. Received {counts}.")


def _mixed(seed: int, version: int) -> int:
    """A seed of its own for every version: neighbours of (seed, version) do not share samples."""
    return int(np.random.SeedSequence([seed % 2**64, version]).generate_state(1, "uint32")[0] >> 1)
