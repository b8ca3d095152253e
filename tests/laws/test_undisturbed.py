"""Laws 1 and 2 where state hides: in averages, in optimizers, in loaders, and when something else ends a step."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from adaptive_trainer import AdaptiveTrainer, Plan, RecipeError
from adaptive_trainer.testing import inject_oom
from tests.zoo import ZOO, loss, same, state_of

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Averaged(nn.Module):
    """Moves an average of its weights in each forward, as momentum contrast and mean teachers do."""

    def __init__(self, *, by_data):
        super().__init__()
        self.student = ZOO["mlp"].make()
        self.teacher = copy.deepcopy(self.student)
        self.by_data = by_data

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                target = mine.data if self.by_data else mine
                target.mul_(0.9).add_(theirs.detach(), alpha=0.1)
        return self.student(x) + self.teacher(x).detach()


@pytest.mark.parametrize("given", ["all", "student"])
@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_average_that_a_forward_moves_comes_back(by_data, given, step):
    ends = []
    for disturbed in (False, True):
        model = Averaged(by_data=by_data)
        moved = (model if given == "all" else model.student).parameters()
        trainer = AdaptiveTrainer(
            model,
            ZOO["mlp"].data(32),
            loss=loss,
            batch_size=8,
            optimizer=torch.optim.SGD(moved, lr=0.1),
            progress=False,
        )
        if disturbed:
            with inject_oom(step=step, phase="backward"):
                trainer.fit()
        else:
            trainer.fit()
        ends.append(state_of(trainer))
    assert same(*ends) is None


class Hiding(torch.optim.Optimizer):
    """Keeps its state where no other optimizer does: in the group, beside it, and in an optimizer within it."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 0.01})
        self.count = 0
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=0.01, foreach=False)

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad, alpha=-0.01 * self.count)


@pytest.mark.parametrize("allocation", [1, 4, 9])
def test_a_first_step_that_failed_half_way_gives_back_what_optimizers_hide(allocation):
    ends = []
    for disturbed in (False, True):
        trainer = AdaptiveTrainer(
            ZOO["mlp"].make(), ZOO["mlp"].data(24), loss=loss, batch_size=8, optimizer=Hiding, progress=False
        )
        if disturbed:
            with inject_oom(step=1, phase="optimizer", allocation=allocation) as injected:
                trainer.fit()
            assert injected.fired == 1
        else:
            trainer.fit()
        optimizer = trainer._loop.workshop.state.optimizer
        ends.append((state_of(trainer), optimizer.count, optimizer.inner.state_dict()))
    assert same(*ends) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("mine")], ids=["interrupt", "users"])
@pytest.mark.parametrize("kind", ["cnn_batch_norm", "dropout_transformer"])
def test_a_step_that_something_else_ends_is_undone_and_done_by_the_next_call(kind, error):
    calm = AdaptiveTrainer(ZOO[kind].make(), ZOO[kind].data(32), loss=loss, batch_size=8, progress=False)
    calm.fit()
    left = [error]

    def failing(output, targets):
        if trainer._loop.track.step == 2 and left:
            raise left.pop()
        return loss(output, targets)

    trainer = AdaptiveTrainer(ZOO[kind].make(), ZOO[kind].data(32), loss=failing, batch_size=8, progress=False)
    with pytest.raises(type(error)) as caught:
        trainer.fit()
    assert caught.value is error
    assert trainer.fit().steps == 4
    assert same(state_of(trainer), state_of(calm)) is None


def test_two_calls_that_meet_at_an_epochs_end_are_one_run():
    told, orders = [], []

    class Told(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return torch.tensor([float(index)])

        def set_epoch(self, epoch):
            told.append(epoch)

    for steps, calls in ((8, 1), (4, 2)):
        seen = []

        def step(model, batch, seen=seen):
            seen.extend(batch[:, 0].tolist())
            return model(batch).pow(2).mean()

        trainer = AdaptiveTrainer(nn.Linear(1, 1), Told(), step=step, batch_size=4, steps=steps, progress=False)
        results = [trainer.fit() for _ in range(calls)]
        assert results[-1].epochs == 2
        orders.append(seen)
    assert told == [0, 1, 0, 1]
    assert orders[0] == orders[1]


def test_a_users_loader_gives_the_same_order_however_often_the_model_draws():
    """Stochastic depth draws once a forward, so more pieces draw more."""
    orders = []
    for plan in (None, Plan(micro_batch=2), Plan(micro_batch=1)):
        seen = []

        def step(model, batch, seen=seen):
            seen.extend(batch[:, 0].tolist())
            return model(batch).pow(2).mean() * (torch.rand(()) > 0.1)

        rows = [torch.tensor([float(index)]) for index in range(16)]
        loader = DataLoader(rows, batch_size=4, shuffle=True)
        AdaptiveTrainer(nn.Linear(1, 1), loader, step=step, epochs=3, plan=plan, progress=False).fit()
        orders.append(seen)
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][:16] != orders[0][16:32] != orders[0][32:]


