"""What a single argument may be: predicates, and hints that say more about a value which fails one.

Types are meant strictly: ``True`` is no number of epochs and ``"8"`` is no batch size, because a value that was bent
into shape is a mistake that nobody hears of. Objects are judged by what they can do (be called, be iterated over), so
that nothing here needs torch.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptive_trainer.ladder import RUNG_NAMES, Ladder, Rung, same_names
from adaptive_trainer.units import parse_bytes

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mtia", "privateuseone")
TRACKERS = (
    "all", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip


def nearest(word: object, words: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest of ``words``, or an empty text if none is near."""
    by_folded = {known.casefold(): known for known in words}
    found = difflib.get_close_matches(str(word).casefold(), by_folded, n=1)
    return f"; did you mean {by_folded[found[0]]!r}?" if found else ""


def shown(value: object) -> str:
    """A value as its user knows it: plain data as typed, shortened where long, other objects by their type."""
    if isinstance(value, (str, int, float, list, tuple, dict, type(None))):
        return reprlib.repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


# Checks. Each says whether one value is legal.


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def at_least(smallest: int) -> Callable[[Any], bool]:
    return lambda value: is_integer(value) and value >= smallest


def is_seed(value: Any) -> bool:
    return is_integer(value) and 0 <= value < 2**32


def is_positive(value: Any) -> bool:
    return (is_integer(value) or isinstance(value, float)) and value > 0


def is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def one_of(*legal: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in legal


def is_model(value: Any) -> bool:
    is_module = hasattr(value, "parameters") and not isinstance(value, type)
    return callable(value) and (is_module or not lacking(value))


def lacking(function: Callable[..., Any]) -> list[str]:
    """The arguments without which a function or class cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # written in C, or no function at all
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [entry.name for entry in parameters if entry.default is entry.empty and entry.kind not in optional]


def is_data(value: Any) -> bool:
    # A class has the methods of its instances, and a mapping or a text could be iterated over without being batches.
    if isinstance(value, (str, bytes, Mapping, type)):
        return False
    return hasattr(value, "__iter__") or hasattr(value, "__getitem__")


def is_function(value: Any) -> bool:
    # A class can be called too, but gives an object of its own where a tensor or a number is wanted.
    return callable(value) and not isinstance(value, type)


def is_optimizer(value: Any) -> bool:
    return callable(value) or hasattr(value, "param_groups")


def is_device(value: Any) -> bool:
    if isinstance(value, str):
        kind = re.fullmatch(r"([a-z]+)(?::\d+)?", value)
        return kind is not None and kind[1] in DEVICE_TYPES
    return hasattr(value, "type") and hasattr(value, "index")


def is_memory_limit(value: Any) -> bool:
    if isinstance(value, str):
        try:
            return parse_bytes(value) > 0 and not _lacks_a_unit(value)
        except ValueError:
            return False
    if isinstance(value, float):
        return 0 < value <= 1
    return is_integer(value) and value > 0 and not _lacks_a_unit(value)


def _lacks_a_unit(value: int | str) -> bool:
    """Whether this says bytes, and so few that gigabytes were meant. One that writes the unit means what it says."""
    return re.fullmatch(r"[\s\d.]+", str(value)) is not None and parse_bytes(str(value)) < 2**20


def is_rung(entry: Any) -> bool:
    return entry in RUNG_NAMES if isinstance(entry, str) else isinstance(entry, Rung) or callable(entry)


def is_ladder(value: Any) -> bool:
    return isinstance(value, Ladder) or (is_list(value) and all(map(is_rung, value)) and not same_names(value))


def is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def is_callback(entry: Any) -> bool:
    return is_function(entry) or (not isinstance(entry, type) and callable(getattr(entry, "on_event", None)))


def are_callbacks(value: Any) -> bool:
    return is_list(value) and all(map(is_callback, value))


def is_tracker(entry: Any) -> bool:
    return isinstance(entry, str) and entry in TRACKERS


def are_trackers(value: Any) -> bool:
    return is_list(value) and all(map(is_tracker, value))


def are_metrics(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(name, str) and name != "loss" and is_function(entry) for name, entry in value.items())


def is_run_dir(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and os.fspath(value) != "" and file_in_the_way(value) is None


def file_in_the_way(value: str | os.PathLike[str]) -> Path | None:
    path = Path(value)
    # Not Path.is_file: that raises for names that the file system does not take.
    return next((place for place in (path, *path.parents) if os.path.isfile(place)), None)  # noqa: PTH113  see above


# Hints. Each says what more can be said of an illegal value.


def like(words: Sequence[str]) -> Callable[[Any], str]:
    return lambda value: nearest(value, words)


def resume_hint(value: Any) -> str:
    if isinstance(value, bool):
        return " (YAML reads yes, no, on and off as true and false)"
    return nearest(value, ("auto", "never", "must"))


def entry_hint(is_legal: Callable[[Any], bool], words: Sequence[str]) -> Callable[[Any], str]:
    def hint(value: Any) -> str:
        if isinstance(value, str):
            return f"; write a list, [{value}]" if is_legal(value) else nearest(value, words)
        wrong = [entry for entry in value if not is_legal(entry)] if is_list(value) else []
        return "".join(f"; {shown(entry)} is none of them" + nearest(entry, words) for entry in wrong)

    return hint


def ladder_hint(value: Any) -> str:
    if is_list(value) and all(map(is_rung, value)):
        return f"; {same_names(value)}"
    return entry_hint(is_rung, RUNG_NAMES)(value)


def memory_hint(value: Any) -> str:
    if is_integer(value) and value == 1:
        return "; 1 is one byte, write 1.0 for the whole device"
    if re.fullmatch(r"\s*[1-9]\d*\s*", str(value)):
        number = str(value).strip()
        return f"; {number} alone is {number} bytes: did you mean '{number}GiB'? (bytes are written '{number}B')"
    return ""


def run_dir_hint(value: Any) -> str:
    if isinstance(value, (str, os.PathLike)) and (file := file_in_the_way(value)):
        return f"; {str(file)!r} is a file"
    return "; in YAML, put it in quotes" if is_integer(value) else ""


def class_hint(value: Any) -> str:
    return f"; type {value.__name__}(...), an object of it" if isinstance(value, type) else ""


def model_hint(value: Any) -> str:
    needed = lacking(value) if callable(value) else []
    if not needed:
        return ""
    name = getattr(value, "__name__", type(value).__name__)
    return f"; {name} needs {', '.join(needed)}: type {name}({', '.join(f'{entry}=...' for entry in needed)})"


def callbacks_hint(value: Any) -> str:
    return "; write a list with this one entry" if is_callback(value) else ""


def metrics_hint(value: Any) -> str:
    return "; 'loss' is always there" if isinstance(value, Mapping) and "loss" in value else ""
