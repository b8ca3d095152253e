"""How long a run goes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """Where a run ends: the first that is reached.

    Attributes:
        steps: Optimizer steps in all; None for no such end.
        epochs: Epochs in all; None for no such end.
    """

    steps: int | None
    epochs: int | None

    def after(self, steps: int, epochs: int) -> Goal:
        """The same distance from a later start."""
        return Goal(
            None if self.steps is None else self.steps + steps,
            None if self.epochs is None else self.epochs + epochs,
        )

    def reached(self, steps: int, epochs: int) -> bool:
        """Whether the run is over."""
        return self.steps_reached(steps) or (self.epochs is not None and epochs >= self.epochs)

    def steps_reached(self, steps: int) -> bool:
        """Whether no further step may be done."""
        return self.steps is not None and steps >= self.steps

    def total_steps(self, num_batches: int | None) -> int | None:
        """Optimizer steps that the run will have in all; None where unknown beforehand."""
        by_epochs = None if self.epochs is None or num_batches is None else self.epochs * num_batches
        known = [count for count in (self.steps, by_epochs) if count is not None]
        return min(known) if known and (self.epochs is None or by_epochs is not None) else self.steps


#: Steps in a row that may be skipped because their numbers are not finite.
MAX_SKIPPED = 25


class Skips:
    """Counts the steps in a row that were skipped."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def too_many(self, *, skipped: bool) -> bool:
        """Whether one too many was skipped with this one; the count begins anew then."""
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row < MAX_SKIPPED:
            return False
        self._in_a_row = 0
        return True
