"""Writes the ladder table, as `adaptive_trainer.rungs.RUNGS` has it, between its marks in README.md and docs/design.md.

Type `.venv/bin/python scripts/ladder_table.py` after a change to the table; a test says when that was forgotten.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from adaptive_trainer import Fidelity, OutOfMemory, Phase, Plan, Rung, Situation, Skip, Traits
from adaptive_trainer.rungs import RUNGS

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "design.md")
MARKED = re.compile(r"(<!-- ladder -->\n).*?(<!-- /ladder -->\n)", re.DOTALL)

_SAMENESS = {
    Fidelity.BIT: "bit-equal",
    Fidelity.ROUNDING: "equal up to rounding",
    Fidelity.STATISTICAL: "other draws, same expectation",
    Fidelity.CHANGED: "changed",
}


def ladder_table() -> str:
    """The rungs in their default order, as a Markdown table."""
    rows = ["| rung | gives | costs | same mathematics? |", "|---|---|---|---|"]
    for rung in RUNGS:
        costs = rung.costs if _is_there(rung) else f"{rung.costs} (not in this version)"
        rows.append(f"| `{rung.name}` | {rung.gives} | {costs} | {_sameness(rung)} |")
    return "\n".join(rows) + "\n"


def _sameness(rung: Rung) -> str:
    usual = rung.fidelity(Traits())
    exceptions = {"with dropout and the like": Traits(random=True), "with BatchNorm": Traits(batch_norm=True)}
    found = {words: rung.fidelity(traits) for words, traits in exceptions.items()}
    others = [f"{words}: {_SAMENESS[fidelity]}" for words, fidelity in found.items() if fidelity is not usual]
    return "; ".join([_SAMENESS[usual], *others])


def _is_there(rung: Rung) -> bool:
    """Whether the rung itself has an answer for a step of eight samples in two processes."""
    plan = Plan()
    event = OutOfMemory(step=0, phase=Phase.FORWARD, message="", plan=plan)
    found = rung.step(plan, Situation(plan=plan, event=event, traits=Traits(num_processes=2), num_rows=8))
    return not isinstance(found, Skip)


def written(text: str) -> str:
    """A document with the table between its marks."""
    return MARKED.sub(lambda found: f"{found[1]}{ladder_table()}{found[2]}", text)


def main() -> int:
    """Write the table into every document that has a place for it."""
    for path in DOCUMENTS:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
