"""The loop: fetch a batch once, attempt its step until it is computed, commit, go on.

recipe -> plan -> engine -> attempt -> (failure -> cause -> decision -> state carried over -> engine) -> commit
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from adaptive_trainer import memory, traits
from adaptive_trainer.batches import Uncuttable, cut, length, num_elements, shapes
from adaptive_trainer.boundary import Boundary, Failure
from adaptive_trainer.descent import Descent, Load, Surroundings, pieces
from adaptive_trainer.engines.base import Committed, Evaluated
from adaptive_trainer.events import Cause, OutOfMemory, Step
from adaptive_trainer.plan import sizes
from adaptive_trainer.rungs import Traits
from adaptive_trainer.workshop import Workshop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from adaptive_trainer.data import Fetched
    from adaptive_trainer.engines.base import Engine, Task
    from adaptive_trainer.events import Event
    from adaptive_trainer.ladder import Descend, Ladder
    from adaptive_trainer.plan import Plan
    from adaptive_trainer.ranks import Ranks

Outcome = TypeVar("Outcome", Committed, Evaluated)

#: How long a device that other processes hold is waited for, once in a step.
WAIT_SECONDS = 2.0
#: What an element of a batch holds, about.
_BYTES = 8


class Loop:
    """One model on its way.

    Attributes:
        task: What engines are built from.
        track: Where the run is.
        ranks: This process among all.
        record: Takes each event.
        workshop: The engine in force.
        descent: The training's walk.
        walk: The walk under way, the training's or an evaluation's.
        is_whole: The state is that after the last completed step, or of one that can still be undone.

    Args:
        model: The user's module, or a function that makes it.
        task: What engines are built from.
        ladder: The rungs.
        plan: Where the walk begins.
        record: Takes each event.
        separable: Whether a batch may be cut.
        ranks: This process among all.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        task: Task,
        ladder: Ladder,
        plan: Plan,
        record: Callable[[Event], None],
        *,
        separable: bool,
        ranks: Ranks,
    ) -> None:
        self.task = replace(task, answerable=self._answerable)
        self.track = task.track
        self.ranks = ranks
        self.record = record
        self.workshop = Workshop(model, self.task, lambda: self.walk.now, self._answer)
        self.descent = Descent(ladder, plan, record, traits=self.traits)
        self.walk = self.descent
        self.is_whole = True
        self._separable = separable
        self._batch: Any = None
        self._traits = Traits()
        self._mark: int | None = None
        self._inherited: Failure | None = None
        # Nobody counts the memory of a CPU without a limit, so nobody needs to be asked in every step.
        self._is_measured = task.budget is not None or task.device.type != "cpu"

    # Coming and going.

    def begin(self) -> None:
        """Load the model, and put it into training mode if its root is in evaluation mode, as loaded models arrive."""
        self.track.hint = None
        model = self.workshop.load().model
        if not model.training:
            model.train()

    def inherit(self, plan: Plan | None, failure: Failure) -> None:
        """Go on after a process that has died: from its plan, and one rung lower in the next step."""
        self.descent.plan = plan or self.descent.plan
        self._inherited = failure

    @property
    def whole_start(self) -> Plan:
        """Where an evaluation's walk begins: with whole batches where none may be cut."""
        return self.descent.start if self._separable else replace(self.descent.start, micro_batch=None)

    @property
    def in_step(self) -> bool:
        """Whether a batch is under way."""
        return self._batch is not None

    def close(self) -> None:
        """Leave the model as the user knows it."""
        self._batch = None
        self.workshop.close()

    # One batch.

    def step(self, fetched: Fetched) -> Step:
        """Do one optimizer step with all of the batch.

        Raises:
            LadderExhausted: Memory does not suffice under any plan that the ladder allows.
        """
        started = time.perf_counter()
        engine = self.workshop.open()
        if self._is_measured:
            memory.reset_peak(self.task.device, self.task.budget)
        try:
            self._face(fetched)
            self._prepare(engine)
            if self._inherited is not None:
                failure, self._inherited = self._inherited, None
                self._answer(failure)
                engine = self.workshop.open()
            committed = self._insist(engine, self._attempted)
        except BaseException as error:
            self._abandon(error)
            raise
        self.track.step += committed.moved
        return Step(
            step=self.track.step,
            rank=self.ranks.rank,
            loss=committed.loss,
            seconds=time.perf_counter() - started,
            num_samples=self.walk.load.num_rows,
            lr=committed.lr,
            peak_bytes=memory.peak_bytes(self.task.device, self.task.budget) if self._is_measured else None,
            skipped=not committed.moved,
        )

    def _prepare(self, engine: Engine) -> None:
        engine.prepare()
        self.workshop.history.begin(engine)

    def _attempted(self, engine: Engine, batch: Any, cuts: tuple[int, ...]) -> Committed | Failure:
        outcome = engine.attempt(batch, cuts)
        if isinstance(outcome, Failure):
            return outcome
        state, history = self.workshop.load(), self.workshop.history
        # A forward that changes parameters is found out in its first step.
        if not (state.optimizer_has_stepped or state.forward_moves_parameters):
            state.forward_moves_parameters = engine.rewind.parameters_moved or history.shows_a_move()
        committed = engine.commit(outcome)
        if not isinstance(committed, Failure):
            history.keep(engine, batch, cuts, committed, self.walk.load.num_elements * _BYTES)
        return committed

    def _abandon(self, error: BaseException) -> None:
        """Leave no half of a step behind that something else than memory ends: another call of fit does it again."""
        engine, self._batch = self.workshop.engine, None
        if engine is None:
            return
        number, history = self.track.step + 1, self.workshop.history
        was_whole, self.is_whole = self.is_whole, False
        try:
            self.is_whole = history.undo(engine, untouched=engine.discard()) and was_whole
            if not self.is_whole:
                error.add_note(f"step {number} was half done and could not be undone: {history.complaint}")
        except Exception as other:  # noqa: BLE001  the user's own exception matters more, so this one is in its notes
            error.add_note(f"step {number} was half done and could not be undone: {type(other).__name__}: {other}")

    def evaluate(self, fetched: Fetched) -> Evaluated:
        """Measure one batch; nothing moves.

        Raises:
            LadderExhausted: Memory does not suffice for the smallest piece.
        """
        engine = self.workshop.open()
        self._face(fetched)
        return self._insist(engine, _evaluated)

    @contextmanager
    def walking(self, walk: Descent) -> Iterator[None]:
        """Let another walk answer the failures for a while."""
        kept, self.walk = (self.walk, self._traits), walk
        self._traits = self.traits()
        try:
            yield
        finally:
            self.walk, self._traits = kept

    def _face(self, fetched: Fetched) -> None:
        self._batch = fetched.batch
        rows = length(fetched.batch, fetched.expected)
        self._mark = memory.allocated_bytes(self.task.device, self.task.budget) if self._is_measured else None
        if self.walk.now.micro_batch is not None:  # somebody may have unfrozen what must not see a single row
            norm = traits.normalises_over_batch(self.workshop.load().model)
            self._traits = replace(self._traits, batch_norm=norm)
        self.walk.face(Load(num_rows=rows, num_elements=num_elements(fetched.batch), held_bytes=self._mark))

    def _insist(self, engine: Engine, attempt: Callable[[Engine, Any, tuple[int, ...]], Outcome | Failure]) -> Outcome:
        """Attempt what is to be done with the batch until it is done."""
        while True:
            cuts = pieces(self.walk.now, self.walk.load, self._traits)
            outcome = attempt(engine, self._batch, cuts)
            if not isinstance(outcome, Failure):
                self.walk.passed(cuts)
                self._batch = self.track.hint = None
                return outcome
            self._answer(outcome)
            engine = self.workshop.open()

    def take_back_amp(self, reason: str) -> bool:
        """Take amp back, if it was the ladder that switched it on.

        Raises:
            LadderExhausted: No other rung is left.
        """
        if not self.descent.switched_on("amp"):
            return False
        self.descent.take_back("amp", reason, self._surroundings(), step=self.track.step, rank=self.ranks.rank)
        self.workshop.open()
        return True

    # What follows a failure.

    def _answerable(self, failure: Failure) -> bool:
        """Whether the walk that is under way, training's or evaluation's, has an answer."""
        return self.walk.answerable(failure)

    def _answer(self, failure: Failure) -> None:
        """Clean up after a failed attempt, record it, and go one rung down (or raise `LadderExhausted`)."""
        step, rank = self.track.step, self.ranks.rank
        self.track.hint = (
            f"before this, step {step + 1} had met: {failure.recognition.type_name}: {failure.recognition.message}"
        )
        with Boundary(self.track, lambda _failure: False):  # a device that is lost may be noticed here first
            around = self._clean_up()
        self.walk.load = replace(self.walk.load, shapes=shapes(self._batch))
        blamed = self.walk.blames(failure)
        if blamed is not None:
            self.walk.take_back(blamed, failure.text, around, step=step, rank=rank)
        else:
            make_room(self.walk.fall(failure, around, step=step, rank=rank), self.walk, self.task)
        if not self.workshop.is_fit():
            self._rebuild()

    def _clean_up(self) -> Surroundings:
        """Put back what the attempt has changed, give back what it held, and measure that."""
        self._traits = self.traits()
        engine, lost = self.workshop.engine, ""
        if engine is not None:
            untouched = memory.forgiving(engine.discard)
            if self.walk is self.descent and self.in_step:
                history = self.workshop.history
                lost = "" if history.undo(engine, untouched=untouched) else history.complaint
                self.is_whole = not lost
        memory.release(self.task.device)
        return self._surroundings(lost)

    def _surroundings(self, lost: str = "") -> Surroundings:
        now = memory.read(self.task.device, self.task.budget)
        # Between two steps the mark is that of the one before, which had room for less.
        known = self.in_step and now.allocated_bytes is not None and self._mark is not None
        return Surroundings(
            traits=self._traits,
            total_bytes=now.total_bytes,
            held_bytes=max(0, (now.allocated_bytes or 0) - (self._mark or 0)) if known else None,
            host_is_device=self.task.device.type == "cpu",
            lost=lost,
        )

    def _rebuild(self) -> None:
        """Another engine, for the build that the walk has come to."""
        engine = self.workshop.open()
        if self.in_step and self.walk is self.descent:
            self._prepare(engine)

    def traits(self) -> Traits:
        """The model's traits as they are now."""
        state, engine = self.workshop.state, self.workshop.engine
        if state is None:
            return Traits(num_processes=self.ranks.size)
        return traits.read(
            state.model,
            state.optimizer,
            self.task.device,
            separable=self._separable,
            cut_refusal=_cut_refusal(self._batch, self.walk.load.num_rows),
            drew_random_numbers=engine is not None and engine.drew_random_numbers,
            num_processes=self.ranks.size,
        )


def _evaluated(engine: Engine, batch: Any, cuts: tuple[int, ...]) -> Evaluated | Failure:
    return engine.evaluate(batch, cuts)


def make_room(decision: Descend, descent: Descent, task: Task) -> None:
    """What a rung asks of the machine beside a new plan."""
    if decision.rung.name != "empty_cache":
        return
    memory.enable_expandable_segments(task.device)
    last = next((entry for entry in reversed(descent.trail) if isinstance(entry, OutOfMemory)), None)
    if last is not None and last.cause is Cause.OTHER_PROCESS:
        time.sleep(WAIT_SECONDS)


def _cut_refusal(batch: Any, num_rows: int | None) -> str | None:
    """Why a batch cannot be cut, None if it can."""
    if batch is None or num_rows is None or num_rows < 2:
        return None
    try:
        cut(batch, num_rows, sizes(num_rows, -(-num_rows // 2)))
    except Uncuttable as refusal:
        return str(refusal)
    return None
