"""What every engine can do, and what it is built from.

An attempt computes the gradients of one step, or fails and leaves nothing behind. Only a commit moves the optimizer
and the schedule. An engine is built for one `Build`; another one needs another engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from adaptive_trainer.boundary import Failure
    from adaptive_trainer.budget import Budget
    from adaptive_trainer.objective import Objective
    from adaptive_trainer.phases import Track
    from adaptive_trainer.plan import Build
    from adaptive_trainer.state import Rewind, TrainState


@dataclass(frozen=True, kw_only=True)
class Task:
    """What an engine needs to know beside plan and state.

    Attributes:
        objective: What is minimised.
        optimizer: The user's optimizer, or how to make one from the model's parameters.
        scheduler: How to make the schedule from the optimizer; None for none.
        max_grad_norm: Common norm to which gradients are clipped once a step; None for none.
        device: Where the training is.
        budget: The memory limit of a machine without an accelerator; None for none.
        track: Is told every phase.
        answerable: Whether a failure has an answer; one that has none is raised.
    """

    objective: Objective
    optimizer: Optimizer | Callable[[Any], Optimizer] | None
    scheduler: Callable[[Optimizer], Any] | None
    max_grad_norm: float | None
    device: torch.device
    budget: Budget | None
    track: Track
    answerable: Callable[[Failure], bool] = lambda _failure: False


@dataclass(slots=True)  # not frozen: it is made in every step, and would take three times as long
class Computed:
    """The gradients of a step are there. ``loss`` is the whole batch's, with one element, without a graph."""

    loss: Tensor


@dataclass(slots=True)  # not frozen: it is made in every step, and would take three times as long
class Committed:
    """A step is done.

    Attributes:
        loss: Of the whole batch.
        lr: The first group's learning rate, as it was used.
        moved: False where the step was skipped, because its numbers were not finite.
    """

    loss: float
    lr: float | None
    moved: bool


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Sums over a batch: divide by ``weight`` and ``num_items`` for means.

    Attributes:
        loss: Sum of the losses of all items.
        weight: What the loss is divided by: the number of items, or the sum of their classes' weights.
        num_items: What the user's metrics are divided by: the number of items.
        metrics: Sums of the user's metrics over all items.
    """

    loss: float = 0.0
    weight: float = 0.0
    num_items: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)

    def __add__(self, other: Evaluated) -> Evaluated:
        names = {**self.metrics, **other.metrics}
        metrics = {name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0) for name in names}
        return Evaluated(self.loss + other.loss, self.weight + other.weight, self.num_items + other.num_items, metrics)


class Engine(Protocol):
    """A built thing that can attempt and commit a step.

    Attributes:
        build: What it was built for.
        model: The user's own module.
        optimizer: What a commit moves the model by.
        parameters: All that a step may move. Another list where these have become others.
        rewind: The state from which the step under way started.
    """

    build: Build
    model: nn.Module
    optimizer: Optimizer
    parameters: list[nn.Parameter]
    rewind: Rewind

    def prepare(self) -> None:
        """Remember the state from which the next step starts. Once a step, before its first attempt."""

    def attempt(self, batch: Any, sizes: tuple[int, ...]) -> Computed | Failure:
        """Compute the gradients of a step, in pieces of ``sizes`` samples. A `Failure` must be discarded."""

    def commit(self, computed: Computed) -> Committed | Failure:
        """Move optimizer and schedule. A `Failure` must be discarded, and the step attempted again."""

    @property
    def drew_random_numbers(self) -> bool:
        """Whether a random stream has moved since `prepare`."""

    @property
    def cannot_repeat(self) -> bool:
        """Whether a step that is done again from the state before others need not come out the same."""

    def discard(self) -> bool:
        """Go back to the state that `prepare` remembered, as far as no parameter has moved. Returns whether none has.

        Parameters and optimizer state are the caller's to put back.
        """

    def evaluate(self, batch: Any, sizes: tuple[int, ...]) -> Evaluated | Failure:
        """Measure a batch without gradients; nothing moves."""

    def export(self) -> TrainState:
        """What the next engine is built from."""

    def adopt(self) -> None:
        """Take up the `TrainState` again, after its values were put back."""

    def close(self) -> None:
        """Drop all that the engine holds and take off what it put on the model."""
