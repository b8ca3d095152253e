"""The public types as users write them. Never run: mypy reads it, and what it accepts here is part of the contract."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from adaptive_trainer import (
    AdaptiveTrainer,
    Event,
    Fallback,
    Fidelity,
    FitResult,
    Ladder,
    LadderExhausted,
    OutOfMemory,
    Plan,
    RecipeError,
    Rung,
    Situation,
    Skip,
    Step,
)
from adaptive_trainer.testing import Injection, inject_oom

samples = TensorDataset(torch.zeros(8, 4), torch.zeros(8))


def make_model() -> nn.Module:
    return nn.Linear(4, 1)


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return ((output - targets) ** 2).mean()


def own_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    inputs, targets = batch
    return mean_square(model(inputs), targets), float(len(inputs))


def own_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def own_rung(plan: Plan, situation: Situation) -> Plan | Skip:
    return Skip("no") if situation.num_rows is None else plan


def listen(event: Event) -> None:
    if isinstance(event, Fallback):
        assert_type(event.old, Plan)
        assert_type(event.fidelity, Fidelity)
        assert_type(event.skipped, dict[str, str])
    elif isinstance(event, Step):
        assert_type(event.loss, float)
    elif isinstance(event, OutOfMemory):
        assert_type(event.requested_bytes, int | None)


class Listener:
    def on_event(self, event: Event) -> None:
        listen(event)


# One call at its shortest, and one with everything.
assert_type(AdaptiveTrainer(make_model(), samples, loss=mean_square, batch_size=4).fit(), FitResult)
trainer = AdaptiveTrainer(
    make_model,
    DataLoader(samples, batch_size=4),
    step=own_step,
    optimizer=own_optimizer,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
    steps=10,
    eval_data=samples,
    eval_steps=5,
    max_grad_norm=1.0,
    reduction="sum",
    weight=len,
    separable=False,
    plan=Plan(micro_batch=2, precision="bf16", gradient_checkpointing=True),
    ladder=["empty_cache", own_rung, Rung.of(own_rung)],
    memory_limit="1GiB",
    device=torch.device("cpu"),
    seed=1,
    run_dir=Path("runs/typing"),
    callbacks=[listen, Listener()],
    trackers=["tensorboard"],
    progress=False,
    metrics={"error": mean_square},
)
AdaptiveTrainer(make_model, [torch.zeros(4)], optimizer=torch.optim.SGD(make_model().parameters(), lr=0.1))
AdaptiveTrainer(make_model, samples, ladder=Ladder(), memory_limit=0.5, run_dir="runs/typing", device="cpu")
assert_type(AdaptiveTrainer.from_recipe("recipe.yaml", ["epochs=2"]), AdaptiveTrainer)

try:
    result = trainer.fit()
except LadderExhausted as error:
    assert_type(error.trail, tuple[OutOfMemory | Fallback, ...])
    assert_type(error.skipped, dict[str, str])
except RecipeError as error:
    assert_type(error.mistakes, tuple[str, ...])
else:
    assert_type(result.steps, int)
    assert_type(result.plan, Plan)
    assert_type(result.fallbacks, tuple[Fallback, ...])
    assert_type(result.loss, float | None)
    assert_type(result.losses, tuple[float, ...])
    assert_type(result.metrics, dict[str, float])
    assert_type(result.events, tuple[Event, ...])
    assert_type(result.plan.accumulation(8), int | None)
    assert_type(trainer.model, nn.Module)
    assert_type(trainer.evaluate(), dict[str, float])

with inject_oom(step=3, phase="backward", times=2) as injection:
    assert_type(injection, Injection)

# What must not pass: each line's `type: ignore` is an error by itself where mypy finds nothing to ignore.
AdaptiveTrainer(make_model, samples, batch_size="4")  # type: ignore[arg-type]  # samples are counted by whole numbers
AdaptiveTrainer(make_model, samples, None)  # type: ignore[call-arg]  # keywords only
Plan(precision="int8")  # type: ignore[arg-type]  # no such precision
Plan(4)  # type: ignore[call-arg]  # keywords only
