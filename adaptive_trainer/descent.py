"""The walk of one run down the ladder: what was tried, what is known to fit, and what comes next.

`Descent` remembers; `decide` judges. Training and evaluation each have a walk of their own, over the same ladder.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NoReturn

from adaptive_trainer.diagnosis import ADVICE, Symptoms, diagnose
from adaptive_trainer.errors import LadderExhausted
from adaptive_trainer.events import Cause, Fallback, Fidelity, OutOfMemory
from adaptive_trainer.ladder import Descend, GiveUp, Ladder, Situation, Traits, decide
from adaptive_trainer.oom import Verdict
from adaptive_trainer.plan import sizes
from adaptive_trainer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from adaptive_trainer.boundary import Failure
    from adaptive_trainer.events import Event
    from adaptive_trainer.plan import Plan

#: Batches that the usual length is taken from.
_REMEMBERED = 101
#: What a failure can speak against, by the rung of the table that switches it on, and where a plan says so.
_FIELDS = {"amp": "precision", "gradient_checkpointing": "gradient_checkpointing"}


@dataclass(slots=True, kw_only=True)  # not frozen: it is made in every step, and would take three times as long
class Load:
    """What the walk has to get through at the moment: one batch, or none while a model is loaded or built.

    Attributes:
        num_rows: Its samples on this process; None where nothing counts them.
        num_elements: Elements of all its tensors.
        shapes: Of its tensors, by their place.
        held_bytes: What tensors held before it came; None where nobody counts.
    """

    num_rows: int | None = None
    num_elements: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    held_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is read of model and machine when an attempt has failed.

    Attributes:
        traits: What the model is like.
        total_bytes: What the device has, or the limit; None where unknown.
        held_bytes: What the failed attempt still holds after the clean-up; None where unknown.
        host_is_device: The training runs on the CPU, so host memory is the device's.
        lost: Why the step cannot be done again; empty if it can.
    """

    traits: Traits = field(default_factory=Traits)
    total_bytes: int | None = None
    held_bytes: int | None = None
    host_is_device: bool = False
    lost: str = ""


