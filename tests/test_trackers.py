"""Trackers: they are started, told what happens and finished; those that are not installed are named."""

import sys

import pytest
import torch
from accelerate import tracking  # noqa: TID251  the trackers are its own
from accelerate.utils import LoggerType  # noqa: TID251  the trackers are its own
from torch import nn
from torch.utils.data import TensorDataset

from adaptive_trainer import AdaptiveTrainer
from adaptive_trainer.cli import main
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.trackers import Trackers

RECIPE = """
model: {_target_: torch.nn.Linear, in_features: 4, out_features: 1}
data: {_target_: tracked_parts.make_data}
loss: torch.nn.functional.mse_loss
batch_size: 8
device: cpu
trackers: [tensorboard, wandb]
"""
PARTS = """
import torch

def make_data():
    return torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
"""


class Diary(tracking.GeneralTracker):
    """Stands in for TensorBoard: as lazy as accelerate's trackers are, and as strict."""

    name = "tensorboard"
    requires_logging_directory = True
    pages: list

    @tracking.on_main_process
    def __init__(self, run_name, logging_dir):
        super().__init__()
        self.place = (run_name, logging_dir)

    @property
    def tracker(self):
        return self.pages

    @tracking.on_main_process
    def start(self):
        self.pages.append(("start", *self.place))

    @tracking.on_main_process
    def log(self, values, step=None):
        tracking.logger.debug("logged")
        self.pages.append((step, values))

    @tracking.on_main_process
    def finish(self):
        self.pages.append("finish")


class Locked(Diary):
    """A tracker whose service lets nobody in."""

    name = "wandb"

    def start(self):
        raise ConnectionError("no key")


@pytest.fixture
def installed(monkeypatch):
    """Nothing is installed but what a test says; gives the pages that the stand-ins write."""
    pages = []

    def only(*trackers):
        monkeypatch.setattr(tracking, "_available_trackers", [LoggerType(each.name) for each in trackers])
        for each in trackers:
            monkeypatch.setattr(each, "pages", pages, raising=False)
            monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, each.name, each)
        return pages

    return only


def trainer(**arguments):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    return AdaptiveTrainer(nn.Linear(4, 1), data, loss=nn.MSELoss(), batch_size=8, device="cpu", **arguments)


@pytest.mark.parametrize("names", [["tensorboard"], ["all"], ["tensorboard", "all", "tensorboard"]])
def test_a_tracker_is_started_told_every_step_and_evaluation_and_finished(installed, tmp_path, names):
    pages = installed(Diary)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
    result = trainer(trackers=names, run_dir=tmp_path, eval_data=data).fit()
    assert pages[0] == ("start", "adaptive-trainer", str(tmp_path))
    assert [page[0] for page in pages[1:-1]] == [1, 2, 2]
    assert [page[1]["train/loss"] for page in pages[1:3]] == list(result.losses)
    assert pages[3][1] == {"eval/loss": result.metrics["loss"]}
    assert pages[-1] == "finish"


def test_a_tracker_is_finished_when_the_run_fails(installed, tmp_path):
    def fail(event):
        if event.event == "step":
            raise ZeroDivisionError

    pages = installed(Diary)
    with pytest.raises(ZeroDivisionError):
        trainer(trackers=["tensorboard"], run_dir=tmp_path, callbacks=[fail]).fit()
    assert pages[-1] == "finish"


def test_a_tracker_that_cannot_start_passes_its_error_on_and_the_others_are_finished(installed, tmp_path):
    pages = installed(Diary, Locked)
    with pytest.raises(ConnectionError, match="no key"):
        trainer(trackers=["tensorboard", "wandb"], run_dir=tmp_path).fit()
    assert pages[-1] == "finish"


def test_all_that_is_missing_is_named_with_what_to_type(installed):
    installed()
    with pytest.raises(RecipeError, match="package of tensorboard, wandb is not installed; type pip install tensorbo"):
        Trackers(["tensorboard", "wandb"], None)
    with pytest.raises(RecipeError, match="package of any tracker is not installed; type pip install tensorboard"):
        Trackers(["all"], None)


def test_trackers_that_are_not_installed_are_wrong_input_for_the_command(installed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "tracked_parts.py").write_text(PARTS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    installed(Diary)
    assert main(["fit", str(tmp_path / "recipe.yaml")]) == 2
    assert "error: trackers: the package of wandb is not installed; type pip install wandb" in capsys.readouterr().err
