"""The command ``adaptive-trainer``: argparse above, one function for each command below.

What ends a command early becomes an exit code and words in one place, `_Edge`. Mistakes are one line each. What the
user's own code raised is not ours to comment on: its traceback is shown whole, from the user's first frame on.

torch is imported by the commands that need it, so that ``--help`` and a misspelt recipe answer at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from adaptive_trainer.arguments import ARGUMENTS
from adaptive_trainer.errors import AdaptiveTrainerError, DataError, LadderExhausted, RecipeError
from adaptive_trainer.progress import log_on_terminal
from adaptive_trainer.report import read_history
from adaptive_trainer.supervisor import supervise
from adaptive_trainer.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from adaptive_trainer.result import FitResult

DONE, FAILED, WRONG_INPUT, EXHAUSTED, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command and its arguments; the process's own if None.

    Returns:
        0 done; 1 the user's own code failed; 2 recipe, arguments or data are wrong; 3 the ladder is exhausted, or
        nothing was recognised; 130 interrupted.
    """
    with _Edge() as edge:
        arguments = _parsed(argv)
        edge.code = arguments.command(arguments)
    return edge.code


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, unknown = parser.parse_known_args(argv)
    arguments.started_as = [sys.executable, "-m", "adaptive_trainer"] if argv is not None else _own_command()
    if "overrides" in arguments and not any(entry.startswith("-") for entry in unknown):
        arguments.overrides += unknown  # argparse takes none that come after an option
        return arguments
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_as_overrides(unknown)}")
    return arguments


def _own_command() -> list[str]:
    """How this process was started, without the arguments."""
    return [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]


def _as_overrides(unknown: Sequence[str]) -> str:
    """How a recipe's keys are typed, for whoever has typed them as options."""
    meant = []
    for option, following in pairwise((*unknown, "--")):
        key, _, value = option.removeprefix("--").partition("=")
        if option.startswith("--") and _is_key(key):
            meant.append(f"{key.replace('-', '_')}={value or (following if following[:1] != '-' else '...')}")
    return f"; write {' '.join(meant)}" if meant else ""


def _is_key(text: str) -> bool:
    return text.partition(".")[0].replace("-", "_") in ARGUMENTS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adaptive-trainer", description="Trains a PyTorch model through out-of-memory."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        place = commands.add_parser(command.name, help=command.summary, description=command.summary)
        for name, options in command.arguments:
            place.add_argument(name, **options)
        place.set_defaults(command=command.run)
    return parser


def _version() -> str:
    try:
        return version("adaptive-trainer")
    except PackageNotFoundError:
        return "not installed: run from its source"


# Commands.


def _fit(arguments: argparse.Namespace) -> int:
    from adaptive_trainer.recipe import load_recipe  # noqa: PLC0415  other commands read no YAML

    if arguments.restarts is not None:
        return _supervised(arguments)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from adaptive_trainer.trainer import AdaptiveTrainer  # noqa: PLC0415  torch is slow, a mistake is told first

    with log_on_terminal() as log:
        result = AdaptiveTrainer.from_recipe(recipe).fit()
    for warning in log.warnings:
        _complain(f"warning: {warning}")
    _say(_result_words(result))
    return DONE


def _supervised(arguments: argparse.Namespace) -> int:
    from adaptive_trainer.recipe import read_values  # noqa: PLC0415  other commands read no YAML

    values = read_values(arguments.recipe, arguments.overrides)
    run_dir = values.get("run_dir")
    if not isinstance(run_dir, str) or not run_dir:
        raise RecipeError("run_dir: --restarts needs a folder with checkpoints to go on from; type run_dir=runs/first")
    command = [*arguments.started_as, "fit", arguments.recipe, *arguments.overrides]
    # A run that is to begin anew has done so by the first start.
    again = [*command, "resume=auto"] if values.get("resume") == "never" else command
    return supervise(command, again, Path(run_dir), arguments.restarts, _complain)


