"""What a model is like, as far as the ladder cares."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from torch import nn

from adaptive_trainer import memory, recompute
from adaptive_trainer.rungs import Traits
from adaptive_trainer.streams import is_generator

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Layers that draw random numbers in training mode, with the attributes that say how likely.
_DROPOUT = ("p", "dropout", "drop_prob", "attention_dropout")


def normalises_over_batch(model: nn.Module) -> bool:
    """Whether a layer computes its statistics over the samples of a batch, now."""
    return any(
        isinstance(module, nn.modules.batchnorm._NormBase)  # noqa: SLF001  torch's common base of BatchNorm and InstanceNorm
        and not isinstance(module, nn.modules.instancenorm._InstanceNorm)  # noqa: SLF001  statistics of one sample each
        and (module.training or not module.track_running_stats)
        for module in model.modules()
    )


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether a layer is built to draw random numbers, now. Functional dropout shows only when it has run."""
    for module in model.modules():
        if not module.training:
            continue
        if any(map(is_generator, vars(module).values())):
            return True
        name = type(module).__name__.lower()
        named = isinstance(module, nn.RNNBase | nn.MultiheadAttention) or "drop" in name
        probabilities = (getattr(module, attribute, 0) for attribute in _DROPOUT)
        if named and any(isinstance(chance, float) and chance > 0 for chance in probabilities):
            return True
    return False


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether the optimizer evaluates the loss itself, several times in a step (LBFGS)."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _amp_refusal(model: nn.Module, optimizer: Optimizer | None, device: torch.device, precision: str) -> str | None:
    halves = {parameter.dtype for parameter in model.parameters() if parameter.dtype in {torch.float16, torch.bfloat16}}
    if halves:
        return f"the model's parameters are {', '.join(sorted(map(str, halves)))} already"
    if any(parameter.dtype is torch.float64 for parameter in model.parameters()):
        return "the model's parameters are torch.float64, which autocast leaves as they are"
    if not torch.amp.autocast_mode.is_autocast_available(device.type):
        return f"torch has no autocast for {device.type}"
    if precision == "fp16" and optimizer is not None and needs_closure(optimizer):
        return f"{type(optimizer).__name__} evaluates the loss itself, which a gradient scaler cannot follow"
    return None


def read(
    model: nn.Module,
    optimizer: Optimizer | None,
    device: torch.device,
    *,
    separable: bool,
    cut_refusal: str | None,
    drew_random_numbers: bool,
    num_processes: int,
) -> Traits:
    """The traits of a model as it stands now, in the middle of a run."""
    precision = "bf16" if memory.bf16_supported(device) else "fp16"
    coupled = None if separable else "separable=False: the loss couples the samples of a batch"
    return Traits(
        cut_refusal=coupled or cut_refusal,
        batch_norm=normalises_over_batch(model),
        random=drew_random_numbers or draws_random_numbers(model),
        recompute_refusal=recompute.possible(model),
        caches_keys=recompute.drops_cache(model),
        amp_precision="bf16" if precision == "bf16" else "fp16",
        amp_refusal=_amp_refusal(model, optimizer, device, precision),
        num_processes=num_processes,
    )
