"""The command line: what each way of ending says and which exit code it has."""

import inspect
import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from adaptive_trainer import cli, errors
from adaptive_trainer.cli import main
from adaptive_trainer.events import Fallback, Fidelity, OutOfMemory
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan
from adaptive_trainer.recipe import load_recipe
from adaptive_trainer.result import FitResult

MODULE = """
import torch

def make_model(width=4):
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

def make_data(num_samples=32):
    torch.manual_seed(0)
    inputs = torch.randn(num_samples, 4)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

def failing_loss(output, targets):
    raise ZeroDivisionError("a failure of the loss's own")
"""
RECIPE = """
model: {_target_: cli_parts.make_model, width: 8}
data: {_target_: cli_parts.make_data}
loss: torch.nn.functional.mse_loss
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
batch_size: 8
device: cpu
run_dir: RUN_DIR
"""
WHOLE, HALF = Plan(micro_batch=8), Plan(micro_batch=4)
FAILURE = OutOfMemory(step=1, phase=Phase.BACKWARD, message="CUDA out of memory", plan=WHOLE, requested_bytes=2**20)
FALLBACK = Fallback(step=1, rung="halve_batch", old=WHOLE, new=HALF, fidelity=Fidelity.ROUNDING)
RESULT = FitResult(
    steps=12, epochs=3, plan=HALF, fallbacks=(FALLBACK,), loss=0.25, losses=(1.5, 0.25), metrics={"loss": 0.5},
    peak_bytes=2**20, seconds=2.0,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe and its module; what they did to the interpreter is undone afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cli_parts.py").write_text(MODULE)
    (tmp_path / "demo.yaml").write_text(RECIPE.replace("RUN_DIR", str(tmp_path / "run")))
    yield tmp_path
    sys.modules.pop("cli_parts", None)


@pytest.fixture
def ends_with(monkeypatch):
    """Puts a trainer in place whose ``fit`` ends in a given way."""

    def put(outcome):
        class StandIn:
            @classmethod
            def from_recipe(cls, recipe):
                recipe.arguments()
                return cls()

            def fit(self):
                if isinstance(outcome, BaseException):
                    raise outcome
                return outcome

        monkeypatch.setitem(sys.modules, "adaptive_trainer.trainer", SimpleNamespace(AdaptiveTrainer=StandIn))

    return put


def command(*arguments, cwd):
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "adaptive_trainer", *map(str, arguments)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_a_run_that_is_done_exits_with_0_and_sums_up(folder, ends_with, capsys):
    ends_with(RESULT)
    assert main(["fit", str(folder / "demo.yaml")]) == 0
    out = capsys.readouterr().out
    for part in (
        "12 steps", "loss 1.5 -> 0.25", "micro-batch 4, fp32", "fallbacks: 1 (halve_batch x 1)", "loss 0.5", "1.0 MiB",
    ):  # fmt: skip
        assert part in out


def test_the_resolved_recipe_lies_in_the_run_dir(folder):
    main(["fit", str(folder / "demo.yaml"), "model.width=${batch_size}"])
    written = load_recipe(folder / "run" / "recipe.yaml")
    assert written.values["model"]["width"] == 8
    assert written.values["optimizer"] == {"_target_": "torch.optim.SGD", "lr": 0.01}


def test_a_run_without_a_run_dir_writes_nothing(folder, ends_with):
    ends_with(RESULT)
    before = sorted(folder.iterdir())
    assert main(["fit", str(folder / "demo.yaml"), "run_dir=null"]) == 0
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


def test_an_exhausted_ladder_exits_with_3_and_shows_the_trail(folder, ends_with, capsys):
    ends_with(errors.LadderExhausted("no rung is left:\n  amp: bf16 is on already", (FAILURE, FALLBACK, FAILURE)))
    assert main(["fit", str(folder / "demo.yaml")]) == 3
    err = capsys.readouterr().err
    for part in ("halve_batch", "backward", "none left", "error: no rung is left:\n  amp: bf16 is on already\n"):
        assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.RecipeError(["epochs: one", "steps: two"]), 2, "error: epochs: one\nerror: steps: two\n"),
        (errors.DataError("data: it is\nempty"), 2, "error: data: it is empty\n"),
        (errors.CheckpointError("damaged"), 1, "error: damaged\n"),
        (errors.NonFiniteError("25 steps"), 1, "error: 25 steps\n"),
        (errors.RankFailure("rank 1"), 1, "error: rank 1\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(143), 143, ""),
        (SystemExit("mine"), 1, "mine\n"),
        (SystemExit(None), 0, ""),
    ],
)
def test_every_ending_has_its_exit_code_and_its_words(folder, ends_with, capsys, error, code, said):
    ends_with(error)
    assert main(["fit", str(folder / "demo.yaml")]) == code
    assert capsys.readouterr().err == said


