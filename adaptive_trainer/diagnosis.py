"""Which kind of shortage an out-of-memory is, from its place, its numbers and what was seen before it.

The rules are tried from the top; the first that holds names the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptive_trainer.events import Cause
from adaptive_trainer.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptive_trainer.oom import Numbers

#: A batch that is so many times the usual one is long: below it, halving for good is the better answer.
LONG = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptoms:
    """What a diagnosis is made from.

    Attributes:
        phase: Where it struck.
        numbers: What the message and the device said.
        host: Host memory ran out, while the training is on another device.
        suspected: It only may have been memory.
        num_elements: Tensor elements of the failed batch's largest micro-batch.
        usual_elements: The median of the batches before it, cut under the same plan; None for the first ones.
    """

    phase: Phase
    numbers: Numbers
    host: bool = False
    suspected: bool = False
    num_elements: float = 0.0
    usual_elements: float | None = None


def _held_by_others(seen: Symptoms) -> bool:
    total, others = seen.numbers.total_bytes, seen.numbers.other_processes_bytes
    ours = seen.numbers.reserved_bytes or seen.numbers.allocated_bytes or 0
    return total is not None and others is not None and others > total / 2 and ours < total / 4


def _fragmented(seen: Symptoms) -> bool:
    reserved, allocated, asked = seen.numbers.reserved_bytes, seen.numbers.allocated_bytes, seen.numbers.requested_bytes
    if reserved is None or allocated is None or asked is None:
        return False
    return reserved - allocated >= max(asked, reserved // 4)


def _long(seen: Symptoms) -> bool:
    in_pieces = seen.phase in {Phase.DATA, Phase.FORWARD, Phase.BACKWARD}
    return in_pieces and seen.usual_elements is not None and seen.num_elements > LONG * seen.usual_elements


_RULES: tuple[tuple[Cause, Callable[[Symptoms], bool]], ...] = (
    (Cause.UNKNOWN, lambda seen: seen.suspected),
    (Cause.HOST_MEMORY, lambda seen: seen.host),
    (Cause.OTHER_PROCESS, _held_by_others),
    (Cause.FRAGMENTATION, _fragmented),
    (Cause.OPTIMIZER_STEP, lambda seen: seen.phase is Phase.OPTIMIZER),
    (Cause.MODEL_STATE, lambda seen: seen.phase in {Phase.LOAD, Phase.BUILD}),
    (Cause.LONG_BATCH, _long),
    (Cause.ACTIVATIONS, lambda seen: seen.phase in {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATE}),
)


def diagnose(seen: Symptoms) -> Cause:
    """The cause, `Cause.UNKNOWN` where no rule holds."""
    return next((cause for cause, holds in _RULES if holds(seen)), Cause.UNKNOWN)
