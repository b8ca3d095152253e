"""The rungs of the fallback ladder, as one table: what each does to a plan, gives, costs and is good for.

A rung is a function from the plan that ran out of memory to a lower plan, or to a `Skip` with the reason why it cannot
help. It may also give back the very plan it was given, which means "try that again, something else has been freed".

What a rung can help with depends on where memory ran out: smaller micro-batches do nothing for an optimizer that
allocates its moments. The column `helps` says in which phases a rung is worth trying. What a rung does to the
mathematics is the column `fidelity`, as a function of the model's traits: halving is rounding, unless the model draws
random numbers (other masks, same expectation) or normalises over the batch (another function altogether).

Nothing here touches a tensor, a device or a clock. A new rung is a function and a row.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from adaptive_trainer.events import Cause, Fidelity
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan, Precision, sizes
from adaptive_trainer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptive_trainer.events import OutOfMemory


@dataclass(frozen=True, slots=True)
class Skip:
    """A rung cannot help, for this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What model, data and machine are like, as far as a rung cares.

    Attributes:
        cut_refusal: Why this step's batch cannot be cut into micro-batches; None if it can.
        batch_norm: Layers that normalise over the batch are in training mode.
        random: The forward draws random numbers (dropout and the like).
        recompute_refusal: Why gradient checkpointing cannot be put on; None if it can.
        caches_keys: The model keeps its attention's keys, which its own gradient checkpointing switches off.
        amp_precision: The precision that autocast would use here.
        amp_refusal: Why autocast cannot be used; None if it can.
        num_processes: Processes of the run.
    """

    cut_refusal: str | None = None
    batch_norm: bool = False
    random: bool = False
    recompute_refusal: str | None = None
    caches_keys: bool = False
    amp_precision: Precision = "bf16"
    amp_refusal: str | None = None
    num_processes: int = 1

    @property
    def smallest_piece(self) -> int:
        """Rows that a micro-batch must have at least: one row has no batch statistics."""
        return 2 if self.batch_norm else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """All that `decide` may know.

    Attributes:
        plan: The plan that ran out of memory.
        event: What happened.
        traits: What it happened to.
        num_rows: Samples of the failed batch on this process; None where the batch has no such number.
        fitting_rows: Samples of this batch that are as large as what is known to fit; None where nothing is known.
        suspected: It only may have been memory; then a smaller piece is the one thing to try.
        crashed: The process that it happened to is dead, so the same plan would not find more room.
        used: Rungs that were already granted another try of the same plan in this step.
        undone: Rungs that were taken back in this run.
        leak_answered: A lower plan was taken for a leak in this run already.
    """

    plan: Plan
    event: OutOfMemory
    traits: Traits = field(default_factory=Traits)
    num_rows: int | None = None
    fitting_rows: int | None = None
    suspected: bool = False
    crashed: bool = False
    used: frozenset[str] = frozenset()
    undone: frozenset[str] = frozenset()
    leak_answered: bool = False

    @property
    def largest_piece(self) -> int | None:
        """Samples of the failed batch's longest micro-batch."""
        return self._longest(self.plan.micro_batch)

    def _longest(self, micro_batch: int | None) -> int | None:
        return None if self.num_rows is None else sizes(self.num_rows, micro_batch, self.traits.smallest_piece)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row of the ladder.

    Attributes:
        name: What recipes, journal and log call it.
        step: From the failed plan to a lower one, to the same one (try again) or to a `Skip`.
        gives: What it frees, in a few words.
        costs: What is paid for it, in a few words.
        fidelity: How a step compares afterwards, given the model's traits.
        helps: The phases in which it is worth trying.
    """

    name: str
    step: Callable[[Plan, Situation], Plan | Skip]
    gives: str
    costs: str
    fidelity: Callable[[Traits], Fidelity] = field(default=lambda _: Fidelity.CHANGED)
    helps: frozenset[Phase] = frozenset(Phase)

    @staticmethod
    def name_of(entry: Rung | Callable[..., Any]) -> str:
        """The name of a rung, or the one that a function gets as a rung."""
        return entry.name if isinstance(entry, Rung) else getattr(entry, "__name__", type(entry).__name__)

    @classmethod
    def of(cls, function: Callable[..., Plan | Skip | None]) -> Rung:
        """A user's own rung: one function of the plan (and, if it takes two arguments, of the `Situation`).

        It returns a lower plan, the same plan for one more try, or ``Skip(reason)``; None is a skip without words.
        """
        takes_situation = len(_positional(function)) > 1

        def step(plan: Plan, situation: Situation) -> Plan | Skip:
            found = function(plan, situation) if takes_situation else function(plan)
            return Skip("it says that it cannot help") if found is None else found

        summary = (inspect.getdoc(function) or "a rung of your own").partition("\n")[0]
        return cls(name=cls.name_of(function), step=step, gives=summary, costs="as you know")


def _positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [entry for entry in inspect.signature(function).parameters.values() if entry.kind in kinds]


# The rungs as functions.


def _empty_cache(plan: Plan, situation: Situation) -> Plan | Skip:
    event = situation.event
    if event.cause is Cause.LONG_BATCH:
        return Skip("this batch is longer than the others, which no freed cache makes shorter")
    if (
        event.requested_bytes is not None
        and event.total_bytes is not None
        and event.requested_bytes > event.total_bytes
    ):
        asked, there = format_bytes(event.requested_bytes), format_bytes(event.total_bytes)
        return Skip(f"one request of {asked} is more than the {there} there are in all")
    return plan


def _halve_batch(plan: Plan, situation: Situation) -> Plan | Skip:
    traits, largest = situation.traits, situation.largest_piece
    if traits.cut_refusal is not None:
        return Skip(traits.cut_refusal)
    if largest is None:
        return Skip("the batch has no dimension that counts its samples")
    if largest <= traits.smallest_piece:
        return Skip(
            "the micro-batch is one sample already"
            if traits.smallest_piece == 1
            else f"a micro-batch of {largest} cannot be halved: BatchNorm needs two rows or more"
        )
    half = max(traits.smallest_piece, -(-largest // 2))
    if situation.event.cause is Cause.LONG_BATCH and situation.fitting_rows is not None:
        half = max(traits.smallest_piece, min(half, situation.fitting_rows))
    lower = replace(plan, micro_batch=half)
    if sizes(situation.num_rows or largest, half, traits.smallest_piece)[0] >= largest:
        return Skip(f"{situation.num_rows} samples cannot be cut into smaller pieces of two rows or more")
    return lower


def _gradient_checkpointing(plan: Plan, situation: Situation) -> Plan | Skip:
    if plan.gradient_checkpointing:
        return Skip("it is on already")
    if situation.traits.recompute_refusal is not None:
        return Skip(situation.traits.recompute_refusal)
    return replace(plan, gradient_checkpointing=True)


def _amp(plan: Plan, situation: Situation) -> Plan | Skip:
    if plan.precision != "fp32":
        return Skip(f"{plan.precision} is on already")
    if situation.traits.amp_refusal is not None:
        return Skip(situation.traits.amp_refusal)
    return replace(plan, precision=situation.traits.amp_precision)


def _zero(stage: int) -> Callable[[Plan, Situation], Plan | Skip]:
    def step(plan: Plan, situation: Situation) -> Plan | Skip:
        if plan.zero_stage >= stage:
            return Skip(f"stage {plan.zero_stage} is on already")
        if situation.traits.num_processes == 1:
            return Skip("there is one process, so there is nothing to shard over")
        return Skip("sharding is not part of this version")

    return step


def _offload(_plan: Plan, _situation: Situation) -> Plan | Skip:
    return Skip("offloading is not part of this version")


def _halving_fidelity(traits: Traits) -> Fidelity:
    coupled = Fidelity.CHANGED if traits.batch_norm else Fidelity.ROUNDING
    return Fidelity.worst(coupled, Fidelity.STATISTICAL if traits.random else Fidelity.ROUNDING)


_PIECES = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE})
_ACTIVATIONS = frozenset({Phase.FORWARD, Phase.BACKWARD})
_STATE = frozenset(Phase) - {Phase.DATA, Phase.EVALUATE}


def _bit(_traits: Traits) -> Fidelity:
    return Fidelity.BIT


def _recomputing_fidelity(traits: Traits) -> Fidelity:
    # Without the cache, keys lie elsewhere in memory, and matrix kernels may add in another order.
    return Fidelity.ROUNDING if traits.caches_keys else Fidelity.BIT


def _rounding(_traits: Traits) -> Fidelity:
    return Fidelity.ROUNDING


#: The table, in the default order.
RUNGS: tuple[Rung, ...] = (
    Rung(
        name="empty_cache",
        step=_empty_cache,
        gives="cached and fragmented blocks",
        costs="nothing",
        fidelity=_bit,
    ),
    Rung(
        name="halve_batch",
        step=_halve_batch,
        gives="half the activations",
        costs="kernels run smaller",
        fidelity=_halving_fidelity,
        helps=_PIECES,
    ),
    Rung(
        name="gradient_checkpointing",
        step=_gradient_checkpointing,
        gives="activations of repeated blocks",
        costs="about one more forward",
        fidelity=_recomputing_fidelity,
        helps=_ACTIVATIONS,
    ),
    Rung(
        name="amp",
        step=_amp,
        gives="half of most activations",
        costs="numerics",
        helps=_ACTIVATIONS,
    ),
    *(
        Rung(
            name=f"zero_{stage}",
            step=_zero(stage),
            gives=f"{what}, sharded over the processes",
            costs="communication",
            fidelity=_rounding,
            helps=_STATE,
        )
        for stage, what in enumerate(("optimizer state", "gradients", "parameters"), start=1)
    ),
    *(
        Rung(
            name=f"offload_{what}",
            step=_offload,
            gives=f"{held}, in host memory",
            costs="PCIe traffic",
            fidelity=_rounding,
            helps=_STATE,
        )
        for what, held in (("optimizer", "optimizer state"), ("parameters", "parameters"))
    ),
)

RUNG_NAMES: tuple[str, ...] = tuple(rung.name for rung in RUNGS)
