"""SIGTERM and Ctrl-C while training: noted at once, obeyed when the window has ended."""

import os
import signal
import threading
from types import FrameType
from typing import Any

TERMINATED = 128 + int(signal.SIGTERM)  # the exit status that shells give a process ended by SIGTERM
_OURS_TO_TAKE = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """Takes SIGTERM and SIGINT over from Python's own handlers, and gives them back.

    Only in the main thread, since signals have no other; and only where the handler is Python's or the
    system's own: a program that handles a signal itself keeps it, and one that is ignored stays ignored.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def take(self) -> None:
        """Begin to listen."""
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler in _OURS_TO_TAKE:
                self._before[number] = handler
                signal.signal(number, self._handle)

    def give_back(self) -> None:
        """Put the handlers back as they were."""
        if threading.current_thread() is threading.main_thread():
            while self._before:
                signal.signal(*self._before.popitem())

    def leave(self) -> None:
        """End training as the signal asks for: KeyboardInterrupt, or SystemExit with status 143."""
        self.give_back()
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(TERMINATED)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            self.give_back()
            raise KeyboardInterrupt
        self.received = number
        hint = ", then training stops. Ctrl-C once more stops at once" if number == signal.SIGINT else ""
        text = f"\n{signal.Signals(number).name}: a checkpoint is written when this window has ended{hint}.\n"
        os.write(2, text.encode())  # print() may be what was interrupted
