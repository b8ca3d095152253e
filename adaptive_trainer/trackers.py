"""Trackers that accelerate knows (TensorBoard and the rest), as listeners of events."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from adaptive_trainer.errors import RecipeError
from adaptive_trainer.events import Evaluate, Event, Step

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_PROJECT = "adaptive-trainer"


class Trackers:
    """Logs losses, learning rates, memory and metrics to trackers.

    Args:
        names: As accelerate knows them.
        run_dir: Folder for those that write files; None is the present folder's ``runs``.

    Raises:
        RecipeError: A tracker's package is not installed.
    """

    def __init__(self, names: Sequence[str], run_dir: Path | None) -> None:
        # Imported here, because accelerate costs more to import than all of this package.
        from accelerate import PartialState, tracking  # noqa: PLC0415, TID251

        installed = [str(entry.value) for entry in tracking.get_available_trackers()]
        wanted = list(dict.fromkeys(installed if "all" in names else names))
        missing = [name for name in wanted if name not in installed]
        if missing or not wanted:
            lacking = ", ".join(missing) or "any tracker"
            raise RecipeError(
                f"trackers: the package of {lacking} is not installed; "
                f"type pip install {' '.join(missing) or 'tensorboard'}, or leave trackers out"
            )
        PartialState()  # accelerate's trackers refuse to work without it
        folder = str(run_dir or Path("runs"))
        self._trackers: list[Any] = []
        for name in wanted:
            known = tracking.LOGGER_TYPE_TO_CLASS[name]
            folders = {"logging_dir": folder} if known.requires_logging_directory else {}
            self._trackers.append(known(_PROJECT, **folders))
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for tracker in self._trackers:
                tracker.start()
                stack.callback(tracker.finish)
            self._closing = stack.pop_all()
        return self

    def __call__(self, event: Event) -> None:
        """Log one event."""
        for values in self._values(event):
            for tracker in self._trackers:
                tracker.log(values, step=event.step)

    def _values(self, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Step):
            values = {"loss": event.loss, "lr": event.lr, "peak_bytes": event.peak_bytes, "seconds": event.seconds}
            return [{f"train/{key}": value for key, value in values.items() if value is not None}]
        if isinstance(event, Evaluate):
            return [{f"eval/{key}": value for key, value in event.metrics.items()}]
        return []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.close()
