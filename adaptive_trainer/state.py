"""What outlives an engine (`TrainState`), and what an attempt must give back (`Rewind`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

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
        places = [parameter.data_ptr() for parameter in self._plain]
        if places != self._places:
            self._places, self._values = places, [parameter.data for parameter in self._plain]
        self.streams = RandomStreams.take(self._device)

    def note_versions(self) -> None:
        """Take what was written into parameters up to here, a copy put back, as none of the next attempt's doing."""
        self.versions = [parameter._version for parameter in self._parameters]  # noqa: SLF001  torch names no other way to it

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
        return self.versions != [parameter._version for parameter in self._parameters]  # noqa: SLF001  as above


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
        self._parameters = [(parameter, _to_host(parameter)) for parameter in parameters if not is_lazy(parameter)]
        self._optimizer = optimizer
        self._state = [(parameter, _copied(state)) for parameter, state in optimizer.state.items()]
        self._groups = [
            {key: value if key == "params" else _copied(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        own = {name: value for name, value in vars(optimizer).items() if name not in kept_by_torch()}
        self._attributes = {name: _copied(value) for name, value in own.items() if not isinstance(value, Optimizer)}
        self._inner = [StateCopy((), value) for value in own.values() if isinstance(value, Optimizer)]

    def differs(self) -> bool:
        """Whether a parameter is not, bit for bit, what it was; writes through ``.data`` show only so."""
        return not all(torch.equal(parameter.detach().cpu(), value) for parameter, value in self._parameters)

    @torch.no_grad()
    def restore(self) -> None:
        """Put parameters and optimizer back as they were, in the tensors that they are in."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        before = dict(self._state)
        state = self._optimizer.state
        for key in [key for key in state if key not in before]:
            del state[key]
        for key, value in before.items():
            state[key] = _put_back(state.get(key), value, key)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=False):
            _put_back_entries(group, saved)
        own = {name for name in vars(self._optimizer) if name not in kept_by_torch()}
        inner = {name for name in own if isinstance(vars(self._optimizer)[name], Optimizer)}
        for name in own - inner - self._attributes.keys():
            delattr(self._optimizer, name)
        for name, value in self._attributes.items():
            setattr(self._optimizer, name, _put_back(vars(self._optimizer).get(name), value, None))
        for copy in self._inner:
            copy.restore()


@cache  # and no constant, because the first optimizer that is made imports torch's compiler
def kept_by_torch() -> frozenset[str]:
    """What every optimizer has: copied by name above, or hooks, which no step moves."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))])))


def _put_back_entries(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for name in group.keys() - saved.keys():
        del group[name]
    for name, value in saved.items():
        group[name] = value if name == "params" else _put_back(group.get(name), value, None)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copied(value: Any) -> Any:
    """A deep copy of plain structures, tensors on the host."""
    if isinstance(value, Tensor):
        return _to_host(value)
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(entry) for entry in value)
    return value


def _put_back(now: Any, saved: Any, parameter: Any) -> Any:
    """``saved`` again as live state: into the tensors that are there where they fit, else as new ones.

    New tensors go where the optimizer had the old ones: beside the parameter, or on the host if they have no shape of
    the parameter's (step counters).
    """
    if isinstance(saved, Tensor):
        if isinstance(now, Tensor) and now.shape == saved.shape and now.dtype == saved.dtype:
            return now.copy_(saved)
        beside = isinstance(parameter, Tensor) and saved.dim() > 0
        return saved.to(parameter.device, copy=True) if beside else saved.clone()
    if isinstance(saved, dict):
        old = now if isinstance(now, dict) else {}
        return {key: _put_back(old.get(key), entry, parameter) for key, entry in saved.items()}
    if isinstance(saved, list | tuple):
        old_entries = now if isinstance(now, list | tuple) and len(now) == len(saved) else [None] * len(saved)
        return type(saved)(_put_back(old, entry, parameter) for old, entry in zip(old_entries, saved, strict=True))
    return saved
