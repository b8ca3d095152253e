"""(Build, TrainState) -> Engine. Building is itself an attempt, with phase build."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adaptive_trainer.engines.native import NativeEngine
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.phases import Phase
from adaptive_trainer.traits import needs_closure

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from adaptive_trainer.engines.base import Engine, Task
    from adaptive_trainer.plan import Build
    from adaptive_trainer.state import TrainState


def build(wanted: Build, state: TrainState, task: Task) -> Engine:
    """An engine for ``wanted`` that goes on from ``state``.

    Raises:
        RecipeError: The build is not possible here, or the optimizer is not one over the model's parameters.
    """
    if wanted.zero_stage or wanted.offload != "none":
        raise RecipeError("plan: ZeRO and offload are not part of this version; give zero_stage=0 and offload='none'")
    with task.track.enter(Phase.BUILD):
        state.model.to(task.device)
        if task.budget is not None:
            task.budget.adopt([*state.model.parameters(), *state.model.buffers()])
        if state.optimizer is None:
            optimizer = _optimizer(state.model, task)
            state.scheduler = None if task.scheduler is None else task.scheduler(optimizer)
            state.optimizer = optimizer  # last, so that a schedule which could not be made is asked for again
        if wanted.precision == "fp16" and needs_closure(state.optimizer):
            name = type(state.optimizer).__name__
            raise RecipeError(
                f"plan: precision='fp16' needs a gradient scaler, and {name} evaluates the loss itself, which none can "
                "follow; give precision='bf16' or 'fp32'"
            )
        return NativeEngine(wanted, state, task)


def _optimizer(model: nn.Module, task: Task) -> Optimizer:
    """The user's optimizer, made or checked.

    Raises:
        RecipeError: It is none, or holds none of the model's parameters.
    """
    if task.optimizer is None:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    made = task.optimizer
    if not isinstance(made, torch.optim.Optimizer):
        made = made(model.parameters())
    if not isinstance(made, torch.optim.Optimizer):
        raise RecipeError(
            f"optimizer: it gave a {type(made).__name__}; give a torch Optimizer, or a function from parameters to one"
        )
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in made.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in held):
        raise RecipeError(
            "optimizer: none of its parameters is the model's; make it from model.parameters() of the same model, "
            "or give a function: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
        )
    return made
