"""What a recipe writes as ``_target_``: finding it, checking its arguments, calling it.

A node is a mapping with ``_target_`` (a dotted name), perhaps ``_args_`` (positional arguments) and ``_partial_``
(true: a function is made, nothing is called), and the keyword arguments; its arguments may be nodes again. This is how
Hydra's users write objects. All that can be said about a node without calling it is said before anything is called.

A module that fails while it is imported, and a target that fails while it is called, are the user's own code: what they
raise passes through untouched.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import sysconfig
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any

from adaptive_trainer.checks import nearest, shown

_OWN_KEYS = ("_target_", "_args_", "_partial_")
_LIBRARY_FOLDERS = ("site-packages", "dist-packages", "lib-dynload")

#: Which of our extras brings a library, by the name under which it is imported.
EXTRAS: Mapping[str, str] = {
    "sklearn": "digits", "transformers": "transformers", "deepspeed": "deepspeed", "pynvml": "nvidia",
}  # fmt: skip


class Missing:
    """Stands for a value that could not be worked out, which has been reported already."""


MISSING = Missing()


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A module that could not be imported, because this one is not installed."""

    module: str


class Use(StrEnum):
    """What becomes of a target."""

    CALL = "called with its arguments alone"
    FEED = "called later, with one more positional argument"
    FUNCTION = "a class is called now; a function too if it lacks nothing, else it is called later"


@dataclass(frozen=True, slots=True)
class Found:
    """The object that a dotted name means."""

    name: str
    value: Any


def is_node(value: object) -> bool:
    """Whether a value of a recipe stands for an object."""
    return isinstance(value, Mapping) and "_target_" in value


def resolve(name: str) -> Found | str:
    """The object of a dotted name, or a sentence that says why there is none."""
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return f"{name!r} is no dotted name; write for example my_module.make_model"
    value: Any = _import(parts[0])
    if value is None:
        return f"there is no module {parts[0]!r}" + (_extra_for(parts[0]) or _where_it_was_looked_for(parts[0]))
    for place, part in enumerate(parts[1:], start=1):
        path = ".".join(parts[:place])
        if isinstance(value, _Lacking):
            break
        # Some packages remove a submodule's name again, as torch.optim does: it is there, but no attribute.
        inner = getattr(value, part) if hasattr(value, part) else _import_submodule(value, f"{path}.{part}")
        if inner is None and not hasattr(value, part):
            return f"{path} has no {part!r}" + nearest(part, _public_names(value))
        value = inner
    if isinstance(value, _Lacking):
        return f"{path} needs {value.module}, which is not installed{_extra_for(value.module)}"
    return Found(name, value)


def _import(name: str) -> Any:
    """The module, None if there is none, or `_Lacking`.

    A module of the user's that lacks another is their own failure, unless it is a library of one of our extras.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        lacking = (error.name or "").partition(".")[0]
        if lacking not in EXTRAS:
            raise
    return _Lacking(lacking)


def _import_submodule(package: object, name: str) -> Any:
    return _import(name) if inspect.ismodule(package) else None


def _extra_for(module: str) -> str:
    return f'; type: pip install "adaptive-trainer[{EXTRAS[module]}]"' if module in EXTRAS else ""


def _where_it_was_looked_for(module: str) -> str:
    """The folders that a recipe's own modules may lie in: all that are searched, apart from installed libraries."""
    installed = {*sysconfig.get_paths().values(), str(Path(sys.executable).parent)}
    searched = dict.fromkeys(str(Path(entry or ".").resolve()) for entry in sys.path if not entry.endswith(".zip"))
    own = [entry for entry in searched if entry not in installed and Path(entry).name not in _LIBRARY_FOLDERS]
    near = nearest(module, (entry.name for entry in pkgutil.iter_modules()))
    return f"{near}; looked among the installed ones and in {', '.join(own)}"


def _public_names(value: object) -> list[str]:
    submodules = [entry.name for entry in pkgutil.iter_modules(getattr(value, "__path__", []))]
    return [name for name in dir(value) if not name.startswith("_")] + submodules


# Checking a node.


def check(value: object, path: str, use: Use = Use.CALL) -> Iterator[str]:
    """Every mistake in ``value`` and in all nodes inside it, each a sentence that starts with its key's path."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from check(entry, f"{path}.{index}")
    elif isinstance(value, Mapping):
        yield from _check_node(value, path, use) if is_node(value) else ()
        for key, entry in value.items():
            yield from check(entry, f"{path}.{key}")


def _check_node(node: Mapping[Any, Any], path: str, use: Use) -> Iterator[str]:
    keywords = _keywords_of(node)
    for key in keywords:
        if not isinstance(key, str):
            yield f"{path}.{key}: is no argument's name; put it in quotes"
        elif _is_reserved(key):
            yield f"{path}.{key}: is not understood here; beside arguments write {', '.join(_OWN_KEYS)}"
    args, is_partial = node.get("_args_", []), node.get("_partial_", False)
    if not isinstance(args, list):
        yield f"{path}._args_: got {shown(args)}; give a list of positional arguments"
        args = []
    if not isinstance(is_partial, bool):
        yield f"{path}._partial_: got {shown(is_partial)}; give true or false"
    found = _found(node["_target_"])
    if isinstance(found, str):
        yield f"{path}._target_: {found}"
    elif found is not None:
        is_whole = not is_partial and (use is not Use.FUNCTION or inspect.isclass(found.value))
        num_given = len(args) + (use is Use.FEED and not is_partial)
        texts = [key for key in keywords if isinstance(key, str) and not _is_reserved(key)]
        yield from _check_call(found, path, num_given, texts, is_whole=is_whole)
        yield from _check_numbers(found, path, keywords)


def _is_reserved(key: str) -> bool:
    return key.startswith("_") and key.endswith("_")


def _found(name: object) -> Found | str | None:
    """What a target's name means, if it can be called; else why not; None where the name itself is not known."""
    if isinstance(name, Missing):
        return None
    if not isinstance(name, str):
        return f"got {shown(name)}; give a dotted name such as my_module.make_model"
    found = resolve(name)
    if isinstance(found, Found) and isinstance(found.value, ModuleType):
        return f"{name} is a module, which cannot be called{_callable_of(found)}"
    if isinstance(found, Found) and not callable(found.value):
        return f"{name} is {shown(found.value)}, which cannot be called"
    return found