class Descent:
    """One walk.

    Attributes:
        trail: Every failure and every fallback.
        undone: The names of the rungs that were taken back.

    Args:
        ladder: The rungs.
        plan: Where the walk begins.
        record: Takes each event.
        traits: Reads the model's traits now, for failures that only may be memory.
        scope: What a new plan holds for.
    """

    def __init__(
        self,
        ladder: Ladder,
        plan: Plan,
        record: Callable[[Event], None],
        *,
        traits: Callable[[], Traits],
        scope: Literal["run", "evaluation"] = "run",
    ) -> None:
        self.ladder = ladder
        self.plan = plan
        self.start = plan
        self.load = Load()
        self.trail: list[OutOfMemory | Fallback] = []
        self.undone: set[str] = set()
        self._record = record
        self._traits = traits
        self._scope: Literal["run", "evaluation"] = scope
        self._step_plan: Plan | None = None
        self._refused: set[str] = set()
        self._followed: Descent | None = None
        self._used: set[str] = set()
        self._suspected_once = False
        self._first: Failure | None = None
        self._usual: deque[Load] = deque(maxlen=_REMEMBERED)
        self._fitting_elements = 0.0

    @property
    def now(self) -> Plan:
        """The plan of the next attempt."""
        return self._step_plan or self.plan

    def follow(self, other: Descent) -> None:
        """Go on under another walk's plan, with this one's micro-batch and without what was refused in this one."""
        plan = replace(other.plan, micro_batch=self.plan.micro_batch)
        for refused in self._refused:
            plan = self._without(refused, plan)
        self.plan, self._followed = plan, other

    def face(self, load: Load) -> None:
        """A new batch comes, and the ladder is whole again for it."""
        self.load = load
        self._step_plan = None
        self._used.clear()
        self._suspected_once = False

    def passed(self, pieces: tuple[int, ...]) -> None:
        """The batch got through in ``pieces``."""
        self._usual.append(self.load)
        if self.load.num_rows:
            largest = self.load.num_elements * pieces[0] / self.load.num_rows
            self._fitting_elements = max(self._fitting_elements, largest)

    def answerable(self, failure: Failure) -> bool:
        """Whether the ladder has an answer to a failure; asked while the exception is still in flight."""
        if not self.ladder:
            return False
        return (failure.refused is None and self._may_be_smaller(failure)) or self.blames(failure) is not None

    def blames(self, failure: Failure) -> str | None:
        """What a failure speaks against, by its rung in the table, if this walk switched it on; it is taken back."""
        rung = failure.refused
        if rung is None and not self._may_be_smaller(failure):
            # What only may be memory and did not go away with a smaller piece may come from a kernel that there is in
            # fp32 alone: libraries say "not supported" and "could not create a primitive" then.
            rung = "amp"
        return rung if rung is not None and self.switched_on(rung) else None

    def _may_be_smaller(self, failure: Failure) -> bool:
        """False for what only may be memory, once a smaller piece was tried or where there is none."""
        if failure.recognition.verdict is not Verdict.SUSPECTED:
            return True
        situation = self._situation(self._event(failure, Surroundings()), self._traits(), failure)
        return not self._suspected_once and isinstance(decide(self.ladder, situation), Descend)

    def switched_on(self, rung: str) -> bool:
        """Whether it was this walk that switched on what a rung of the table does, and may take it back."""
        return self._without(rung, self.now) != self.now

    def _taker(self, refused: str) -> str:
        """The name of the rung that switched something on: the table's, or a user's own that does the same."""
        trail = [*(self._followed.trail if self._followed else ()), *self.trail]
        for entry in reversed(trail):
            # Taking something back leads up, so it is not mistaken for what led down.
            if isinstance(entry, Fallback) and entry.new.descends_from(entry.old):
                before, after = (getattr(plan, _FIELDS[refused]) for plan in (entry.old, entry.new))
                if before != after:
                    return entry.rung
        return refused

    def fall(self, failure: Failure, around: Surroundings, *, step: int, rank: int = 0) -> Descend:
        """Record a failure and go one rung down.

        Returns:
            What was decided; `now` is the plan of the next attempt.

        Raises:
            LadderExhausted: No rung is left.
        """
        event = replace(self._event(failure, around), step=step, rank=rank)
        self._first = self._first or failure
        self._suspected_once = self._suspected_once or failure.recognition.verdict is Verdict.SUSPECTED
        self._note(event)
        if around.lost:
            self._give_up(event, {"every rung": f"the step was half done and could not be undone: {around.lost}"})
        return self._descend(event, around, failure)

    def take_back(self, rung: str, reason: str, around: Surroundings, *, step: int, rank: int = 0) -> Descend | None:
        """Undo what a rung has switched on, never to take that rung again, and go on with the next one.

        Args:
            rung: The rung of the table that switches on what was refused.
            reason: What spoke against it.
            around: Model and machine as they are now.
            step: Optimizer steps completed.
            rank: The process.

        Returns:
            The step further down, for the failure that the rung was the answer to; None if there was none.

        Raises:
            LadderExhausted: No other rung is left.
        """
        old, name = self.now, self._taker(rung)
        # Under the name that `decide` knows: else a user's own rung would be taken again, and refused again, for ever.
        self.undone.add(name)
        self._refused.add(rung)
        self.plan = self._without(rung, self.plan)
        self._step_plan = None if self._step_plan is None else self._without(rung, self._step_plan)
        new = self.now
        self._note(
            Fallback(
                step=step,
                rank=rank,
                rung=f"undo:{name}",
                old=old,
                new=new,
                fidelity=Fidelity.CHANGED,
                reason=reason,
                scope=self._scope,
                held_bytes=around.held_bytes,
                num_rows=self.load.num_rows,
                smallest_piece=around.traits.smallest_piece,
            )
        )
        failures = [entry for entry in self.trail if isinstance(entry, OutOfMemory)]
        if not failures:
            return None
        event = replace(failures[-1], step=step, rank=rank, plan=new, num_rows=self.load.num_rows)
        return self._descend(event, around, None)

    def _descend(self, event: OutOfMemory, around: Surroundings, failure: Failure | None) -> Descend:
        decision = decide(self.ladder, self._situation(event, around.traits, failure))
        if isinstance(decision, GiveUp):
            self._give_up(event, decision.skipped)
        old, new = self.now, decision.plan
        alone = decision.this_step_only and self._scope == "run"
        if new == old:
            self._used.add(decision.rung.name)
        elif alone:
            self._step_plan = new
        else:
            # A long batch's own split stays its own when a build rung is taken on top of it.
            self.plan = new if self._step_plan is None else replace(new, micro_batch=self.plan.micro_batch)
            self._step_plan = None if self._step_plan is None else new
        self._note(
            Fallback(
                step=event.step,
                rank=event.rank,
                rung=decision.rung.name,
                old=old,
                new=new,
                fidelity=decision.fidelity,
                skipped=dict(decision.skipped),
                reason="; ".join((f"frees {decision.rung.gives}", *_advice(event, failure))),
                scope="step" if alone else self._scope,
                held_bytes=around.held_bytes,
                num_rows=self.load.num_rows,
                smallest_piece=around.traits.smallest_piece,
            )
        )
        return decision

    def _give_up(self, event: OutOfMemory, skipped: Mapping[str, str]) -> NoReturn:
        assert self._first is not None  # noqa: S101  there is an event, so there was a failure
        where = f"step {event.step + 1}, phase {event.phase}"
        asked = "" if event.requested_bytes is None else f" (asked for {format_bytes(event.requested_bytes)})"
        reasons = "\n".join(f"  {rung}: {reason}" for rung, reason in skipped.items())
        raise LadderExhausted(
            f"out of memory in {where}{asked} under the plan: {event.plan}. No rung is left:\n{reasons}\n"
            + "".join(f"{advice[0].upper()}{advice[1:]}.\n" for advice in _advice(event))
            + "Give more memory (memory_limit, another device), a smaller model, or a ladder with more rungs.",
            self.trail,
            dict(skipped),
        ) from self._first.fresh()

    def _situation(self, event: OutOfMemory, traits: Traits, failure: Failure | None) -> Situation:
        rows, elements = self.load.num_rows, self.load.num_elements
        fits = None
        if rows and elements and self._fitting_elements:
            # Where not even one sample is as small as what is known to fit, one is still the best guess.
            fits = max(1, int(self._fitting_elements * rows / elements))
        return Situation(
            plan=event.plan,
            event=event,
            traits=traits,
            num_rows=rows,
            fitting_rows=fits,
            suspected=failure is not None and failure.recognition.verdict is Verdict.SUSPECTED,
            crashed=failure is not None and failure.crashed,
            used=frozenset(self._used),
            undone=frozenset(self.undone),
            leak_answered=self._leak_answered(),
        )

    def _event(self, failure: Failure, around: Surroundings) -> OutOfMemory:
        recognition, numbers = failure.recognition, failure.recognition.numbers
        suspected = recognition.verdict is Verdict.SUSPECTED
        total_bytes = around.total_bytes if numbers.total_bytes is None else numbers.total_bytes
        cause = diagnose(
            Symptoms(
                phase=failure.phase,
                numbers=replace(numbers, total_bytes=total_bytes),
                host=recognition.host and (failure.crashed or not around.host_is_device),
                suspected=suspected or failure.crashed,
                num_elements=_largest_piece(self.now, self.load),
                usual_elements=self._usual_elements(),
                held_bytes=self._held_bytes(),
            )
        )
        return OutOfMemory(
            step=0,
            phase=failure.phase,
            cause=cause,
            message=recognition.message,
            requested_bytes=numbers.requested_bytes,
            allocated_bytes=numbers.allocated_bytes,
            reserved_bytes=numbers.reserved_bytes,
            free_bytes=numbers.free_bytes,
            total_bytes=total_bytes,
            other_processes_bytes=numbers.other_processes_bytes,
            plan=self.now,
            input_shapes=dict(self.load.shapes),
            num_rows=self.load.num_rows,
            smallest_piece=around.traits.smallest_piece,
        )

    def _held_bytes(self) -> tuple[int, ...]:
        return tuple(load.held_bytes for load in (*self._usual, self.load) if load.held_bytes is not None)

    def _leak_answered(self) -> bool:
        """Whether a lower plan, and one that still holds, was taken for a leak."""
        answers = [taken for before, taken in pairwise(self.trail) if getattr(before, "cause", None) is Cause.LEAK]
        lower = [entry for entry in answers if isinstance(entry, Fallback) and entry.new != entry.old]
        return any(entry.rung not in self.undone for entry in lower)

    def _usual_elements(self) -> float | None:
        """What the largest micro-batch of a usual batch would have under the present plan."""
        return statistics.median(_largest_piece(self.now, load) for load in self._usual) if self._usual else None

    def _note(self, event: OutOfMemory | Fallback) -> None:
        self.trail.append(event)
        self._record(event)

    def _without(self, rung: str, plan: Plan) -> Plan:
        """A plan without what a rung of the table, or one that does the same, has switched on since the start."""
        field_name = _FIELDS[rung]
        return replace(plan, **{field_name: getattr(self.start, field_name)})


def _advice(event: OutOfMemory, failure: Failure | None = None) -> tuple[str, ...]:
    crash = (failure.text,) if failure is not None and failure.crashed else ()
    return (*crash, *((ADVICE[event.cause],) if event.cause in ADVICE else ()))


def _largest_piece(plan: Plan, load: Load) -> float:
    """Elements of a batch's largest micro-batch under a plan."""
    return load.num_elements * sizes(load.num_rows, plan.micro_batch)[0] / load.num_rows if load.num_rows else 0.0


def pieces(plan: Plan, load: Load, traits: Traits) -> tuple[int, ...]:
    """How a batch is cut under a plan; one piece where its samples cannot be counted."""
    if load.num_rows is None:
        return (0,)
    return sizes(load.num_rows, plan.micro_batch, traits.smallest_piece)
