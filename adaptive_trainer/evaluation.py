"""Evaluation: its own micro-batch and its own walk; whatever happens in it, the training goes on as before."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from adaptive_trainer.descent import Descent
from adaptive_trainer.engines.base import Evaluated
from adaptive_trainer.errors import DataError
from adaptive_trainer.events import Evaluate
from adaptive_trainer.ladder import Ladder, Rung, Situation, Skip
from adaptive_trainer.plan import Plan
from adaptive_trainer.streams import RandomStreams

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

    from adaptive_trainer.data import Source
    from adaptive_trainer.loop import Loop


class Evaluation:
    """Evaluates a loop's model, and remembers between evaluations which micro-batch fits.

    Args:
        loop: The training whose model is evaluated. Its ladder is walked as far as the rungs leave the build alone.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        ladder = Ladder(tuple(_keeping_the_build(rung) for rung in loop.descent.ladder), fixed=True)
        self._walk = Descent(ladder, loop.whole_start, loop.record, traits=loop.traits, scope="evaluation")

    def run(self, source: Source) -> Evaluate:
        """Metrics over all of ``source``: the mean over all items, whatever the batches.

        Raises:
            DataError: There is no batch.
            LadderExhausted: Not even the smallest micro-batch fits.
        """
        started = time.perf_counter()
        loop, found, batches = self._loop, Evaluated(), 0
        loop.track.hint = None  # what a step had met that was then given up says nothing about an evaluation
        engine = loop.workshop.open()
        # The build is the training's; the evaluation's own is the micro-batch, and what it had to take back.
        self._walk.follow(loop.descent)
        modules = [engine.model, *loop.task.objective.modules]
        with _undisturbed(modules, loop.task.device), loop.walking(self._walk):
            source.begin_epoch(0)
            while (fetched := source.next()) is not None:
                found += loop.evaluate(fetched)
                batches += 1
        if not batches:
            raise DataError("eval_data: it gave no batch")
        return Evaluate(
            step=loop.track.step,
            rank=loop.ranks.rank,
            metrics=_metrics(found, sums=loop.task.objective.sums),
            seconds=time.perf_counter() - started,
        )


def _keeping_the_build(rung: Rung) -> Rung:
    """The same rung, as far as it leaves the build alone: that is the training's."""

    def step(plan: Plan, situation: Situation) -> Plan | Skip:
        found = rung.step(plan, situation)
        other = isinstance(found, Plan) and found.build != plan.build
        return Skip("an evaluation runs under the training's build") if other else found

    return replace(rung, step=step)


@contextmanager
def _undisturbed(roots: list[nn.Module], device: torch.device) -> Iterator[None]:
    """The modules in evaluation mode; their flags and the random streams come back afterwards."""
    streams = RandomStreams.take(device)
    flags = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
        streams.restore()


def _metrics(found: Evaluated, *, sums: bool) -> dict[str, float]:
    """Means over all items; a loss that is a sum stays one."""
    loss = found.loss if sums else found.loss / (found.weight or 1.0)
    return {"loss": loss, **{name: total / found.num_items for name, total in found.metrics.items()}}
