"""What users can name is listed here, so that nothing is added, renamed or lost by accident; and the README tells the truth."""

import argparse
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
import torch

import adaptive_trainer
from adaptive_trainer import cli, testing
from adaptive_trainer.arguments import ARGUMENTS
from adaptive_trainer.forward import call
from adaptive_trainer.rungs import RUNG_NAMES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")

NAMES = """
    AdaptiveTrainer AdaptiveTrainerError Build Cause Checkpoint CheckpointError Climb DataError Evaluate Event Fallback
    Fidelity Finish FitResult Ladder LadderExhausted NonFiniteError OutOfMemory Phase Plan RankFailure RecipeError Rung
    Situation Skip Start Step Traits
""".split()

ARGUMENTS_IN_ORDER = """
    model data loss step optimizer scheduler batch_size epochs steps shuffle collate_fn num_workers eval_data eval_steps
    max_grad_norm reduction weight separable plan ladder memory_limit device seed run_dir resume checkpoint_steps
    keep_checkpoints callbacks trackers progress metrics
""".split()

COMMANDS = {
    "": ["--help", "--version"],
    "fit": ["--help", "--restarts", "overrides", "recipe"],
    "report": ["--help", "run_dir"],
    "doctor": ["--help"],
}

INJECTION = "step phase micro_batch rank allocation times message".split()

PLAN = {
    "micro_batch": None, "gradient_checkpointing": False, "precision": "fp32", "zero_stage": 0, "offload": "none",
}  # fmt: skip

RUNGS = """
    empty_cache halve_batch gradient_checkpointing amp zero_1 zero_2 zero_3 offload_optimizer offload_parameters
""".split()


def test_public_names():
    assert adaptive_trainer.__all__ == sorted(adaptive_trainer.__all__)
    assert set(adaptive_trainer.__all__) == set(NAMES)
    assert all(getattr(adaptive_trainer, name).__name__ == name for name in NAMES)


def test_arguments_of_the_constructor_and_keys_of_a_recipe_are_the_same():
    parameters = list(inspect.signature(adaptive_trainer.AdaptiveTrainer).parameters.values())
    assert [entry.name for entry in parameters] == ARGUMENTS_IN_ORDER
    assert [entry.name for entry in parameters if entry.kind is not entry.KEYWORD_ONLY] == ["model", "data"]
    assert list(ARGUMENTS) == ARGUMENTS_IN_ORDER


def test_fields_of_a_plan():
    parameters = inspect.signature(adaptive_trainer.Plan).parameters.values()
    assert {entry.name: entry.default for entry in parameters} == PLAN


def test_names_of_the_rungs():
    assert list(RUNG_NAMES) == RUNGS


def test_options_of_the_command_line():
    parser = cli._parser()
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = {name: options_of(place) for name, place in {"": parser, **commands.choices}.items()}
    assert found == COMMANDS


def options_of(parser):
    actions = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    return sorted(action.option_strings[-1] if action.option_strings else action.dest for action in actions)


def test_keywords_of_inject_oom():
    parameters = inspect.signature(testing.inject_oom).parameters.values()
    assert [entry.name for entry in parameters] == INJECTION
    assert {entry.kind for entry in parameters} == {inspect.Parameter.KEYWORD_ONLY}


def public_members():
    for name in NAMES:
        value = getattr(adaptive_trainer, name)
        yield name, value
        if isinstance(value, type) and not issubclass(value, Enum):
            for key, member in vars(value).items():
                if not key.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                    yield f"{name}.{key}", getattr(value, key)


@pytest.mark.parametrize(("name", "value"), [pytest.param(*entry, id=entry[0]) for entry in public_members()])
def test_every_public_name_has_a_docstring_of_its_own(name, value):
    text = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    assert text, f"{name} has none"
    # Dataclasses and enums are given one that says nothing.
    assert not text.startswith((f"{name}(", "An enumeration")), f"{name} has a generated one"


def test_every_argument_is_described():
    text = adaptive_trainer.AdaptiveTrainer.__doc__
    assert [name for name in ARGUMENTS_IN_ORDER if not re.search(rf"^ +{name}: ", text, re.MULTILINE)] == []


# The README.


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for found, text in fenced if found == language]


