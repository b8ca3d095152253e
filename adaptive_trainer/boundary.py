"""The boundary at which a failure becomes a value.

An exception that is being handled keeps the failed step's frames alive, and with them its tensors. So nothing is
retried inside an ``except`` block and no exception object is kept: `Boundary` swallows what the ladder can answer,
leaves a `Failure` of plain values, and lets everything else pass through as the same object.
"""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from adaptive_trainer.oom import Recognition, Verdict, recognise
from adaptive_trainer.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from adaptive_trainer.phases import Track

#: By what a rung is refused: type and words of the exception. The first pattern is wide on purpose: it is only asked
#: while autocast is on by our own doing, and a fault of the user's shows again once it is off.
_REFUSALS = {
    "amp": re.compile(
        r"autocast|\bhalf(?:tensor)?\b|b?float16|\b(?:float|fp)32\b|\bdtypes?\b|scalar ?type", re.IGNORECASE
    ),
    "gradient_checkpointing": re.compile(r"^torch\.utils\.checkpoint|saved[ _]tensors? hooks"),
}
_RERUN = str(Path(__file__).with_name("rerun.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An attempt that failed, as plain values.

    Attributes:
        phase: Where it struck.
        recognition: What it was recognised as.
        exception_type: Its class, to make a fresh one from; classes hold no tensors.
        text: Its own words.
        refused: The rung that it speaks against, if it is a refusal rather than an out-of-memory.
        crashed: It was met by an earlier process, which died of it.
    """

    phase: Phase
    recognition: Recognition
    exception_type: type[BaseException]
    text: str
    refused: str | None = None
    crashed: bool = False

    @property
    def is_memory(self) -> bool:
        """Whether it is, or may be, an out-of-memory."""
        return self.recognition.verdict in {Verdict.OOM, Verdict.SUSPECTED}

    def fresh(self) -> BaseException:
        """A new exception of the same type and text, without the old one's frames.

        Made without calling the class's own ``__init__``, which may want arguments that nobody has any more.
        """
        try:
            made = self.exception_type.__new__(self.exception_type, self.text)
        except TypeError:  # a group's ``__new__`` wants its members, which are dead
            return RuntimeError(f"{self.exception_type.__name__}: {self.recognition.message}")
        BaseException.__init__(made, self.text)  # the text again, because ``MemoryError.__new__`` drops it
        if not _can_speak(made):
            # Its own words want what only its ``__init__`` makes (NumPy's name a shape), so it is given these.
            words = {"__str__": BaseException.__str__}
            kind: type[BaseException] = type(self.exception_type.__name__, (self.exception_type,), words)
            made = kind.__new__(kind, self.text or self.recognition.message)
            BaseException.__init__(made, self.text or self.recognition.message)
        return made


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
        self._handled: BaseException | None = None

    def __enter__(self) -> Self:
        # Somebody who trains again in the handler of an out-of-memory has it as the context of all that is raised here.
        self._handled = sys.exception()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        handled, self._handled = self._handled, None
        if kind is None or error is None or not isinstance(error, Exception):
            return False
        failure = _failure_of(error, handled, self._track.phase)
        if (failure.is_memory or failure.refused is not None) and self._answerable(failure):
            self.failure = failure
            _let_go(error, handled)
            return True
        if self._track.hint is not None:
            error.add_note(self._track.hint)
        return False

    @property
    def failed(self) -> Failure:
        """The failure, where there must be one."""
        assert self.failure is not None, "the block was left without a value and without a failure"  # noqa: S101  our own invariant
        return self.failure


def _let_go(error: BaseException, handled: BaseException | None) -> None:
    """Clear the frames of the failed attempt, which has ended, in all of the exception's chain.

    Somebody else may keep the exception, such as a log or an error tracker; it then keeps its lines, but no tensors.
    """
    waiting, seen = [error], {id(handled)}
    while waiting:
        current = waiting.pop()
        if id(current) not in seen:
            seen.add(id(current))
            traceback.clear_frames(current.__traceback__)
            members = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
            chain = (current.__cause__, current.__context__, *members)
            waiting.extend(entry for entry in chain if entry is not None)


def _asserted(error: Exception) -> str:
    """The source line of an assertion, which is all that it says where it has no words."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, AssertionError) else []
    return (frames[-1].line or "") if frames else ""


def _can_speak(error: BaseException) -> bool:
    try:
        str(error)
    except (AttributeError, LookupError, TypeError):
        return False
    return True


def _in_a_rerun(error: Exception) -> bool:
    """Whether it was raised while a block was computed again, which without the rung would not have been done."""
    return any(frame.filename == _RERUN for frame in traceback.extract_tb(error.__traceback__))


def _failure_of(error: Exception, handled: BaseException | None, phase: Phase) -> Failure:
    recognition = recognise(error, handled)
    text = " ".join(entry for entry in error.args if isinstance(entry, str))
    words = f"{type(error).__module__}.{type(error).__qualname__}: {text or _asserted(error)}"
    refused = None
    if recognition.verdict is Verdict.NOT_OOM:
        refused = next((rung for rung, pattern in _REFUSALS.items() if pattern.search(words)), None)
        if phase is Phase.BACKWARD and _in_a_rerun(error):
            refused = "gradient_checkpointing"
    return Failure(
        phase=phase,
        recognition=recognition,
        exception_type=type(error),
        text=text,
        refused=refused,
    )
