"""Wrong input ends with exit code 2, without a traceback, each mistake on a line with its key and the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import adaptive_trainer
from adaptive_trainer.cli import main

MODULE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def make_model(width=4):
    return torch.nn.Linear(4, width)

def make_data(num_samples=16):
    return TensorDataset(torch.zeros(num_samples, 4), torch.zeros(num_samples, 1))

def make_loader():
    return DataLoader(make_data(), batch_size=4)

def nothing():
    return None

def nothing_at_all():
    return []

def vector_loss(output, targets):
    return (output - targets).flatten()
"""
GOOD = {
    "model": "{_target_: bad_parts.make_model, width: 1}",
    "data": "{_target_: bad_parts.make_data}",
    "loss": "torch.nn.functional.mse_loss",
    "batch_size": "8",
    "device": "cpu",
}
LEFT_OUT = object()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the parts of a recipe; what they did to the interpreter is undone afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "bad_parts.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("bad_parts", None)


def write(folder, changes, name="demo.yaml"):
    values = {key: value for key, value in (GOOD | changes).items() if value is not LEFT_OUT}
    path = folder / name
    path.write_text("".join(f"{key}: {value}\n" for key, value in values.items()))
    return str(path)


def refused(capsys, *arguments):
    """The lines on standard error of a command that must refuse its input."""
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    lines = captured.err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


RECIPES = {
    "no model": ({"model": LEFT_OUT}, "model: missing; give an nn.Module"),
    "no data": ({"data": LEFT_OUT}, "data: missing; give a Dataset"),
    "unknown key": ({"epoch": 3}, "epoch: there is no such argument; did you mean 'epochs'?"),
    "word for a number": ({"epochs": "many"}, "epochs: got 'many'; give a whole number, 1 or more"),
    "zero": ({"batch_size": 0}, "batch_size: got 0; give a whole number, 1 or more"),
    "unknown rung": ({"ladder": "[halve_btach]"}, "did you mean 'halve_batch'?"),
    "ladder is no list": ({"ladder": "amp"}, "write a list, [amp]"),
    "no amount of memory": ({"memory_limit": "lots"}, "memory_limit: got 'lots'; give '20GiB'"),
    "unknown choice": ({"reduction": "avg"}, "reduction: got 'avg'; give 'mean' or 'sum'"),
    "yaml's own idea of off": ({"resume": "off"}, "resume: got False; give 'auto', 'never' or 'must' (YAML reads"),
    "unknown device": ({"device": "cudo"}, "device: got 'cudo'; give a device such as 'cpu', 'cuda' or 'cuda:0'"),
    "nothing to resume from": (
        {"resume": "must"},
        "resume: 'must' looks for checkpoints in run_dir, and there is none",
    ),
    "checkpoints": (
        {"checkpoint_steps": "5"},
        "checkpoint_steps: checkpoints are written into run_dir, and there is none",
    ),
    "loss and step": ({"step": "bad_parts.vector_loss"}, "step: it replaces the loss"),
    "unknown module": ({"loss": "bad_prats.loss"}, "loss: there is no module 'bad_prats'; did you mean 'bad_parts'?"),
    "unknown name": (
        {"model": "{_target_: bad_parts.mak_model}"},
        "model._target_: bad_parts has no 'mak_model'; did you mean 'make_model'?",
    ),
    "argument not taken": (
        {"model": "{_target_: bad_parts.make_model, widht: 3}"},
        "model.widht: bad_parts.make_model takes no argument 'widht'; did you mean 'width'?",
    ),
    "argument lacking": (
        {"scheduler": "{_target_: torch.optim.lr_scheduler.StepLR}"},
        "scheduler: torch.optim.lr_scheduler.StepLR needs an argument 'step_size'",
    ),
    "no target": ({"model": "{width: 3}"}, "model: has no _target_"),
    "broken interpolation": ({"epochs": "${epochz}"}, "epochs: ${epochz} cannot be resolved"),
    "yaml": ({"epochs": "[1"}, "demo.yaml: line 7, column 1: "),
    "plan": ({"plan": "{micro_batch: none}"}, "plan.micro_batch: micro_batch='none' is no number of samples"),
    "run_dir is a file": ({"run_dir": __file__}, "is a file"),
}


@pytest.mark.parametrize(("changes", "expected"), RECIPES.values(), ids=RECIPES.keys())
def test_a_bad_recipe_exits_with_2_and_one_line_that_helps(folder, capsys, changes, expected):
    lines = refused(capsys, "fit", write(folder, changes))
    assert len(lines) == 1
    assert expected in lines[0]


DATA = {
    "a factory that gives nothing": ({"data": "{_target_: bad_parts.nothing}"}, "data: "),
    "a data set without samples": ({"data": "{_target_: bad_parts.make_data, num_samples: 0}"}, "data: "),
    "an iterable without batches": (
        {"data": "{_target_: bad_parts.nothing_at_all}", "batch_size": LEFT_OUT},
        "data: ",
    ),
    "a data set without a batch size": ({"batch_size": LEFT_OUT}, "batch_size: "),
    "a loader with a batch size": ({"data": "{_target_: bad_parts.make_loader}"}, "batch_size: "),
    "a loss with many elements": ({"loss": "bad_parts.vector_loss"}, "loss: "),
}


@pytest.mark.parametrize(("changes", "key"), DATA.values(), ids=DATA.keys())
def test_bad_data_exit_with_2_and_name_their_key(folder, capsys, changes, key):
    path = write(folder, changes)
    assert main(["fit", path]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {key}")


def test_five_mistakes_are_five_lines(folder, capsys):
    changes = {
        "model": "{_target_: bad_parts.make_modle}",
        "loss": "torch.nn.functional.mse_los",
        "epochs": "-1",
        "ladder": "[apm]",
        "sede": "3",
    }
    lines = refused(capsys, "fit", write(folder, changes))
    assert sorted(line.partition(":")[0] for line in lines) == ["epochs", "ladder", "loss", "model._target_", "sede"]


def test_bad_overrides_are_named_as_they_were_typed(folder, capsys):
    lines = refused(capsys, "fit", write(folder, {}), "epochs", "batch_size=eight", "modle.width=3")
    assert [line.partition(":")[0] for line in lines] == ["epochs", "modle", "batch_size"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dmeo.yaml", "did you mean 'demo.yaml'?"), (".", "type for example"), ("no/demo.yaml", "type the path")],
)
def test_a_recipe_that_is_not_there_exits_with_2(folder, capsys, name, expected):
    write(folder, {})
    (line,) = refused(capsys, "fit", folder / name)
    assert expected in line


@pytest.mark.parametrize("changes", [{"epochs": "many", "sede": 3}, {"batch_size": LEFT_OUT}, {"data": "{_target_: bad_parts.nothing}"}])  # fmt: skip
def test_the_whole_command_says_the_same(folder, changes):
    environment = os.environ | {"PYTHONPATH": str(Path(adaptive_trainer.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "adaptive_trainer", "fit", write(folder, changes)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split()[1].rstrip(":") for line in lines] == (
        ["sede", "epochs"] if "sede" in changes else [next(iter(changes))]
    )
