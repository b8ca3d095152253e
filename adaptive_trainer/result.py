"""What a call of ``fit`` gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptive_trainer.events import Fallback, Step

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from adaptive_trainer.events import Event
    from adaptive_trainer.plan import Plan


@dataclass(frozen=True, kw_only=True, repr=False)
class FitResult:
    """How a run ended.

    Attributes:
        steps: Optimizer steps done in all.
        epochs: Epochs completed in all.
        plan: The last plan.
        fallbacks: The fallbacks of this call, in order.
        loss: The last step's loss; None if there was no step.
        losses: One loss for each step of this call.
        metrics: The last evaluation's metrics, empty if there was none.
        peak_bytes: The highest memory use of a step; None where nothing measures it.
        seconds: How long this call took.
        events: The journal of this call.
        run_dir: Where the journal lies on disk, if anywhere.
    """

    steps: int
    epochs: int
    plan: Plan
    fallbacks: tuple[Fallback, ...] = ()
    loss: float | None = None
    losses: tuple[float, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    seconds: float = 0.0
    events: tuple[Event, ...] = ()
    run_dir: Path | None = None

    @classmethod
    def of(cls, events: Sequence[Event], **rest: Any) -> FitResult:
        """What a journal and ``rest`` tell of a run."""
        steps = [event for event in events if isinstance(event, Step)]
        done = tuple(event.loss for event in steps if not event.skipped)
        return cls(
            fallbacks=tuple(event for event in events if isinstance(event, Fallback)),
            loss=done[-1] if done else None,
            losses=done,
            peak_bytes=max((event.peak_bytes for event in steps if event.peak_bytes is not None), default=None),
            events=tuple(events),
            **rest,
        )

    def __repr__(self) -> str:
        """What a prompt shows; whole journals and a loss for each step are no use there."""
        loss = "no step was done" if self.loss is None else f"loss {self.loss:.4g}"
        fallbacks = "1 fallback" if len(self.fallbacks) == 1 else f"{len(self.fallbacks)} fallbacks"
        return f"<FitResult: {self.steps} steps, {loss}, {self.plan}, {fallbacks}>"
