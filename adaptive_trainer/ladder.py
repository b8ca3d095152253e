"""The fallback ladder and the one function that decides what is tried next.

`decide` walks the user's list from its top at every failure and takes the first rung that gives a plan. Going back to
the top is what makes the order a preference rather than a sequence: after gradient checkpointing was switched on, a
halving may be possible again, and comes first again if the list says so.

Why the walk ends. A new plan must be strictly lower in one respect and higher in none (`Plan.descends_from`), and each
respect has a floor: one row, checkpointing on, half precision, stage 3, parameters offloaded. A rung that gives back
the plan it was given is granted that once in each step. A rung that was taken back (an operation refused autocast,
say) is never tried again in the run. So there are finitely many fallbacks in a step, and finitely many lowerings in a
run. All of it is pure: every process that is given the same situation decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from adaptive_trainer.errors import RecipeError
from adaptive_trainer.events import Cause, Fidelity
from adaptive_trainer.plan import Plan
from adaptive_trainer.rungs import RUNG_NAMES, RUNGS, Rung, Situation, Skip, Traits
from adaptive_trainer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


__all__ = ["RUNG_NAMES", "Descend", "GiveUp", "Ladder", "Rung", "Situation", "Skip", "Traits", "decide"]

_BY_NAME = {rung.name: rung for rung in RUNGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Descend:
    """Go on with ``plan``."""

    rung: Rung
    plan: Plan
    fidelity: Fidelity
    skipped: Mapping[str, str]
    this_step_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """No rung is left; ``skipped`` says why for each."""

    skipped: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ladder:
    """Rungs in the order in which they are tried.

    Attributes:
        rungs: The rungs.
        fixed: The order is the user's own; otherwise gradient checkpointing comes before halving for models with
            BatchNorm in training mode, because halving changes what such a model computes.

    Raises:
        RecipeError: Two rungs have one name, by which journal and walk know them.
    """

    rungs: tuple[Rung, ...] = RUNGS
    fixed: bool = False

    def __post_init__(self) -> None:
        complaint = same_names(self.rungs)
        if complaint:
            raise RecipeError(f"ladder: {complaint}")

    @classmethod
    def of(cls, entries: Ladder | Iterable[str | Rung | Callable[..., Any]] | None) -> Ladder:
        """The ladder of a user's list: names, `Rung`s and functions; None for the default one.

        Raises:
            KeyError: A name that no rung has.
            RecipeError: Two rungs have one name.
        """
        if entries is None:
            return cls()
        if isinstance(entries, Ladder):
            return entries
        return cls(tuple(_rung_of(entry) for entry in entries), fixed=True)

    def order(self, traits: Traits) -> Sequence[Rung]:
        """The rungs as they are tried for a model of these traits."""
        if self.fixed or not traits.batch_norm:
            return self.rungs
        names = [rung.name for rung in self.rungs]
        if "halve_batch" not in names or "gradient_checkpointing" not in names:
            return self.rungs
        ordered = list(self.rungs)
        halving = ordered.pop(names.index("halve_batch"))
        after = [rung.name for rung in ordered].index("gradient_checkpointing") + 1
        return [*ordered[:after], halving, *ordered[after:]]

    def __iter__(self) -> Iterator[Rung]:
        return iter(self.rungs)

    def __len__(self) -> int:
        return len(self.rungs)


def same_names(entries: Iterable[str | Rung | Callable[..., Any]]) -> str:
    """What is wrong with the names of a list of rungs, and what to type; empty if each has its own."""
    names = [entry if isinstance(entry, str) else Rung.name_of(entry) for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is None:
        return ""
    return (
        f"more than one rung is called {twice!r}; give each once, under a name of its own: write a function as a def, "
        "or wrap it as Rung(name=..., step=..., gives=..., costs=...)"
    )


def _rung_of(entry: str | Rung | Callable[..., Any]) -> Rung:
    if isinstance(entry, Rung):
        return entry
    return _BY_NAME[entry] if isinstance(entry, str) else Rung.of(entry)


def decide(ladder: Ladder, situation: Situation) -> Descend | GiveUp:
    """What is tried next. Pure: the same situation always gives the same decision."""
    skipped: dict[str, str] = {}
    for rung in ladder.order(situation.traits):
        found = _try(rung, situation)
        if isinstance(found, Skip):
            skipped[rung.name] = found.reason
            continue
        return Descend(
            rung=rung,
            plan=found,
            fidelity=rung.fidelity(situation.traits),
            skipped=skipped,
            this_step_only=situation.event.cause is Cause.LONG_BATCH and rung.name == "halve_batch",
        )
    return GiveUp(skipped=skipped)


def _try(rung: Rung, situation: Situation) -> Plan | Skip:
    """The plan that a rung gives, held to the rules of the walk."""
    refusal = _refusal(rung, situation)
    if refusal is not None:
        return Skip(refusal)
    found, plan = rung.step(situation.plan, situation), situation.plan
    if isinstance(found, Skip):
        return found
    if not isinstance(found, Plan):
        raise RecipeError(
            f"ladder: the rung {rung.name!r} gave a {type(found).__name__}; let it return a lower Plan, the same plan "
            "for one more try, or Skip(reason)"
        )
    if found == plan:
        return Skip(spent) if (spent := _spent(rung, situation)) else found
    if found.micro_batch != plan.micro_batch and situation.traits.cut_refusal is not None:
        return Skip(situation.traits.cut_refusal)
    if not found.descends_from(plan):
        return Skip(f"its plan ({found}) is not lower than the one that failed ({plan})")
    # Endless halving would only hide a leak. The same plan again is still granted: a user's rung may free what leaks.
    hidden = Skip("what is held grows with every step, and one lower plan was taken for that already")
    return hidden if situation.event.cause is Cause.LEAK and situation.leak_answered else found


def _spent(rung: Rung, situation: Situation) -> str:
    """Why another try of the same plan is not granted; empty if it is."""
    if situation.crashed:
        return "the process that ran out of memory is dead, and what it held is free already"
    return "it was tried in this step already" if rung.name in situation.used else ""


def _refusal(rung: Rung, situation: Situation) -> str | None:
    """Why a rung is not even asked, or None."""
    if rung.name in situation.undone:
        return "it was tried and taken back"
    if situation.suspected and rung.name != "halve_batch":
        return "this may not be memory at all, so only a smaller piece is tried"
    if situation.event.cause is Cause.OTHER_PROCESS and rung.name != "empty_cache":
        held, there = situation.event.other_processes_bytes, situation.event.total_bytes
        return f"other processes hold {format_bytes(held)} of {format_bytes(there)}, which no smaller plan gives back"
    if situation.event.phase not in rung.helps:
        return f"it frees nothing that phase {situation.event.phase} needs"
    return None
