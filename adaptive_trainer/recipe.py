"""From a YAML file and ``key=value`` overrides to the trainer's arguments.

A recipe is read in two moves. `load_recipe` finds every mistake that can be found without calling anything, and raises
them all at once; for this it imports the modules that the recipe names. `Recipe.arguments` then makes the objects. The
model is not made: it stays a function, so that loading it is protected by the trainer like everything else.

Only this room reads YAML and knows OmegaConf.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from inspect import isclass, isroutine
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf  # noqa: TID251  this is the room that reads YAML
from omegaconf.errors import OmegaConfBaseException  # noqa: TID251  this is the room that reads YAML

from adaptive_trainer import targets
from adaptive_trainer.arguments import ARGUMENTS, Kind, check_arguments
from adaptive_trainer.checks import nearest, shown
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.plan import Plan
from adaptive_trainer.targets import MISSING, Missing, Use

_USES = {Kind.MODEL: Use.CALL, Kind.MADE: Use.CALL, Kind.MAKER: Use.FEED, Kind.FUNCTION: Use.FUNCTION}
_MAX_DEPTH = 50


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe without a known mistake.

    Attributes:
        path: The file it was read from.
        values: Its content as plain data, overrides applied and interpolations resolved.
    """

    path: Path
    values: Mapping[str, Any]

    def to_yaml(self) -> str:
        """The recipe as it was meant, with nothing left to resolve."""
        return yaml.safe_dump(dict(self.values), sort_keys=False, allow_unicode=True)

    def save(self, run_dir: Path) -> None:
        """Write ``recipe.yaml``, with nothing left to resolve, into a run's folder.

        Raises:
            RecipeError: The folder cannot be written to.
        """
        path = run_dir / "recipe.yaml"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            path.write_text(self.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise RecipeError(f"run_dir: {path} cannot be written ({error.strerror}); give a writable folder") from None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the trainer's constructor. Everything is made anew at each call.

        What the user's own code raises on the way passes through untouched.
        """
        return {key: _argument(ARGUMENTS[key].kind, value) for key, value in self.values.items()}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    The recipe's folder and the current one are put at the end of ``sys.path``, so that it can name modules there.

    Args:
        path: A YAML file.
        overrides: ``key=value`` each, such as ``epochs=3`` or ``model.width=512``; values are read as YAML.

    Raises:
        RecipeError: With all mistakes at once.
    """
    path = Path(path)
    values, mistakes = _read_values(path, overrides)
    mistakes += check_arguments(values, _unmade(values))
    _search_in(path.parent.resolve(), Path.cwd())
    mistakes += [sentence for key, value in values.items() if key in ARGUMENTS for sentence in _check_value(key, value)]
    if mistakes:
        raise RecipeError(mistakes)
    return Recipe(path, values)


def read_values(path: str | Path, overrides: Sequence[str] = ()) -> Mapping[str, Any]:
    """A recipe's content as plain data, resolved but not judged: nothing that it names is imported.

    Raises:
        RecipeError: With all mistakes of the file and the overrides.
    """
    values, mistakes = _read_values(Path(path), overrides)
    if mistakes:
        raise RecipeError(mistakes)
    return values


def _read_values(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    config = _parse(path, _read(path))
    mistakes = [sentence for override in overrides if (sentence := _apply(config, override))]
    return _plain(config, (), mistakes), mistakes


def _search_in(*folders: Path) -> None:
    for folder in folders:
        if folder not in (Path(entry).resolve() for entry in sys.path):
            sys.path.append(str(folder))
    importlib.invalidate_caches()


# Reading.


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: there is no such file{_nearest_file(path)}") from None
    except (IsADirectoryError, NotADirectoryError):
        inside = sorted(path.glob("*.y*ml"))
        raise RecipeError(f"{path}: is no file; type for example {inside[0] if inside else 'recipe.yaml'}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is no UTF-8 text (byte {error.start}); give a YAML file") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); give a readable YAML file") from None


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f", and no folder {str(path.parent)!r}; type the path of a recipe"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    return nearest(path.name, names) or "; type the path of a YAML file"


def _parse(path: Path, text: str) -> DictConfig:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode):
            what = "is empty" if root is None else f"holds a {root.tag.rpartition(':')[2]}, not a mapping"
            raise RecipeError(f"{path}: {what}; write key: value lines, at least model and data")
        config = OmegaConf.create(text)
    except yaml.MarkedYAMLError as error:
        place, problem = error.problem_mark or error.context_mark, error.problem or "cannot be parsed"
        at = f"line {place.line + 1}, column {place.column + 1}: " if place else ""
        start, what, key = problem.partition("found duplicate key ")
        sentence = f"{key} is written twice; keep one" if what else f"{start}; correct the YAML there"
        raise RecipeError(f"{key or path}: {at}{sentence}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RecipeError(f"{path}: {_first_line(error)}; correct the YAML") from None
    assert isinstance(config, DictConfig)  # noqa: S101  our own invariant: the root is a mapping
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _apply(config: DictConfig, override: str) -> str | None:
    """Put one ``key=value`` into ``config``, or say why it cannot be done."""
    key, equals, text = override.partition("=")
    if not equals or not key or not all(key.split(".")):
        return f"{override}: is no override; write key=value, for example epochs=3 or model.width=512"
    parent = key.rpartition(".")[0]
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        owner = OmegaConf.select(config, parent) if parent else config
        if owner is not None and not isinstance(owner, (DictConfig, ListConfig)):
            return f"{key}: {parent} is {shown(owner)}, not a mapping; override {parent} itself"
        OmegaConf.update(config, key, value["value"] if isinstance(value, dict) else value)
    except yaml.YAMLError:
        return f"{key}: {text!r} is no YAML value; quote it for the shell and for YAML"
    except (OmegaConfBaseException, TypeError, ValueError, IndexError) as error:
        return f"{key}: cannot become {text!r} ({_first_line(error)}); override a value that is there"
    return None


def _plain(config: DictConfig | ListConfig, place: tuple[str, ...], mistakes: list[str]) -> Any:
    """A configuration as plain data. What cannot be resolved is reported once and becomes `MISSING`."""
    if len(place) > _MAX_DEPTH:
        mistakes.append(f"{place[0]}: its interpolation goes round in a circle; write the value itself")
        return MISSING
    if config._is_none():  # noqa: SLF001  OmegaConf has no public word for a whole mapping that is null
        return None
    if isinstance(config, DictConfig):
        return {key: _entry(config, key, (*place, str(key)), mistakes) for key in config}
    return [_entry(config, index, (*place, str(index)), mistakes) for index in range(len(config))]


def _entry(config: DictConfig | ListConfig, key: Any, place: tuple[str, ...], mistakes: list[str]) -> Any:
    path = ".".join(place)
    if OmegaConf.is_missing(config, key):
        mistakes.append(f"{path}: is ???, to be filled in; give a value, for example {path}=...")
        return MISSING
    try:
        value = config[key]
    except OmegaConfBaseException as error:
        typed = OmegaConf.to_container(config, resolve=False)
        wrong = typed[key] if isinstance(typed, (dict, list)) else typed
        mistakes.append(f"{path}: {wrong} cannot be resolved ({_first_line(error)}); write the value or correct it")
        return MISSING
    return _plain(value, place, mistakes) if isinstance(value, (DictConfig, ListConfig)) else value


# Checking.


def _unmade(values: Mapping[Any, Any]) -> set[str]:
    """Keys that are judged by `_check_value`, or that have been reported already."""
    made = {key for key, argument in ARGUMENTS.items() if argument.kind is not Kind.VALUE}
    return made | {key for key, value in values.items() if _has_missing(value)}


def _has_missing(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_missing, value.values()))
    return any(map(_has_missing, value)) if isinstance(value, list) else isinstance(value, Missing)


