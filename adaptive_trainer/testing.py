"""Failures on purpose, so that an out-of-memory can be rehearsed without filling a device.

with inject_oom(step=3, phase="backward"):
    trainer.fit()
"""

from __future__ import annotations

import builtins
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adaptive_trainer import phases
from adaptive_trainer.allocations import Allocations
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.phases import Passage, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.12 GiB is free. "
    "Including non-PyTorch memory, this process has 6.88 GiB memory in use. Of the allocated memory 6.32 GiB is "
    "allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)
_NAMED = re.compile(r"(?P<type>[\w.]*(?:Error|Exception|OutOfResources)): (?P<text>.*)", re.DOTALL)


@dataclass
class Injection:
    """What a rehearsed failure has done so far.

    Attributes:
        fired: How often it has struck.
        passages: How often its place was passed.
        allocations: Tensor allocations counted at the last passage, where they are counted.
    """

    fired: int = 0
    passages: int = 0
    allocations: int = 0


@contextmanager
def inject_oom(
    *,
    step: int | None = None,
    phase: str = "forward",
    micro_batch: int | None = None,
    rank: int | None = None,
    allocation: int | None = None,
    times: float = 1,
    message: str | None = None,
) -> Iterator[Injection]:
    """Let training run out of memory at a chosen place. Nested injections add up.

    Args:
        step: The optimizer step, counted from 1; None for every step.
        phase: ``load``, ``build``, ``data``, ``forward``, ``backward``, ``reduce``, ``optimizer``, ``evaluate`` or
            ``checkpoint``.
        micro_batch: The micro-batch of the step, counted from 0; None for every one.
        rank: The process; None for every one.
        allocation: The tensor allocation of the phase, counted from 1, that fails; None fails at the phase's entry.
        times: How often it strikes, ``math.inf`` for ever.
        message: The exception's text; ``"TypeName: text"`` names its type too, which otherwise is
            ``torch.OutOfMemoryError``.

    Yields:
        What the injection has done, for tests to look at.

    Raises:
        RecipeError: There is no such phase.
    """
    if phase not in set(Phase):
        raise RecipeError(f"phase: {phase!r} is none; give one of {', '.join(Phase)}")
    done = Injection()

    def strike() -> None:
        if done.fired < times:
            done.fired += 1
            raise _error(message)

    def count(_storage: torch.UntypedStorage) -> None:
        done.allocations += 1
        if done.allocations == allocation:
            strike()

    def guard(passage: Passage) -> AbstractContextManager[object] | None:
        wanted = (step, micro_batch, rank)
        here = (passage.step, passage.micro_batch, passage.rank)
        if passage.phase != phase or any(want not in (None, is_) for want, is_ in zip(wanted, here, strict=True)):
            return None
        done.passages += 1
        done.allocations = 0
        if allocation is not None:
            return Allocations(count)
        strike()
        return None

    phases.everywhere.append(guard)
    try:
        yield done
    finally:
        phases.everywhere.remove(guard)


def _error(message: str | None) -> BaseException:
    """The exception that a message stands for."""
    named = None if message is None else _NAMED.fullmatch(message)
    if message is None or named is None:
        return torch.OutOfMemoryError(message or _MESSAGE)
    name = named["type"].rpartition(".")[2]
    found = getattr(torch, name, None) or getattr(builtins, name, None)
    kind = found if isinstance(found, type) and issubclass(found, BaseException) else type(name, (RuntimeError,), {})
    error: BaseException = kind(named["text"])
    return error
