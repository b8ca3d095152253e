"""Every exception that the trainer raises, grouped by whose fault it is.

What is not out-of-memory and not listed here comes from the user's own code and passes through untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adaptive_trainer.events import Fallback, OutOfMemory


class AdaptiveTrainerError(Exception):
    """What all the trainer's own exceptions have in common."""


class RecipeError(AdaptiveTrainerError, ValueError):
    """The user's arguments or recipe are wrong.

    Attributes:
        mistakes: One sentence for each mistake, all that were found, each beginning with its key.
    """

    def __init__(self, mistakes: str | Sequence[str]) -> None:
        self.mistakes: tuple[str, ...] = (mistakes,) if isinstance(mistakes, str) else tuple(mistakes)
        super().__init__("\n".join(self.mistakes))


class DataError(AdaptiveTrainerError, ValueError):
    """The user's data cannot be trained on as they are."""


class LadderExhausted(AdaptiveTrainerError, RuntimeError):  # noqa: N818  the name is public and fixed
    """The hardware is too small: no rung is left that could help.

    The parameters are those of the last completed step, unless the message says that a step was half done and could
    not be undone. ``__cause__`` is an exception of the type and text of the
    first failure of the trail; the original ones are dead, because a living one would keep its step's tensors alive.

    Attributes:
        trail: Everything that ran out of memory in this run and everything that was tried against it, in order.
        skipped: The rungs that were passed over at the end, each with its reason.
    """

    def __init__(
        self, message: str, trail: Sequence[OutOfMemory | Fallback] = (), skipped: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.trail = tuple(trail)
        self.skipped = dict(skipped or {})


class NonFiniteError(AdaptiveTrainerError, ArithmeticError):
    """Too many steps in a row gave gradients that are not finite, so nothing was being trained."""


class CheckpointError(AdaptiveTrainerError, RuntimeError):
    """A checkpoint is damaged, foreign or missing."""


class RankFailure(AdaptiveTrainerError, RuntimeError):  # noqa: N818  the name is public and fixed
    """Another process of the run has failed."""