def _check_value(key: str, value: Any) -> Iterator[str]:
    """Every mistake in a value that stands for something else."""
    kind = ARGUMENTS[key].kind
    if value is None or isinstance(value, Missing):
        return
    if kind is Kind.PLAN:
        yield from _check_plan(key, value)
    elif kind is Kind.FUNCTION_LIST:
        if not isinstance(value, list):
            yield f"{key}: got {shown(value)}; write a list, for example [{{_target_: my_module.MyCallback}}]"
            return
        for index, entry in enumerate(value):
            yield from _check_object(key, f"{key}.{index}", entry, Use.FUNCTION)
    elif kind is Kind.FUNCTION_MAPPING:
        if not isinstance(value, Mapping) or targets.is_node(value):
            yield f"{key}: got {shown(value)}; write name: my_module.my_metric lines below it"
            return
        for name, entry in value.items():
            yield from _check_object(key, f"{key}.{name}", entry, Use.FUNCTION)
    elif kind is not Kind.VALUE:
        yield from _check_object(key, key, value, _USES[kind])


def _check_object(key: str, path: str, value: Any, use: Use) -> Iterator[str]:
    argument = ARGUMENTS[key]
    if targets.is_node(value):
        if argument.kind is Kind.MADE and value.get("_partial_") is True:
            yield f"{path}._partial_: gives a function, not {argument.legal}; leave it out"
        yield from targets.check(value, path, use)
    elif isinstance(value, Mapping):
        near = nearest("_target_", [str(name) for name in value]).replace("did you mean", "is it")
        yield f"{path}: has no _target_{near}; write _target_: and a dotted name"
    elif not isinstance(value, str):
        yield f"{path}: got {shown(value)}; write {{_target_: my_module.my_function}} with its arguments"
    else:
        found = targets.resolve(value)
        if isinstance(found, str):
            yield f"{path}: {found}"
        elif argument.kind in (Kind.MODEL, Kind.MAKER) and (isclass(found.value) or isroutine(found.value)):
            yield from targets.check({"_target_": value}, path, use)
        elif not argument.check(_as_whole(argument.kind, found.value)):
            yield f"{path}: {value} is {shown(found.value)}; give {argument.legal}, or write {{_target_: {value}}}"


