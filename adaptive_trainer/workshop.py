"""Where the model is loaded and engines are built, down the ladder if need be, and taken apart again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from adaptive_trainer.boundary import Boundary
from adaptive_trainer.engines.build import build
from adaptive_trainer.errors import DataError
from adaptive_trainer.history import History
from adaptive_trainer.phases import Phase
from adaptive_trainer.state import TrainState
from adaptive_trainer.streams import RandomStreams, seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable

    from adaptive_trainer.boundary import Failure
    from adaptive_trainer.engines.base import Engine, Task
    from adaptive_trainer.plan import Plan

Made = TypeVar("Made")


class Workshop:
    """The train state, and the engine that works on it at the moment.

    Attributes:
        task: What engines are built from.
        state: None until the model is loaded.
        engine: None until it is needed, and between two runs.
        history: The engine's last steps.

    Args:
        model: The user's module, or a function that makes it.
        plan: The plan in force now.
        answer: Deals with a failure while loading or building, so that it can be tried again; or raises.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        task: Task,
        plan: Callable[[], Plan],
        answer: Callable[[Failure], None],
    ) -> None:
        self.task = task
        self.state: TrainState | None = None
        self.engine: Engine | None = None
        self.history = History(task)
        self._opened_for: Plan | None = None
        self._model = model
        self._plan = plan
        self._answer = answer

    def load(self) -> TrainState:
        """Load the model, once.

        Raises:
            DataError: It is no module.
        """
        while self.state is None:
            self.state = self._tried(self._loaded)
        return self.state

    def _loaded(self) -> TrainState:
        model = self._model
        if not isinstance(model, nn.Module):
            with self.task.track.enter(Phase.LOAD):
                model = model()
        return TrainState(model=_module(model))

    def _tried(self, make: Callable[[], Made]) -> Made | None:
        """What ``make`` gives; None where memory ran out, which is answered then.

        What was drawn for weights that found no room will be drawn again.
        """
        streams = RandomStreams.take(self.task.device)
        with Boundary(self.task.track, self.task.answerable) as boundary:
            return make()
        streams.restore()
        self._answer(boundary.failed)
        return None

    def load_apart(self, seed: int) -> None:
        """Load the model as a run would that begins with this seed, and leave the user's random streams as they are."""
        streams = RandomStreams.take(self.task.device)
        seed_everything(seed)
        try:
            self.load()
        finally:
            streams.restore()

    def open(self) -> Engine:
        """The engine for the plan in force."""
        plan = self._plan()
        if plan is self._opened_for and self.engine is not None:
            return self.engine  # asked in every step, and a build is not made in no time
        if self.engine is not None and self.engine.build != plan.build:
            self.close()
        while self.engine is None:
            self.engine = self._tried(partial(build, self._plan().build, self.load(), self.task))
        self._opened_for = self._plan()
        return self.engine

    def is_fit(self) -> bool:
        """Whether there is no engine, or the right one."""
        return self.engine is None or self.engine.build == self._plan().build

    def close(self) -> None:
        """Leave the model as the user knows it, whatever happens on the way."""
        self.history.forget()
        if self.engine is None:
            return
        engine, self.engine = self.engine, None
        try:
            self.state = engine.export()
        finally:
            engine.close()


def _module(model: Any) -> nn.Module:
    """The module, if it is one.

    Raises:
        DataError: It is no module.
    """
    if not isinstance(model, nn.Module):
        raise DataError(f"model: it gave a {type(model).__name__}; give a torch.nn.Module or a function that makes one")
    return model
