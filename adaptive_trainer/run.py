"""One call of ``fit``: epochs of steps, with evaluations between them, until the goal is reached."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from adaptive_trainer.errors import DataError, LadderExhausted, NonFiniteError
from adaptive_trainer.goal import MAX_SKIPPED, Skips

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptive_trainer.checkpoints import Checkpoints
    from adaptive_trainer.data import Source
    from adaptive_trainer.events import Event, Step
    from adaptive_trainer.goal import Goal
    from adaptive_trainer.loop import Loop
    from adaptive_trainer.signals import Signals

log = logging.getLogger("adaptive_trainer")


class Run:
    """Drives a loop over a source.

    Attributes:
        epochs: Epochs completed in all.

    Args:
        loop: Does the steps.
        source: Gives the batches.
        goal: Where the run ends.
        record: Takes each event.
        evaluate: Evaluates at this point, if there is anything to evaluate on.
        checkpoints: Writes checkpoints when they are due.
        signals: Tells whether the process was asked to end.
        eval_steps: Every how many steps; None for the end of each epoch.
    """

    def __init__(
        self,
        loop: Loop,
        source: Source,
        goal: Goal,
        record: Callable[[Event], None],
        *,
        evaluate: Callable[[], None],
        checkpoints: Checkpoints,
        signals: Signals,
        eval_steps: int | None,
    ) -> None:
        self.epochs = 0
        self._loop = loop
        self._source = source
        self._goal = goal
        self._record = record
        self._evaluate = evaluate
        self._checkpoints = checkpoints
        self._signals = signals
        self._eval_steps = eval_steps
        self._skips = Skips()
        self._is_finite = True

    def train(self, epochs: int) -> None:
        """Train until the goal is reached; ``epochs`` are complete already.

        Raises:
            DataError: The data give no batch at all.
            LadderExhausted: No rung is left; a checkpoint of the last completed step was written.
        """
        self.epochs = epochs
        self._loop.begin()
        try:
            self._train()
        except LadderExhausted:
            if self._loop.is_whole:
                self._checkpoints.write()
            raise
        self._checkpoints.write()

    def _train(self) -> None:
        while not self._goal.reached(self._loop.track.step, self.epochs):
            if not self._source.in_epoch:
                self._source.begin_epoch(self.epochs)
            if not self._finish_epoch():
                break
            if self._source.num_taken == 0:
                self._out_of_batches()
                break
            self.epochs += 1
            if self._eval_steps is None:
                self._evaluate()
            self._checkpoints.write()
            self._end_if_asked()
        if self._eval_steps is None:
            self._evaluate()

    def _finish_epoch(self) -> bool:
        """Train on the rest of an epoch. Returns whether its end was reached, which is seen by asking for more."""
        while not self._goal.steps_reached(self._loop.track.step):
            fetched = self._source.next()
            if fetched is None:
                return True
            self._source.give_back(fetched)  # until its step is done: another call of fit goes on with it
            event = self._loop.step(fetched)
            self._source.keep()
            del fetched
            self._record(event)
            self._warn_of_the_first(event)
            if self._skips.too_many(skipped=event.skipped):
                self._end_skipping(event)
            if self._eval_steps is not None and event.step % self._eval_steps == 0 and not event.skipped:
                self._evaluate()
            # At the end of an epoch one is written anyway.
            if (self._checkpoints.is_due or self._signals.asked) and not self._is_at_end():
                self._checkpoints.write()
                self._end_if_asked()
        if not self._is_at_end():
            return False
        # Asked for all the same: torch's shuffling draws once more at the end, and the next epoch's order hangs on it.
        fetched = self._source.next()
        if fetched is not None:  # there are more than its length says
            self._source.give_back(fetched)
        return fetched is None

    def _warn_of_the_first(self, event: Step) -> None:
        """Say once that a loss is not finite, where no step is skipped for it."""
        if not self._is_finite or event.skipped or math.isfinite(event.loss):
            return
        self._is_finite = False
        log.warning(
            "step %d: its loss is %s, the first of this run that is not finite, and fp32 skips no step for that; "
            "look for such values in the data, or give a smaller learning rate or max_grad_norm=1.0",
            event.step, event.loss,
        )  # fmt: skip

    def _is_at_end(self) -> bool:
        """Whether all batches that the epoch has were taken, as far as they can be counted."""
        return self._source.num_taken == self._source.num_batches

    def _end_if_asked(self) -> None:
        if self._signals.asked:
            self._checkpoints.write()
            self._signals.end()

    def _end_skipping(self, event: Step) -> None:
        """Take amp back when too many steps in a row were skipped, ``event`` the last of them.

        Raises:
            NonFiniteError: It was not the ladder that had switched amp on.
            LadderExhausted: No other rung is left.
        """
        plan = self._loop.descent.now
        reason = f"{MAX_SKIPPED} steps in a row were not finite under {plan.precision}, so nothing was trained"
        if not self._loop.take_back_amp(reason):
            raise NonFiniteError(
                f"{reason}; the loss of the last one was {event.loss}. Give plan=Plan(precision='fp32'), "
                "a smaller learning rate or max_grad_norm=1.0"
            )

    def _out_of_batches(self) -> None:
        if self.epochs == 0:
            raise DataError("data: it gave no batch; give an iterable with at least one")
        log.warning(
            "data ended after %d steps, before %s; a data set, a loader or a list could be gone through again",
            self._loop.track.step,
            "the next epoch" if self._goal.steps is None else f"the {self._goal.steps} steps asked for",
        )
