"""Trains a PyTorch model through out-of-memory: the same optimizer step again, one rung lower, nothing lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptive_trainer.errors import (
    AdaptiveTrainerError,
    CheckpointError,
    DataError,
    LadderExhausted,
    NonFiniteError,
    RankFailure,
    RecipeError,
)
from adaptive_trainer.events import (
    Cause,
    Checkpoint,
    Climb,
    Evaluate,
    Event,
    Fallback,
    Fidelity,
    Finish,
    OutOfMemory,
    Start,
    Step,
)
from adaptive_trainer.ladder import Ladder, Rung, Situation, Skip, Traits
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Build, Plan
from adaptive_trainer.result import FitResult

if TYPE_CHECKING:
    from adaptive_trainer.trainer import AdaptiveTrainer

__version__ = "0.1.0"

__all__ = [
    "AdaptiveTrainer",
    "AdaptiveTrainerError",
    "Build",
    "Cause",
    "Checkpoint",
    "CheckpointError",
    "Climb",
    "DataError",
    "Evaluate",
    "Event",
    "Fallback",
    "Fidelity",
    "Finish",
    "FitResult",
    "Ladder",
    "LadderExhausted",
    "NonFiniteError",
    "OutOfMemory",
    "Phase",
    "Plan",
    "RankFailure",
    "RecipeError",
    "Rung",
    "Situation",
    "Skip",
    "Start",
    "Step",
    "Traits",
]


def __getattr__(name: str) -> Any:
    # torch is imported with the trainer and not before, so that `--help` and a mistake in a recipe are quick.
    if name == "AdaptiveTrainer":
        from adaptive_trainer.trainer import AdaptiveTrainer  # noqa: PLC0415  see above

        return AdaptiveTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
