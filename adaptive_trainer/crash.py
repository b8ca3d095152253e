"""How the last process of a run died of memory, told to the next one: a file in the run's folder.

Some shortages leave nobody behind to go down the ladder. The kernel kills a process, and a device that was lost under
it answers nothing any more. The mark says what happened and which plan was in force. Whoever starts next in that folder
takes it, and begins with the fallback that the dead process could not take.

Who is killed cannot leave the mark; whoever has started it does that. Who loses the device leaves it on the way out.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from adaptive_trainer.boundary import Failure
from adaptive_trainer.errors import AdaptiveTrainerError
from adaptive_trainer.oom import Numbers, Recognition, Verdict, recognise
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from adaptive_trainer.loop import Loop

log = logging.getLogger("adaptive_trainer")

NAME = "crash.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A process that died of memory.

    Attributes:
        pid: Its process id.
        reason: What it died of.
        plan: The plan in force; None where that is not known.
        host: Whether it was the host's memory.
    """

    pid: int
    reason: str
    plan: Plan | None
    host: bool

    def leave(self, run_dir: Path) -> None:
        """Write the mark, in place of one that is there.

        Raises:
            OSError: It cannot be written.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        part = run_dir / f".{NAME}.{os.getpid()}.part"
        part.write_text(json.dumps(asdict(self)), encoding="utf-8")
        part.replace(run_dir / NAME)

    def failure(self) -> Failure:
        """The same as a failure of the next step, which is where the ladder can answer it.

        Nobody can say in which phase it was: a kernel's kill tells nothing, and a lost device is noticed late. The
        forward is the phase that all rungs but those for state are for.
        """
        recognition = Recognition(
            verdict=Verdict.OOM, flavour="crash", message=self.reason, type_name="crash", numbers=Numbers(),
            host=self.host,
        )  # fmt: skip
        return Failure(
            phase=Phase.FORWARD, recognition=recognition, exception_type=RuntimeError, text=self.reason, crashed=True
        )


def left(run_dir: Path) -> Crash | None:
    """The mark in a run's folder; None if there is none, or nothing that one could be."""
    try:
        row = json.loads((run_dir / NAME).read_bytes())
        plan = row["plan"] if row["plan"] is None else Plan(**row["plan"])
        found = Crash(pid=row["pid"], reason=row["reason"], plan=plan, host=row["host"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    kinds = {"pid": int, "reason": str, "host": bool}
    return found if all(type(getattr(found, name)) is kind for name, kind in kinds.items()) else None


def taken(run_dir: Path) -> Crash | None:
    """The mark, which is gone then."""
    found = left(run_dir)
    with suppress(OSError):
        (run_dir / NAME).unlink()
    return found


def is_lost(error: BaseException, *, after_memory: bool) -> bool:
    """Whether an exception says that the device is lost to this process, and so that only a new one can go on.

    A runtime that goes on failing once memory ran out has lost its context, whatever its words are now. Errors that
    come from a wrong index or size stay what they are: they would come again.

    Args:
        error: What ends the run.
        after_memory: An out-of-memory was met just before.
    """
    if not isinstance(error, Exception) or isinstance(error, AdaptiveTrainerError):
        return False
    found = recognise(error)
    if found.flavour == "device lost":
        return True
    return after_memory and (found.verdict is Verdict.OOM or found.flavour == "cuda runtime")


class Mark:
    """Takes the mark at the beginning of a run, and leaves one if the run ends with a device that is lost.

    Args:
        run_dir: The run's folder; None for neither.
        loop: The training, its model loaded or not.
        fresh: The run goes on from nothing, so the mark of what was there before says nothing about it.
    """

    def __init__(self, run_dir: Path | None, loop: Loop, *, fresh: bool) -> None:
        self._run_dir = run_dir
        self._loop = loop
        self._fresh = fresh

    def __enter__(self) -> Self:
        crash = None if self._run_dir is None else taken(self._run_dir)
        if crash is not None and not self._fresh:
            self._loop.inherit(crash.plan, crash.failure())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._run_dir is None or error is None:
            return
        if is_lost(error, after_memory=self._loop.track.hint is not None):
            reason = f"the device was lost ({type(error).__name__}: {_first_line(error)})"
            crash = Crash(pid=os.getpid(), reason=reason, plan=self._loop.descent.plan, host=False)
            try:
                crash.leave(self._run_dir)
            except OSError as refusal:
                log.warning("%s cannot be written (%s)", self._run_dir / NAME, refusal.strerror)


def _first_line(error: Any) -> str:
    return str(error).strip().partition("\n")[0]
