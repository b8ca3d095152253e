"""A run as a checkpoint holds it, and a run that goes on from there. Files are the business of `saving`.

Weights go under the model's own names, so that they load into the plain model. All the rest is plain values and
tensors: nothing in it names code. What decides the next steps is in it: optimizer, schedule, gradient scaler, random
streams, the place in the data, the plan in force, and of the modules the flags, counters and buffers that a
``state_dict`` leaves out.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adaptive_trainer import packing, schedule
from adaptive_trainer.attributes import is_torchs_own
from adaptive_trainer.errors import CheckpointError
from adaptive_trainer.plan import Plan
from adaptive_trainer.state import kept_by_torch
from adaptive_trainer.streams import HostStreams, RandomStreams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from adaptive_trainer.data import Source
    from adaptive_trainer.loop import Loop

log = logging.getLogger("adaptive_trainer")

#: Attributes of these types are counters and the like. Others are built by the model's constructor.
_SCALARS = (bool, int, float)


@dataclass(slots=True)
class Progress:
    """What of a run is neither model nor optimizer nor data.

    Attributes:
        epochs: Completed ones.
        metrics: The last evaluation's.
        evaluated_at: The step of that evaluation.
        given: Arguments that decide the order of samples.
    """

    epochs: int
    metrics: dict[str, float]
    evaluated_at: int | None
    given: dict[str, Any]


def draw(loop: Loop, source: Source, progress: Progress) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights, and all the rest, as they are between two steps."""
    state, engine = loop.workshop.load(), loop.workshop.engine
    if engine is not None:
        state = engine.export()
    entries = state.model.state_dict()
    return {name: value for name, value in entries.items() if isinstance(value, Tensor)}, {
        "step": loop.track.step,
        "progress": asdict(progress),
        "plan": asdict(loop.descent.plan),
        "undone": sorted(loop.descent.undone),
        "extra_state": {name: value for name, value in entries.items() if not isinstance(value, Tensor)},
        "modules": [_module_entries(module) for module in _modules(loop)],
        "optimizer": None if state.optimizer is None else _optimizer_entries(state.optimizer),
        "schedule": schedule.state(state.scheduler),
        "scaler": state.scaler,
        "optimizer_has_stepped": state.optimizer_has_stepped,
        "forward_moves_parameters": state.forward_moves_parameters,
        "streams": _stream_entries(RandomStreams.take(loop.task.device)),
        "source": source.position(_stream_entries),
    }


def resume(
    loop: Loop, source: Source, weights: Mapping[str, Tensor], rest: dict[str, Any], given: dict[str, Any]
) -> Progress:
    """Take up a run where the checkpoint left it.

    Raises:
        CheckpointError: It is of another model, optimizer or order of samples. Nothing has been changed then.
    """
    state = loop.workshop.load()
    progress = Progress(**rest["progress"])
    _refuse_other_weights(state.model, weights)
    _refuse_other_order(progress.given, given, in_epoch=rest["source"]["in_epoch"])
    loop.descent.plan, loop.descent.undone = Plan(**rest["plan"]), set(rest["undone"])
    engine = loop.workshop.open()
    if rest["optimizer"] is not None:
        _refuse_other_optimizer(engine.optimizer, rest["optimizer"])
    state.model.load_state_dict({**weights, **rest["extra_state"]}, strict=True)
    for module, entries in zip(_modules(loop), rest["modules"], strict=True):
        _give_entries(module, entries)
    if rest["optimizer"] is not None:
        _give_optimizer(engine.optimizer, rest["optimizer"])
    schedule.restore(state.scheduler, rest["schedule"])
    state.scaler = rest["scaler"]
    state.optimizer_has_stepped = rest["optimizer_has_stepped"]
    state.forward_moves_parameters = rest["forward_moves_parameters"]
    engine.adopt()
    loop.track.step = rest["step"]
    source.resume(rest["source"], lambda entries: _streams_of(entries, loop.task.device))
    _streams_of(rest["streams"], loop.task.device).restore()
    return progress


# What is refused.


