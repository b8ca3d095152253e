"""What happens in a run, as frozen records: one journal row, one log line, one call of each callback.

Every record has the journal's keys as attributes and gives the row itself with ``as_dict()``.
"""

from __future__ import annotations

import math
import time as clock
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from adaptive_trainer.plan import Plan

if TYPE_CHECKING:
    from adaptive_trainer.phases import Phase


class Cause(StrEnum):
    """Which kind of shortage an out-of-memory is."""

    ACTIVATIONS = "activations"
    MODEL_STATE = "model_state"
    OPTIMIZER_STEP = "optimizer_step"
    FRAGMENTATION = "fragmentation"
    LEAK = "leak"
    OTHER_PROCESS = "other_process"
    LONG_BATCH = "long_batch"
    HOST_MEMORY = "host_memory"
    UNKNOWN = "unknown"


class Fidelity(StrEnum):
    """How a step under the new plan compares with the same step under the old one, best first."""

    BIT = "bit"
    ROUNDING = "rounding"
    STATISTICAL = "statistical"
    CHANGED = "changed"

    @classmethod
    def worst(cls, *found: Fidelity) -> Fidelity:
        """The worst of those that apply."""
        order = list(cls)
        return max(found, key=order.index)


def _hidden(default: int | None = None) -> Any:
    """A field that callbacks can read but that is no key of the journal: what a plan's accumulation follows from."""
    return field(default=default, repr=False, metadata={"journal": False})


@dataclass(frozen=True, kw_only=True)
class Event:
    """One row of the journal.

    Attributes:
        time: Seconds since 1970.
        step: Optimizer steps completed.
        rank: The process that it happened in.
    """

    event: ClassVar[str]
    step: int
    time: float = field(default_factory=clock.time)
    rank: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The row as the journal writes it; numbers that are not finite become null, which JSON can say."""
        row: dict[str, Any] = {"event": self.event}
        for entry in fields(self):
            if entry.metadata.get("journal", True):
                row[entry.name] = self._plain(getattr(self, entry.name))
        return row

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Plan):
            return value.as_dict(getattr(self, "num_rows", None), getattr(self, "smallest_piece", 1))
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {key: self._plain(entry) for key, entry in value.items()}
        if isinstance(value, tuple):
            return [self._plain(entry) for entry in value]
        return value


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A run begins. ``effective_batch`` is in samples per optimizer step over all processes, None where unknown."""

    event = "start"
    plan: Plan
    effective_batch: int | None
    num_processes: int
    resumed_from: str | None = None
    num_rows: int | None = _hidden()
    smallest_piece: int = _hidden(1)


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """An optimizer step was completed, or skipped because its fp16 gradients were not finite."""

    event = "step"
    loss: float
    seconds: float
    num_samples: int | None
    lr: float | None
    peak_bytes: int | None = None
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(Event):
    """An attempt ran out of memory. Bytes are None where the message and the device do not tell.

    Attributes:
        phase: Where in the step it struck.
        cause: The diagnosis.
        message: The first failure's own words.
        requested_bytes: What was asked for when it failed.
        allocated_bytes: What tensors held at that moment.
        reserved_bytes: What the allocator held, tensors and cache.
        free_bytes: What the device had left.
        total_bytes: What the device has, or the limit that was set.
        plan: The plan of the attempt.
        input_shapes: The shapes of the step's batch by their place in it.
        other_processes_bytes: What other processes hold on the device, if known.
    """

    event = "out_of_memory"
    phase: Phase
    cause: Cause = Cause.UNKNOWN
    message: str
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    other_processes_bytes: int | None = None
    plan: Plan
    input_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    num_rows: int | None = _hidden()
    smallest_piece: int = _hidden(1)


@dataclass(frozen=True, kw_only=True)
class Fallback(Event):
    """The plan went down one rung, or a rung was taken back (``rung`` is then ``undo:<name>``).

    Attributes:
        rung: The rung's name.
        old: The plan that ran out of memory.
        new: The plan of the next attempt.
        fidelity: How a step under ``new`` compares with one under ``old``.
        skipped: Rungs passed over on the way, each with its reason.
        reason: What the rung gives, in a few words.
        scope: ``"run"``; ``"step"`` where ``new`` holds for this one step alone; ``"evaluation"`` where it holds for
            evaluations and the training goes on as before.
        held_bytes: What the failed attempt still holds after the clean-up; 0 in a sound run, None where unknown.
    """

    event = "fallback"
    rung: str
    old: Plan
    new: Plan
    fidelity: Fidelity
    skipped: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    scope: Literal["run", "step", "evaluation"] = "run"
    held_bytes: int | None = None
    num_rows: int | None = _hidden()
    smallest_piece: int = _hidden(1)


@dataclass(frozen=True, kw_only=True)
class Climb(Event):
    """The micro-batch grew back."""

    event = "climb"
    old: Plan
    new: Plan
    num_rows: int | None = _hidden()
    smallest_piece: int = _hidden(1)


@dataclass(frozen=True, kw_only=True)
class Evaluate(Event):
    """An evaluation was completed: metrics over the whole evaluation set."""

    event = "evaluate"
    metrics: dict[str, float]
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint is on disk."""

    event = "checkpoint"
    path: str
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Finish(Event):
    """The run is complete."""

    event = "finish"
    plan: Plan
    loss: float | None
    seconds: float
    peak_bytes: int | None
    num_fallbacks: int
    num_rows: int | None = _hidden()
    smallest_piece: int = _hidden(1)
