"""What a run's journal tells, as values; the modules beside this one draw it.

A journal may have been cut by a crash, edited, or written by another program. `_KEYS` says what a row has to hold; one
that holds something else is passed over, so that what draws a row need not doubt it.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from adaptive_trainer.errors import RecipeError
from adaptive_trainer.journal import JOURNAL_NAME, read
from adaptive_trainer.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Row = dict[str, Any]

# What a row may hold.


def _is_number(value: object, most: float = sys.float_info.max) -> bool:
    """Whether it is a finite number, and one that a float can hold: JSON knows larger ones."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -most <= value <= most


def _is_amount(value: object) -> bool:
    """Whether it is a number of bytes, samples or seconds that can be added up and put into words."""
    return _is_number(value, 1e18) and cast("float", value) >= 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_amount(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_metrics(value: object) -> bool:
    return isinstance(value, dict) and all(map(_optional(_is_number), value.values()))


def _optional(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or check(value)


#: What the keys of a row hold, by event. A key may be missing, where an older version had none; ``step`` may not.
_KEYS: dict[str, dict[str, Callable[[object], bool]]] = {
    "start": {"plan": _is_mapping},
    "step": {
        "loss": _optional(_is_number), "seconds": _is_amount, "peak_bytes": _optional(_is_amount),
        "skipped": _is_switch,
    },
    "out_of_memory": {
        "phase": _is_text, "cause": _is_text, "plan": _is_mapping, "requested_bytes": _optional(_is_amount),
        "allocated_bytes": _optional(_is_amount), "free_bytes": _optional(_is_amount),
        "total_bytes": _optional(_is_amount),
    },
    "fallback": {
        "rung": _is_text, "old": _is_mapping, "new": _is_mapping, "fidelity": _is_text, "scope": _is_text,
    },
    "climb": {"old": _is_mapping, "new": _is_mapping},
    "evaluate": {"metrics": _is_metrics},
    "checkpoint": {},
    "finish": {"plan": _is_mapping, "peak_bytes": _optional(_is_amount)},
}  # fmt: skip


def _is_known(row: Row) -> bool:
    """Whether a row is of a known event and holds what that event's rows hold."""
    event = row.get("event")
    if not isinstance(event, str) or event not in _KEYS or not _is_count(row.get("step")):
        return False
    return all(check(row[key]) for key, check in _KEYS[event].items() if key in row)


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
        rows: All of the run's rows that are what the journal's rows are, in the order written.
        num_earlier: Runs that were written into the same journal before this one.
    """

    run_dir: Path
    rows: tuple[Row, ...]
    num_earlier: int = 0

    @property
    def steps(self) -> dict[int, Row]:
        """One row for each optimizer step that was done, by number; of those done again after a crash, the last."""
        return {row["step"]: row for row in self.of("step") if not row.get("skipped", False)}

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
        """The sum of all steps' seconds, the skipped ones included, those done again after a crash counted once."""
        skipped = [row for row in self.of("step") if row.get("skipped", False)]
        return sum(float(row.get("seconds", 0)) for row in (*self.steps.values(), *skipped))

    @property
    def losses(self) -> list[float]:
        """The losses of the steps in their order, without those that were not finite."""
        return [row["loss"] for _, row in sorted(self.steps.items()) if row.get("loss") is not None]

    @property
    def peak_bytes(self) -> int | None:
        """The highest memory use of a step; None where nothing measured it."""
        return max((row["peak_bytes"] for row in self.rows if row.get("peak_bytes") is not None), default=None)

    def of(self, event: str) -> list[Row]:
        """All rows of one event."""
        return [row for row in self.rows if row["event"] == event]


def read_history(run_dir: Path) -> History | None:
    """The history of the last run in a journal; None if that holds nothing that is known.

    Raises:
        RecipeError: There is no such folder, or no journal in it, or it cannot be read.
    """
    try:
        path = _journal_of(run_dir)
    except OSError as error:
        raise RecipeError(f"{run_dir}: it cannot be read ({error.strerror}); type the run_dir of a run") from None
    rows = tuple(row for row in read(path) if _is_known(row))
    begins = [at for at, row in enumerate(rows) if at == 0 or (row["event"] == "start" and row["step"] == 0)]
    return History(run_dir, rows[begins[-1] :], num_earlier=len(begins) - 1) if rows else None


def _journal_of(run_dir: Path) -> Path:
    path = run_dir / JOURNAL_NAME
    if not run_dir.is_dir():
        near = _near(run_dir.name, run_dir.parent, lambda place: (place / JOURNAL_NAME).is_file())
        raise RecipeError(f"{run_dir}: there is no such folder{near}; type the run_dir of a run")
    if not path.is_file():
        runs = [place for place in sorted(run_dir.iterdir()) if (place / JOURNAL_NAME).is_file()]
        inside = f"; did you mean {', '.join(map(str, runs[:3]))}?" if runs else "; type the run_dir of a run"
        raise RecipeError(f"{run_dir}: there is no {JOURNAL_NAME} in it{inside}")
    return path


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
    try:
        words = str(Plan.of_row(row))
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
