"""The phases of a step, and the gate through which each of them is entered.

Whoever has to be there when a phase runs (the memory limit of a machine without an accelerator, a rehearsed failure)
is a guard: it is asked at the entry for a context that then lies around the phase. With no guards, which is the usual
case, entering a phase costs less than a microsecond.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager


class Phase(StrEnum):
    """Where in a run something happens."""

    LOAD = "load"
    BUILD = "build"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"
    EVALUATE = "evaluate"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Passage:
    """One entry into a phase.

    Attributes:
        phase: The phase.
        step: The optimizer step that is being attempted, counted from 1.
        micro_batch: Which micro-batch of the step, counted from 0; None outside micro-batches.
        rank: The process.
    """

    phase: Phase
    step: int
    micro_batch: int | None
    rank: int


class Guard(Protocol):
    """Is asked at the entry of every phase. It may raise there, or give a context to lie around the phase."""

    def __call__(self, passage: Passage, /) -> AbstractContextManager[object] | None:
        """The context for this passage, or None for none."""


_UNGUARDED = nullcontext()

#: Guards of the whole process, beside those of one track: rehearsed failures put themselves here.
everywhere: list[Guard] = []


class Track:
    """Where one run is at the moment, so that a failure can be told where it struck.

    Attributes:
        step: Optimizer steps completed.
        rank: This process.
        phase: The phase entered last; it stays after a failure, until the next entry.
        hint: What somebody should know who meets an exception now, None for nothing.
    """

    def __init__(self, *, rank: int = 0, guards: Sequence[Guard] = ()) -> None:
        self.step = 0
        self.rank = rank
        self.phase = Phase.LOAD
        self.hint: str | None = None
        self.guards = tuple(guards)

    def enter(self, phase: Phase, micro_batch: int | None = None) -> AbstractContextManager[object]:
        """Be in ``phase`` for the duration of the block."""
        self.phase = phase
        return self._guarded(phase, micro_batch) if self.guards or everywhere else _UNGUARDED

    @contextmanager
    def _guarded(self, phase: Phase, micro_batch: int | None) -> Iterator[None]:
        passage = Passage(phase, self.step + 1, micro_batch, self.rank)
        with ExitStack() as around:
            for guard in (*self.guards, *everywhere):
                context = guard(passage)
                if context is not None:
                    around.enter_context(context)
            yield
