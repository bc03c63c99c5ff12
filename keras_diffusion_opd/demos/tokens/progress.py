"""A progress bar that is one line on a terminal, and a few lines in a log."""

import sys
import time
from types import TracebackType
from typing import Any

import keras

_WIDTH = 24


class Progress:
    """A bar: `with Progress("teacher", 100) as bar: bar.to(1, "loss 2.1")`.

    Args:
        name: shown before the bar.
        total: int, steps at the end.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total = name, max(total, 1)
        self.live = sys.stdout.isatty()
        self._done = 0
        self._note = ""
        self._start = self._shown = time.monotonic()
        self._next_line = 0.0 if self.live else 0.25

    def to(self, done: int, note: str = "") -> None:
        """Set the number of steps that are done, and what is said beside the bar."""
        self._done, self._note = done, note or self._note
        now, share = time.monotonic(), done / self.total
        if self.live and (now - self._shown > 0.1 or done >= self.total):
            self._shown = now
            print(f"\r{self._line(share)}", end="", flush=True)
        elif not self.live and share >= self._next_line:
            self._next_line = share + 0.25 if share < 1 else 2.0
            print(self._line(share), flush=True)

    def _line(self, share: float) -> str:
        filled = round(_WIDTH * min(share, 1.0))
        bar = "█" * filled + "·" * (_WIDTH - filled)
        seconds = time.monotonic() - self._start
        return f"{self.name:<24} {bar} {self._done:>5}/{self.total} {seconds:5.0f} s  {self._note:<32}"

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            print(flush=True)


class FitProgress(keras.callbacks.Callback):
    """Drives one bar through a whole `fit`, whatever its epochs."""

    def __init__(self, bar: Progress) -> None:
        super().__init__()
        self.bar = bar
        self._updates = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One update more."""
        self._updates += 1
        if self.bar.live and self._updates % 10:
            return
        loss = float((logs or {}).get("loss", float("nan")))
        self.bar.to(self._updates, f"loss {loss:.4f}")