def run_here(path):
    """Run a script with this tree's package, wherever another one may be installed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path],
        cwd=path.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_the_first_script_of_the_readme_prints_what_the_readme_says(tmp_path):
    script, (printed,) = blocks("python")[0], blocks("text")
    path = tmp_path / "first.py"
    path.write_text(script)
    done = run_here(path)
    said = re.compile(r"(\d+ steps), loss (\S+) -> (\S+)")
    (line, *walk), (expected_line, *expected_walk) = done.stdout.splitlines(), printed.splitlines()
    steps, first, last = said.fullmatch(line).groups()
    assert walk == expected_walk
    assert steps == said.fullmatch(expected_line)[1]
    assert float(last) < float(first) / 2


@pytest.fixture(scope="module")
def readme_folder(tmp_path_factory):
    """A folder with the recipe of the README and the module that it names."""
    folder = tmp_path_factory.mktemp("readme")
    (recipe,) = blocks("yaml")
    (folder / "recipe.yaml").write_text(recipe)
    (module,) = [block for block in blocks("python") if block.startswith("# my_module.py\n")]
    (folder / "my_module.py").write_text(module)
    return folder


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_every_script_of_the_readme_runs_and_prints_what_its_comments_say(readme_folder, number):
    script = blocks("python")[number]
    (readme_folder / "script.py").write_text(script)
    printed = run_here(readme_folder / "script.py").stdout
    assert [said for said in re.findall(r"^print\(.*  # (.*)$", script, re.MULTILINE) if said not in printed] == []


def test_the_weights_that_the_readme_saves_are_the_models(readme_folder):
    (script,) = [block for block in blocks("python") if "torch.save" in block]
    (readme_folder / "save.py").write_text(script)
    run_here(readme_folder / "save.py")
    weights = torch.load(readme_folder / "weights.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in weights.items()}["0.weight"] == (256, 32)


def test_the_commands_of_the_readme_do_what_they_say(readme_folder, monkeypatch, capsys):
    monkeypatch.chdir(readme_folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    commands = [line for block in blocks("") for line in block.splitlines() if line.startswith("adaptive-trainer ")]
    assert len(commands) == 3
    for command in commands:
        assert cli.main(command.split()[1:]) == 0, capsys.readouterr().err
    assert "done: 48 steps" in capsys.readouterr().out
    sys.modules.pop("my_module", None)


TABLE_OF_BATCHES = {
    ("pair", True): (("x", "y"), (("x",), "y")),
    ("pair", False): (("x", "y"), (("x", "y"), None)),
    ("several inputs", True): ((("a", "b"), "y"), ((("a", "b"),), "y")),
    ("several inputs", False): ((("a", "b"), "y"), ((("a", "b"), "y"), None)),
    ("three", True): (("x", "y", "z"), ((("x", "y", "z"),), ("x", "y", "z"))),
    ("three", False): (("x", "y", "z"), (("x", "y", "z"), None)),
    ("mapping", True): ({"x": 1, "labels": 2}, ({"x": 1, "labels": 2}, 2)),
    ("mapping", False): ({"x": 1, "labels": 2}, ({"x": 1, "labels": 2}, 2)),
    ("anything", True): ("x", (("x",), "x")),
    ("anything", False): ("x", (("x",), None)),
}


@pytest.mark.parametrize("case", TABLE_OF_BATCHES, ids=str)
def test_a_batch_reaches_model_and_loss_as_the_readme_says(case):
    class Telling(torch.nn.Module):
        def forward(self, *args, **keywords):
            return keywords or args

    batch, told = TABLE_OF_BATCHES[case]
    assert call(Telling(), batch, print if case[1] else None) == told


def test_commands_and_files_of_the_readme_are_there():
    commands = {line.split()[1] for block in blocks("") for line in block.splitlines() if "adaptive-trainer" in line}
    assert commands
    assert commands <= set(COMMANDS)
    scripts = set(re.findall(r"scripts/\w+", README))
    links = {link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link}
    assert {"scripts/demo", "scripts/test"} <= scripts
    assert {"LICENSE", "docs/demo.svg"} <= links
    assert [path for path in scripts | links if not (ROOT / path).exists()] == []


def test_the_ladder_in_the_documents_is_the_ladder_of_the_code():
    path = ROOT / "scripts" / "ladder_table.py"
    spec = importlib.util.spec_from_file_location("ladder_table", path)
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    assert len(writer.DOCUMENTS) == 2
    for document in writer.DOCUMENTS:
        text = document.read_text("utf-8")
        assert writer.ladder_table() in text
        assert writer.written(text) == text, "type: .venv/bin/python scripts/ladder_table.py"


def test_importing_the_trainer_does_not_import_torchs_compiler():
    """It takes more than a second, and whoever only imports has no use for it."""
    code = "import sys, torch; before = 'torch._dynamo' in sys.modules; from adaptive_trainer import AdaptiveTrainer; print(before, 'torch._dynamo' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.split() == ["False", "False"]
