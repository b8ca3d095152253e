"""SIGINT and SIGTERM during a run: the step under way is finished, and a checkpoint written, before the run ends."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

log = logging.getLogger("adaptive_trainer")

#: Signals of a kind that come within so many seconds are one. Process managers, and a supervisor whose whole group was
#: sent the signal, let a process have it twice.
ECHO_SECONDS = 1.0


class Signals:
    """Takes both signals within its block, once each; the next of its kind, but for an echo, does what it did before.

    Only the main thread of a process can do that; elsewhere nothing is taken.
    """

    def __init__(self, *, taken: bool) -> None:
        self._asked: int | None = None
        self._before: dict[int, Any] = {}
        self._came: dict[int, float] = {}
        self._taken = taken and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM) if self._taken else ():
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self._came:
            if now - self._came[number] >= ECHO_SECONDS:
                signal.signal(number, self._before.pop(number))
                signal.raise_signal(number)
            return
        self._asked, self._came[number] = number, now
        log.warning("%s: the step under way is finished first; once more ends at once", signal.Signals(number).name)

    @property
    def asked(self) -> bool:
        """Whether the run shall end."""
        return self._asked is not None

    def end(self) -> None:
        """End as the signal would have.

        Raises:
            KeyboardInterrupt: It was SIGINT.
            SystemExit: It was SIGTERM, with the exit code that shells give it.
        """
        if self._asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self._asked is not None:
            raise SystemExit(128 + self._asked)