def test_a_users_failure_exits_with_1_and_its_traceback_from_their_first_frame(folder, capsys):
    (folder / "cli_parts.py").write_text(MODULE.replace("torch.manual_seed(0)", "raise KeyError('mine')"))
    assert main(["fit", str(folder / "demo.yaml")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert f'"{folder / "cli_parts.py"}"' in lines[1]
    assert lines[-1] == "KeyError: 'mine'"


def test_a_failing_import_of_the_user_shows_where(folder, capsys):
    (folder / "cli_parts.py").write_text("import torch\ndef (:\n")
    assert main(["fit", str(folder / "demo.yaml")]) == 1
    err = capsys.readouterr().err
    assert f'File "{folder / "cli_parts.py"}", line 2' in err
    assert "SyntaxError" in err
    assert "targets.py" not in err


def test_a_failure_of_our_own_is_shown_whole(folder, ends_with, capsys):
    (folder / "demo.yaml").write_text((folder / "demo.yaml").read_text() + "seed: 1\n")
    ends_with(RESULT)
    broken = SimpleNamespace(AdaptiveTrainer=None)
    sys.modules["adaptive_trainer.trainer"] = broken
    assert main(["fit", str(folder / "demo.yaml")]) == 1
    assert "in _fit" in capsys.readouterr().err


def test_warnings_that_are_no_fallbacks_are_said_again_at_the_end(folder, ends_with, capsys, monkeypatch):
    ends_with(RESULT)
    stand_in = sys.modules["adaptive_trainer.trainer"].AdaptiveTrainer

    def fit(self):
        logging.getLogger("adaptive_trainer").warning("checkpoint 3 was not written")
        logging.getLogger("adaptive_trainer").info("calm")
        return RESULT

    monkeypatch.setattr(stand_in, "fit", fit)
    assert main(["fit", str(folder / "demo.yaml")]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning: checkpoint 3 was not written",
        "calm",
        "warning: checkpoint 3 was not written",
    ]


@pytest.mark.parametrize("arguments", [[], ["fti"], ["fit"], ["report"], ["fit", "--nope", "x"]])
def test_a_wrong_command_line_exits_with_2_and_says_how(arguments, capsys):
    assert main(arguments) == 2
    assert "usage: adaptive-trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["--epochs=3"], "; write epochs=3"),
        (["--batch-size=8", "--model.width=3"], "; write batch_size=8 model.width=3"),
        (["--epochs", "3"], "; write epochs=3"),
        (["--epochs"], "; write epochs=..."),
        (["--nope=3"], ""),
    ],
)
def test_a_key_typed_as_an_option_says_how_overrides_are_written(typed, hint, capsys):
    assert main(["fit", "demo.yaml", *typed]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"unrecognized arguments: {' '.join(typed)}{hint}")