def _num_restarts(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of restarts; type 1 or more")
    return int(text)


def _result_words(result: FitResult) -> str:
    loss = f"loss {result.losses[0]:.4g} -> {result.losses[-1]:.4g}" if result.losses else "no step was done"
    names = [event.rung for event in result.fallbacks]
    counts = ", ".join(f"{name} x {names.count(name)}" for name in dict.fromkeys(names))
    lines = [
        f"done: {result.steps} steps in all, {loss}, {format_seconds(result.seconds)}",
        f"plan: {result.plan}",
        f"fallbacks: {len(names)}" + (f" ({counts})" if names else ""),
    ]
    if result.metrics:
        lines.append("evaluation: " + ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items()))
    if result.peak_bytes is not None:
        lines.append(f"peak: {format_bytes(result.peak_bytes)}")
    if result.run_dir is not None:
        lines.append(f"run: {result.run_dir} (adaptive-trainer report {result.run_dir})")
    return "\n".join(lines)


def _report(arguments: argparse.Namespace) -> int:
    from adaptive_trainer.report.terminal import console, render  # noqa: PLC0415  only here are tables drawn

    history = read_history(arguments.run_dir)
    if history is None:
        _complain(f"error: {arguments.run_dir}: nothing in its journal was recognised")
        return EXHAUSTED
    screen = console()
    screen.print(render(history, screen.width))
    return DONE


def _doctor(_arguments: argparse.Namespace) -> int:
    from adaptive_trainer.doctor import examine  # noqa: PLC0415  it imports torch

    section = ""
    for finding in examine():
        if finding.section != section:
            _say(f"{chr(10) if section else ''}{finding.section}")
            section = finding.section
        _say(f"  {finding.name:<24} {finding.words}")
    return DONE


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    arguments: tuple[tuple[str, dict[str, Any]], ...] = ()


COMMANDS = (
    _Command(
        "fit",
        "train what a recipe says",
        _fit,
        (
            ("recipe", {"metavar": "RECIPE", "help": "a YAML file"}),
            ("overrides", {"metavar": "key=value", "nargs": "*", "help": "such as epochs=3 or model.width=512"}),
            (
                "--restarts",
                {
                    "metavar": "N",
                    "type": _num_restarts,
                    "help": "run in a process of its own, and start it again, at most N times, one rung lower, when it "
                    "is killed by signal 9 or loses its device; needs a run_dir",
                },
            ),
        ),
    ),
    _Command(
        "report",
        "say what happened in a run",
        _report,
        (("run_dir", {"metavar": "RUN_DIR", "type": Path, "help": "the run_dir of a run"}),),
    ),
    _Command("doctor", "say what this machine offers, and what is missing for which rung", _doctor),
)


# The edge: where an exception becomes an exit code.


class _Edge:
    """Turns what a command raises into words on standard error and an exit code.

    Attributes:
        code: The exit code.
    """

    def __init__(self) -> None:
        self.code = DONE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if error is not None:
            self.code = _end(error)
        return True


def _end(error: BaseException) -> int:
    """Say what ended the command; its exit code."""
    match error:
        case SystemExit():
            return _exit_code(error.code)
        case KeyboardInterrupt():
            _complain("interrupted")
            return INTERRUPTED
        case RecipeError():
            for mistake in error.mistakes:
                _complain(f"error: {_one_line(mistake)}")
            return WRONG_INPUT
        case LadderExhausted():
            _show_trail(error)
            return EXHAUSTED
        case AdaptiveTrainerError():
            _complain(f"error: {_one_line(str(error))}")
            return WRONG_INPUT if isinstance(error, DataError) else FAILED
    _show_theirs(error)
    return FAILED


def _exit_code(code: object) -> int:
    """What Python itself makes of the argument of ``sys.exit``."""
    if code is None or isinstance(code, int):
        return code or DONE
    _complain(str(code))
    return FAILED


def _show_trail(error: LadderExhausted) -> None:
    from adaptive_trainer.report.terminal import console, trail_table  # noqa: PLC0415  only here are tables drawn

    if error.trail:
        screen = console(stderr=True)
        screen.print(trail_table((event.as_dict() for event in error.trail), screen.width))
    _complain(f"error: {error}")


def _show_theirs(error: BaseException) -> None:
    """The traceback from the first frame that is not the trainer's own; all of it if there is none."""
    own, frame = str(Path(__file__).parent), error.__traceback__
    while frame is not None and _is_ours(frame.tb_frame.f_code.co_filename, own):
        frame = frame.tb_next
    if frame is None and not isinstance(error, SyntaxError):
        frame = error.__traceback__
    traceback.print_exception(type(error), error, frame)


def _is_ours(path: str, own: str) -> bool:
    return path.startswith((own, "<frozen importlib", str(Path(importlib.__file__).parent)))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")
