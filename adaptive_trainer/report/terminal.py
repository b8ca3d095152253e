"""A run's history as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console, Group  # noqa: TID251  this room draws
from rich.table import Table  # noqa: TID251  this room draws
from rich.text import Text  # noqa: TID251  this room draws

from adaptive_trainer.report import History, Transition, plan_words, transitions
from adaptive_trainer.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

_TRAIL_COLUMNS = ("step", "phase", "cause", "asked", "allocated", "free / limit", "rung", "plan", "fidelity")
_PLAIN_WIDTH = 160
_WIDE = 140  # what a column each needs


def console(*, stderr: bool = False) -> Console:
    """Where tables go. A file or a pipe has no width of its own, so it gets one that no table is squeezed by."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_PLAIN_WIDTH)


def render(history: History, width: int = _PLAIN_WIDTH) -> Group:
    """Header, trail and evaluations of a run, for a terminal of ``width`` characters."""
    parts: list[Any] = [_header(history)]
    if history.transitions:
        parts += [Text(), trail_table(history.rows, width)]
    if history.of("evaluate"):
        parts += [Text(), _evaluations(history)]
    return Group(*parts)


def trail_table(rows: Iterable[dict[str, Any]], width: int = _PLAIN_WIDTH) -> Table:
    """One row for each fallback: where it struck, the numbers, the rung, the old and the new plan.

    Where ``width`` is too small for a column each, columns that belong together are one, with a line each.
    """
    table = Table(title="out of memory, and what was done", title_justify="left", title_style="bold", show_lines=True)
    cells = [_trail_cells(transition) for transition in transitions(rows)]
    if width >= _WIDE:
        table.show_lines = False
        for column in _TRAIL_COLUMNS:
            table.add_column(column)
        for row in cells:
            table.add_row(*_cells(*row))
        return table
    for column in ("where", "memory", "rung", "plan"):
        table.add_column(column, no_wrap=column != "plan")
    for step, phase, cause, asked, allocated, free, rung, plan, fidelity in cells:
        memory = f"asked {asked}\nallocated {allocated}\nfree {free}"
        table.add_row(*_cells(f"step {step}\n{phase}\n{cause}", memory, f"{rung}\n{fidelity}", plan))
    return table


def _trail_cells(transition: Transition) -> tuple[str, ...]:
    what, did = transition.out_of_memory or {}, transition.fallback or {}
    step = what.get("step", did.get("step"))
    # A step that is being attempted is the next one; an evaluation comes after those that are done.
    evaluating = what.get("phase") == "evaluate" or did.get("scope") == "evaluation"
    return (
        "?" if step is None else str(step if evaluating else step + 1),
        what.get("phase", "-"),
        what.get("cause", "-"),
        format_bytes(what.get("requested_bytes")),
        format_bytes(what.get("allocated_bytes")),
        f"{format_bytes(what.get('free_bytes'))} / {format_bytes(what.get('total_bytes'))}",
        did.get("rung", "none left"),
        _change(what, did),
        did.get("fidelity", "-"),
    )


def _change(what: dict[str, Any], did: dict[str, Any]) -> str:
    if not did:
        return plan_words(what.get("plan"))
    old, new = plan_words(did.get("old")), plan_words(did.get("new"))
    scope = {"step": " (this step)", "evaluation": " (evaluations)"}.get(did.get("scope", "run"), "")
    return (f"{old}, again" if old == new else f"{old} -> {new}") + scope


def _header(history: History) -> Table:
    losses, peak_bytes = history.losses, history.peak_bytes
    recipe = history.run_dir / "recipe.yaml"
    ended = "" if history.of("finish") else " (the run has not finished)"
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("run", str(history.run_dir)),
        ("recipe", str(recipe) if recipe.is_file() else "none: started from Python"),
        ("steps", f"{max(history.steps, default=0)}{ended}"),
        ("time in steps", format_seconds(history.seconds)),
        ("final plan", plan_words(history.plan)),
        ("fallbacks", str(len(history.of("fallback")))),
        ("loss", f"{losses[0]:.4g} -> {losses[-1]:.4g}" if losses else "unknown"),
        ("peak", format_bytes(peak_bytes)),
    ]
    if history.num_earlier:
        rows.insert(1, ("earlier runs", f"{history.num_earlier} in the same journal, not shown here"))
    for row in rows:
        table.add_row(*_cells(*row))
    return table


def _evaluations(history: History) -> Table:
    rows = history.of("evaluate")
    names = list(dict.fromkeys(name for row in rows for name in row.get("metrics", {})))
    table = Table(title="evaluations", title_justify="left", title_style="bold")
    for column in _cells("step", *names):
        table.add_column(column)
    for row in rows:
        values = (row.get("metrics", {}).get(name) for name in names)
        table.add_row(*_cells(row["step"], *("-" if value is None else f"{value:.6g}" for value in values)))
    return table


def _cells(*values: object) -> list[Text]:
    # Texts of the user's own making may hold brackets, which rich would read as markup, and halves of characters, which
    # no screen takes.
    return [Text(str(value).encode("utf-8", "replace").decode()) for value in values]
