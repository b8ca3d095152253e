"""Learning rates and counts of steps: rows 64, 68 and 69.

Rows 65 (several processes) and 66 (an engine that steps the schedule itself) are not part of this version.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from adaptive_trainer import AdaptiveTrainer, Plan
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import At, at_backward, at_forward, cap, regression, rows_of, rungs
from tests.cases.runs import assert_close, data, rates, sgd, trainer_of
from tests.zoo import same, state_of

STEPS = 5


def steep(parameters):
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def linear(optimizer):
    """1, .9, .8, .7, .6, and .5 after the fifth step."""
    return LinearLR(optimizer, start_factor=1.0, end_factor=0.5, total_iters=STEPS)


def run(model=None, *, scheduler=linear, optimizer=steep, num=STEPS, **rest):
    trainer = trainer_of(model, data(8 * num), batch_size=8, scheduler=scheduler, optimizer=optimizer, **rest)
    return trainer, trainer.fit()


def rate_of(trainer):
    return trainer._loop.workshop.state.optimizer.param_groups[0]["lr"]


# Row 64: one step of the schedule for one of the optimizer.


@pytest.mark.parametrize("attach", [at_forward, at_backward])
@pytest.mark.parametrize("passages", [(3,), (3, 4), (3, 4, 5, 6)])
def test_case_064_accumulation_that_changes_leaves_the_learning_rates_alone(attach, passages):
    """From one piece to two (and four) after the second of five steps: .5 in the end, and not .2."""
    model = regression()
    attach(model, *passages)
    trainer, result = run(model, ladder=["halve_batch", "empty_cache"])
    assert rungs(result)[0] == "halve_batch"
    assert result.plan.accumulation(8) > 1
    assert rates(result) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert rate_of(trainer) == pytest.approx(0.5)
    plain, expected = run()
    assert rates(result) == rates(expected)
    assert (
        same(trainer._loop.workshop.state.scheduler.state_dict(), plain._loop.workshop.state.scheduler.state_dict())
        is None
    )


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_case_064_nor_does_a_plan_from_the_start(micro_batch):
    trainer, result = run(plan=Plan(micro_batch=micro_batch))
    assert rates(result) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert rate_of(trainer) == pytest.approx(0.5)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
@pytest.mark.parametrize("ladder", [["empty_cache"], ["gradient_checkpointing"], ["amp"]], ids=lambda names: names[0])
def test_case_064_nor_does_another_engine(phase, ladder):
    if phase in {"data", "optimizer"} and ladder != ["empty_cache"]:
        ladder = ["empty_cache", *ladder]
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))  # fmt: skip
    with inject_oom(step=1, phase=phase) as injected:
        trainer, result = run(model, ladder=ladder)
    assert injected.fired == 1
    assert rates(result) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert rate_of(trainer) == pytest.approx(0.5)
    assert len(result.fallbacks) == 1


def test_case_064_a_schedule_that_is_its_users_own_object():
    """Anything with ``step()`` is a schedule."""

    class Own:
        def __init__(self, optimizer):
            self.optimizer, self.steps = optimizer, 0

        def step(self):
            self.steps += 1
            self.optimizer.param_groups[0]["lr"] *= 0.5

        def state_dict(self):
            return {"steps": self.steps}

    model = regression()
    at_backward(model, 2, 3)
    trainer, result = run(model, scheduler=Own)
    assert rates(result) == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert trainer._loop.workshop.state.scheduler.steps == 5


def test_case_064_a_schedule_that_could_not_be_made_at_once_is_made():
    at = At(1, 2)

    def made(optimizer):
        at()
        return linear(optimizer)

    _, result = run(scheduler=made, ladder=["empty_cache", lambda plan: plan])
    assert len(result.fallbacks) == 2
    assert rates(result) == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])


SCHEDULES = {
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "sequential": lambda optimizer: SequentialLR(optimizer, [ConstantLR(optimizer, 0.1), ExponentialLR(optimizer, 0.5)], [2]),
    "chained": lambda optimizer: ChainedScheduler([ConstantLR(optimizer, 0.1, 3), ExponentialLR(optimizer, 0.5)]),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("passages", [(1,), (3, 4)])
def test_case_064_every_kind_of_schedule_is_where_it_would_be(kind, passages):
    """OneCycle raises if it is stepped more often than it was told; the plateau's loss is the whole batch's."""
    plain, expected = run(scheduler=SCHEDULES[kind], optimizer=sgd)
    model = regression()
    at_backward(model, *passages)
    trainer, result = run(model, scheduler=SCHEDULES[kind], optimizer=sgd)
    assert rates(result) == rates(expected)
    assert len(set(rates(result))) > 1 or kind == "plateau"
    assert rate_of(trainer) == rate_of(plain)
    assert_close(trainer, plain)


# Row 68: steps that the scaler skips.


class Exploding(nn.Module):
    """Its loss is infinite at the batch that says so."""

    def __init__(self):
        super().__init__()
        self.inner = regression()

    def forward(self, x):
        return self.inner(x) * torch.where(x[:1, :1] > 100, float("inf"), 1.0)


def exploding_at(position, num=8):
    batches = [tuple(entry.clone() for entry in batch) for batch in zip(*(t.split(8) for t in data(8 * num)[:]), strict=True)]  # fmt: skip
    batches[position - 1][0][:, 0] = 1000.0
    return batches


@pytest.fixture
def _growing_scale(monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, growth_interval=3))


def half(batches, *, fail=(), attach=at_backward, plan=None, **rest):
    model = Exploding()
    attach(model, *fail)
    trainer = trainer_of(
        model, batches, batch_size=None, optimizer=steep, scheduler=partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=9),
        plan=plan or Plan(precision="fp16"), loss=lambda output, targets: functional.mse_loss(output, targets) * 1e-4, **rest,
    )  # fmt: skip
    result = trainer.fit()
    return trainer, result


@pytest.mark.usefixtures("_growing_scale")
@pytest.mark.parametrize("fail", [(3,), (4,), (2, 3), (5,)])
@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_068_a_skipped_step_moves_neither_schedule_nor_count_with_and_without_a_fallback(fail, attach):
    """Infinite at the fourth batch: the batch counts as used, the schedule waits, the scale is halved once."""
    batches = exploding_at(4)
    plain, expected = half(batches)
    trainer, result = half(batches, fail=fail, attach=attach, ladder=["empty_cache", lambda plan: plan])
    assert len(result.fallbacks) == len(fail)
    for found in (expected, result):
        rows = rows_of(found, "step")
        assert [row.skipped for row in rows] == [False] * 3 + [True] + [False] * 4
        assert [row.step for row in rows] == [1, 2, 3, 3, 4, 5, 6, 7]
        assert [round(row.lr, 6) for row in rows] == [1.0, 0.9, 0.8, 0.7, 0.7, 0.6, 0.5, 0.4]
        assert found.steps == 7
    assert same(state_of(trainer), state_of(plain)) is None
    assert trainer._loop.workshop.state.scaler == plain._loop.workshop.state.scaler
    assert (
        plain._loop.workshop.state.scaler["scale"] == 65536.0 * 2
    )  # doubled after 3, halved at the fourth, doubled after 7


@pytest.mark.usefixtures("_growing_scale")
@pytest.mark.parametrize("position", [1, 4, 8])
def test_case_068_a_step_in_pieces_is_skipped_as_a_whole(position):
    """One infinite piece of several: nothing of the step is taken, and the scale falls once."""
    batches = exploding_at(position)
    batches[position - 1][0][:6, 0] = 1.0
    batches[position - 1][0][6:, 0] = 1000.0
    trainer, result = half(batches, plan=Plan(precision="fp16", micro_batch=2))
    rows = rows_of(result, "step")
    assert [index for index, row in enumerate(rows, 1) if row.skipped] == [position]
    assert result.steps == 7
    assert rate_of(trainer) == pytest.approx(0.3)


def small_loss(output, targets):
    return functional.mse_loss(output, targets) * 1e-3


def test_case_068_a_scale_survives_a_rebuild():
    """Gradient checkpointing put on in the middle of an fp16 run builds another engine, with the same scaler."""
    ends = []
    for fail in ((), (3,)):
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)]
        torch.manual_seed(1)
        for block in blocks:
            nn.init.normal_(block[0].weight)
            nn.init.zeros_(block[0].bias)
        head = nn.Linear(8, 1)
        nn.init.ones_(head.weight)
        nn.init.zeros_(head.bias)
        model = nn.Sequential(*blocks, head)
        at_backward(model, *fail)
        trainer = trainer_of(
            model, plan=Plan(precision="fp16"), ladder=["gradient_checkpointing"], scheduler=linear, loss=small_loss
        )
        result = trainer.fit()
        assert rungs(result) == (["gradient_checkpointing"] if fail else [])
        ends.append((state_of(trainer), trainer._loop.workshop.state.scaler, rates(result)))
    assert ends[0][1]["_growth_tracker"] == 4
    assert same(ends[1], ends[0]) is None


# Row 69: lengths are in optimizer steps.


def warm_up(optimizer):
    """Up in four steps, then down."""
    return LambdaLR(optimizer, lambda step: (step + 1) / 4 if step < 4 else 4 / (step + 1))


@pytest.mark.parametrize("largest", [4, 2, 1])
def test_case_069_a_warm_up_of_four_steps_stays_one(largest):
    """The accumulation changes at the second step."""
    model, done = regression(), []
    cap(model, largest, when=lambda _module: bool(done))
    _, result = run(
        model, scheduler=warm_up, num=8, callbacks=[lambda event: done.append(1) if event.event == "step" else None]
    )
    assert result.plan == Plan(micro_batch=largest)
    assert {event.step for event in result.fallbacks} == {1}
    expected = [0.25, 0.5, 0.75, 1.0, 4 / 5, 4 / 6, 4 / 7, 4 / 8]
    assert rates(result) == pytest.approx(expected)
    assert rates(run(scheduler=warm_up, num=8)[1]) == pytest.approx(expected)


@pytest.mark.parametrize(
    "where", [{"epochs": 3}, {"steps": 12}, {"epochs": 3, "steps": 12}, {"epochs": 99, "steps": 12}]
)
def test_case_069_the_length_of_a_run_is_not_the_plans(where):
    model = regression()
    cap(model, 1)
    trainer = trainer_of(model, data(32), batch_size=8, **where)
    result = trainer.fit()
    assert result.steps == 12
    assert result.epochs == 3
    assert len(rows_of(result, "step")) == 12


def test_case_069_evaluations_come_every_so_many_optimizer_steps():
    model = regression()
    cap(model, 2, when=lambda module: module.training)
    result = trainer_of(model, batch_size=8, eval_data=data(8), eval_steps=2).fit()
    assert [event.step for event in rows_of(result, "evaluate")] == [2, 4, 6, 8]
    torch.manual_seed(0)
    plain = AdaptiveTrainer(regression(), data(), loss=functional.mse_loss, optimizer=sgd, batch_size=8, eval_data=data(8), eval_steps=2, progress=False).fit()  # fmt: skip
    assert [event.step for event in rows_of(plain, "evaluate")] == [2, 4, 6, 8]
    for mine, theirs in zip(rows_of(result, "evaluate"), rows_of(plain, "evaluate"), strict=True):
        assert mine.metrics["loss"] == pytest.approx(theirs.metrics["loss"], abs=1e-6)