def test_help_names_every_command_and_imports_neither_torch_nor_rich():
    code = (
        "import sys; from adaptive_trainer.cli import main; code = main(['--help']); "
        "sys.exit(code or sum(name in sys.modules for name in ('torch', 'rich', 'omegaconf')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    for name in ("fit", "report", "doctor"):
        assert name in done.stdout


def test_the_commands_and_their_options_are_these():
    """A frozen list: what users type does not grow by accident."""
    assert {entry.name: [name for name, _ in entry.arguments] for entry in cli.COMMANDS} == {
        "fit": ["recipe", "overrides", "--restarts"],
        "report": ["run_dir"],
        "doctor": [],
    }


def test_the_doctor_names_the_device_the_versions_and_every_rung(capsys):
    from adaptive_trainer.ladder import RUNG_NAMES

    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("device", "host memory", "torch", "accelerate", "omegaconf", "g++", *RUNG_NAMES):
        assert f"  {name} " in out
    assert "halve_batch              yes: " in out


def test_the_doctor_says_what_a_rung_lacks(monkeypatch):
    from adaptive_trainer import doctor
    from adaptive_trainer.rungs import RUNGS, Rung, Skip

    words = {finding.name: finding.words for finding in doctor.examine() if finding.section == "rungs"}
    for rung in RUNGS:
        assert words[rung.name].partition(":")[0] in ("yes", "no", "in several processes only (accelerate launch)")
    shy = Rung(name="shy", step=lambda plan, situation: Skip("no reason"), gives="", costs="")
    assert doctor._possibility(shy, "bf16") == "no: no reason"


def libraries_with(monkeypatch, requirements):
    from adaptive_trainer import doctor

    monkeypatch.setattr(doctor.metadata, "requires", requirements)
    return {finding.name: finding.words for finding in doctor.examine() if finding.section == "libraries"}


def test_a_library_that_is_not_there_is_said_to_be_missing(monkeypatch):
    found = libraries_with(
        monkeypatch, lambda name: ["no-such-library>=1,<2", 'no-such-extra>=0.19; extra == "deepspeed"', "torch>=2.13"]
    )
    assert found["no-such-library"] == 'not installed (needed: pip install "no-such-library")'
    assert found["no-such-extra"] == 'not installed (pip install "adaptive-trainer[deepspeed]")'
    assert found["torch"][0].isdigit()
    assert set(found) == {"python", "adaptive-trainer", "no-such-library", "no-such-extra", "torch"}


def test_the_doctor_looks_at_all_that_the_project_requires(monkeypatch):
    project = tomllib.loads((Path(cli.__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    requirements = [
        *project["dependencies"],
        *(f'{entry}; extra == "{name}"' for name in extras for entry in extras[name]),
    ]
    found = libraries_with(monkeypatch, lambda name: requirements)
    assert {"torch", "pyyaml", "scikit-learn", "nvidia-ml-py"} <= set(found)
    assert len(found) == 2 + len(requirements)


def test_a_result_is_short_to_look_at():
    result = FitResult(steps=5000, epochs=1, plan=HALF, fallbacks=(FALLBACK,), loss=0.25, losses=(0.25,) * 5000)
    assert repr(result) == str(result) == "<FitResult: 5000 steps, loss 0.25, micro-batch 4, fp32, 1 fallback>"


def test_the_whole_command_trains_reports_and_exits_with_0(folder):
    done = command("fit", "demo.yaml", "epochs=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "done: 8 steps" in done.stdout
    assert "warning" not in done.stderr
    rows = [json.loads(line) for line in (folder / "run" / "journal.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows].count("step") == 8
    told = command("report", "run", cwd=folder)
    assert told.returncode == 0, told.stderr
    assert "8" in told.stdout


def test_the_whole_command_shows_a_users_failure_and_exits_with_1(folder):
    done = command("fit", "demo.yaml", "loss=cli_parts.failing_loss", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ZeroDivisionError: a failure of the loss's own")
    traceback = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert "cli_parts.py" in traceback[1]


def test_a_recipe_and_python_take_the_same_arguments(folder):
    from adaptive_trainer.trainer import AdaptiveTrainer

    arguments = load_recipe(folder / "demo.yaml").arguments()
    inspect.signature(AdaptiveTrainer).bind(**arguments)
