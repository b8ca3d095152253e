"""A run in a process of its own, which is started again after a crash that smells of memory.

What a process dies of cannot be answered inside it: a kill by the kernel's out-of-memory killer, a device that is
lost. The supervisor starts the same command again, at most so many times; the new process finds the mark of the dead
one (`crash`), goes on from the newest checkpoint and takes the next rung. Everything else is passed through.

It holds neither torch nor the model, and nothing of the run: the terminal is the child's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any, Self

from adaptive_trainer import crash
from adaptive_trainer.crash import Crash
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.plan import Plan
from adaptive_trainer.report import read_history
from adaptive_trainer.signals import SUPERVISOR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import FrameType, TracebackType

_FAILED = 1
#: Signals have the exit codes that shells give them.
_SIGNALLED = 128


def supervise(
    command: Sequence[str], again: Sequence[str], run_dir: Path, restarts: int, say: Callable[[str], None]
) -> int:
    """Run a command to its end, and again after each crash that smells of memory.

    SIGINT and SIGTERM are handed on to the child, and nothing is started after one.

    Args:
        command: What is started, with its arguments.
        again: What is started after a crash.
        run_dir: Of the run.
        restarts: How often it is started again at most.
        say: Takes one line for people.

    Returns:
        The exit code of the last child; 128 + n for one that signal n has ended.
    """
    with _Child() as child:
        for done in range(restarts + 1):
            code = child.run(again if done else command)
            found = None if child.is_asked else _crash(code, child.pid, run_dir)
            if found is None:
                break
            if (refusal := _marked(found, run_dir)) or done == restarts:
                say(f"{found.reason}; it is not started again: {refusal or f'--restarts {restarts} is used up'}")
                break
            say(f"restart {done + 1} of {restarts}: {found.reason}; it goes on one rung lower")
    return code if code >= 0 else _SIGNALLED - code


def _crash(code: int, pid: int, run_dir: Path) -> Crash | None:
    """The crash that an exit tells of; None if it is no matter of memory."""
    if code == -signal.SIGKILL:
        reason = "the process was killed by signal 9, as the kernel does when the host's memory runs out"
        return Crash(pid=pid, reason=reason, plan=_plan_in_force(run_dir), host=True)
    found = crash.left(run_dir) if code == _FAILED else None
    return found if found is not None and found.pid == pid else None


def _marked(found: Crash, run_dir: Path) -> str:
    """Leave the mark, from which the next process knows where to go on; why that could not be done, else empty."""
    try:
        found.leave(run_dir)
    except OSError as error:
        return f"{run_dir / crash.NAME} cannot be written ({error.strerror})"
    return ""


def _plan_in_force(run_dir: Path) -> Plan | None:
    """The plan that the journal has last; None if it has none."""
    try:
        history = read_history(run_dir)
        return None if history is None or history.plan is None else Plan.of_row(history.plan)
    except (RecipeError, TypeError, ValueError):  # killed before it had begun, or a journal that somebody has edited
        return None


class _Child:
    """One child at a time, which gets what this process is asked by signals. Only a main thread can be asked.

    It stays in this process's group, so that it may read from the terminal. What is sent to the whole group (Ctrl-C,
    a process manager) therefore reaches it twice, a moment apart, which it takes for one (`signals.SUPERVISOR`).

    Attributes:
        is_asked: A signal has come.
        pid: Of the last child.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}
        self._early: list[int] = []

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            self._before[number] = signal.signal(number, self._hand_on)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def run(self, command: Sequence[str]) -> int:
        """Start a command and wait for its end; its exit code, -n for signal n."""
        environment = {**os.environ, SUPERVISOR: str(os.getpid())}
        with subprocess.Popen(command, env=environment) as process:  # noqa: S603  the user's own command
            self.pid, self._process = process.pid, process
            while self._early:
                process.send_signal(self._early.pop(0))
            return process.wait()

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.is_asked = True
        if self._process is None or self._process.returncode is not None:
            self._early.append(number)
        else:
            self._process.send_signal(number)
