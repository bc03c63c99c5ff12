"""How old the batches of an epoch were when they were trained on."""


class Staleness:
    """Counts the updates between rollout and use, over the batches of one epoch.

    A batch may be drawn well before its window begins (Keras fetches ahead), so that drawing only notes the
    version that it was rolled out by; its age is taken when its window ends. A resumed epoch goes on from the
    counts of before.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self._versions: dict[int, int] = {}
        self._done = self._total = self._count = 0

    def drawn(self, index: int, version: int) -> None:
        """The batch at `index` of the epoch was rolled out by the student of `version` updates."""
        self._versions[index] = version

    def trained(self, done: int, version: int) -> None:
        """`done` batches of the epoch have been trained on, the last of them from `version` updates on."""
        ages = [version - self._versions[i] for i in range(self._done, done) if i in self._versions]
        self._done, self._total, self._count = done, self._total + sum(ages), self._count + len(ages)

    def mean(self) -> float | None:
        """Mean age in updates; None where no batch had a stamp."""
        return self._total / self._count if self._count else None

    def state(self) -> list[int]:
        """The counts, for a checkpoint."""
        return [self._done, self._total, self._count]

    def restore(self, state: list[int]) -> None:
        """Go on from the counts of an earlier run."""
        self._done, self._total, self._count = map(int, state)
