"""Recipes: what is read, what is made of it, and that every mistake is found before anything is called."""

import functools
import importlib
import inspect
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from accelerate.utils import LoggerType  # noqa: TID251  the names are compared with theirs
from torch import nn

from adaptive_trainer import targets
from adaptive_trainer.arguments import ARGUMENTS, check_arguments
from adaptive_trainer.checks import TRACKERS, nearest, shown
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.ladder import Ladder
from adaptive_trainer.plan import Plan
from adaptive_trainer.recipe import load_recipe

MODULE = """
import torch

calls = []

def make_model(width, depth=2):
    calls.append("model")
    return torch.nn.Linear(width, depth)

def make_data(num_batches=3):
    calls.append("data")
    return [(torch.zeros(4, 8), torch.zeros(4, 2))] * num_batches

def wrap(inner, scale=1.0):
    calls.append("wrap")
    return inner

def loss(output, targets, scale=1.0):
    return (output - targets).square().mean() * scale

def make_loss(scale):
    calls.append("make_loss")
    return lambda output, targets: (output - targets).abs().mean() * scale

def warmup(step, length):
    return min(1.0, (step + 1) / length)

class Listener:
    def __init__(self, name="x"):
        self.name = name
    def on_event(self, event):
        pass

NUMBER = 3
"""
BASE = """
model: {_target_: my_parts.make_model, width: 8}
data: {_target_: my_parts.make_data}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a recipe's module; what it did to the interpreter is undone afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "my_parts.py").write_text(MODULE)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def read(folder, text, *overrides):
    path = folder / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, overrides)


def mistakes_of(folder, text, *overrides):
    with pytest.raises(RecipeError) as caught:
        read(folder, text, *overrides)
    return list(caught.value.mistakes)


def test_the_model_stays_a_function_and_data_are_made(folder):
    recipe = read(folder, BASE)
    arguments = recipe.arguments()
    calls = sys.modules["my_parts"].calls
    assert calls == ["data"]
    assert isinstance(arguments["model"], functools.partial)
    assert isinstance(arguments["model"](), nn.Linear)
    assert calls == ["data", "model"]
    assert len(arguments["data"]) == 3


def test_reading_a_recipe_calls_nothing(folder):
    read(folder, BASE + "loss: {_target_: my_parts.make_loss, scale: 2}\n")
    assert sys.modules["my_parts"].calls == []


def test_a_nested_target_of_the_model_is_made_at_each_call(folder):
    text = BASE.replace("{_target_: my_parts.make_model, width: 8}", "{_target_: my_parts.wrap, inner: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}}")  # fmt: skip
    make = read(folder, text).arguments()["model"]
    first, second = make(), make()
    assert isinstance(first, nn.Linear)
    assert first is not second


def test_optimizer_and_scheduler_take_one_more_argument(folder):
    text = BASE + (
        "optimizer: {_target_: torch.optim.SGD, lr: 3e-4}\n"
        "scheduler: {_target_: torch.optim.lr_scheduler.LambdaLR, "
        "lr_lambda: {_target_: my_parts.warmup, _partial_: true, length: 4}}\n"
    )
    arguments = read(folder, text).arguments()
    optimizer = arguments["optimizer"](nn.Linear(1, 1).parameters())
    assert optimizer.param_groups[0]["lr"] == 3e-4
    arguments["scheduler"](optimizer)
    assert optimizer.param_groups[0]["lr"] == 3e-4 / 4


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("torch.nn.functional.mse_loss", 4.0),  # a plain name is the object itself
        ("{_target_: my_parts.loss, scale: 3}", 12.0),  # a function that lacks arguments is called later
        ("{_target_: my_parts.make_loss, scale: 3}", 6.0),  # one that lacks none is a factory
        ("{_target_: torch.nn.MSELoss, reduction: sum}", 8.0),  # a class is called
    ],
)
def test_a_loss_is_named_given_arguments_or_made(folder, written, value):
    loss = read(folder, f"{BASE}loss: {written}\n").arguments()["loss"]
    assert float(loss(torch.full((2,), 2.0), torch.zeros(2))) == value


def test_lists_and_mappings_of_functions_are_made(folder):
    text = f"{BASE}callbacks: [{{_target_: my_parts.Listener, name: me}}, my_parts.loss]\nmetrics: {{mae: my_parts.loss}}\n"
    arguments = read(folder, text).arguments()
    assert arguments["callbacks"][0].name == "me"
    assert arguments["callbacks"][1] is sys.modules["my_parts"].loss
    assert arguments["metrics"] == {"mae": sys.modules["my_parts"].loss}
    assert check_arguments(arguments) == []


def test_positional_arguments_are_written_as_a_list(folder):
    model = read(folder, BASE.replace("width: 8", "_args_: [8, 5]")).arguments()["model"]()
    assert (model.in_features, model.out_features) == (8, 5)


def test_a_plan_is_written_by_its_fields(folder):
    assert read(folder, BASE + "plan: {micro_batch: 8, precision: bf16}\n").arguments()["plan"] == Plan(
        micro_batch=8, precision="bf16"
    )


def test_overrides_are_yaml_and_reach_inside(folder):
    text = BASE + "epochs: 1\nladder: [amp]\n"
    recipe = read(folder, text, "epochs=3", "model.width=${batch_size}", "batch_size=16", "ladder=[]", "run_dir=null")
    assert recipe.values["epochs"] == 3
    assert recipe.values["model"]["width"] == 16
    assert recipe.values["ladder"] == []
    assert recipe.arguments()["run_dir"] is None


def test_scientific_notation_is_a_number(folder):
    assert read(folder, BASE + "max_grad_norm: 3e-4\n").values["max_grad_norm"] == 3e-4


def test_the_resolved_recipe_reads_back_as_itself(folder):
    text = (
        BASE
        + "batch_size: 16\noptimizer: {_target_: torch.optim.SGD, lr: 3e-7, momentum: 0.9}\nsteps: ${batch_size}\nresume: 'never'\n"
    )
    recipe = read(folder, text, "epochs=2")
    assert "${" not in recipe.to_yaml()
    assert read(folder, recipe.to_yaml()).values == recipe.values


def test_the_recipes_folder_comes_last_on_the_path(folder):
    read(folder, BASE)
    assert sys.path[-1] == str(folder)
    read(folder, BASE)
    assert sys.path.count(str(folder)) == 1


def test_a_module_that_fails_while_imported_passes_through(folder):
    (folder / "broken_part.py").write_text("raise ZeroDivisionError('mine')\n")
    with pytest.raises(ZeroDivisionError, match="mine"):
        read(folder, BASE + "loss: broken_part.loss\n")


def test_a_module_that_lacks_another_is_the_users_own_failure(folder):
    (folder / "lacking_part.py").write_text("import no_such_module_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        read(folder, BASE + "loss: lacking_part.loss\n")


def test_a_target_that_fails_while_called_passes_through(folder):
    recipe = read(folder, BASE.replace("make_data}", "make_data, num_batches: three}"))
    with pytest.raises(TypeError, match="can't multiply sequence"):
        recipe.arguments()


@pytest.mark.parametrize(
    ("addition", "expected"),
    [
        ("loss: torch.nn.functional.mse_los\n", "loss: torch.nn.functional has no 'mse_los'; did you mean 'mse_loss'?"),
        ("loss: my_prats.loss\n", "loss: there is no module 'my_prats'; did you mean 'my_parts'?"),
        ("loss: my_parts.NUMBER\n", "loss: my_parts.NUMBER is 3; give"),
        ("loss: {_target_: my_parts.NUMBER}\n", "loss._target_: my_parts.NUMBER is 3, which cannot be called"),
        ("loss: 'a b.c'\n", "loss: 'a b.c' is no dotted name"),
        (
            "loss: {_target_: torch.nn.MSELoss, reductoin: sum}\n",
            "loss.reductoin: torch.nn.MSELoss takes no argument 'reductoin'; did you mean 'reduction'?",
        ),
        ("loss: {target: torch.nn.MSELoss}\n", "loss: has no _target_; is it 'target'?"),
        ("loss: 3\n", "loss: got 3; write {_target_"),
        ("loss: torch.nn.MSELoss\n", "loss: torch.nn.MSELoss is the class MSELoss; give"),
        ("loss: mse\n", "loss: 'mse' is no dotted name"),
        ("scheduler: torch.optim.lr_scheduler.StepLR\n", "scheduler: torch.optim.lr_scheduler.StepLR needs an argument"),
        (
            "optimizer: {_target_: torch.optim.SGD, lr: {_target_: my_parts.warmup, step: 1}}\n",
            "optimizer.lr: my_parts.warmup needs an argument 'length'",
        ),
        (
            "optimizer: {_target_: torch.optim.SGD, params: 3}\n",
            "optimizer.params: torch.optim.SGD is given 'params' by its place already",
        ),
        ("optimizer: {_target_: my_parts.Listener, _args_: [1]}\n", "takes 1 positional arguments, and would be given 2"),
        ("optimizer: {_target_: torch.optim.SGD, _convert_: all}\n", "optimizer._convert_: is not understood here"),
        ("optimizer: {_target_: torch.optim.SGD, _partial_: 3}\n", "optimizer._partial_: got 3; give true or false"),
        ("optimizer: {_target_: torch.optim.SGD, _args_: 3}\n", "optimizer._args_: got 3; give a list"),
        ("eval_data: {_target_: my_parts.make_data, _partial_: true}\n", "eval_data._partial_: gives a function"),
        ("eval_data: my_parts.make_data\n", "write {_target_: my_parts.make_data}"),
        ("callbacks: {_target_: my_parts.Listener}\n", "callbacks: got {'_target_': 'my_parts.Listener'}; write a list"),
        ("callbacks: [my_parts.NUMBER]\n", "callbacks.0: my_parts.NUMBER is 3"),
        ("metrics: {mae: my_parts.los}\n", "metrics.mae: my_parts has no 'los'; did you mean 'loss'?"),
        ("metrics: [my_parts.loss]\n", "metrics: got ['my_parts.loss']; write name:"),
        ("plan: {micro_batsh: 3}\n", "plan.micro_batsh: a plan has no such field; did you mean 'micro_batch'?"),
        ("plan: {micro_batch: 0}\n", "plan.micro_batch: micro_batch=0 is no number of samples"),
        ("plan: 8\n", "plan: got 8; write its fields"),
        ("batch_size: 8\nseparable: false\nplan: {micro_batch: 4}\n", "plan: micro_batch 4 cuts a batch of 8"),
        ("epochs: ${epohcs}\n", "epochs: ${epohcs} cannot be resolved"),
        ("epochs: ???\n", "epochs: is ???, to be filled in"),
        ("epochs: ${epochs}\n", "epochs: ${epochs} cannot be resolved"),
        ("loss: {_target_: my_parts.loss, scale: '${oc.env:NOT_SET_AT_ALL}'}\n", "loss.scale: ${oc.env:NOT_SET_AT_ALL}"),
        ("epochz: 3\n", "epochz: there is no such argument; did you mean 'epochs'?"),
        ("1: 2\n", "1: there is no such argument"),
        ("resume: off\n", "resume: got False; give 'auto', 'never' or 'must' (YAML reads"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_key_and_the_remedy(folder, addition, expected):
    found = mistakes_of(folder, BASE + addition)
    assert len(found) == 1
    assert expected in found[0]


def test_a_misspelt_argument_that_is_needed_is_one_mistake(folder):
    assert len(mistakes_of(folder, BASE.replace("width", "widht"))) == 1


def test_all_mistakes_of_a_recipe_are_told_at_once(folder):
    text = "model: {_target_: my_parts.make_modle}\nepochs: none\nladder: [ampp]\nloss: {_target_: torch.nn.MSELos}\nseeed: 3\n"
    found = mistakes_of(folder, text, "batch_size=x")
    keys = {sentence.partition(":")[0] for sentence in found}
    assert keys == {"data", "epochs", "ladder", "seeed", "batch_size", "model._target_", "loss._target_"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs", "epochs: is no override; write key=value"),
        ("=3", "=3: is no override"),
        ("model..width=3", "model..width=3: is no override"),
        ("epochs=[1,", "epochs: '[1,' is no YAML value"),
        ("model._target_.x=3", "model._target_.x: model._target_ is 'my_parts.make_model', not a mapping"),
        ("ladder.7=amp", "ladder.7: cannot become 'amp'"),
        ("epochs=x", "epochs: got 'x'; give a whole number"),
    ],
)
def test_a_wrong_override_is_a_mistake_with_its_key(folder, override, expected):
    found = mistakes_of(folder, BASE + "ladder: [amp]\n", override)
    assert len(found) == 1
    assert found[0].startswith(expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- 1\n- 2\n", "holds a seq, not a mapping"),
        ("hello\n", "holds a str, not a mapping"),
        ("model: [1,\ndata: 3\n", "line 3, column 1"),
        ("model: 1\nmodel: 2\n", "model: line 2, column 1: model is written twice"),
        ("model: 1\n---\nmodel: 2\n", "line 2, column 1"),
        ("model: !!python/name:os.system\n", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_recipe_says_where(folder, content, expected):
    found = mistakes_of(folder, content)
    assert len(found) == 1
    assert expected in found[0]


def test_a_file_that_is_not_there_has_a_nearest_name(folder):
    (folder / "demo.yaml").write_text(BASE)
    for name, expected in (
        ("dmeo.yaml", "did you mean 'demo.yaml'?"),
        ("nowhere/demo.yaml", "no folder"),
        (".", "is no file; type for example"),
    ):
        with pytest.raises(RecipeError, match="yaml") as caught:
            load_recipe(folder / name)
        assert expected in str(caught.value)


def test_a_file_that_is_no_text_is_a_mistake(folder):
    (folder / "weights.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(RecipeError, match=r"weights.yaml: is no UTF-8 text \(byte 7\)"):
        load_recipe(folder / "weights.yaml")


# The table of arguments, which Python's constructor is checked against as well.


def good():
    return {"model": nn.Linear(1, 1), "data": [1]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 0), ("batch_size", True), ("batch_size", 2.0), ("batch_size", "8"), ("epochs", -1), ("steps", 0),
        ("shuffle", 1), ("shuffle", None), ("num_workers", -1), ("num_workers", None), ("eval_steps", 0),
        ("max_grad_norm", 0), ("max_grad_norm", float("nan")), ("max_grad_norm", True), ("reduction", "none"),
        ("reduction", None), ("separable", "yes"), ("plan", {"micro_batch": 3}), ("ladder", "amp"), ("ladder", ["apm"]),
        ("ladder", [3]), ("memory_limit", "20 gigs"), ("memory_limit", 1.5), ("memory_limit", 0), ("memory_limit", 1),
        ("memory_limit", "0.9"), ("memory_limit", True), ("memory_limit", float("nan")), ("device", "gpu"),
        ("device", 0), ("device", "cuda:"), ("seed", None), ("seed", -1), ("seed", 2**32), ("run_dir", ""),
        ("run_dir", 2024), ("run_dir", __file__), ("run_dir", __file__ + "/below"), ("resume", True), ("resume", "yes"),
        ("checkpoint_steps", 0), ("keep_checkpoints", 0), ("callbacks", print), ("callbacks", [3]),
        ("callbacks", [nn.Linear]), ("callbacks", None), ("trackers", "tensorboard"), ("trackers", ["tensorbord"]),
        ("progress", "yes"), ("metrics", [print]), ("metrics", {"loss": print}), ("metrics", {"a": 3}), ("loss", "mse"), ("loss", nn.MSELoss),
        ("optimizer", "adam"), ("scheduler", 3), ("collate_fn", 3), ("weight", 1.0), ("data", "text"), ("data", 3),
        ("data", {"a": 1}), ("data", list), ("eval_data", 3), ("model", "gpt2"), ("model", None), ("no_such_key", 3),
    ],
)  # fmt: skip
def test_an_illegal_argument_is_one_mistake_that_begins_with_its_key(key, value):
    extra = {"eval_data": [1]} if key == "eval_steps" else {}
    extra |= {"run_dir": "r"} if key == "checkpoint_steps" else {}
    found = check_arguments(good() | extra | {key: value})
    assert len(found) == 1
    assert found[0].startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 1), ("max_grad_norm", 1), ("max_grad_norm", 0.5), ("ladder", []), ("ladder", ["amp", print]),
        ("ladder", Ladder()), ("memory_limit", "20GiB"), ("memory_limit", 2**20), ("memory_limit", 1.0),
        ("memory_limit", None), ("device", "cuda:1"), ("device", torch.device("cpu")), ("seed", 0),
        ("callbacks", (print,)), ("trackers", ["tensorboard"]), ("metrics", {"a": print}), ("plan", Plan()),
        ("optimizer", torch.optim.SGD([torch.zeros(1)])), ("optimizer", torch.optim.SGD), ("data", iter([1])),
        ("run_dir", "not/there/yet"), ("run_dir", "x" * 300), ("collate_fn", dict), ("progress", None),
    ],
)  # fmt: skip
def test_a_legal_argument_is_no_mistake(key, value):
    assert check_arguments(good() | {key: value}) == []


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"loss": print, "step": print}, "step"),
        ({"eval_steps": 3}, "eval_steps"),
        ({"resume": "must"}, "resume"),
        ({"checkpoint_steps": 3}, "checkpoint_steps"),
        ({"separable": False, "plan": Plan(micro_batch=2), "batch_size": 4}, "plan"),
    ],
)
def test_arguments_that_do_not_go_together_are_a_mistake(values, key):
    found = check_arguments(good() | values)
    assert len(found) == 1
    assert found[0].startswith(f"{key}: ")


def test_the_table_has_the_arguments_of_the_constructor():
    from adaptive_trainer.trainer import AdaptiveTrainer

    assert list(ARGUMENTS) == list(inspect.signature(AdaptiveTrainer).parameters)


def test_the_trackers_are_those_that_accelerate_knows():
    assert set(TRACKERS) == {entry.value for entry in LoggerType}


def test_a_large_or_strange_value_is_shown_in_few_words():
    assert len(shown("x" * 10_000)) < 100
    assert shown(torch.zeros(1000)) == "an object of type Tensor"
    assert shown(dict) == "the class dict"


def test_nearest_is_silent_when_nothing_is_near():
    assert nearest("zzz", ["model"]) == ""
    assert nearest("MODLE", ["model"]) == "; did you mean 'model'?"


def test_a_function_written_in_c_is_not_judged():
    assert list(targets.check({"_target_": "torch.relu", "x": 1}, "loss", targets.Use.FUNCTION)) == []
    assert targets.make({"_target_": "torch.relu"}, targets.Use.FUNCTION)(torch.tensor(-1.0)) == 0


def test_a_class_is_called_even_if_it_does_not_tell_what_it_takes():
    assert targets.make({"_target_": "builtins.dict", "a": 1}, targets.Use.FUNCTION) == {"a": 1}


# What newcomers write.


def test_a_module_in_the_place_of_its_class_suggests_the_class(folder):
    (found,) = mistakes_of(folder, BASE + "optimizer: {_target_: torch.optim.adam, lr: 0.1}\n")
    assert found == (
        "optimizer._target_: torch.optim.adam is a module, which cannot be called; did you mean 'torch.optim.Adam'?"
    )
    (found,) = mistakes_of(folder, BASE + "loss: {_target_: torch.nn.functional}\n")
    assert "name something in it, torch.nn.functional." in found


@pytest.mark.parametrize("given", ["foo", "'0.1'"])
def test_a_text_where_the_target_takes_a_number_is_a_mistake_with_its_key(folder, given):
    (found,) = mistakes_of(folder, BASE + "optimizer: {_target_: torch.optim.AdamW}\n", f"optimizer.lr={given}")
    text = given.strip("'")
    assert found == f"optimizer.lr: got {text!r}; torch.optim.AdamW takes a number there"


def test_a_text_is_fine_where_the_target_takes_one_or_says_nothing(folder):
    (folder / "my_parts.py").write_text(MODULE + "\ndef typed(output, targets, scale: float | str = 1.0): pass\n")
    read(folder, BASE + "loss: {_target_: my_parts.typed, scale: auto}\n")
    read(folder, BASE + "loss: {_target_: my_parts.loss, scale: auto}\n")


def test_modules_are_looked_for_in_the_current_folder_too_and_a_mistake_says_where(
    folder, tmp_path_factory, monkeypatch
):
    current = tmp_path_factory.mktemp("current")
    (current / "beside_me.py").write_text("def loss(output, targets): pass\n")
    monkeypatch.chdir(current)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (found,) = mistakes_of(folder, BASE + "loss: beside_mee.loss\n")
    assert "loss: there is no module 'beside_mee'; did you mean 'beside_me'?" in found
    assert str(folder) in found
    assert str(current) in found
    assert "site-packages" not in found
    assert read(folder, BASE + "loss: beside_me.loss\n").arguments()["loss"].__module__ == "beside_me"
    del sys.modules["beside_me"]


def test_what_an_extra_brings_is_a_mistake_like_others_with_the_line_to_type(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    real = importlib.import_module

    def without(name, *rest):
        if name in ("sklearn", "digits_part"):
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
        return real(name, *rest)

    monkeypatch.setattr(targets.importlib, "import_module", without)
    text = "model: {_target_: digits_part.make_model}\ndata: {_target_: sklearn.datasets.load_digits}\nepochs: many\n"
    found = mistakes_of(folder, text)
    assert [sentence.partition(":")[0] for sentence in found] == ["epochs", "model._target_", "data._target_"]
    assert "digits_part needs sklearn, which is not installed" in found[1]
    assert all('pip install "adaptive-trainer[digits]"' in sentence for sentence in found[1:])


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((Path(targets.__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(targets.EXTRAS.values()) == set(project["optional-dependencies"])


@pytest.mark.parametrize("given", [20, 1000, "20", "512 "])
def test_few_bytes_without_a_unit_ask_whether_gigabytes_were_meant(given):
    (found,) = check_arguments(good() | {"memory_limit": given})
    number = str(given).strip()
    assert f"did you mean '{number}GiB'?" in found
    assert f"'{number}B'" in found
    for meant in (f"{number}B", 2**20, "180KiB"):
        assert check_arguments(good() | {"memory_limit": meant}) == []


def test_a_class_or_function_that_lacks_arguments_is_no_model():
    class Net(nn.Module):
        def __init__(self, width, depth=2, *, heads):
            super().__init__()

    (found,) = check_arguments(good() | {"model": Net})
    assert found == (
        "model: got the class Net; give an nn.Module, or a function without arguments that returns one; "
        "Net needs width, heads: type Net(width=..., heads=...)"
    )
    for legal in (nn.Linear(1, 1), lambda: None, functools.partial(Net, 3, heads=2)):
        assert check_arguments(good() | {"model": legal}) == []
