"""What the trainer's arguments may be, as one table: the constructor and the recipe are both checked against it.

Every mistake is found, not only the first one, and each begins with its key.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from adaptive_trainer import checks
from adaptive_trainer.checks import DEVICE_TYPES, TRACKERS, nearest, shown
from adaptive_trainer.plan import Plan
from adaptive_trainer.rungs import RUNG_NAMES


class Kind(StrEnum):
    """How a value of a recipe becomes an argument."""

    VALUE = "as it stands"
    MODEL = "a target that the trainer calls without arguments"
    MADE = "a target that is called at once"
    MAKER = "a target that the trainer calls with one argument"
    FUNCTION = "a function, or a target that gives one"
    FUNCTION_LIST = "a list of functions or targets"
    FUNCTION_MAPPING = "a mapping from names to functions or targets"
    PLAN = "the fields of a plan"


def _silent(_value: Any) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Argument:
    """One row of the table.

    Attributes:
        kind: How a recipe's value becomes this argument.
        check: Whether a value is legal.
        legal: What to give, as the end of a sentence.
        hint: What more can be said of an illegal value; empty for nothing.
        optional: Whether None is legal as well.
    """

    kind: Kind
    check: Callable[[Any], bool]
    legal: str
    hint: Callable[[Any], str] = _silent
    optional: bool = True


_MODEL = "an nn.Module, or a function without arguments that returns one"
_DATA = "a Dataset, a DataLoader or any iterable of batches"
_COUNT = "a whole number, 1 or more"

#: Every keyword of the trainer's constructor.
ARGUMENTS: Mapping[str, Argument] = {
    "model": Argument(Kind.MODEL, checks.is_model, _MODEL, checks.model_hint, optional=False),
    "data": Argument(Kind.MADE, checks.is_data, _DATA, optional=False),
    "loss": Argument(
        Kind.FUNCTION,
        checks.is_function,
        "a function of output and targets that returns a scalar tensor",
        checks.class_hint,
    ),
    "step": Argument(
        Kind.FUNCTION, checks.is_function, "a function of model and batch that returns the loss", checks.class_hint
    ),
    "optimizer": Argument(
        Kind.MAKER, checks.is_optimizer, "an Optimizer, or a function of the parameters that returns one"
    ),
    "scheduler": Argument(Kind.MAKER, callable, "a function of the optimizer that returns a learning-rate scheduler"),
    "batch_size": Argument(Kind.VALUE, checks.at_least(1), f"{_COUNT} (samples per optimizer step)"),
    "epochs": Argument(Kind.VALUE, checks.at_least(1), _COUNT),
    "steps": Argument(Kind.VALUE, checks.at_least(1), f"{_COUNT} (optimizer steps)"),
    "shuffle": Argument(Kind.VALUE, checks.is_switch, "true or false", optional=False),
    "collate_fn": Argument(Kind.FUNCTION, callable, "a function from a list of samples to a batch"),
    "num_workers": Argument(Kind.VALUE, checks.at_least(0), "a whole number, 0 or more", optional=False),
    "eval_data": Argument(Kind.MADE, checks.is_data, _DATA),
    "eval_steps": Argument(Kind.VALUE, checks.at_least(1), f"{_COUNT} (optimizer steps)"),
    "max_grad_norm": Argument(Kind.VALUE, checks.is_positive, "a number above 0, or nothing for no clipping"),
    "reduction": Argument(
        Kind.VALUE, checks.one_of("mean", "sum"), "'mean' or 'sum'", checks.like(("mean", "sum")), optional=False
    ),
    "weight": Argument(
        Kind.FUNCTION,
        checks.is_function,
        "a function from a batch to the number of items that count",
        checks.class_hint,
    ),
    "separable": Argument(Kind.VALUE, checks.is_switch, "true or false", optional=False),
    "plan": Argument(Kind.PLAN, lambda value: isinstance(value, Plan), "a Plan, for example micro_batch: 8"),
    "ladder": Argument(
        Kind.VALUE,
        checks.is_ladder,
        f"a list of {', '.join(RUNG_NAMES)}",
        checks.ladder_hint,
    ),
    "memory_limit": Argument(
        Kind.VALUE, checks.is_memory_limit, "'20GiB', a number of bytes, or a fraction such as 0.9", checks.memory_hint
    ),
    "device": Argument(
        Kind.VALUE, checks.is_device, "a device such as 'cpu', 'cuda' or 'cuda:0'", checks.like(DEVICE_TYPES)
    ),
    "seed": Argument(Kind.VALUE, checks.is_seed, "a whole number from 0 to 4294967295", optional=False),
    "run_dir": Argument(Kind.VALUE, checks.is_run_dir, "the path of a folder", checks.run_dir_hint),
    "resume": Argument(
        Kind.VALUE,
        checks.one_of("auto", "never", "must"),
        "'auto', 'never' or 'must'",
        checks.resume_hint,
        optional=False,
    ),
    "checkpoint_steps": Argument(Kind.VALUE, checks.at_least(1), f"{_COUNT} (optimizer steps)"),
    "keep_checkpoints": Argument(Kind.VALUE, checks.at_least(1), _COUNT, optional=False),
    "callbacks": Argument(
        Kind.FUNCTION_LIST,
        checks.are_callbacks,
        "a list of functions of an event, or of objects with on_event",
        checks.callbacks_hint,
        optional=False,
    ),
    "trackers": Argument(
        Kind.VALUE,
        checks.are_trackers,
        f"a list of {', '.join(TRACKERS)}",
        checks.entry_hint(checks.is_tracker, TRACKERS),
        optional=False,
    ),
    "progress": Argument(Kind.VALUE, checks.is_switch, "true or false, or nothing for a bar on a terminal only"),
    "metrics": Argument(
        Kind.FUNCTION_MAPPING,
        checks.are_metrics,
        "a mapping from names to functions of output and targets",
        checks.metrics_hint,
    ),
}


def check_arguments(values: Mapping[str, Any], unmade: Container[str] = ()) -> list[str]:
    """All mistakes in ``values``, each a sentence that starts with its key; an empty list if there is none.

    Nothing is called, opened or changed. A key that is left out has its default; `model` and `data` have none.

    Args:
        values: Arguments by name.
        unmade: Keys whose values only stand for the arguments, so that there is nothing to judge yet.
    """
    mistakes = [f"{key}: there is no such argument" + nearest(key, ARGUMENTS) for key in values if key not in ARGUMENTS]
    for key, argument in ARGUMENTS.items():
        value = values.get(key)
        if key in values and value is not None:
            if key not in unmade and not argument.check(value):
                mistakes.append(f"{key}: got {shown(value)}; give {argument.legal}{argument.hint(value)}")
        elif key in ("model", "data"):
            mistakes.append(f"{key}: missing; give {argument.legal}")
        elif key in values and not argument.optional:
            mistakes.append(f"{key}: got {shown(value)}; give {argument.legal}, or leave it out")
    return mistakes + _cross_mistakes(values)


def _cross_mistakes(values: Mapping[str, Any]) -> list[str]:
    """Arguments that are each legal but not together."""
    has = {key for key, value in values.items() if value is not None}
    plan, batch_size = values.get("plan"), values.get("batch_size")
    micro_batch = plan.get("micro_batch") if isinstance(plan, Mapping) else getattr(plan, "micro_batch", None)
    whole = isinstance(micro_batch, int) and isinstance(batch_size, int) and micro_batch >= batch_size
    cut = f"a batch of {batch_size}" if "batch_size" in has else "larger batches"
    table = (
        ({"loss", "step"} <= has, "step: it replaces the loss; give step or loss, not both"),
        (
            "step" in has and bool(values.get("metrics")),
            (
                "metrics: they look at output and targets, which step keeps to itself; drop metrics, or give loss "
                "instead of step, with data that give pairs (inputs, targets)"
            ),
        ),
        ("eval_steps" in has and "eval_data" not in has, "eval_steps: nothing is evaluated without eval_data; give it"),
        (
            values.get("resume") == "must" and "run_dir" not in has,
            "resume: 'must' looks for checkpoints in run_dir, and there is none; give run_dir",
        ),
        (
            "checkpoint_steps" in has and "run_dir" not in has,
            "checkpoint_steps: checkpoints are written into run_dir, and there is none; give run_dir",
        ),
        (
            values.get("separable") is False and isinstance(micro_batch, int) and not whole,
            f"plan: micro_batch {micro_batch} cuts {cut}, which separable=False forbids; drop one",
        ),
    )
    return [sentence for wrong, sentence in table if wrong]
