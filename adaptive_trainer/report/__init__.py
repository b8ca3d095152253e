"""What a run's journal tells, as values; the modules beside this one draw it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from adaptive_trainer.errors import RecipeError
from adaptive_trainer.journal import JOURNAL_NAME, read
from adaptive_trainer.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Row = dict[str, Any]

_KNOWN_EVENTS = {"start", "step", "out_of_memory", "fallback", "climb", "evaluate", "checkpoint", "finish"}


@dataclass(frozen=True, slots=True)
class Transition:
    """One out-of-memory with what answered it; either may be missing where a run ended in between.

    Attributes:
        out_of_memory: The row of what happened.
        fallback: The row of the rung that was taken.
    """

    out_of_memory: Row | None
    fallback: Row | None


@dataclass(frozen=True, slots=True)
class History:
    """A run as its journal tells it.

    Attributes:
        run_dir: The run's folder.
        rows: All rows with a known event, in the order written.
        steps: One row for each optimizer step, by number; of steps that were done again after a crash, the last.
    """

    run_dir: Path
    rows: tuple[Row, ...]
    steps: dict[int, Row]

    @property
    def transitions(self) -> list[Transition]:
        """The trail: every out-of-memory and every fallback."""
        return transitions(self.rows)

    @property
    def plan(self) -> Row | None:
        """The plan in use at the end."""
        for row in reversed(self.rows):
            found = row.get("plan") if row["event"] in ("finish", "start") else row.get("new")
            if isinstance(found, dict) and row.get("scope", "run") == "run":
                return found
        return None

    @property
    def seconds(self) -> float:
        """The sum of all steps' seconds, those done again after a crash counted once."""
        return sum(float(row["seconds"]) for row in self.steps.values() if _is_number(row.get("seconds")))

    @property
    def losses(self) -> list[float]:
        """The losses of the steps in their order, without those that were not finite."""
        return [self.steps[step]["loss"] for step in sorted(self.steps) if _is_number(self.steps[step].get("loss"))]

    @property
    def peak_bytes(self) -> int | None:
        """The highest memory use of a step; None where nothing measured it."""
        return max((row["peak_bytes"] for row in self.rows if _is_number(row.get("peak_bytes"))), default=None)

    def of(self, event: str) -> list[Row]:
        """All rows of one event."""
        return [row for row in self.rows if row["event"] == event]


def read_history(run_dir: Path) -> History | None:
    """The history of a run; None if its journal holds nothing that is known.

    Raises:
        RecipeError: There is no such folder, or no journal in it.
    """
    path = run_dir / JOURNAL_NAME
    if not run_dir.is_dir():
        near = _near(run_dir.name, run_dir.parent, lambda place: (place / JOURNAL_NAME).is_file())
        raise RecipeError(f"{run_dir}: there is no such folder{near}; type the run_dir of a run")
    if not path.is_file():
        runs = [place for place in sorted(run_dir.iterdir()) if (place / JOURNAL_NAME).is_file()]
        inside = f"; did you mean {', '.join(map(str, runs[:3]))}?" if runs else "; type the run_dir of a run"
        raise RecipeError(f"{run_dir}: there is no {JOURNAL_NAME} in it{inside}")
    rows = tuple(row for row in read(path) if row.get("event") in _KNOWN_EVENTS)
    steps = {row["step"]: row for row in rows if row["event"] == "step" and _is_number(row.get("step"))}
    return History(run_dir, rows, steps) if rows else None


def transitions(rows: Iterable[Row]) -> list[Transition]:
    """Each out-of-memory paired with the fallback that follows it."""
    found: list[Transition] = []
    for row in rows:
        if row["event"] == "out_of_memory":
            found.append(Transition(row, None))
        elif row["event"] == "fallback":
            is_open = bool(found) and found[-1].fallback is None
            found.append(Transition(found.pop().out_of_memory if is_open else None, row))
    return found


def plan_words(row: Row | None) -> str:
    """A journal's plan in words, with the accumulation where it is known."""
    if row is None:
        return "unknown"
    known = {field.name for field in fields(Plan)}
    try:
        words = str(Plan(**{key: value for key, value in row.items() if key in known}))
    except ValueError:
        return str(row)
    accumulation = row.get("accumulation")
    if accumulation in (None, 1) or row.get("micro_batch") is None:
        return words
    first, comma, rest = words.partition(",")
    return f"{first} x {accumulation}{comma}{rest}"


def _near(name: str, folder: Path, is_run: Callable[[Path], bool]) -> str:
    runs = [place for place in folder.iterdir() if is_run(place)] if folder.is_dir() else []
    found = difflib.get_close_matches(name, [place.name for place in runs], n=2)
    return f"; did you mean {' or '.join(str(folder / near) for near in found)}?" if found else ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
