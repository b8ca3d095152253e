"""The tiny regression of the cases as a run, and how two runs are compared."""

from __future__ import annotations

import torch
from torch.nn import functional

from adaptive_trainer import AdaptiveTrainer
from tests.cases.hooks import regression, rows_of


def data(num_samples=64):
    generator = torch.Generator().manual_seed(2)
    return torch.utils.data.TensorDataset(
        torch.randn(num_samples, 8, generator=generator), torch.randn(num_samples, 1, generator=generator)
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def trainer_of(model=None, samples=None, **rest):
    arguments = {"loss": functional.mse_loss, "optimizer": sgd, "batch_size": 16, "progress": False} | rest
    arguments = {key: value for key, value in arguments.items() if not (key == "loss" and "step" in rest)}
    return AdaptiveTrainer(
        regression() if model is None else model, data() if samples is None else samples, **arguments
    )


def rates(result):
    """The learning rate of each optimizer step."""
    return [event.lr for event in rows_of(result, "step")]


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_close(found, expected, atol=1e-6):
    """Parameters, buffers, optimizer state and learning rates of two trainers are equal but for rounding."""
    mine, theirs = found.model.state_dict(), expected.model.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=atol)
    mine, theirs = found._loop.workshop.state, expected._loop.workshop.state
    state, wanted = mine.optimizer.state_dict(), theirs.optimizer.state_dict()
    assert state["state"].keys() == wanted["state"].keys()
    for index, entries in wanted["state"].items():
        for name, value in entries.items():
            torch.testing.assert_close(state["state"][index][name], value, rtol=0, atol=atol)
    assert [group["lr"] for group in state["param_groups"]] == [group["lr"] for group in wanted["param_groups"]]
    assert (mine.scheduler is None) == (theirs.scheduler is None)
    assert getattr(mine.scheduler, "last_epoch", None) == getattr(theirs.scheduler, "last_epoch", None)
