"""The recipes that come with the project, and the commands that are made of them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from adaptive_trainer import AdaptiveTrainer
from adaptive_trainer.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
QUIET = ["device=cpu", "progress=false", "run_dir=null"]
# As somebody has it who has not installed the package but runs a script of the checkout.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def byte_lm(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    import byte_lm

    return byte_lm


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_for_whom_and_has_no_mistake(path):
    assert path.read_text("utf-8").startswith("# For whoever ")
    assert path.with_suffix(".py").read_text("utf-8").startswith('"""For whoever ')
    assert load_recipe(path).values["batch_size"] > 0


def test_text_is_the_same_each_time_and_held_out_files_are_not_trained_on(byte_lm):
    data, again, held_out = byte_lm.make_data(64), byte_lm.make_data(64), byte_lm.make_eval_data(64)
    assert 100_000 < len(data) * 64 <= 4_000_000
    assert all(torch.equal(data[index][0], again[index][0]) for index in (0, 1000, len(data) - 1))
    (inputs, targets), (following, _) = data[5], data[6]
    assert torch.equal(inputs[1:], targets[:-1])
    assert torch.equal(targets[-1:], following[:1])
    trained, kept = ({bytes(texts[index][0].tolist()) for index in range(len(texts))} for texts in (data, held_out))
    # The same licence may head two files.
    assert len(trained & kept) <= len(kept) / 20
    with pytest.raises(IndexError):
        data[len(data)]


def test_the_first_guess_of_the_model_is_uniform_and_its_head_is_its_embedding(byte_lm):
    torch.manual_seed(0)
    model, (inputs, targets) = byte_lm.make_model(context=64), byte_lm.make_data(64)[3]
    assert byte_lm.loss(model(inputs[None]), targets[None]).item() == pytest.approx(math.log(256), abs=0.05)
    assert model.head.weight is model.tokens.weight


def test_the_model_sees_no_byte_that_is_still_to_come(byte_lm):
    model, inputs = byte_lm.make_model(context=16), torch.arange(16)[None]
    other = inputs.clone()
    other[0, 10:] = 0
    with torch.no_grad():
        assert torch.equal(model(inputs)[0, :10], model(other)[0, :10])
        assert not torch.equal(model(inputs)[0, 10:], model(other)[0, 10:])


def test_digits_are_recognised_and_with_batch_norm_checkpointing_comes_before_halving():
    free = AdaptiveTrainer.from_recipe(ROOT / "recipes" / "digits.yaml", QUIET)
    result = free.fit()
    assert result.metrics["accuracy"] > 0.9
    assert result.fallbacks == ()
    assert any(isinstance(module, nn.BatchNorm2d) for module in free.model.modules())
    tight = AdaptiveTrainer.from_recipe(ROOT / "recipes" / "digits.yaml", [*QUIET, "memory_limit=7MiB", "epochs=1"])
    rungs = [event.rung for event in tight.fit().fallbacks]
    assert rungs[:3] == ["empty_cache", "gradient_checkpointing", "halve_batch"]


def test_the_demo_walks_the_ladder_and_ends_with_its_figures(tmp_path):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    old = tmp_path / "runs" / "demo" / "journal.jsonl"
    old.write_text("from an earlier demo\n")
    command = [sys.executable, ROOT / "scripts" / "demo.py", "--picture", "run.svg", "steps=3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=110
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rungs"] == ["empty_cache", "halve_batch", "gradient_checkpointing"]
    assert figures["num_fallbacks"] >= 6
    assert figures["first_loss"] == pytest.approx(math.log(256), abs=0.05)
    assert figures["last_loss"] < figures["first_loss"]
    assert figures["journal"] == "runs/demo/journal.jsonl"
    rows = [json.loads(line) for line in (tmp_path / figures["journal"]).read_text().splitlines()]
    assert [row["rung"] for row in rows if row["event"] == "fallback"].count("halve_batch") >= 3
    assert "is replaced" in done.stdout
    picture = (tmp_path / "run.svg").read_text()
    assert picture.startswith("<svg")
    assert "http://www.w3.org" in picture
    assert "https://" not in picture, "the picture fetches something"


def test_the_gpu_check_says_so_where_there_is_nothing_to_check():
    command = [sys.executable, ROOT / "scripts" / "gpu_check.py"]
    hidden = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=True, timeout=110)
    assert done.stdout == "no NVIDIA GPU here: nothing was checked\n"
