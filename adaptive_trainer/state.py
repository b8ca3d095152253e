"""What outlives an engine (`TrainState`), and what an attempt must give back (`Rewind`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from adaptive_trainer.copies import Copier, Session, to_host
from adaptive_trainer.snapshot import ModuleSnapshot
from adaptive_trainer.streams import RandomStreams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.optim.lr_scheduler import LRScheduler


@dataclass(kw_only=True)
class TrainState:
    """Everything that is carried from one engine to the next, in a form that no plan shows in.

    Attributes:
        model: The user's own module.
        optimizer: Over the model's parameters; None until the first build.
        scheduler: Stepped once for each optimizer step; None if the user gave none.
        scaler: The fp16 gradient scaler's state, empty in other precisions.
        optimizer_has_stepped: Its state exists, so that a later step allocates little.
        forward_moves_parameters: The model's forward changes parameters (an average of others, say), so that every
            step needs a copy of them to be undone.
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    scaler: dict[str, Any] = field(default_factory=dict)
    optimizer_has_stepped: bool = False
    forward_moves_parameters: bool = False


class Rewind:
    """The state from which a step starts, short of what only a commit moves.

    `take` is called once a step, before its first attempt; `restore` after every attempt that is thrown away.
    Parameters and optimizer state are not copied: a forward and a backward leave them alone. That this is so is
    checked by their version counters, which `parameters_moved` reads. A module that gathers a sharded parameter for
    its forward puts another storage in the place of its own, though, and that is undone.

    Attributes:
        versions: How often each parameter had been written into.
        streams: Where the random streams stood.
    """

    def __init__(self, roots: Iterable[nn.Module], parameters: Iterable[Tensor], device: torch.device) -> None:
        self._modules = ModuleSnapshot(*roots)
        self._parameters = list(parameters)
        self._plain = [entry for entry in self._parameters if type(entry) is nn.Parameter and _has_place(entry)]
        self._places: list[int] = []
        self._values: list[Tensor] = []
        self.versions: list[int] = []
        self._device = device
        self.streams: RandomStreams | None = None

    def take(self) -> None:
        """Remember buffers, attributes and random streams as they are now."""
        self._modules.take()
        self.note_versions()
        places = [*map(Tensor.data_ptr, self._plain)]
        if places != self._places:
            self._places, self._values = places, [parameter.data for parameter in self._plain]
        self.streams = RandomStreams.take(self._device)

    def note_versions(self) -> None:
        """Take what was written into parameters up to here, a copy put back, as none of the next attempt's doing."""
        self.versions = versions(self._parameters)

    def restore_places(self) -> None:
        """Put back the storages that parameters had."""
        for parameter, place, value in zip(self._plain, self._places, self._values, strict=True):
            if parameter.data_ptr() != place or parameter.shape != value.shape:
                parameter.data = value

    def restore(self) -> None:
        """Put back what `take` remembered."""
        self.restore_places()
        self.note_versions()
        self._modules.restore()
        if self.streams is not None:
            self.streams.restore()

    @property
    def drew_random_numbers(self) -> bool:
        """Whether a random stream has moved since `take`."""
        return self.streams is not None and self.streams.moved()

    @property
    def parameters_moved(self) -> bool:
        """Whether a parameter was changed since `take`."""
        return self.versions != versions(self._parameters)


#: Torch names no other way to it. Asked twice in every step, of all parameters, so in one call.
_version = attrgetter("_version")


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """How often torch has seen each tensor written into."""
    return [*map(_version, tensors)]


def _has_place(parameter: Tensor) -> bool:
    return parameter.layout is torch.strided and parameter.device.type != "meta"


class StateCopy:
    """A copy on the host of all that a commit moves: parameters, and all that an optimizer keeps.

    An optimizer step that fails half-way cannot simply be done again: a foreach Adam has counted its step and moved
    its moments before the allocation that failed. From this copy it can. An optimizer within an optimizer is copied
    with it.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizer: Optimizer) -> None:
        # A lazy parameter has no value yet, and none to come back to.
        parameters = list(parameters)
        self._parameters = [(parameter, to_host(parameter)) for parameter in parameters if not is_lazy(parameter)]
        self._copier = Copier()
        self._copier.keep(parameters)
        self._optimizer = _OptimizerCopy(optimizer, self._copier)
        self._copier.finish()

    def differs(self) -> bool:
        """Whether a parameter is not, bit for bit, what it was; writes through ``.data`` show only so."""
        return not all(torch.equal(parameter.detach().cpu(), value) for parameter, value in self._parameters)

    @torch.no_grad()
    def restore(self) -> None:
        """Put parameters and optimizer back as they were, in the tensors and containers that they are in."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        self._optimizer.restore(Session(self._copier))


class _OptimizerCopy:
    """What one optimizer keeps; parameters are in it by reference."""

    def __init__(self, optimizer: Optimizer, copier: Copier) -> None:
        self._optimizer = optimizer
        own = _own(optimizer)
        copier.keep([optimizer, *(entry for group in optimizer.param_groups for entry in group["params"])])
        inner = [entry for value in own.values() for entry in _entries(value) if isinstance(entry, Optimizer)]
        self._inner = [_OptimizerCopy(entry, copier) for entry in inner if not copier.keeps(entry)]
        self._state = copier.copied(optimizer.state)
        self._groups = copier.copied(optimizer.param_groups)
        self._attributes = {name: copier.copied(value) for name, value in own.items()}

    def restore(self, session: Session) -> None:
        optimizer = self._optimizer
        for name in _own(optimizer).keys() - self._attributes.keys():
            delattr(optimizer, name)
        for name, saved in {"state": self._state, "param_groups": self._groups, **self._attributes}.items():
            now = getattr(optimizer, name, None)
            live = session.put(now, saved)
            if live is not now or not hasattr(optimizer, name):
                setattr(optimizer, name, live)
        for entry in self._inner:
            entry.restore(session)


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer has beside what every optimizer has."""
    return {name: value for name, value in vars(optimizer).items() if name not in kept_by_torch()}


@cache  # and no constant, because the first optimizer that is made imports torch's compiler
def kept_by_torch() -> frozenset[str]:
    """What every optimizer has: copied by name above, or hooks, which no step moves."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])))


def _entries(value: Any) -> list[Any]:
    """What a list or dict holds, or the value itself."""
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple) else [value]
