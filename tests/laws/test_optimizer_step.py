"""Law 1 for a failure inside the optimizer's step: whatever has moved already is put back, whichever optimizer it is."""

import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan, history
from adaptive_trainer.testing import inject_oom
from tests.zoo import same, state_of

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Factored(torch.optim.Optimizer):
    """Like Adafactor: row and column means in the state, an update clipped by its own size."""

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr, "decay": 0.8})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, squares = self.state[parameter], parameter.grad**2 + 1e-30
                if not state:
                    state["step"] = 0
                    if squares.dim() > 1:
                        state["rows"], state["columns"] = torch.zeros_like(squares[:, 0]), torch.zeros_like(squares[0])
                    else:
                        state["all"] = torch.zeros_like(squares)
                state["step"] += 1
                decay = 1 - state["step"] ** -group["decay"]
                if squares.dim() > 1:
                    state["rows"].lerp_(squares.mean(1), 1 - decay)
                    state["columns"].lerp_(squares.mean(0), 1 - decay)
                    second = state["rows"][:, None] * state["columns"][None] / state["rows"].mean()
                else:
                    second = state["all"].lerp_(squares, 1 - decay)
                update = parameter.grad * second.rsqrt()
                parameter.sub_(update / update.square().mean().sqrt().clamp(min=1.0), alpha=group["lr"])


class Plain(torch.optim.Optimizer):
    """A user's own: a counter beside the state, a list in it, and a loop that writes at once."""

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr})
        self.calls = 0
        self.seen = []

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                self.seen.append(float(parameter.grad.abs().sum()))
                self.state[parameter].setdefault("past", []).append(parameter.grad.clone())
                self.state[parameter]["past"] = self.state[parameter]["past"][-3:]
                parameter.sub_(sum(self.state[parameter]["past"]), alpha=group["lr"])


class Moments(NamedTuple):
    mean: torch.Tensor
    count: int


class Furnished(torch.optim.Optimizer):
    """A user's own that keeps what it keeps in containers of every kind, some under two names."""

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr})
        self.moments = self.state
        self.counts = defaultdict(int)
        self.recent = deque(maxlen=3)
        self.order = OrderedDict(a=1, b=2)
        self.seen = set()
        self.total = Moments(torch.zeros(()), 0)
        self.both = [self.total.mean, self.recent]

    @torch.no_grad()
    def step(self, closure=None):
        self.order.move_to_end("a")
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                self.counts[index] += 1
                self.seen.add((index, self.counts[index]))
                state = self.moments[parameter]
                old = state.get("moments", Moments(torch.zeros_like(parameter), 0))
                state["moments"] = Moments(old.mean.lerp(parameter.grad, 0.5), old.count + 1)
                self.recent.append(parameter.grad.abs().sum())
                self.total.mean.add_(self.recent[-1])
                self.total = self.total._replace(count=self.total.count + 1)
                parameter.sub_(state["moments"].mean + self.recent[0] * 1e-3, alpha=group["lr"])

    def kept(self):
        assert self.moments is self.state
        assert self.both[0] is self.total.mean
        assert self.both[1] is self.recent
        assert self.recent.maxlen == 3
        self.counts.default_factory()
        return [dict(self.counts), list(self.recent), list(self.order), sorted(self.seen), self.total]


def two_groups(make, parameters, **rest):
    first, *others = list(parameters)
    return make([{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.02}], **rest)


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=False),
    "sgd foreach": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": partial(torch.optim.Adam, foreach=False),
    "adam foreach": partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "torch's adafactor": torch.optim.Adafactor,
    "factored": Factored,
    "a user's own": Plain,
    "one with containers of every kind": Furnished,
    "two groups of sgd": partial(two_groups, partial(torch.optim.SGD, momentum=0.9, foreach=False)),
    "two groups of adam": partial(two_groups, partial(torch.optim.Adam, foreach=True)),
}


def model_of():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


def data_of(rows=48):
    torch.manual_seed(4)
    return TensorDataset(torch.randn(rows, 6), torch.randn(rows, 2))


def trainer_of(optimizer, **rest):
    arguments = {
        "loss": nn.MSELoss(),
        "batch_size": 8,
        "optimizer": optimizer,
        "scheduler": lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step)),
        "epochs": 1,
        **rest,
    }
    return AdaptiveTrainer(model_of(), data_of(), **arguments)


