"""The laws as properties of random runs: any batch, any ladder, failures and interruptions anywhere.

`RANDOM_RUNS=2000 scripts/test tests/laws/test_random_runs.py` tries so many runs of each kind, other ones every time;
without it a few are tried, always the same.
"""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from adaptive_trainer import AdaptiveTrainer, Fallback, LadderExhausted, OutOfMemory, Plan
from adaptive_trainer.goal import Goal
from adaptive_trainer.ladder import Ladder
from adaptive_trainer.plan import sizes
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import rows_of
from tests.structures import Node, make, read, structures
from tests.zoo import decay, same, state_of

LONG = int(os.environ.get("RANDOM_RUNS", "0"))


def examples(few):
    """How many runs are tried; by default the same few every time."""
    return settings(
        max_examples=LONG or few,
        derandomize=not LONG,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


NUM_CLASSES = 3
RUNGS = ["empty_cache", "halve_batch", "gradient_checkpointing", "amp"]
BUILT_IN = [rung.name for rung in Ladder().rungs]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "plain_sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
SCHEDULES = {
    "none": None,
    "decay": decay,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
}


# What is run.


@dataclass(frozen=True)
class Failing:
    """A place where memory runs out."""

    phase: str
    step: int
    times: int
    allocation: int | None
    micro_batch: int | None


@dataclass(frozen=True)
class Cut:
    """A run that ends early, and how it goes on."""

    step: int
    by: str
    then: str


@dataclass(frozen=True, kw_only=True)
class Case:
    structure: Node
    form: str
    layers: tuple[str, ...]
    dtype: torch.dtype
    num_samples: int
    batch_size: int
    source: str
    shuffle: bool
    draws: bool
    steps: int
    in_epochs: bool
    ladder: tuple[str, ...] | None
    plan: Plan
    failures: tuple[Failing, ...]
    cuts: tuple[Cut, ...]
    optimizer: str
    schedule: str
    max_grad_norm: float | None
    is_limited: bool
    eval_steps: int | None
    checkpoint_steps: int | None
    as_function: bool

    @property
    def num_batches(self):
        return -(-self.num_samples // self.batch_size)

    @property
    def smallest_piece(self):
        return 2 if "batch_norm" in self.layers else 1

    def batch(self, ids):
        batch = make(self.structure, ids)
        if self.form in {"step", "weighted step"}:
            return batch
        labels = labels_of(ids)
        return (batch, labels) if self.form == "loss" else {"structure": batch, "labels": labels}


def labels_of(ids):
    """Classes, of which every third does not count."""
    return torch.tensor([-100 if index % 3 == 1 else index % NUM_CLASSES for index in ids])


FAILURES = st.builds(
    Failing,
    phase=st.sampled_from(["data", "forward", "backward", "optimizer", "build", "evaluate", "checkpoint", "load"]),
    step=st.integers(1, 7),
    times=st.sampled_from([1, 1, 1, 2, 3, 5, 20]),
    allocation=st.none() | st.integers(1, 12),
    micro_batch=st.none() | st.integers(0, 2),
)


@st.composite
def cases(draw):
    layers = tuple(draw(st.lists(st.sampled_from(["dropout", "batch_norm"]), unique=True)))
    batch_size = draw(st.integers(2 if "batch_norm" in layers else 1, 11))
    num_batches = draw(st.integers(1, 3))
    last = draw(st.integers(2 if "batch_norm" in layers else 1, batch_size))
    num_samples = batch_size * (num_batches - 1) + last
    in_epochs = draw(st.booleans())
    steps = draw(st.integers(1, 2)) * num_batches if in_epochs else draw(st.integers(1, 6))
    cuts = st.builds(
        Cut,
        step=st.integers(1, max(1, steps - 1)),
        by=st.sampled_from(["callback", "forward", "goal"]),
        then=st.sampled_from(["resume", "again"]),
    )
    micro_batch = draw(st.none() | st.integers(1, batch_size))
    return Case(
        structure=draw(structures({batch_size, last})),
        form=draw(st.sampled_from(["step", "weighted step", "loss", "carried"])),
        layers=layers,
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        num_samples=num_samples,
        batch_size=batch_size,
        source=draw(st.sampled_from(["dataset", "loader", "loader with a generator", "list"])),
        shuffle=draw(st.booleans()),
        draws=draw(st.booleans()),
        steps=steps,
        in_epochs=in_epochs,
        ladder=draw(st.none() | st.lists(st.sampled_from(RUNGS), unique=True, min_size=1).map(tuple)),
        plan=Plan(micro_batch=micro_batch, gradient_checkpointing=draw(st.booleans())),
        failures=tuple(draw(st.lists(FAILURES, max_size=3))),
        cuts=tuple(draw(st.lists(cuts, max_size=2, unique_by=lambda cut: cut.step))) if steps > 1 else (),
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        schedule=draw(st.sampled_from(list(SCHEDULES))),
        max_grad_norm=draw(st.sampled_from([None, 0.5])),
        is_limited=draw(st.booleans()),
        eval_steps=draw(st.none() | st.integers(1, 3)),
        checkpoint_steps=draw(st.none() | st.integers(1, 3)),
        as_function=draw(st.booleans()),
    )


class Numbered(Dataset):
    def __init__(self, num_samples):
        self._num_samples = num_samples

    def __len__(self):
        return self._num_samples

    def __getitem__(self, index):
        if not 0 <= index < self._num_samples:
            raise IndexError
        return index


def data_of(case):
    """Data and batch size as arguments of the trainer."""

    def together(ids):
        if case.draws:
            torch.rand(3)
        return case.batch(ids)

    if case.source == "dataset":
        return {
            "data": Numbered(case.num_samples), "batch_size": case.batch_size, "collate_fn": together,
            "shuffle": case.shuffle,
        }  # fmt: skip
    # Of its own, or every run would read another list.
    generator = torch.Generator().manual_seed(4) if case.source != "loader" else None
    loader = DataLoader(
        Numbered(case.num_samples), case.batch_size, collate_fn=together, shuffle=case.shuffle, generator=generator
    )
    return {"data": list(loader) if case.source == "list" else loader}


@dataclass
class Output:
    """An output of a class of its own, as Hugging Face models give."""

    loss: Any
    logits: Any


class Model(nn.Module):
    """Computes from the samples' numbers, which it reads from all fields of the batch."""

    def __init__(self, case, watch):
        super().__init__()
        torch.manual_seed(1)
        kinds = {"dropout": lambda: nn.Dropout(0.3), "batch_norm": lambda: nn.BatchNorm1d(4)}
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), *(kinds[layer]() for layer in case.layers), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(4, NUM_CLASSES)
        self.to(case.dtype)
        self.structure, self.form, self.watch = case.structure, case.form, watch

    def forward(self, structure, labels=None):
        ids = read(self.structure, structure)
        self.watch.enter(ids, training=self.training)
        x = torch.sin(torch.tensor(ids)[:, None] * torch.arange(1, 5)).to(self.head.weight.dtype)
        for block in self.blocks:
            x = block(x)
            self.watch.keep_track(x)
        logits = self.head(x)
        self.watch.keep_track(logits)
        return Output(functional.cross_entropy(logits, labels), logits) if self.form == "carried" else logits


def objective_of(case):
    if case.form in {"loss", "carried"}:
        return {"loss": functional.cross_entropy if case.form == "loss" else None}

    def step(model, batch):
        labels = labels_of(read(case.structure, batch))
        if case.form == "weighted step":
            return functional.cross_entropy(model(batch), labels), int((labels != -100).sum())
        return functional.cross_entropy(model(batch), labels.clamp(0))

    return {"step": step}


# What is seen of a run.


class Stop(Exception):
    """Ends a run from outside."""


class Watch:
    """Holds every event of a run to the laws of descent and honesty, and the samples that the model saw.

    Attributes:
        used: The plan of each committed step.
        samples: The pieces of each committed step.
        plan: The training's plan, as the journal tells it.
    """

    def __init__(self, case, *, stop_at=None):
        self.case = case
        self.used: dict[int, Plan] = {}
        self.samples: dict[int, list[list[int]]] = {}
        self.losses: dict[int, float] = {}
        self.saved: dict[int, tuple[Plan, int]] = {0: (case.plan, 0)}
        self.plan = case.plan
        self.step = 0
        self.attempt: list[list[int]] = []
        self.events: list[Any] = []
        self.error: Stop | None = None
        self.stop = stop_at
        self._alive: list[weakref.ref] = []
        self._step_plan: Plan | None = None
        self._evaluated_in: int | None = case.plan.micro_batch
        self.held_bytes = 0 if case.is_limited else None

    # In the model.

    def enter(self, ids, *, training):
        alive = [reference().shape for reference in self._alive if reference() is not None]
        assert not alive, f"tensors of an earlier piece or attempt are alive: {alive}"
        self._alive.clear()
        if training:
            self.attempt.append(ids)
            if self.stop is not None and self.stop.by == "forward" and self.step + 1 == self.stop.step:
                self.stop_now()

    def keep_track(self, tensor):
        self._alive.append(weakref.ref(tensor))

    def stop_now(self):
        self.stop, self.error = None, Stop("as asked")
        raise self.error

    # Of the journal.

    def now(self, *, evaluating):
        if evaluating:
            return replace(self.plan, micro_batch=self._evaluated_in)
        return self._step_plan or self.plan

    def on_event(self, event):
        self.events.append(event)
        getattr(self, f"_{event.event}", lambda _: None)(event)

    def _start(self, event):
        assert event.plan == self.plan
        assert event.step == self.step

    def _out_of_memory(self, event):
        self.attempt = []
        self._evaluating = event.phase == "evaluate"
        assert event.step == self.step
        assert event.plan == self.now(evaluating=self._evaluating)

    def _fallback(self, event):
        assert event.step == self.step
        assert type(self.events[-2]) is OutOfMemory
        assert (event.scope == "evaluation") == self._evaluating
        assert event.old == self.now(evaluating=self._evaluating)
        assert event.rung in (self.case.ladder or BUILT_IN)
        # Between two batches nobody has looked what there was.
        assert event.held_bytes in ({0, None} if self.events[-2].phase in {"load", "build"} else {self.held_bytes})
        if event.new == event.old:
            assert event.rung == "empty_cache"
        else:
            assert event.new.descends_from(event.old)
        if event.scope == "evaluation":
            self._evaluated_in = event.new.micro_batch
        elif event.scope == "step":
            self._step_plan = event.new
        else:
            self.plan = event.new if self._step_plan is None else replace(event.new, micro_batch=self.plan.micro_batch)
            self._step_plan = None if self._step_plan is None else event.new

    def _step(self, event):
        self.step += 1
        assert event.step == self.step
        assert math.isfinite(event.loss)
        assert not event.skipped
        self.used[self.step], self._step_plan = self.now(evaluating=False), None
        self.samples[self.step], self.attempt = self.attempt, []
        self.losses[self.step] = event.loss
        assert sum(map(len, self.samples[self.step])) == event.num_samples
        if self.stop is not None and self.stop.by == "callback" and self.stop.step <= self.step:
            self.stop_now()

    def _checkpoint(self, event):
        assert event.step == self.step
        self.saved[event.step] = self.plan, event.step

    def _finish(self, event):
        assert event.plan == self.plan
        assert event.step == self.step

    def goes_on_from(self, step):
        """A new trainer goes on, from the checkpoint of a step or from the start."""
        self.plan, self.step = self.saved[step]
        self._step_plan, self._evaluated_in = None, self.case.plan.micro_batch


def trainer_of(case, watch, **rest):
    model = (lambda: Model(case, watch)) if case.as_function else Model(case, watch)
    arguments = {
        "optimizer": OPTIMIZERS[case.optimizer], "scheduler": SCHEDULES[case.schedule], "callbacks": [watch.on_event],
        "max_grad_norm": case.max_grad_norm, "ladder": None if case.ladder is None else list(case.ladder),
        "plan": case.plan, "progress": False, "seed": 3,
    }  # fmt: skip
    return AdaptiveTrainer(model, **data_of(case), **objective_of(case), **(arguments | rest))


class Disturbed:
    """A run with all that happens to it."""

    def __init__(self, case, run_dir):
        self._case, self._run_dir = case, run_dir
        self.watch = Watch(case)
        self.exhausted: LadderExhausted | None = None
        self.evaluated: dict[str, float] = {}

    def run(self):
        case = self._case
        with ExitStack() as stack:
            for failing in case.failures:
                stack.enter_context(inject_oom(**vars(failing)))
            self.trainer = None
            for cut in (*sorted(case.cuts, key=lambda cut: cut.step), None):
                if cut is None or cut.step > self.watch.step:
                    self._go_on(cut)
                    if self.exhausted is not None:
                        return
                    if cut is not None and cut.then == "resume":
                        self.trainer = None

    def _go_on(self, cut):
        case, watch = self._case, self.watch
        until = cut.step if cut is not None and cut.by == "goal" else case.steps
        if self.trainer is None:
            goal = {"steps": until}
            if until == case.steps and case.in_epochs:
                goal = {"epochs": case.steps // case.num_batches}
            evaluated = [case.batch(list(range(case.num_samples)))] if case.eval_steps else None
            self.trainer = trainer_of(
                case, watch, **goal, run_dir=self._run_dir, checkpoint_steps=case.checkpoint_steps,
                eval_data=evaluated, eval_steps=case.eval_steps, memory_limit="1GiB" if case.is_limited else None,
            )  # fmt: skip
            newest = sorted(self._run_dir.glob("checkpoints/step-*"))[-1:]
            watch.goes_on_from(int(newest[0].name.removeprefix("step-")) if newest else 0)
        else:
            self.trainer._goal = Goal(until - watch.step, None)
        watch.stop, watch.error, watch.attempt = cut, None, []
        first = len(watch.events)
        try:
            result = self.trainer.fit()
        except Stop as error:
            if error is not watch.error:
                raise
        except LadderExhausted as error:
            self.exhausted = error
            own = [event for event in watch.events[first:] if type(event) in {OutOfMemory, Fallback}]
            self._check_the_end(own)
        else:
            assert result.steps == until
            assert list(result.events) == watch.events[first:]
            assert watch.events[-1].event == "finish"
            assert result.losses == tuple(event.loss for event in rows_of(result, "step"))

    def _check_the_end(self, own):
        error, last = self.exhausted, own[-1]
        assert type(last) is OutOfMemory
        assert set(error.skipped) == set(self._case.ladder or BUILT_IN) or "every rung" in error.skipped
        assert isinstance(error.__cause__, torch.OutOfMemoryError)
        evaluating = last.phase == "evaluate"
        walk = [
            entry for before, entry in zip([None, *own], own, strict=False)
            if ((entry if type(entry) is OutOfMemory else before).phase == "evaluate") == evaluating
        ]  # fmt: skip
        assert list(error.trail)[-len(walk) :] == walk


def by_itself(case, used, steps):
    """A run that nothing disturbs and that takes the plans of its steps by itself, without a ladder."""
    watch = Watch(replace(case, plan=used[1]))

    def take(event):
        if event.event == "step":
            watch.plan = trainer._loop.descent.plan = used.get(event.step + 1, watch.plan)

    trainer = trainer_of(case, watch, steps=steps, plan=used[1], ladder=[], callbacks=[watch.on_event, take])
    trainer.fit()
    return state_of(trainer), watch


@pytest.mark.timeout(0 if LONG else 300)
@examples(120)
@given(case=cases())
def test_a_random_run_keeps_the_laws(case):
    """Replay, samples, descent, release, honesty, and going on from checkpoints, in one run."""
    with tempfile.TemporaryDirectory() as folder:
        from pathlib import Path

        disturbed = Disturbed(case, Path(folder))
        disturbed.run()
    watch, trainer = disturbed.watch, disturbed.trainer
    steps = trainer._loop.track.step
    assert steps == watch.step
    assert disturbed.exhausted is not None or steps == case.steps
    if steps == 0:
        return
    expected, plain = by_itself(case, watch.used, steps)
    found = state_of(trainer)
    if disturbed.exhausted is not None:
        del found["streams"], expected["streams"]
    assert same(found, expected) is None
    for step in range(1, steps + 1):
        assert watch.losses[step] == plain.losses[step]
        assert watch.samples[step] == plain.samples[step]
        rows = sum(map(len, watch.samples[step]))
        wanted = sizes(rows, watch.used[step].micro_batch, case.smallest_piece)
        assert tuple(map(len, watch.samples[step])) == wanted
    check_epochs(case, [list(chain(*watch.samples[step])) for step in range(1, steps + 1)])


def check_epochs(case, steps):
    """Every sample once in each epoch, in batches of the right size."""
    for first in range(0, len(steps), case.num_batches):
        epoch = steps[first : first + case.num_batches]
        seen = list(chain(*epoch))
        assert len(set(seen)) == len(seen)
        assert all(len(batch) == case.batch_size for batch in epoch[: case.num_batches - 1])
        if len(epoch) == case.num_batches:
            assert set(seen) == set(range(case.num_samples))
