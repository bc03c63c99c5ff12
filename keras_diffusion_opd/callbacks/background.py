"""One piece of work at a time beside the training: a checkpoint that is hashed and written."""

import threading
from collections.abc import Callable


class Background:
    """Runs functions one after the other in a thread; what one raises surfaces in the next call.

    The thread is no daemon: an interpreter that ends waits for the checkpoint that is being written.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, function: Callable[[], None]) -> None:
        """Wait for the work before, then begin this one."""
        self.join()

        def run() -> None:
            try:
                function()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="checkpoint")
        self._thread.start()

    def poll(self) -> None:
        """Raise what finished work has raised; do not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.join()

    def join(self) -> None:
        """Wait for the work, and raise what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
