"""The boundary at which a failure becomes a value.

An exception that is being handled keeps the failed step's frames alive, and with them its tensors. So nothing is
retried inside an ``except`` block and no exception object is kept: `Boundary` swallows what the ladder can answer,
leaves a `Failure` of plain values, and lets everything else pass through as the same object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from adaptive_trainer.oom import Recognition, Verdict, recognise

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from adaptive_trainer.phases import Phase, Track

#: By what a rung is refused: type and words of the exception. The first pattern is wide on purpose: it is only asked
#: while autocast is on by our own doing, and a fault of the user's shows again once it is off.
_REFUSALS = {
    "amp": re.compile(r"autocast|\bhalf\b|b?float16|\bdtypes?\b|scalar ?type", re.IGNORECASE),
    "gradient_checkpointing": re.compile(r"^torch\.utils\.checkpoint"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An attempt that failed, as plain values.

    Attributes:
        phase: Where it struck.
        recognition: What it was recognised as.
        exception_type: Its class, to make a fresh one from; classes hold no tensors.
        text: Its own words.
        refused: The rung that it speaks against, if it is a refusal rather than an out-of-memory.
    """

    phase: Phase
    recognition: Recognition
    exception_type: type[BaseException]
    text: str
    refused: str | None = None

    @property
    def is_memory(self) -> bool:
        """Whether it is, or may be, an out-of-memory."""
        return self.recognition.verdict in {Verdict.OOM, Verdict.SUSPECTED}

    def fresh(self) -> BaseException:
        """A new exception of the same type and text, without the old one's frames.

        Made without calling ``__init__``, which may want arguments that nobody has any more.
        """
        return self.exception_type.__new__(self.exception_type, self.text)


class Boundary:
    """``with Boundary(track, answerable) as boundary: ...``; afterwards ``boundary.failure`` is None or what failed.

    Args:
        track: Tells the phase, and a hint for the notes of what passes through: the one thing that is added to it.
        answerable: Whether a failure has an answer; what has none passes through untouched.
    """

    def __init__(self, track: Track, answerable: Callable[[Failure], bool]) -> None:
        self.failure: Failure | None = None
        self._track = track
        self._answerable = answerable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        if kind is None or error is None or not isinstance(error, Exception):
            return False
        failure = _failure_of(error, self._track.phase)
        if (failure.is_memory or failure.refused is not None) and self._answerable(failure):
            self.failure = failure
            return True
        if self._track.hint is not None:
            error.add_note(self._track.hint)
        return False

    @property
    def failed(self) -> Failure:
        """The failure, where there must be one."""
        assert self.failure is not None, "the block was left without a value and without a failure"  # noqa: S101  our own invariant
        return self.failure


def _failure_of(error: Exception, phase: Phase) -> Failure:
    recognition = recognise(error)
    text = " ".join(entry for entry in error.args if isinstance(entry, str))
    words = f"{type(error).__module__}.{type(error).__qualname__}: {text}"
    refused = None
    if recognition.verdict is Verdict.NOT_OOM:
        refused = next((rung for rung, pattern in _REFUSALS.items() if pattern.search(words)), None)
    return Failure(
        phase=phase,
        recognition=recognition,
        exception_type=type(error),
        text=text,
        refused=refused,
    )