def end_of(trainer):
    optimizer = trainer._loop.workshop.state.optimizer
    kept = optimizer.kept() if isinstance(optimizer, Furnished) else []
    return state_of(trainer), {k: v for k, v in vars(optimizer).items() if k in {"calls", "seen"}}, kept


def rarely(monkeypatch):
    """No second copy falls due within the run, so that later steps have to be done again from the first."""
    monkeypatch.setattr(history, "SHARE", 1e-9)


@pytest.mark.parametrize("replayed", [False, True], ids=["copy at hand", "steps done again"])
@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_allocation_of_an_optimizer_step_may_fail(monkeypatch, name, step, replayed):
    if replayed:
        rarely(monkeypatch)
    plain = trainer_of(OPTIMIZERS[name])
    losses = plain.fit().losses
    expected = end_of(plain)
    for allocation in (1, 2, 3, 5, 8, 13, 21, 34):
        trainer = trainer_of(OPTIMIZERS[name])
        with inject_oom(step=step, phase="optimizer", allocation=allocation):
            result = trainer.fit()
        if not result.fallbacks:
            break
        assert same(end_of(trainer), expected) is None
        assert result.losses == losses
        assert [event.rung for event in result.fallbacks] == ["empty_cache"]
    assert allocation > 1 or step > 1


def last_write(optimizer, at):
    """The optimizer, whose second group fails when it is about to be written."""

    class Failing(type(optimizer)):
        left = 1

        def step(self, closure=None):
            groups, steps = self.param_groups, self.steps = self.param_groups, getattr(self, "steps", 0) + 1
            self.param_groups = groups[:1]
            super().step()
            self.param_groups = groups
            if steps == at and Failing.left:
                Failing.left = 0
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            self.param_groups = groups[1:]
            super().step()
            self.param_groups = groups

    optimizer.__class__ = Failing
    return optimizer


@pytest.mark.parametrize("step", [1, 2, 6])
@pytest.mark.parametrize("replayed", [False, True])
def test_both_groups_advance_exactly_once_when_the_second_fails(monkeypatch, step, replayed):
    if replayed:
        rarely(monkeypatch)

    def make(parameters, at):
        made = two_groups(partial(torch.optim.Adam, foreach=True), parameters)
        made.steps = 0
        return last_write(made, at)

    plain, trainer = trainer_of(partial(make, at=0)), trainer_of(partial(make, at=step))
    plain.fit()
    result = trainer.fit()
    assert [event.rung for event in result.fallbacks] == ["empty_cache"]
    mine, theirs = (entry._loop.workshop.state.optimizer for entry in (trainer, plain))
    assert {float(state["step"]) for state in mine.state.values()} == {6.0}
    assert mine.steps == theirs.steps == 6
    assert same(state_of(trainer), state_of(plain)) is None


@pytest.mark.parametrize("step", [1, 3])
def test_the_gradient_scaler_is_as_before_whether_it_had_unscaled_or_not(step):
    plain = trainer_of(OPTIMIZERS["adam foreach"], plan=Plan(precision="fp16"), max_grad_norm=0.5)
    plain.fit()
    for allocation in range(1, 8):
        trainer = trainer_of(OPTIMIZERS["adam foreach"], plan=Plan(precision="fp16"), max_grad_norm=0.5)
        with inject_oom(step=step, phase="optimizer", allocation=allocation):
            result = trainer.fit()
        assert len(result.fallbacks) == 1
        assert same(state_of(trainer), state_of(plain)) is None
        assert trainer._loop.workshop.state.scaler == plain._loop.workshop.state.scaler


def test_learning_rates_that_a_callback_sets_come_back_with_the_steps(monkeypatch):
    rarely(monkeypatch)
    ends = []
    for failing in (False, True):
        made = []

        def make(parameters, made=made):
            made.append(torch.optim.Adam(parameters))
            return made[0]

        def follow(event, made=made):
            if event.event == "step":
                made[0].param_groups[0]["lr"] = 0.001 * (event.step + 1)

        trainer = trainer_of(make, scheduler=None, callbacks=[follow])
        with inject_oom(step=5 if failing else 99, phase="optimizer", allocation=2):
            assert len(trainer.fit().fallbacks) == failing
        ends.append(state_of(trainer))
    assert same(*ends) is None


