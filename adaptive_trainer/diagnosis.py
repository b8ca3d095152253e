"""Which kind of shortage an out-of-memory is, from its place, its numbers and what was seen before it.

The rules are tried from the top; the first that holds names the cause.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from adaptive_trainer.events import Cause
from adaptive_trainer.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptive_trainer.oom import Numbers

#: A batch that is so many times the usual one is long: below it, halving for good is the better answer.
LONG = 1.5
#: Steps in a row that each left more held than there was, for a leak; and the part of the device that they must take.
_LEAKING_STEPS, _LEAKED_SHARE = 5, 20

#: What only the user can do about a cause.
ADVICE = {
    Cause.LEAK: (
        "what tensors hold between steps has grown with every step, so something keeps them: keep loss.item() or "
        "output.detach().cpu(), not the tensors with their graphs"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What a diagnosis is made from.

    Attributes:
        phase: Where it struck.
        numbers: What the message and the device said.
        host: Host memory ran out, while the training is on another device, or the kernel killed the process for it.
        suspected: It only may have been memory, or nobody is left who has seen it.
        num_elements: Tensor elements of the failed batch's largest micro-batch.
        usual_elements: The median of the batches before it, cut under the same plan; None for the first ones.
        held_bytes: What tensors held when each of the last steps began, the failed one last.
    """

    phase: Phase
    numbers: Numbers
    host: bool = False
    suspected: bool = False
    num_elements: float = 0.0
    usual_elements: float | None = None
    held_bytes: tuple[int, ...] = ()


def _held_by_others(seen: Symptoms) -> bool:
    total, others = seen.numbers.total_bytes, seen.numbers.other_processes_bytes
    ours = seen.numbers.reserved_bytes or seen.numbers.allocated_bytes or 0
    return total is not None and others is not None and others > total / 2 and ours < total / 4


def _fragmented(seen: Symptoms) -> bool:
    reserved, allocated, asked = seen.numbers.reserved_bytes, seen.numbers.allocated_bytes, seen.numbers.requested_bytes
    if reserved is None or allocated is None or asked is None:
        return False
    return reserved - allocated >= max(asked, reserved // 4)


def _leaking(seen: Symptoms) -> bool:
    """What is held between steps has grown in each of the last ones, and not only by a trifle."""
    growth = [after - before for before, after in pairwise(seen.held_bytes)]
    growth = list(takewhile(lambda num_bytes: num_bytes > 0, reversed(growth)))
    if len(growth) < _LEAKING_STEPS or seen.numbers.total_bytes is None:
        return False
    # The median, because the optimizer's state comes once and is no leak.
    return statistics.median(growth) * len(growth) >= seen.numbers.total_bytes / _LEAKED_SHARE


def _long(seen: Symptoms) -> bool:
    in_pieces = seen.phase in {Phase.DATA, Phase.FORWARD, Phase.BACKWARD}
    return in_pieces and seen.usual_elements is not None and seen.num_elements > LONG * seen.usual_elements


_RULES: tuple[tuple[Cause, Callable[[Symptoms], bool]], ...] = (
    (Cause.HOST_MEMORY, lambda seen: seen.host),
    (Cause.UNKNOWN, lambda seen: seen.suspected),
    (Cause.OTHER_PROCESS, _held_by_others),
    (Cause.FRAGMENTATION, _fragmented),
    (Cause.LEAK, _leaking),
    (Cause.OPTIMIZER_STEP, lambda seen: seen.phase is Phase.OPTIMIZER),
    (Cause.MODEL_STATE, lambda seen: seen.phase in {Phase.LOAD, Phase.BUILD}),
    (Cause.LONG_BATCH, _long),
    (Cause.ACTIVATIONS, lambda seen: seen.phase in {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE}),
)


def diagnose(seen: Symptoms) -> Cause:
    """The cause, `Cause.UNKNOWN` where no rule holds."""
    return next((cause for cause, holds in _RULES if holds(seen)), Cause.UNKNOWN)