def _callable_of(module: Found) -> str:
    """What was probably meant: the class or function in a module that has the module's name, as torch.optim's have."""
    package, _, last = module.name.rpartition(".")
    for place in (package, module.name):
        found = resolve(place) if "." in place else Found(place, _import(place))
        inside = found.value if isinstance(found, Found) else None
        for name in dir(inside):
            if name.casefold() == last.replace("_", "").casefold() and inspect.isclass(getattr(inside, name)):
                return f"; did you mean '{place}.{name}'?"
    return f"; name something in it, {module.name}. and a function or class"


def _check_call(found: Found, path: str, num_given: int, keywords: list[str], *, is_whole: bool) -> Iterator[str]:
    """Whether a call with ``num_given`` positional arguments and ``keywords`` binds; all of them if ``is_whole``."""
    parameters = _parameters(found.value)
    if parameters is None:
        return
    ordered = [entry for entry in parameters if entry.kind in (entry.POSITIONAL_ONLY, entry.POSITIONAL_OR_KEYWORD)]
    by_place = {entry.name for entry in ordered[:num_given]}
    named = {entry.name for entry in parameters if entry.kind in (entry.POSITIONAL_OR_KEYWORD, entry.KEYWORD_ONLY)}
    takes_any = any(entry.kind is entry.VAR_KEYWORD for entry in parameters)
    takes_more = any(entry.kind is entry.VAR_POSITIONAL for entry in parameters)
    if num_given > len(ordered) and not takes_more:
        yield f"{path}: {found.name} takes {len(ordered)} positional arguments, and would be given {num_given}"
    unknown = [key for key in keywords if key not in named and not takes_any]
    for key in unknown:
        legal = f"; it takes {', '.join(sorted(named - by_place)) or 'none'}"
        yield f"{path}.{key}: {found.name} takes no argument {key!r}" + (nearest(key, named) or legal)
    for key in by_place & named & set(keywords):
        yield f"{path}.{key}: {found.name} is given {key!r} by its place already; leave it out"
    lacking = [entry.name for entry in parameters if _is_required(entry)]
    for key in lacking if is_whole else []:
        # One misspelt argument is one mistake: it is reported as the one that is not known.
        if key not in by_place and key not in keywords and not any(nearest(typed, [key]) for typed in unknown):
            yield f"{path}: {found.name} needs an argument {key!r}; add {key}: ... to it"


def _check_numbers(found: Found, path: str, keywords: Mapping[Any, Any]) -> Iterator[str]:
    """Texts where the target says that it takes numbers. What says nothing of its arguments takes anything."""
    hints = _hints(found.value)
    for key, value in keywords.items():
        if isinstance(value, str) and key in hints and _is_numeric(hints[key]):
            yield f"{path}.{key}: got {shown(value)}; {found.name} takes a number there"


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError, SyntaxError):  # names that exist for a type checker alone, say
        return {}


def _is_numeric(hint: Any) -> bool:
    members = typing.get_args(hint) if typing.get_origin(hint) in {typing.Union, UnionType} else (hint,)
    others = [member for member in members if member not in {int, float, complex, NoneType}]
    # torch's tensors by name, because nothing here needs torch.
    return len(others) < len(members) and all(getattr(member, "__name__", "") == "Tensor" for member in others)


def _is_required(entry: inspect.Parameter) -> bool:
    return entry.default is entry.empty and entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """What a target takes; None for the few written in C that do not tell."""
    try:
        return list(inspect.signature(target).parameters.values())
    except ValueError:
        return None


def _keywords_of(node: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in node.items() if key not in _OWN_KEYS}


# Calling.


def make(value: Any, use: Use = Use.CALL) -> Any:
    """The object that a checked value stands for; what is no node is itself, with the nodes inside it made."""
    if isinstance(value, list):
        return [make(entry) for entry in value]
    if not isinstance(value, Mapping):
        return value
    if not is_node(value):
        return {key: make(entry) for key, entry in value.items()}
    target = _value_of(value["_target_"])
    args = [make(entry) for entry in value.get("_args_", [])]
    keywords = {key: make(entry) for key, entry in _keywords_of(value).items()}
    if value.get("_partial_", False) or use is Use.FEED:
        return partial(target, *args, **keywords)
    if use is Use.FUNCTION and not _is_factory(target, len(args), keywords):
        return partial(target, *args, **keywords)
    return target(*args, **keywords)


def named(name: str) -> Any:
    """The object of a checked dotted name."""
    return _value_of(name)


def _value_of(name: str) -> Any:
    found = resolve(name)
    assert isinstance(found, Found), found  # noqa: S101  our own invariant: only checked recipes are made
    return found.value


def _is_factory(target: Callable[..., Any], num_given: int, keywords: Mapping[str, Any]) -> bool:
    """Whether calling it now gives the function that is wanted, rather than what that function returns."""
    if inspect.isclass(target):
        return True
    parameters = _parameters(target)
    if parameters is None:
        return False
    return all(entry.name in keywords or not _is_required(entry) for entry in parameters[num_given:])