@pytest.mark.parametrize("through_data", [False, True])
def test_what_a_callback_does_to_parameters_between_steps_is_kept(monkeypatch, through_data):
    """Written into in the open, a new copy is due; behind torch's back, the losses tell that steps come out otherwise."""
    rarely(monkeypatch)
    ends = []
    for failing in (False, True):
        holder = []

        def average(event, holder=holder):
            if event.event == "step" and event.step == 2:
                weight = holder[0].model[0].weight
                with torch.no_grad():
                    (weight.data if through_data else weight).mul_(0.5)

        trainer = trainer_of(OPTIMIZERS["adam"], callbacks=[average])
        holder.append(trainer)
        if failing and through_data:
            with inject_oom(step=5, phase="optimizer", allocation=2), pytest.raises(LadderExhausted) as caught:
                trainer.fit()
            assert "could not be done again" in str(caught.value)
            return
        if failing:
            with inject_oom(step=5, phase="optimizer", allocation=2):
                trainer.fit()
        else:
            trainer.fit()
        ends.append(state_of(trainer))
    assert same(*ends) is None


class Interrupted(torch.optim.SGD):
    """Ends the run in the middle of a step, once."""

    def __init__(self, parameters, error, at=4, **options):
        super().__init__(parameters, **options)
        self.countdown = iter([*[None] * (at - 1), error("in the middle")])

    def step(self, closure=None):
        error = next(self.countdown, None)
        if error is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise error
        return super().step(closure)


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_step_that_something_else_ends_is_undone_and_done_by_the_next_fit(monkeypatch, error, replayed):
    if replayed:
        rarely(monkeypatch)
    plain = trainer_of(partial(torch.optim.SGD, lr=0.05))
    plain.fit()

    trainer = trainer_of(partial(Interrupted, error=error, lr=0.05))
    with pytest.raises(error) as caught:
        trainer.fit()
    assert not getattr(caught.value, "__notes__", [])
    assert trainer._loop.track.step == 3
    trainer.fit()
    assert same(state_of(trainer)["model"], state_of(plain)["model"]) is None


def test_a_schedule_that_fails_after_the_optimizer_has_moved(monkeypatch):
    rarely(monkeypatch)
    left = [1]

    class Failing(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *rest):
            if self.last_epoch == 3 and left:
                left.clear()
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            super().step(*rest)

    def schedule(made, kind):
        return kind(made, lambda step: 1 / (1 + step))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = trainer_of(OPTIMIZERS["adam"], scheduler=partial(schedule, kind=torch.optim.lr_scheduler.LambdaLR))
        plain.fit()
        trainer = trainer_of(OPTIMIZERS["adam"], scheduler=partial(schedule, kind=Failing))
        result = trainer.fit()
    assert [event.rung for event in result.fallbacks] == ["empty_cache"]
    assert same(state_of(trainer), state_of(plain)) is None


def test_without_room_for_a_copy_it_is_said_and_the_state_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(history, "_free_bytes", lambda: 0)
    calm = trainer_of(OPTIMIZERS["adam"])
    assert calm.fit().steps == 6
    with inject_oom(step=2, phase="optimizer", allocation=2), pytest.raises(LadderExhausted) as caught:
        trainer_of(OPTIMIZERS["adam"]).fit()
    assert "a copy of the state before it takes" in str(caught.value)


@pytest.mark.parametrize(("free_bytes", "kept"), [(2**40, True), (6000, False)], ids=["room", "no room"])
def test_batches_of_steps_that_may_be_done_again_are_kept_only_where_the_host_has_room(monkeypatch, free_bytes, kept):
    rarely(monkeypatch)
    monkeypatch.setattr(history, "_free_bytes", lambda: free_bytes)
    given, alive = [], []

    class Batches:
        def __iter__(self):
            for _ in range(4):
                alive.append(sum(batch() is not None for batch in given))
                batch = torch.randn(8, 6)
                given.append(weakref.ref(batch))
                yield batch, torch.randn(8, 2)
                del batch

    AdaptiveTrainer(model_of(), Batches(), loss=nn.MSELoss(), epochs=1).fit()
    assert alive == ([0, 1, 2, 3] if kept else [0, 0, 0, 0])


def test_steps_done_again_are_seen_once_and_counted_once(monkeypatch):
    rarely(monkeypatch)
    seen = []
    trainer = trainer_of(OPTIMIZERS["adam"], callbacks=[lambda event: seen.append((event.event, event.step))])
    with inject_oom(step=5, phase="optimizer", times=1, allocation=2):
        result = trainer.fit()
    assert [step for event, step in seen if event == "step"] == [1, 2, 3, 4, 5, 6]
    assert result.steps == 6
    assert len(result.losses) == 6