def test_groups_that_are_added_later_are_clipped_and_weighted_with_the_others():
    """Gradual unfreezing, by a callback."""
    ends = []
    for micro_batch in (None, 3):
        model = ZOO["mlp"].make(torch.float64)
        optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)

        def unfreeze(event, model=model, optimizer=optimizer):
            if event.event == "step" and event.step == 1:
                optimizer.add_param_group({"params": list(model.blocks.parameters())})

        def step(model, batch):
            return loss(model(batch[0]), batch[1]), len(batch[1])

        AdaptiveTrainer(
            model, ZOO["mlp"].data(32, torch.float64), step=step, batch_size=8, optimizer=optimizer, max_grad_norm=0.1,
            plan=Plan(micro_batch=micro_batch), callbacks=[unfreeze], progress=False,
        ).fit()  # fmt: skip
        ends.append(model.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=1e-12)


def test_evaluating_in_the_middle_of_a_step_is_refused():
    member = ZOO["mlp"]
    trainer = AdaptiveTrainer(
        member.make(), member.data(16), loss=loss, batch_size=8, eval_data=member.data(8), progress=False,
        callbacks=[lambda event: event.event == "fallback" and trainer.evaluate()],
    )  # fmt: skip
    with inject_oom(step=1), pytest.raises(RecipeError, match="step event"):
        trainer.fit()


def test_gradient_checkpointing_that_a_step_cannot_bear_is_taken_back():
    """torch.func refuses the hooks that gradient checkpointing works with."""
    member = ZOO["mlp"]

    def step(model, batch):
        def of(parameters):
            return loss(torch.func.functional_call(model, parameters, (batch[0],)), batch[1])

        parameters = dict(model.named_parameters())
        torch.func.grad(of)({name: value.detach() for name, value in parameters.items()})
        return of(parameters)

    trainer = AdaptiveTrainer(
        member.make(), member.data(16), step=step, batch_size=8, ladder=["gradient_checkpointing", "halve_batch"],
        progress=False,
    )  # fmt: skip
    with inject_oom(step=1):
        result = trainer.fit()
    assert [event.rung for event in result.fallbacks] == [
        "gradient_checkpointing", "undo:gradient_checkpointing", "halve_batch",
    ]  # fmt: skip


def test_buffers_of_every_layout_are_trained_with():
    model = ZOO["mlp"].make()
    model.register_buffer("adjacency", torch.eye(6).to_sparse())
    model.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    with inject_oom(step=1):
        assert AdaptiveTrainer(model, ZOO["mlp"].data(16), loss=loss, batch_size=8, progress=False).fit().steps == 2


class Watched(nn.Module):
    """Its forward counts on one of torch's own layers."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)
        self.first.calls = 0

    def forward(self, inputs):
        self.first.calls += 1
        return self.last(self.drop(self.first(inputs)))


@pytest.mark.parametrize("step", [1, 3, 4, 9, 70])
def test_what_a_forward_binds_on_a_plain_layer_comes_back(step):
    torch.manual_seed(0)
    model, data = Watched(), TensorDataset(torch.randn(144, 4), torch.randn(144, 1))
    trainer = AdaptiveTrainer(model, data, loss=nn.MSELoss(), batch_size=2)
    with inject_oom(step=step, phase="backward"):
        assert trainer.fit().steps == 72
    assert model.first.calls == 72


def test_what_a_callback_does_to_a_plain_layer_that_stood_still_stays():
    torch.manual_seed(0)
    model, data = Watched(), TensorDataset(torch.randn(32, 4), torch.randn(32, 1))

    def freeze(event):
        if event.event == "step" and event.step == 10:
            model.drop.eval()
            model.last.note = "mine"

    trainer = AdaptiveTrainer(model, data, loss=nn.MSELoss(), batch_size=2, callbacks=[freeze])
    with inject_oom(step=12, phase="backward"):
        trainer.fit()
    assert not model.drop.training
    assert model.last.note == "mine"
