"""The user's learning-rate schedule: moved once for each optimizer step, read and put back."""

from __future__ import annotations

import copy
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

#: What is taken to be the state of a schedule that has no ``state_dict``.
_PLAIN = (type(None), bool, int, float, str, list, tuple, dict)


def move(scheduler: Any, loss: float) -> None:
    """Move the schedule by one optimizer step, whose loss was ``loss``. None is no schedule."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()


def state(scheduler: Any) -> dict[str, Any] | None:
    """A copy of what a schedule remembers, without the optimizer and the user's functions; None where there is none."""
    if scheduler is None:
        return None
    if hasattr(scheduler, "state_dict"):
        found: dict[str, Any] = copy.deepcopy(scheduler.state_dict())
        return found
    return copy.deepcopy({name: value for name, value in vars(scheduler).items() if isinstance(value, _PLAIN)})


def restore(scheduler: Any, saved: dict[str, Any] | None) -> None:
    """Put back what `state` gave; it can be used again."""
    if scheduler is None or saved is None:
        return
    if hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(copy.deepcopy(saved))
    else:
        vars(scheduler).update(copy.deepcopy(saved))
