"""The last steps, and the state before them on the host: how a step is undone that the optimizer had begun.

A forward and a backward leave parameters and optimizer state alone, so undoing them costs nothing (`Rewind`). An
optimizer that fails half-way has moved some of its tensors already, whatever optimizer it is, and only a copy brings
them back. Copying everything before every step would cost as much as a small step. So a copy is taken now and then,
so seldom that it costs less than `SHARE` of the time, and the steps since then are kept with all that decides them:
batch, cuts, random streams, learning rates. Doing them again gives the same bits. That it did is checked by the losses.

A new copy is due at once where the steps could not be done again: somebody else has moved a parameter between two
steps, the forward moves parameters itself, the optimizer evaluates the loss, or another engine was built.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from adaptive_trainer import host, schedule
from adaptive_trainer.batches import tensors_of, to_device
from adaptive_trainer.boundary import Boundary, Failure
from adaptive_trainer.state import Rewind, StateCopy, versions
from adaptive_trainer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from adaptive_trainer.engines.base import Committed, Engine, Task
    from adaptive_trainer.streams import RandomStreams

log = logging.getLogger("adaptive_trainer")

#: Part of the time that copies may take.
SHARE = 0.002
#: Part of the free host memory that a copy may take. The rest is for the data; whoever takes too much is killed.
_COPY_SHARE = 0.5
#: Part of the free host memory that the batches of the steps that are kept may hold, and bytes that are enough.
_BATCHES_SHARE, _BATCHES_BYTES = 1 / 16, 256 * 2**20
#: How far a loss may be from what it was, relative to it: kernels that add in any order are not worse.
_SAME_LOSS = 1e-4
_HOST = torch.device("cpu")


@dataclass(slots=True)
class _Done:
    """A step that can be done again."""

    batch: Any
    cuts: tuple[int, ...]
    streams: RandomStreams
    options: list[dict[str, Any]]
    loss: float
    moved: bool


class History:
    """The steps of one engine since the last copy.

    Attributes:
        complaint: Why a step could not be undone, for people; empty as long as it could.
        num_copies: Copies taken so far.
        copy_seconds: What they took, in all.
        num_bytes: Of the last copy.

    Args:
        task: Whose state is copied.
    """

    def __init__(self, task: Task) -> None:
        self.complaint = ""
        self.num_copies = 0
        self.copy_seconds = 0.0
        self.num_bytes = 0
        self._task = task
        self._track = task.track
        self._is_host = task.device.type == "cpu"
        self._steps: list[_Done] = []
        self._copy: _Copy | None = None
        self._options: list[dict[str, Any]] = []  # those of the step under way
        self._parameters: Sequence[Tensor] = []
        self._versions: list[int] | None = None
        self._batches_bytes, self._batches_limit = 0, 0.0
        self._since = 0.0  # when the last copy was taken
        self._pause = 0.0  # for how long it is enough

    # Steps that go well.

    def begin(self, engine: Engine) -> None:
        """A step is prepared; take a copy if one is due. That the host has no room for it is no failure."""
        groups = engine.optimizer.param_groups
        self._options = [{**group} for group in groups]
        if (
            self._versions != engine.rewind.versions
            or engine.parameters is not self._parameters
            or time.perf_counter() - self._since >= self._pause
        ):
            self._take(engine)

    def keep(self, engine: Engine, batch: Any, cuts: tuple[int, ...], committed: Committed, num_bytes: int) -> None:
        """A step is done; ``num_bytes`` is about what its batch holds."""
        if self._copy is None:
            return
        # What has no room is dropped before the next batch is loaded, and asks for a copy.
        if engine.cannot_repeat or self._batches_bytes + num_bytes > self._batches_limit:
            self.forget()
            return
        streams = engine.rewind.streams
        assert streams is not None  # noqa: S101  the engine has prepared this step
        if not self._is_host:
            batch = to_device(batch, _HOST)
        self._steps.append(_Done(batch, cuts, streams, self._options, committed.loss, committed.moved))
        self._batches_bytes += num_bytes
        self._versions = versions(self._parameters)

    def forget(self) -> None:
        """Hold nothing more: another engine is coming, or there is no room; the next step takes a copy."""
        self._copy, self._versions = None, None
        self._steps.clear()

    def shows_a_move(self) -> bool:
        """Whether a parameter is not what it was before this very step; writes through ``.data`` show only so."""
        return self._copy is not None and not self._steps and self._copy.tensors.differs()

    # Steps that do not.

    def undo(self, engine: Engine, *, untouched: bool) -> bool:
        """Go back to where the step began; ``untouched`` tells that no parameter has moved. Returns whether it could.

        Where it could not, the state is that of the last copy, and the track's step says which that is.
        """
        if untouched and (self._steps or self._copy is None):
            return True
        if self._copy is None:
            self.complaint = self.complaint or "no copy of the state before it was held"
            return False
        if not self._steps:
            self._copy.restore(engine)
            engine.rewind.note_versions()
            return True
        return self._do_again(engine)

    def _do_again(self, engine: Engine) -> bool:
        now, options = engine.rewind.streams, self._options
        assert now is not None  # noqa: S101  the engine has prepared the step that failed
        first, last = self._track.step + 1 - sum(done.moved for done in self._steps), self._track.step
        log.info("steps %d to %d are done again from a copy, because the optimizer had begun the next", first, last)
        for _ in range(2):  # what fails once may find room the second time
            if self._repeat(engine):
                break
        else:
            self._back_to_copy(engine)
            self._steps.clear()
            self.complaint = f"the steps {first} to {last}, which lead to it from a copy, could not be done again"
            return False
        now.restore()
        _put(engine, options)
        engine.prepare()
        self._take(engine)  # the next try may fail, too
        return True

    def _back_to_copy(self, engine: Engine) -> None:
        assert self._copy is not None  # noqa: S101  asked by the caller
        engine.discard()
        self._copy.restore(engine)
        self._track.step = self._copy.step

    def _repeat(self, engine: Engine) -> bool:
        self._back_to_copy(engine)
        for done in self._steps:
            done.streams.restore()
            _put(engine, done.options)
            engine.prepare()
            computed = engine.attempt(done.batch, done.cuts)
            committed = computed if isinstance(computed, Failure) else engine.commit(computed)
            if isinstance(committed, Failure) or not self._agrees(committed, done):
                return False
            self._track.step += committed.moved
        return True

    def _agrees(self, again: Committed, done: _Done) -> bool:
        if again.loss == done.loss or (math.isnan(again.loss) and math.isnan(done.loss)):
            return True
        close = math.isclose(again.loss, done.loss, rel_tol=_SAME_LOSS)
        log.warning(
            "step %d was done again, and its loss is %r where it was %r: %s",
            self._track.step + 1, again.loss, done.loss,
            "kernels here do not always give the same bits" if close else "something outside the step decides it",
        )  # fmt: skip
        return close

    # The copy.

    def _take(self, engine: Engine) -> None:
        started = time.perf_counter()
        self.forget()
        self._parameters, self._versions, self._batches_bytes = engine.parameters, engine.rewind.versions, 0
        needed, free = sum(tensor.nbytes for tensor in _tensors(engine)), _free_bytes()
        self._batches_limit = min(_BATCHES_BYTES, free * _BATCHES_SHARE)
        if needed > free * _COPY_SHARE:
            self.complaint = (
                f"a copy of the state before it takes {format_bytes(needed)}, and of the host memory "
                f"{format_bytes(free)} are free"
            )
            self._pause = math.inf
            return
        with Boundary(self._track, lambda failure: failure.is_memory) as boundary:
            self._copy = _Copy(engine, self._task, self._track.step)
        if boundary.failure is not None:
            self.complaint = f"the host had no room for a copy of the state before it ({format_bytes(needed)})"
        self._since = time.perf_counter()
        took = self._since - started
        self.num_copies, self.num_bytes, self.copy_seconds = self.num_copies + 1, needed, self.copy_seconds + took
        self._pause = took / SHARE


class _Copy:
    """Everything that steps move, as it was before one of them."""

    def __init__(self, engine: Engine, task: Task, step: int) -> None:
        state = engine.export()
        self.step = step
        self.tensors = StateCopy(engine.parameters, engine.optimizer)
        self._rewind = Rewind([engine.model, *task.objective.modules], engine.model.parameters(), task.device)
        self._rewind.take()
        self._scaler = copy.deepcopy(state.scaler)
        self._schedule = schedule.state(state.scheduler)
        self._has_stepped = state.optimizer_has_stepped
        self._budget = task.budget

    def restore(self, engine: Engine) -> None:
        self._rewind.restore_places()
        self.tensors.restore()
        self._rewind.restore()
        state = engine.export()
        state.scaler = copy.deepcopy(self._scaler)
        schedule.restore(state.scheduler, self._schedule)
        state.optimizer_has_stepped = self._has_stepped
        engine.adopt()
        if self._budget is not None:
            self._budget.adopt(_tensors(engine))


def _put(engine: Engine, options: list[dict[str, Any]]) -> None:
    """Give the optimizer's groups what they had at a step: learning rates, as whoever wanted had set them."""
    for group, had in zip(engine.optimizer.param_groups, options, strict=False):
        group.update(had)


def _tensors(engine: Engine) -> list[Tensor]:
    """Parameters and optimizer state."""
    found = [*engine.parameters, *tensors_of(list(engine.optimizer.state.values()))]
    return [tensor for tensor in found if not is_lazy(tensor)]


def _free_bytes() -> int:
    used_bytes, total_bytes = host.used_and_total_bytes()
    return max(0, total_bytes - used_bytes)
