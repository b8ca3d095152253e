"""Agreement between the processes of a run; with one process, everything is agreed at once.

The only kind of run that this version knows is the one of a single process. `Ranks` is the place where the others
stand one day, and `alone` refuses to train side by side with processes that nobody synchronises.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from adaptive_trainer.errors import RankFailure


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of the run."""

    rank: int = 0
    size: int = 1


def alone() -> Ranks:
    """The one process that there is.

    Raises:
        RankFailure: A launcher started several, which this version cannot keep in step.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched not in {"", "1"}:
        raise RankFailure(
            f"WORLD_SIZE={launched}: {launched} processes were launched, and this version trains in one process only. "
            "Type: adaptive-trainer fit RECIPE (without the launcher)"
        )
    return Ranks()
