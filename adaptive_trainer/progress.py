"""The progress bar: a listener of events that draws them on standard error.

A step costs a few additions and one look at the clock; drawing happens a few times a second at most. Without a terminal
there is no bar. Who asks for progress all the same gets a plain line now and then, which a log file can hold.

rich is imported when something is drawn, so that importing the trainer does not pay for it.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from adaptive_trainer.events import Climb, Event, Fallback, OutOfMemory, Start, Step
from adaptive_trainer.journal import describe, log
from adaptive_trainer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from rich.console import Console  # noqa: TID251  this room draws

    from adaptive_trainer.plan import Plan

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0


@cache
def terminal() -> Console:
    """Standard error. Bar and log lines share it, which is what keeps lines above the bar."""
    from rich.console import Console  # noqa: PLC0415, TID251  this room draws, and only when there is something to draw

    return Console(stderr=True, soft_wrap=True)


class Progress:
    """Draws the events of one run.

    Args:
        total_steps: Optimizer steps that the run will have in all, None where unknown.
        limit_bytes: What the device has, or the limit that was set; None where unknown.
        console: Where to draw; a bar if it is a terminal, else plain lines.
    """

    def __init__(self, total_steps: int | None, limit_bytes: int | None, console: Console | None = None) -> None:
        self._console = console or terminal()
        self._total_steps = total_steps
        self._limit_bytes = limit_bytes
        self._bar = _Bar(self._console, total_steps) if self._console.is_terminal else None
        self._interval = _LINE_SECONDS if self._bar is None else _REDRAW_SECONDS
        self._plan: Plan | None = None
        self._last_out_of_memory: OutOfMemory | None = None
        self._last_step: Step | None = None
        self._num_samples, self._seconds = 0, 0.0
        self._samples_per_second = 0.0
        self._drawn_at = float("-inf")

    @classmethod
    def for_run(cls, progress: bool | None, total_steps: int | None, limit_bytes: int | None) -> Self | None:  # noqa: FBT001  it is the constructor's own argument
        """What the argument ``progress`` asks for: None is a bar on a terminal and nothing elsewhere."""
        wanted = sys.stderr.isatty() if progress is None else progress
        return cls(total_steps, limit_bytes) if wanted else None

    def __call__(self, event: Event) -> None:
        """Take in one event, and draw if it is time."""
        if type(event) is Step:
            self._last_step = event
            self._num_samples += event.num_samples or 0
            self._seconds += event.seconds
            if time.monotonic() - self._drawn_at >= self._interval:
                self._draw()
        elif isinstance(event, Start):
            self._plan = event.plan
            self._begin(event.step)
        elif isinstance(event, OutOfMemory):
            self._last_out_of_memory = event
        elif isinstance(event, Fallback | Climb):
            self._change_plan(event)

    def close(self) -> None:
        """Draw the last step and leave the bar as it stands."""
        if self._last_step is not None and self._seconds:
            self._draw()
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self, step: int) -> None:
        if self._bar is not None:
            self._bar.start(step, str(self._plan))

    def _change_plan(self, event: Fallback | Climb) -> None:
        if isinstance(event, Climb) or event.scope == "run":
            self._plan = event.new
        if isinstance(event, Fallback) and not _log_is_seen():
            self._console.print(describe(event, self._last_out_of_memory), markup=False, highlight=False)

    def _draw(self) -> None:
        assert self._last_step is not None  # noqa: S101  our own invariant: drawing follows a step
        self._drawn_at = time.monotonic()
        if self._seconds:
            now = self._num_samples / self._seconds
            self._samples_per_second = (self._samples_per_second + now) / 2 if self._samples_per_second else now
        self._num_samples, self._seconds = 0, 0.0
        step, text = self._last_step.step, self._text(self._last_step)
        if self._bar is not None:
            self._bar.draw(step, text)
            return
        total = "" if self._total_steps is None else f" of {self._total_steps}"
        self._console.print(f"step {step}{total}: {text}", markup=False, highlight=False)

    def _text(self, step: Step) -> str:
        parts = [f"loss {step.loss:.4g}"]
        if self._samples_per_second:
            parts.append(f"{_rounded(self._samples_per_second)} samples/s")
        if step.peak_bytes is not None:
            limit = "" if self._limit_bytes is None else f" of {format_bytes(self._limit_bytes)}"
            parts.append(format_bytes(step.peak_bytes) + limit)
        return ", ".join(parts) + f" | {self._plan}"


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


class _Bar:
    """rich's bar, redrawn only when told to: no thread of its own runs beside the training."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        from rich import progress, table  # noqa: PLC0415, TID251  this room draws, when there is something to draw

        # On a narrow terminal the words give way, which stand in the log too, and not the numbers.
        columns = (
            progress.BarColumn(12),
            progress.MofNCompleteColumn(table_column=table.Column(no_wrap=True, min_width=9)),
            progress.TextColumn("{task.description}", table_column=table.Column(ratio=1, no_wrap=True)),
            progress.TimeRemainingColumn(table_column=table.Column(no_wrap=True, min_width=7)),
        )
        self._rich = progress.Progress(*columns, console=console, auto_refresh=False, expand=True)
        self._total_steps = total_steps
        self._task: Any = None

    def start(self, step: int, text: str) -> None:
        if self._task is None:
            self._rich.start()
            self._task = self._rich.add_task(_escaped(text), total=self._total_steps, completed=step)
            self._rich.refresh()

    def draw(self, step: int, text: str) -> None:
        self.start(step, text)
        self._rich.update(self._task, completed=step, description=_escaped(text), refresh=True)

    def stop(self) -> None:
        self._rich.stop()


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


# The log on a terminal.


class TerminalHandler(logging.Handler):
    """Writes log lines to standard error, above the bar where there is one.

    Attributes:
        warnings: What was warned of beside fallbacks, each text once: worth saying again at the end of a long run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record. An out-of-memory has no line of its own: the fallback that answers it says the same."""
        event, text = getattr(record, "event", None), record.getMessage()
        if isinstance(event, OutOfMemory):
            return
        if record.levelno >= logging.WARNING:
            if not isinstance(event, Fallback) and text not in self.warnings:
                self.warnings.append(text)
            text = f"warning: {text}"
        terminal().print(text, markup=False, highlight=False)


@contextmanager
def log_on_terminal(level: int = logging.INFO) -> Iterator[TerminalHandler]:
    """Show the log of the package on standard error for the duration of the block."""
    handler, before = TerminalHandler(), log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _log_is_seen() -> bool:
    """Whether a warning reaches standard error by the log already, so that it need not be drawn a second time."""
    if not log.isEnabledFor(logging.WARNING):
        return False
    handlers, place = list(log.handlers), log
    while place.propagate and place.parent is not None:
        place = place.parent
        handlers += place.handlers
    if not handlers:  # logging then writes warnings to standard error itself
        return True
    return any(
        isinstance(handler, TerminalHandler) or getattr(handler, "stream", None) is sys.stderr for handler in handlers
    )
