"""When checkpoints are written, and what follows if one cannot be: a warning, and the training goes on."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from adaptive_trainer import memory, packing, portrait, saving
from adaptive_trainer.boundary import Boundary
from adaptive_trainer.errors import CheckpointError
from adaptive_trainer.events import Checkpoint
from adaptive_trainer.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from adaptive_trainer.data import Source
    from adaptive_trainer.loop import Loop
    from adaptive_trainer.saving import Opened

log = logging.getLogger("adaptive_trainer")

#: Below a run's folder.
FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run_dir: Below it they lie; None writes none.
        loop: The training.
        source: Its data.
        told: What else there is to keep.
        every: After how many steps one is written; None for ends of epochs only.
        keep: How many stay.
    """

    def __init__(
        self,
        run_dir: Path | None,
        loop: Loop,
        source: Source,
        told: Callable[[], portrait.Progress],
        *,
        every: int | None,
        keep: int,
    ) -> None:
        self._folder = None if run_dir is None else run_dir / FOLDER
        self._loop = loop
        self._source = source
        self._told = told
        self._every = every
        self._keep = keep
        self._task = loop.task
        self._failed = ""
        self._tried = self._key()  # what a run is resumed from need not be written again

    def _key(self) -> tuple[int, int, int | None]:
        """What tells two checkpoints apart."""
        told = self._told()
        return self._task.track.step, told.epochs, told.evaluated_at

    @property
    def is_due(self) -> bool:
        """Whether one is to be written after this step."""
        return self._every is not None and self._task.track.step % self._every == 0

    def write(self) -> None:
        """Write one, unless nothing has changed since the last."""
        step, key = self._task.track.step, self._key()
        if self._folder is None or step == 0 or self._tried == key:
            return
        self._tried = key
        started, saved = time.perf_counter(), None
        for _ in range(2):  # what had no room may find it after the clean-up
            with Boundary(self._task.track, lambda failure: failure.is_memory) as boundary:
                saved = self._saved(self._folder, step)
            if boundary.failure is None:
                break
            memory.release(self._task.device)
        else:
            self._complain(f"out of memory: {boundary.failed.text}")
        if saved is not None:
            self._failed = ""
            seconds = time.perf_counter() - started
            path, rank = str(saved.path), self._task.track.rank
            self._loop.record(Checkpoint(step=step, rank=rank, path=path, num_bytes=saved.num_bytes, seconds=seconds))

    def _saved(self, folder: Path, step: int) -> saving.Saved | None:
        try:
            with self._task.track.enter(Phase.CHECKPOINT):
                weights, rest = portrait.draw(self._loop, self._source, self._told())
                return saving.write(folder, step, weights, rest, keep=self._keep)
        except (OSError, packing.Unpackable) as error:
            self._complain(str(error))
        return None

    def _complain(self, reason: str) -> None:
        self._failed = f"step {self._task.track.step}: its checkpoint could not be written ({reason})"
        log.warning("%s; training goes on, older checkpoints stay", self._failed)

    def close(self) -> None:
        """Say once more that the last one could not be written."""
        if self._failed:
            log.warning("%s, and none after it", self._failed)


def found(run_dir: Path | None, resume: str) -> Opened | None:
    """The checkpoint to go on from, None for a fresh start; ``resume`` as the user gave it.

    Raises:
        CheckpointError: There must be one and is none, or none is good.
    """
    if run_dir is None:
        return None
    folder = run_dir / FOLDER
    saving.clear_unfinished(folder)
    if resume == "never":
        aside = saving.set_aside(folder, datetime.now(tz=UTC))
        if aside is not None:
            log.info("resume='never': the checkpoints that were there are in %s now", aside)
        return None
    opened = saving.open_newest(folder, log.warning)
    if opened is None and resume == "must":
        raise CheckpointError(f"resume: 'must' was given, and {folder} holds no checkpoint; type resume=auto")
    return opened
