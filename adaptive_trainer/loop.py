"""The loop: fetch a batch once, attempt its step until it is computed, commit, go on.

recipe -> plan -> engine -> attempt -> (failure -> cause -> decision -> state carried over -> engine) -> commit
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from adaptive_trainer import memory, traits
from adaptive_trainer.batches import Uncuttable, cut, length, num_elements, shapes
from adaptive_trainer.boundary import Boundary, Failure
from adaptive_trainer.descent import Descent, Load, Surroundings, pieces
from adaptive_trainer.engines.base import Committed, Evaluated
from adaptive_trainer.engines.build import build
from adaptive_trainer.errors import DataError, NonFiniteError
from adaptive_trainer.events import Cause, OutOfMemory, Step
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import sizes
from adaptive_trainer.rungs import Traits
from adaptive_trainer.state import TrainState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from adaptive_trainer.data import Fetched
    from adaptive_trainer.engines.base import Engine, Task
    from adaptive_trainer.events import Event
    from adaptive_trainer.ladder import Descend, Ladder
    from adaptive_trainer.plan import Plan
    from adaptive_trainer.ranks import Ranks

Outcome = TypeVar("Outcome", Committed, Evaluated)

#: Steps in a row that may be skipped because their numbers are not finite.
MAX_SKIPPED = 25
#: How long a device that other processes hold is waited for, once in a step.
WAIT_SECONDS = 2.0


class Loop:
    """One model on its way: the engine in force, the walk, and the state that both leave behind.

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
        self.state: TrainState | None = None
        self.engine: Engine | None = None
        self.descent = Descent(ladder, plan, record, traits=self.traits)
        self.walk = self.descent
        self._model = model
        self._separable = separable
        self._batch: Any = None
        self._traits = Traits()
        self._mark: int | None = None
        self._skipped_in_a_row = 0
        # Nobody counts the memory of a CPU without a limit, so nobody needs to be asked in every step.
        self._is_measured = task.budget is not None or task.device.type != "cpu"

    # Coming and going.

    def begin(self) -> None:
        """Load the model, and put it into training mode if its root is in evaluation mode, as loaded models arrive."""
        self.track.hint = None
        model = self.load().model
        if not model.training:
            model.train()

    def load(self) -> TrainState:
        """Load the model, once."""
        if self.state is None:
            self.state = TrainState(model=self._load())
        return self.state

    def open(self) -> Engine:
        """Load the model and build the engine for the walk under way, down the ladder if need be."""
        if self.engine is not None and self.engine.build != self.walk.now.build:
            return self._rebuild()
        if self.engine is None:
            self.engine = self._build(self.load())
        return self.engine

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
        if self.engine is not None:
            self.state = self.engine.export()
            self.engine.close()
            self.engine = None
        self._batch = None

    def _load(self) -> nn.Module:
        while True:
            with Boundary(self.track, self.task.answerable) as boundary:
                model = self._model
                if not isinstance(model, nn.Module):
                    with self.track.enter(Phase.LOAD):
                        model = model()
                return _module(model)
            self._answer(boundary.failed)

    def _build(self, state: TrainState) -> Engine:
        while True:
            with Boundary(self.track, self.task.answerable) as boundary:
                engine = build(self.walk.now.build, state, self.task)
                self._traits = replace(self._traits, batch_norm=traits.normalises_over_batch(state.model))
                return engine
            self._answer(boundary.failed)

    # One batch.

    def step(self, fetched: Fetched) -> Step:
        """Do one optimizer step with all of the batch.

        Raises:
            LadderExhausted: Memory does not suffice under any plan that the ladder allows.
        """
        started = time.perf_counter()
        engine = self.open()
        engine.prepare()
        self._face(fetched)
        if self._is_measured:
            memory.reset_peak(self.task.device, self.task.budget)
        try:
            committed = self._insist(engine, _attempted)
        finally:
            if self._batch is not None:
                self._abandon()
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

    def _abandon(self) -> None:
        """Leave no half of a step behind that something else than memory ends: another call of fit does it again."""
        self._batch = None
        if self.engine is not None:
            self.engine.discard()

    def evaluate(self, fetched: Fetched) -> Evaluated:
        """Measure one batch; nothing moves.

        Raises:
            LadderExhausted: Memory does not suffice for the smallest piece.
        """
        engine = self.open()
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
            engine = self.open()

    def count_skips(self, event: Step) -> None:
        """Take amp back when too many steps in a row were skipped; ``event`` is the last one, and is told already.

        Raises:
            NonFiniteError: It was not the ladder that had switched amp on.
            LadderExhausted: No other rung is left.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if event.skipped else 0
        if self._skipped_in_a_row < MAX_SKIPPED:
            return
        plan, self._skipped_in_a_row = self.descent.now, 0
        reason = f"{MAX_SKIPPED} steps in a row were not finite under {plan.precision}, so nothing was trained"
        if not self.descent.switched_on("amp"):
            raise NonFiniteError(
                f"{reason}; the loss of the last one was {event.loss}. Give plan=Plan(precision='fp32'), "
                "a smaller learning rate or max_grad_norm=1.0"
            )
        self.descent.take_back("amp", reason, self._surroundings(), step=self.track.step, rank=self.ranks.rank)
        self._rebuild()

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
        if self.engine is not None and self.engine.build != self.walk.now.build:
            self._rebuild().prepare()

    def _clean_up(self) -> Surroundings:
        """Put back what the attempt has changed, give back what it held, and measure that."""
        self._traits = self.traits()
        undoable = self.engine is None or memory.forgiving(self.engine.discard)
        memory.release(self.task.device)
        return self._surroundings(undoable=undoable)

    def _surroundings(self, *, undoable: bool = True) -> Surroundings:
        now = memory.read(self.task.device, self.task.budget)
        known = now.allocated_bytes is not None and self._mark is not None
        return Surroundings(
            traits=self._traits,
            total_bytes=now.total_bytes,
            held_bytes=max(0, (now.allocated_bytes or 0) - (self._mark or 0)) if known else None,
            host_is_device=self.task.device.type == "cpu",
            undoable=undoable,
        )

    def _rebuild(self) -> Engine:
        """Another engine, for the build that the walk has come to. The batch of the step is kept."""
        batch = self._batch
        self.close()
        self._batch = batch
        return self.open()

    def traits(self) -> Traits:
        """The model's traits as they are now."""
        if self.state is None:
            return Traits(num_processes=self.ranks.size)
        return traits.read(
            self.state.model,
            self.state.optimizer,
            self.task.device,
            separable=self._separable,
            cut_refusal=_cut_refusal(self._batch, self.walk.load.num_rows),
            drew_random_numbers=self.engine is not None and self.engine.drew_random_numbers,
            num_processes=self.ranks.size,
        )


def _attempted(engine: Engine, batch: Any, cuts: tuple[int, ...]) -> Committed | Failure:
    outcome = engine.attempt(batch, cuts)
    return outcome if isinstance(outcome, Failure) else engine.commit(outcome)


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


def _module(model: Any) -> nn.Module:
    """The module, if it is one.

    Raises:
        DataError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise DataError(f"model: it gave a {type(model).__name__}; give a torch.nn.Module or a function that makes one")
    return model


def _cut_refusal(batch: Any, num_rows: int | None) -> str | None:
    """Why a batch cannot be cut, None if it can."""
    if batch is None or num_rows is None or num_rows < 2:
        return None
    try:
        cut(batch, num_rows, sizes(num_rows, -(-num_rows // 2)))
    except Uncuttable as refusal:
        return str(refusal)
    return None