def _as_whole(kind: Kind, entry: Any) -> Any:
    """An argument with this one entry, where the argument is a list or a mapping."""
    if kind is Kind.FUNCTION_LIST:
        return [entry]
    return {"metric": entry} if kind is Kind.FUNCTION_MAPPING else entry


def _check_plan(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{key}: got {shown(value)}; write its fields below it, for example micro_batch: 8"
        return
    legal = [field.name for field in fields(Plan)]
    for name, entry in value.items():
        if name not in legal:
            yield f"{key}.{name}: a plan has no such field" + (nearest(name, legal) or f"; it has {', '.join(legal)}")
        elif not isinstance(entry, Missing):
            try:
                Plan(**{name: entry})
            except ValueError as error:
                yield f"{key}.{name}: {error}"


# Making.


def _argument(kind: Kind, value: Any) -> Any:
    if value is None or kind is Kind.VALUE:
        return value
    if kind is Kind.PLAN:
        return Plan(**value)
    if kind is Kind.FUNCTION_LIST:
        return [_object(entry, Use.FUNCTION) for entry in value]
    if kind is Kind.FUNCTION_MAPPING:
        return {name: _object(entry, Use.FUNCTION) for name, entry in value.items()}
    if kind is Kind.MODEL and targets.is_node(value):
        # The nodes inside it are made at each call too: a model that is loaded again starts from nothing.
        return partial(targets.make, value)
    return _object(value, _USES[kind])


def _object(value: Any, use: Use) -> Any:
    return targets.named(value) if isinstance(value, str) else targets.make(value, use)