def _refuse_other_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing, foreign = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or foreign:
        raise CheckpointError(
            f"the checkpoint is another model's: it lacks {_some(missing)}, and has {_some(foreign)} that this model "
            "does not know; give that model, another run_dir, or resume='never'"
        )
    for name, value in own.items():
        if value.shape != weights[name].shape and not nn.parameter.is_lazy(value):
            raise CheckpointError(
                f"the checkpoint is another model's: {name} is {tuple(weights[name].shape)} there and "
                f"{tuple(value.shape)} here; give that model, another run_dir, or resume='never'"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") if names else "nothing"


def _refuse_other_order(then: dict[str, Any], now: dict[str, Any], *, in_epoch: bool) -> None:
    for key in then.keys() & now.keys():
        if in_epoch and then[key] != now[key]:
            raise CheckpointError(
                f"the checkpoint lies in the middle of an epoch with {key}={then[key]}, and {key}={now[key]} "
                f"would give other batches; type {key}={then[key]}, or resume='never'"
            )


def _refuse_other_optimizer(optimizer: Optimizer, entries: dict[str, Any]) -> None:
    kind = _kind_of(optimizer)
    if entries["kind"] != kind:
        raise CheckpointError(
            f"the checkpoint holds the state of {entries['kind']}, and the optimizer is {kind}; give that one, another "
            "run_dir, or resume='never'"
        )
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if entries["sizes"] != sizes:
        raise CheckpointError(
            f"the checkpoint's optimizer has groups of {entries['sizes']} parameters, and this one of {sizes}; give "
            "the same groups, another run_dir, or resume='never'"
        )


# Modules.


def _modules(loop: Loop) -> list[nn.Module]:
    roots = [loop.workshop.load().model, *loop.task.objective.modules]
    return list(dict.fromkeys(chain.from_iterable(root.modules() for root in roots)))


def _module_entries(module: nn.Module) -> dict[str, Any]:
    """Its flag, and what a step may move of it that no ``state_dict`` shows."""
    own = not is_torchs_own(module)
    passing = module._non_persistent_buffers_set  # noqa: SLF001  torch names no other way to it
    buffers = {name: value for name, value in module._buffers.items() if name in passing and value is not None}  # noqa: SLF001
    plain = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in vars(module).items()
        if own and (type(value) in _SCALARS or (type(value) is Tensor and value.layout is torch.strided))
    }
    return {"training": module.training, "buffers": buffers, "plain": plain}


@torch.no_grad()
def _give_entries(module: nn.Module, entries: dict[str, Any]) -> None:
    module.training = entries["training"]
    for name, value in entries["buffers"].items():
        now = module._buffers.get(name)  # noqa: SLF001  as above
        _give_tensor(module, name, now, value)
    for name, value in entries["plain"].items():
        if isinstance(value, Tensor):
            _give_tensor(module, name, getattr(module, name, None), value)
        else:
            setattr(module, name, value)


def _give_tensor(module: nn.Module, name: str, now: Tensor | None, value: Tensor) -> None:
    if now is not None and now.shape == value.shape and now.dtype == value.dtype:
        now.copy_(value)
        return
    device = next((parameter.device for parameter in module.parameters()), value.device)
    setattr(module, name, value.to(device if now is None else now.device, copy=True))


# The optimizer.


def _kind_of(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _held(optimizer: Optimizer) -> list[Tensor]:
    return [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]


def _optimizer_entries(optimizer: Optimizer) -> dict[str, Any]:
    """State by the parameters' places in the groups, which do not depend on anything but the groups."""
    places = {id(parameter): place for place, parameter in enumerate(_held(optimizer))}
    state = [(places.get(id(key), key), value) for key, value in optimizer.state.items()]
    own = {name: value for name, value in vars(optimizer).items() if name not in kept_by_torch()}
    return {
        "kind": _kind_of(optimizer),
        "sizes": [len(group["params"]) for group in optimizer.param_groups],
        "state": [(key, dict(value) if isinstance(value, dict) else value) for key, value in state],
        "groups": [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ],
        "own": {name: value for name, value in own.items() if _can_be_kept(f"optimizer.{name}", value)},
    }


def _can_be_kept(name: str, value: Any) -> bool:
    try:
        packing.pack(value)
    except packing.Unpackable as refusal:
        log.info("%s is not in the checkpoint: %s", name, refusal)
        return False
    return True


def _give_optimizer(optimizer: Optimizer, entries: dict[str, Any]) -> None:
    held = _held(optimizer)
    optimizer.state.clear()
    for key, value in entries["state"]:
        parameter = held[key] if isinstance(key, int) else key
        optimizer.state[parameter] = _beside(value, parameter)
    for group, saved in zip(optimizer.param_groups, entries["groups"], strict=True):
        group.update(saved)
    for name, value in entries["own"].items():
        setattr(optimizer, name, value)


def _beside(value: Any, parameter: Any) -> Any:
    """Tensors where the optimizer would have them: beside the parameter, step counters on the host."""
    if isinstance(value, Tensor):
        return value.to(parameter.device) if isinstance(parameter, Tensor) and value.dim() else value
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = _beside(entry, parameter)
    elif isinstance(value, list):
        value[:] = [_beside(entry, parameter) for entry in value]
    return value


# Random streams.


def _stream_entries(streams: RandomStreams) -> dict[str, Any]:
    return {"python": streams.host.python, "numpy": streams.host.numpy, "cpu": streams.cpu, "own": streams.own}


def _streams_of(entries: dict[str, Any], device: torch.device) -> RandomStreams:
    if entries["numpy"] is not None:
        import_module("numpy.random")
    own = entries["own"] if device.type != "cpu" else None
    return RandomStreams(HostStreams(entries["python"], entries["numpy"]), entries["cpu"], device, own)
