"""The sweep: memory runs out at every allocation of a step, and each run is compared with one that nothing disturbed.

A point is one run of three steps and the one place in it where memory runs out: once, twice in a row, or for ever. It is
held if the run ends as the one that goes on with the smaller plan from that step by itself, bit for bit; or, where no
rung is left, with `LadderExhausted` and the state after the last completed step. What fails once is never held by a
smaller plan: another try of the same one must do.

Where the points are is counted and not assumed: a run of each kind is watched, and what it allocates is what fails later.
`scripts/sweep` tries all of them, `test_sweep.py` some of each kind.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import tempfile
import weakref
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, field, fields, replace
from functools import lru_cache, partial
from itertools import chain, islice, product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan, history, phases, saving
from adaptive_trainer.allocations import Allocations
from adaptive_trainer.phases import Passage, Phase
from adaptive_trainer.state import kept_by_torch
from adaptive_trainer.testing import inject_oom
from tests.zoo import ZOO, decay, loss, same, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from adaptive_trainer.events import Event

BATCH_SIZE, STEPS = 4, 3
#: The last batch is shorter than the others.
NUM_ROWS = BATCH_SIZE * STEPS - 1


class Own(torch.optim.Optimizer):
    """A user's own: a counter beside the state, a list in it, and a loop that writes at once."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})
        self.calls = 0
        self.noise = torch.rand(2) + torch.rand(2)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                past = self.state[parameter].setdefault("past", [])
                if parameter.grad is not None:
                    past.append(parameter.grad * 0.5)
                    parameter.sub_(sum(past[-2:]) * self.noise[0], alpha=group["lr"])


def two_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    first, *others = parameters
    groups = [{"params": [first], "lr": 0.05}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=0.01, foreach=True)


OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, foreach=False),
    "adam_foreach": partial(torch.optim.Adam, lr=0.01, foreach=True, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adafactor": torch.optim.Adafactor,
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
    "own": Own,
    "two_groups": two_groups,
    "lbfgs": partial(torch.optim.LBFGS, max_iter=2),
}
#: The rungs of the walk, as the plans that they lead to.
PLANS = {
    "whole": Plan(),
    "halved": Plan(micro_batch=BATCH_SIZE // 2),
    "gradient_checkpointing": Plan(gradient_checkpointing=True),
    "amp": Plan(precision="bf16"),
}
MODES = {"once": 1, "twice": 2, "for_ever": math.inf}
#: An engine built amid a step, after a failure that asks for another build.
REBUILD = "rebuild"
#: All phases, to count what they allocate.
COUNTED = "counted"
REBUILDING = ("gradient_checkpointing", "amp", "empty_cache", "halve_batch")
#: The steps in which each phase fails. Evaluations and checkpoints come before the next step, and count as its.
STRUCK = {
    Phase.LOAD: (1,),
    Phase.BUILD: (1,),
    REBUILD: (3,),
    Phase.DATA: (1, 2),
    Phase.FORWARD: (1, 2),
    Phase.BACKWARD: (1, 2),
    Phase.REDUCE: (1, 2),
    Phase.OPTIMIZER: (1, 2),
    Phase.EVALUATE: (2,),
    Phase.CHECKPOINT: (3, 4),
}


LASTING = {Phase.LOAD, Phase.BUILD, Phase.CHECKPOINT}


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained.

    Attributes:
        kind: Of the zoo.
        optimizer: Of `OPTIMIZERS`.
        rung: Of `PLANS`: where the walk begins.
    """

    kind: str
    optimizer: str
    rung: str


@dataclass(frozen=True, slots=True)
class Point:
    """What is trained, and where memory runs out.

    Attributes:
        phase: A phase of `STRUCK`.
        step: The step, counted from 1.
        piece: The micro-batch, counted from 0; -1 outside micro-batches.
        allocation: The tensor allocation of the phase, counted from 1; 0 is the phase's entry.
        mode: Of `MODES`.
    """

    case: Case
    phase: str
    step: int
    piece: int
    allocation: int
    mode: str

    def __str__(self) -> str:
        return "/".join(map(str, (*astuple(self.case), *(getattr(self, entry.name) for entry in fields(self)[1:]))))

    @classmethod
    def parsed(cls, text: str) -> Point:
        """The point that `str` gave this text."""
        kind, optimizer, rung, phase, step, piece, allocation, mode = text.split("/")
        return cls(Case(kind, optimizer, rung), phase, int(step), int(piece), int(allocation), mode)

    @property
    def stratum(self) -> tuple[str, ...]:
        """Among which points it is drawn."""
        return (self.case.kind, self.case.optimizer, self.phase, self.mode)

    def failing(self) -> ExitStack:
        """Memory runs out here, in the context that this is; ``fired`` on what it gives tells how often it did."""
        stack = ExitStack()
        if self.phase == REBUILD:
            stack.enter_context(inject_oom(step=self.step, phase=Phase.FORWARD))
        stack.injected = stack.enter_context(  # type: ignore[attr-defined]
            inject_oom(
                step=self.step,
                phase=Phase.BUILD if self.phase == REBUILD else self.phase,
                micro_batch=None if self.piece < 0 else self.piece,
                allocation=self.allocation or None,
                times=MODES[self.mode],
            )
        )
        return stack


# Runs.


class Masked(nn.CrossEntropyLoss):
    """A user's step with weights of its own, which differ from piece to piece."""

    def step(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        tokens, targets = batch
        kept = targets % 3 > 0
        return self(model(tokens), targets.masked_fill(~kept, self.ignore_index)), float(kept.sum())


@dataclass
class Seen:
    """What a callback sees of a run.

    Attributes:
        steps: Number, loss, learning rate and samples of each.
        metrics: Step and metrics of each evaluation.
        fallbacks: The events.
    """

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    metrics: list[tuple[Any, ...]] = field(default_factory=list)
    fallbacks: list[Any] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if event.event == "step":
            self.steps.append((event.step, event.loss, event.lr, event.num_samples))
        elif event.event == "evaluate":
            self.metrics.append((event.step, event.metrics))
        elif event.event == "fallback":
            self.fallbacks.append(event)


def trainer_of(case: Case, phase: str, callbacks: list[Any], run_dir: str | None = None) -> AdaptiveTrainer:
    """What fails in some phase; evaluations and checkpoints are only where they are what fails."""
    member = ZOO[case.kind]
    more: dict[str, Any] = {"step": Masked().step} if case.kind == "tied_lm" else {"loss": loss}
    if phase in {Phase.EVALUATE, COUNTED}:
        more |= {"eval_data": member.data(BATCH_SIZE + 1), "eval_steps": 1}
    if phase in {Phase.CHECKPOINT, COUNTED}:
        more |= {"run_dir": run_dir, "checkpoint_steps": STEPS - 1}
    return AdaptiveTrainer(
        member.model,
        member.data(NUM_ROWS),
        optimizer=OPTIMIZERS[case.optimizer],
        scheduler=decay,
        batch_size=BATCH_SIZE,
        plan=PLANS[case.rung],
        ladder=REBUILDING if phase in {REBUILD, COUNTED} else None,
        max_grad_norm=1.0,
        progress=False,
        callbacks=callbacks,
        **more,
    )


def end_of(trainer: AdaptiveTrainer) -> dict[str, Any]:
    """All that a run leaves; nothing if it never had a model."""
    state = trainer._loop.workshop.state
    if state is None:
        return {}
    # A schedule puts a counting ``step`` on the optimizer, which is nothing that it keeps.
    kept = {} if state.optimizer is None else vars(state.optimizer)
    own = {name: value for name, value in kept.items() if name not in kept_by_torch() and name != "step"}
    return {**state_of(trainer), "own": own}


@lru_cache(maxsize=256)
def reference(case: Case, at: int, plan: Plan, piece: int | None, *, evaluates: bool) -> tuple[Seen, dict[str, Any]]:
    """A run that nothing disturbs, and that goes on with ``plan`` from step ``at`` of its own accord.

    ``piece`` is the micro-batch of its evaluations from there on.
    """
    seen = Seen()

    def go_on(event: Event) -> None:
        if event.event in {"start", "step"} and event.step == at - 1:
            trainer._loop.descent.plan = plan
            trainer._evaluation._walk.plan = replace(plan, micro_batch=piece)

    trainer = trainer_of(case, Phase.EVALUATE if evaluates else "", [seen, go_on])
    with guarded(Alive(at)):
        trainer.fit()
    return seen, end_of(trainer)


@lru_cache(maxsize=64)
def stopped(case: Case, at: int) -> tuple[Seen, dict[str, Any]]:
    """A run that ends where step ``at`` begins."""
    seen = Seen()

    class End(Exception):
        pass

    def end(event: Event) -> None:
        if event.event in {"start", "step"} and event.step == at - 1:
            raise End

    trainer = trainer_of(case, "", [seen, end])
    try:
        trainer.fit()
    except End:
        trainer._loop.begin()
        trainer._loop.workshop.open()
        trainer._loop.close()
    return seen, end_of(trainer)


class Alive:
    """Storages that the attempts at one step have made, and how many of them a fallback finds alive."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.found = 0
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def __call__(self, passage: Passage) -> Allocations | None:
        """Watch a phase. What is loaded or built stays; evaluations are watched in every run, because torch has kernels
        for them that it only takes where nobody watches."""
        if passage.phase != Phase.EVALUATE and (passage.step != self.step or passage.phase in LASTING):
            return None
        return Allocations(lambda storage: self._made.append(weakref.ref(storage)))

    def look(self, event: Event) -> None:
        if event.event == "fallback":
            self.found += sum(reference() is not None for reference in self._made)
            self._made.clear()


@contextmanager
def guarded(guard: phases.Guard) -> Iterator[None]:
    phases.everywhere.append(guard)
    try:
        yield
    finally:
        phases.everywhere.remove(guard)


# Judging.


def lost(point: Point) -> str:
    """What is wrong with how a point's run ends; empty if the point is held."""
    seen, alive = Seen(), Alive(point.step)
    with tempfile.TemporaryDirectory() if point.phase == Phase.CHECKPOINT else nullcontext() as run_dir:
        trainer = trainer_of(point.case, point.phase, [seen, alive.look], run_dir)
        exhausted = False
        with guarded(alive), point.failing() as failing:
            try:
                trainer.fit()
            except LadderExhausted:
                exhausted = True
        end = end_of(trainer)
        if not failing.injected.fired:
            return "it was not reached"
        if alive.found:
            return f"{alive.found} tensors of a failed attempt were alive when the next began"
        if point.mode == "once" and exhausted:
            return "one failure exhausted the ladder"
        if exhausted:
            return _lost_at_the_end(point, seen, end)
        return _lost_by_going_on(point, seen, end) or _lost_on_disk(point, run_dir, end)


def _lost_by_going_on(point: Point, seen: Seen, end: dict[str, Any]) -> str:
    plan = PLANS[point.case.rung]
    rungs, piece = [event.rung for event in seen.fallbacks], plan.micro_batch
    for event in seen.fallbacks:
        if event.step != point.step - 1 or event.old != (
            plan if event.scope == "run" else replace(plan, micro_batch=piece)
        ):
            return f"a fallback that nothing asked for: {event}"
        if event.scope == "run":
            plan = event.new
        else:
            piece = event.new.micro_batch
    if point.mode == "once" and rungs != {REBUILD: [*rungs[:1], "empty_cache"], Phase.CHECKPOINT: []}.get(
        point.phase, ["empty_cache"]
    ):
        return f"one failure was answered by {rungs}"
    changed = (plan, piece) != (PLANS[point.case.rung], PLANS[point.case.rung].micro_batch)
    other, theirs = reference(
        point.case, point.step if changed else 0, plan, piece, evaluates=point.phase == Phase.EVALUATE
    )
    return same([seen.steps, seen.metrics, end], [other.steps, other.metrics, theirs]) or ""


def _lost_at_the_end(point: Point, seen: Seen, end: dict[str, Any]) -> str:
    if not end:
        return "" if point.phase == Phase.LOAD else "there is no model"
    other, theirs = stopped(point.case, point.step)
    if end["optimizer"] is None:  # where none could be built, that is all
        theirs = {**theirs, "optimizer": None, "scheduler": None, "own": {}}
    return same([seen.steps, end], [other.steps, theirs]) or ""


def _lost_on_disk(point: Point, run_dir: str | None, end: dict[str, Any]) -> str:
    """Whether each checkpoint is there and good, but for one that found no room twice."""
    if run_dir is None:
        return ""
    folder, warnings = Path(run_dir) / "checkpoints", []
    expected = {STEPS - 1, STEPS} - ({point.step - 1} if point.mode != "once" else set())
    found = sorted(path.name for path in folder.iterdir())
    if found != [f"step-{step:08}" for step in sorted(expected)]:
        return f"the checkpoints are {found}"
    opened = saving.open_newest(folder, warnings.append)
    if opened is None or warnings:
        return f"no good checkpoint: {warnings}"
    return (same(dict(opened.weights()), end["model"], "checkpoint") or "") if STEPS in expected else ""


# Where the points are.


@dataclass
class Counting:
    """How many allocations each passage through a phase has, at most; its entry alone is 0."""

    counts: dict[tuple[Phase, int, int], int] = field(default_factory=dict)

    def __call__(self, passage: Passage) -> Allocations:
        key = passage.phase, passage.step, -1 if passage.micro_batch is None else passage.micro_batch
        before, now = self.counts.get(key, 0), 0

        def count(_storage: torch.UntypedStorage) -> None:
            nonlocal now
            now += 1
            self.counts[key] = max(before, now)

        self.counts[key] = before
        return Allocations(count)


def points_of(case: Case) -> list[Point]:
    """Every point of a case. One run shows them all: it evaluates, leaves checkpoints, and builds anew at its last step."""
    counting, found = Counting(), []
    with tempfile.TemporaryDirectory() as run_dir, inject_oom(step=STEPS), guarded(counting):
        trainer_of(case, COUNTED, [], run_dir).fit()
    for (phase, step, piece), count in counting.counts.items():
        name = REBUILD if phase is Phase.BUILD and step == STEPS else str(phase)
        if step in STRUCK[name]:
            places = product(range(count + 1), MODES)
            found += [Point(case, name, step, piece, allocation, mode) for allocation, mode in places]
    return found


def cases(kinds: Iterable[str] = ZOO) -> list[Case]:
    return [Case(*entry) for entry in product(kinds, OPTIMIZERS, PLANS)]


def sample(points: Iterable[Point], num_points: int, seed: int) -> list[Point]:
    """So many points, as evenly from all strata as they have them."""
    draw = random.Random(seed)
    strata: dict[tuple[str, ...], list[Point]] = {}
    for point in points:
        strata.setdefault(point.stratum, []).append(point)
    shuffled = [draw.sample(stratum, len(stratum)) for stratum in strata.values()]
    draw.shuffle(shuffled)
    rounds = chain.from_iterable(zip_longest(*shuffled))
    return list(islice((point for point in rounds if point is not None), num_points))


@contextmanager
def conditions() -> Iterator[None]:
    """What makes runs repeatable and quick: no log, steps that are always done again, and little to be collected."""
    log, share = logging.getLogger("adaptive_trainer"), history.SHARE
    disabled, log.disabled = log.disabled, True
    history.SHARE = 1e-9  # a copy at the first step and none after it, whatever the clock says
    reference(Case("mlp", "adam", "amp"), 0, Plan(precision="bf16"), None, evaluates=True)  # brings all of torch in
    gc.collect()
    gc.freeze()  # each clean-up would look through all of torch otherwise, which takes a hundred times as long
    try:
        yield
    finally:
        gc.unfreeze()
        log.disabled, history.SHARE = disabled, share
