"""SIGINT and SIGTERM during a run: the step under way is finished, and a checkpoint written, before the run ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

log = logging.getLogger("adaptive_trainer")

#: Where a supervisor tells its child its process id. It hands on what it is sent; what its whole group was sent, such
#: as Ctrl-C, its child therefore has twice, and takes for one within so many seconds.
SUPERVISOR = "ADAPTIVE_TRAINER_SUPERVISOR"
ECHO_SECONDS = 1.0


class Signals:
    """Takes both signals within its block, once each; the next of its kind does what it did before.

    Only the main thread of a process can do that; elsewhere nothing is taken.
    """

    def __init__(self, *, taken: bool) -> None:
        self._asked: int | None = None
        self._before: dict[int, Any] = {}
        self._echoes = os.environ.get(SUPERVISOR) == str(os.getppid())
        self._taken = taken and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM) if self._taken else ():
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        again = partial(self._ask_again, time.monotonic()) if self._echoes else self._before.pop(number)
        signal.signal(number, again)
        log.warning("%s: the step under way is finished first; once more ends at once", signal.Signals(number).name)

    def _ask_again(self, since: float, number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - since >= ECHO_SECONDS:
            signal.signal(number, self._before.pop(number))
            signal.raise_signal(number)

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
