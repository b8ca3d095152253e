"""The append-only history of a run: kept in memory, written as JSON lines, logged, and told to callbacks.

What is written must outlive a crash, and writing must not slow a step. So rows are collected and go to the file in one
write: at once for every transition, for steps at most once a second. The file is not buffered by Python. A process that
is forked from this one (a loader's worker) then has nothing left to write when it ends, and a write that fails half-way
is known to the byte: its rest is kept and tried again.
"""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, Self

from adaptive_trainer.errors import RecipeError
from adaptive_trainer.events import Event, Fallback, OutOfMemory, Step
from adaptive_trainer.phases import Phase
from adaptive_trainer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from io import FileIO
    from pathlib import Path
    from types import TracebackType

    Hook = Callable[[Event], None]

JOURNAL_NAME = "journal.jsonl"
_STEP_INTERVAL_SECONDS = 1.0

log = logging.getLogger("adaptive_trainer")
_encode = json.JSONEncoder(allow_nan=False).encode


class Journal:
    """Records events.

    Attributes:
        events: Everything recorded through this object, in order.

    Args:
        path: The file to append to, made with its folder if need be; None writes nothing.
        hooks: Called with each event after it has been written. What they raise passes through.

    Raises:
        RecipeError: The file cannot be opened.
    """

    def __init__(self, path: Path | None = None, hooks: Iterable[Hook] = ()) -> None:
        self.events: list[Event] = []
        self._hooks = tuple(hooks)
        self._path = path
        self._file = None if path is None else _open(path)
        self._unwritten = bytearray()
        self._has_failed = False
        self._written_at = float("-inf")
        self._last_out_of_memory: OutOfMemory | None = None

    def record(self, event: Event) -> None:
        """Keep, write and log one event, then call the hooks."""
        self.events.append(event)
        is_step = type(event) is Step
        if self._file is not None:
            self._unwritten += _encode(event.as_dict()).encode() + b"\n"
            if not is_step or time.monotonic() - self._written_at >= _STEP_INTERVAL_SECONDS:
                self.flush()
        level = logging.DEBUG if is_step else _level(event)
        if log.isEnabledFor(level):
            log.log(level, "%s", describe(event, self._last_out_of_memory), extra={"event": event})
        if type(event) is OutOfMemory:
            self._last_out_of_memory = event
        for hook in self._hooks:
            hook(event)

    def flush(self) -> None:
        """Write the rows that were held back. A file that takes no more (a full disk) is warned of once."""
        if self._file is None:
            return
        self._written_at = time.monotonic()
        try:
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]
        except OSError as error:
            if not self._has_failed:
                log.warning("%s cannot be written (%s): training goes on, rows are kept", self._path, error.strerror)
            self._has_failed = True

    def close(self) -> None:
        """Write what was held back and close the file. Recording still works afterwards, without the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _open(path: Path) -> FileIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        # A row that a crash cut short stays what it is; the next one begins on a line of its own.
        with path.open("rb") as written:
            if file.tell() and written.seek(-1, 2) >= 0 and written.read() != b"\n":
                file.write(b"\n")
    except OSError as error:
        raise RecipeError(f"run_dir: {path} cannot be opened ({error.strerror}); give a writable folder") from None
    return file


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a journal in the order written. Lines that a crash cut short are passed over.

    Raises:
        RecipeError: There is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RecipeError(f"{path}: no journal can be read there ({error.strerror}); give a run's folder") from None
    return [row for line in lines if (row := _row_of(line)) is not None]


def _row_of(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def hook_of(callback: Any) -> Hook:
    """A callback as a function of one event: itself, or its ``on_event``.

    Raises:
        RecipeError: It is neither.
    """
    method = getattr(callback, "on_event", None)
    found = method if callable(method) else callback
    if not callable(found):
        raise RecipeError(
            f"callbacks: an object of type {type(callback).__name__} can neither be called nor has it on_event(event)"
        )
    return found  # type: ignore[no-any-return]  # a user's object: that it can be called is all that is known


# Words.


def _level(event: Event) -> int:
    # Every process reaches the same decisions; said once, by the first, they are one line and not one for each process.
    if isinstance(event, OutOfMemory) or event.rank == 0:
        return logging.WARNING if isinstance(event, Fallback) else logging.INFO
    return logging.DEBUG


def describe(event: Event, cause: OutOfMemory | None = None) -> str:
    """One line for people. ``cause`` is the out-of-memory before it, which a fallback answers."""
    if isinstance(event, Fallback):
        return _describe_fallback(event, cause)
    if isinstance(event, OutOfMemory):
        return f"{_place(event, evaluating=event.phase == Phase.EVALUATE)}: {_described_failure(event)}"
    known = {key: getattr(event, key) for key in event.as_dict() if key not in ("event", "step", "time", "rank")}
    words = [f"{key.replace('_', ' ')} {_said(key, value)}" for key, value in known.items() if value is not None]
    return f"step {event.step}: {event.event}: {'; '.join(words)}"


def _describe_fallback(event: Fallback, cause: OutOfMemory | None) -> str:
    old, new = event.old, event.new
    where = f"{_described_failure(cause)}: " if cause is not None and cause.step == event.step else ""
    change = "the same plan again" if old == new else f"{old} -> {new}"
    scope = {"run": "", "step": " for this step alone", "evaluation": " for evaluations"}[event.scope]
    reason = f"; {event.reason}" if event.reason else ""
    place = _place(event, evaluating=event.scope == "evaluation")
    return f"{place}: {where}{event.rung}, {change}{scope} [fidelity {event.fidelity}{reason}]"


def _place(event: Event, *, evaluating: bool) -> str:
    """A step that is being attempted is the next one; an evaluation comes after those that are done."""
    return f"after step {event.step}" if evaluating else f"step {event.step + 1}"


def _described_failure(event: OutOfMemory) -> str:
    asked, held = format_bytes(event.requested_bytes), format_bytes(event.allocated_bytes)
    free = f"{format_bytes(event.free_bytes)} of {format_bytes(event.total_bytes)}"
    return f"out of memory in {event.phase} ({event.cause}; asked {asked}, allocated {held}, free {free})"


def _said(key: str, value: Any) -> str:
    if key.endswith("bytes"):
        return format_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(name, entry)}" for name, entry in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
