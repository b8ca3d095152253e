"""The engine of plain torch: one process, autocast, gradient checkpointing."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from adaptive_trainer import precision, recompute, schedule
from adaptive_trainer.batches import cut, tensors_of, to_device
from adaptive_trainer.boundary import Boundary
from adaptive_trainer.engines.base import Committed, Computed, Evaluated
from adaptive_trainer.objective import zero_gradients
from adaptive_trainer.phases import Phase
from adaptive_trainer.state import Rewind, TrainState
from adaptive_trainer.traits import needs_closure
from adaptive_trainer.weights import shares

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.optim import Optimizer

    from adaptive_trainer.boundary import Failure
    from adaptive_trainer.engines.base import Task
    from adaptive_trainer.objective import Measured
    from adaptive_trainer.plan import Build


_params = itemgetter("params")


class NativeEngine:
    """Attempts and commits steps with plain torch. Built by `adaptive_trainer.engines.build.build`."""

    def __init__(self, build: Build, state: TrainState, task: Task) -> None:
        assert state.optimizer is not None  # noqa: S101  `build` has made it
        self.build = build
        self.model = state.model
        self.optimizer: Optimizer = state.optimizer
        self._state = state
        self._task = task
        self._track = task.track
        self._objective = task.objective
        self._read_parameters()
        self._precision = precision.of(build.precision, task.device)
        self.adopt()
        self._count = task.objective.counter(self.model)
        self._counts_late = task.device.type == "cpu" and task.objective.step is None and task.objective.weight is None
        self._count_items = task.objective.counter(self.model, by_class=False)
        # The first time makes room for the copies, so it belongs to the build, which may run out of memory.
        with nullcontext() if task.budget is None else task.budget.paused():
            self.rewind.take()
        # After all that may fail, because an engine that was never built takes nothing off the model.
        self._recomputation = recompute.Recomputation.put_on(self.model) if build.gradient_checkpointing else None
        self._closure = needs_closure(self.optimizer)
        self._entered = False
        # A wrapper around an optimizer may lack what torch's base class gives; it counts as begun from the start.
        has_hooks = hasattr(self.optimizer, "_optimizer_step_pre_hooks")
        self._entering = self.optimizer.register_step_pre_hook(self._enter) if has_hooks else None

    # One step, from prepare to commit.

    def prepare(self) -> None:
        """Remember the state from which the next step starts."""
        held = [*chain.from_iterable(map(_params, self.optimizer.param_groups))]
        if len(held) != len(self._held_parameters) or not all(map(is_, held, self._held_parameters)):
            self._read_parameters()  # people unfreeze layer by layer, or put another head in the place of the old one
        self._clear_gradients()
        self._entered = False
        self.rewind.take()

    def attempt(self, batch: Any, sizes: tuple[int, ...]) -> Computed | Failure:
        """Compute the gradients of a step."""
        with Boundary(self._track, self._task.answerable) as boundary:
            return self._closure_step(batch, sizes) if self._closure else Computed(self._gradients(batch, sizes))
        return boundary.failed

    def commit(self, computed: Computed) -> Committed | Failure:
        """Move optimizer and schedule."""
        lr = self._learning_rate()
        self._entered = self._entering is None
        with Boundary(self._track, self._task.answerable) as boundary:
            with self._track.enter(Phase.OPTIMIZER):
                moved = self._closure or self._precision.step(
                    self.optimizer, self._held_parameters, self._task.max_grad_norm, computed.loss
                )
            loss = computed.loss.item()
            if moved:
                schedule.move(self._state.scheduler, loss)
                self._state.optimizer_has_stepped = True
            self._entered = False
            return Committed(loss, lr, moved)
        return boundary.failed

    def discard(self) -> bool:
        """Go back to the state that `prepare` remembered, parameters apart. Returns whether none of these has moved."""
        self._clear_gradients()
        _forget_branches()
        self._precision.reset(self.optimizer)
        untouched = not (self._entered or self._closure or self.rewind.parameters_moved)
        self.rewind.restore()
        return untouched

    @property
    def cannot_repeat(self) -> bool:
        """Whether a step needs the copy right before it to be undone: its forward, or the search for it, moves all."""
        return self._closure or self._state.forward_moves_parameters

    @property
    def drew_random_numbers(self) -> bool:
        """Whether a random stream has moved in this step."""
        return self.rewind.drew_random_numbers

    # The pieces of a step.

    def _gradients(self, batch: Any, sizes: tuple[int, ...]) -> Tensor:
        """Accumulate the gradients of the whole batch's loss, which is returned without its graph."""
        pieces = cut(batch, sum(sizes), sizes)
        if len(sizes) == 1 and self._counts_late:
            return self._gradients_counted_afterwards(batch, pieces)
        whole = len(sizes) == 1
        counts = [self._count(piece, size or None, whole=whole) for piece, size in zip(pieces, sizes, strict=True)]
        if self._objective.step is not None and self._objective.weight is None:
            return self._gradients_weighted_afterwards(pieces, sizes, sum(counts) or 1.0)
        parts = [1.0] if whole and counts[0] > 0 else shares(counts, "sum" if self._objective.sums else "mean")
        if not any(counts):
            parts = [0.0] * len(parts)
            zero_gradients(self._held_parameters)
        total, _ = self._piece(0, pieces, parts[0])
        for index in range(1, len(parts)):
            total = total + self._piece(index, pieces, parts[index])[0]
        return total

    def _gradients_counted_afterwards(self, batch: Any, pieces: list[Any]) -> Tensor:
        """The same for a batch in one piece, whose items only matter if there are none: its mean is no number then.

        Only where looking at the loss does not wait for a device; counting the labels costs 30 microseconds.
        """
        total, _ = self._piece(0, pieces, 1.0)
        if math.isfinite(total.item()) or self._count(batch, whole=True) > 0:
            return total
        zero_gradients(self._held_parameters)
        return torch.zeros_like(total)

    def _gradients_weighted_afterwards(self, pieces: list[Any], sizes: tuple[int, ...], expected: float) -> Tensor:
        """The same where a piece's weight is known only once its loss is: the sum is divided at the end.

        Until then it is divided by the ``expected`` weight of the whole batch, so that no piece's scaled gradient
        overflows fp16 where the whole batch's would not.
        """
        total, weights = torch.zeros((), device=self._task.device), 0.0
        alone = len(pieces) == 1
        for index in range(len(pieces)):
            loss, weight = self._piece(index, pieces, None if not alone else 1.0, expected, sizes[index])
            total, weights = total + loss, weights + weight
        if weights == 0:
            zero_gradients(self._held_parameters)
        elif not alone and not self._objective.sums and weights != expected:
            with self._track.enter(Phase.REDUCE), torch.no_grad():
                for parameter in self._held_parameters:
                    if parameter.grad is not None:
                        parameter.grad.div_(weights / expected)
            total = total / (weights / expected)
        return total

    def _piece(
        self, index: int, pieces: list[Any], part: float | None, expected: float = 1.0, size: int = 0
    ) -> tuple[Tensor, float]:
        """Forward and backward of one piece: its part of the loss, without a graph, and its weight.

        ``part`` is what its loss counts for; None where the weight that the user's step gives has to be used, over the
        ``expected`` one of the batch.
        """
        with self._track.enter(Phase.DATA, index):
            piece = to_device(pieces[index], self._task.device)
            held = self._held(piece)
        pieces[index] = None
        with held:
            with self._track.enter(Phase.FORWARD, index), self._precision.autocast():
                measured = self._objective.measure(self.model, piece)
            part, weight = self._part(measured, piece, part, expected, size)
            if part == 0 or weight == 0:
                return torch.zeros((), device=self._task.device), weight
            loss = measured.loss if part == 1 else measured.loss * part
            value = loss.detach()
            del measured
            with self._track.enter(Phase.BACKWARD, index):
                self._precision.backward(loss)
            return value, weight

    def _part(
        self, measured: Measured, piece: Any, part: float | None, expected: float, size: int
    ) -> tuple[float, float]:
        """What a piece's loss is multiplied with, and the piece's weight."""
        if self._objective.step is None or self._objective.weight is not None:
            return cast("float", part), 1.0
        weight = self._count(piece, size or None) if measured.weight is None else measured.weight
        if part is not None or self._objective.sums:
            return 1.0, weight
        return weight / expected, weight

    def _held(self, piece: Any) -> AbstractContextManager[Any]:
        """What charges a piece to the memory limit while it is on the device."""
        return nullcontext() if self._task.budget is None else self._task.budget.hold(tensors_of(piece))

    # Optimizers that evaluate the loss themselves.

    def _closure_step(self, batch: Any, sizes: tuple[int, ...]) -> Computed:
        """The whole step of such an optimizer; `discard` undoes it from the copy that `prepare` made."""

        def closure() -> Tensor:
            self._clear_gradients()
            with torch.enable_grad():
                loss = self._gradients(batch, sizes)
            precision.clip(self._held_parameters, self._task.max_grad_norm)
            return loss

        loss = self.optimizer.step(cast("Any", closure))
        return Computed(torch.as_tensor(loss).detach())

    # What a commit reads and moves beside the optimizer.

    def _learning_rate(self) -> float | None:
        groups = self.optimizer.param_groups
        return float(groups[0]["lr"]) if groups and "lr" in groups[0] else None

    def _read_parameters(self) -> None:
        """Read which parameters there are: the optimizer's, and all.

        What the optimizer was not given gets gradients all the same, and may be moved by a forward (an average).
        """
        self._held_parameters = [*chain.from_iterable(map(_params, self.optimizer.param_groups))]
        self.parameters = list(dict.fromkeys([*self._held_parameters, *self.model.parameters()]))
        self.rewind = Rewind([self.model, *self._objective.modules], self.parameters, self._task.device)

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _enter(self, *_: object) -> None:
        """The optimizer has begun to move, and may have moved something by the time it fails."""
        self._entered = True

    # Evaluation.

    def evaluate(self, batch: Any, sizes: tuple[int, ...]) -> Evaluated | Failure:
        """Measure a batch without gradients."""
        self._clear_gradients()
        self.rewind.take()
        with Boundary(self._track, self._task.answerable) as boundary, torch.no_grad():
            found = Evaluated()
            for index, piece in enumerate(cut(batch, sum(sizes), sizes)):
                with self._track.enter(Phase.EVALUATE, index):
                    found += self._evaluated(piece, sizes[index] or None)
            return found
        return boundary.failed

    def _evaluated(self, piece: Any, num_samples: int | None) -> Evaluated:
        num_items = float(self._count_items(piece, num_samples))
        moved = to_device(piece, self._task.device)
        with self._held(moved), self._precision.autocast():
            measured = self._objective.measure(self.model, moved)
            weight = float(self._count(piece, num_samples)) if measured.weight is None else measured.weight
            # The mean over no items is not a number.
            loss = measured.loss.item() * (1.0 if self._objective.sums else weight) if weight else 0.0
            scores = self._objective.score(measured) if num_items else {}
            return Evaluated(loss, weight, num_items, {name: score * num_items for name, score in scores.items()})

    # Between engines.

    def export(self) -> TrainState:
        """What the next engine is built from."""
        # Another precision has no scaler, and leaves that of an fp16 engine before it for the one after it.
        self._state.scaler = self._precision.state() or self._state.scaler
        return self._state

    def adopt(self) -> None:
        """Take up the train state again, after its values were put back."""
        self._precision.load(self._state.scaler)

    def close(self) -> None:
        """Take gradient checkpointing off and drop the gradients."""
        if self._recomputation is not None:
            self._recomputation.take_off()
        if self._entering is not None:
            self._entering.remove()
        self._clear_gradients()


def _forget_branches() -> None:
    """Let go of the branches that a failed backward had not come to.

    Torch leaves them in its queue, with all that they have saved, until the thread's next backward passes them over.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).clone().backward()  # type: ignore[no-untyped-call]  # torch's own
