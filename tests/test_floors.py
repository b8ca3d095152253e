"""The house stands as docs/design.md says: the table of rooms there is read, and every import is held against it."""

import ast
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "adaptive_trainer"
TABLE = re.compile(r"^\| (F\d) \| `([\w/]+\.py)` \| [^|]+ \|([^|]*)\|$", re.MULTILINE)
MAX_MODULE_LINES = 370  # the table of spellings in oom.py, and what the docstring of all arguments takes
MAX_FUNCTION_LINES = 50


@dataclass(frozen=True)
class Room:
    """One row of the table.

    Attributes:
        place: Its place in the table: imports go to smaller ones.
        floor: ``F0`` and so on.
        third_parties: What may be imported from outside.
    """

    place: int
    floor: str
    third_parties: frozenset[str]


@dataclass
class Imports:
    """What a module imports, those for type checkers included.

    Attributes:
        rooms: Of the package, as paths.
        third_parties: Top-level names of everything else but the standard library.
    """

    rooms: set[str] = field(default_factory=set)
    third_parties: set[str] = field(default_factory=set)


def rooms_of(text):
    rows = [(floor, path, frozenset(re.findall(r"\w+", names))) for floor, path, names in TABLE.findall(text)]
    assert len({path for _, path, _ in rows}) == len(rows), "a room stands in the table twice"
    return {path: Room(place, floor, names) for place, (floor, path, names) in enumerate(rows)}


def path_of(module):
    """The file of a module of the package, None if there is none of that name."""
    inside = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (inside / "__init__.py", inside.with_suffix(".py")):
        if path.is_file():
            return path.relative_to(PACKAGE).as_posix()
    return None


def imports_of(source):
    found = Imports()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            # `from package import module` imports the module; any other name is one of the package's own.
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.startswith("adaptive_trainer.") and path_of(name) else node.module for name in whole]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top == "adaptive_trainer":
                found.rooms.add(path_of(name))
            elif top not in sys.stdlib_module_names:
                found.third_parties.add(top)
    return found


def wrong_imports(rooms, sources):
    """Every import that the table forbids, as a sentence."""
    for path, source in sources.items():
        room, imports = rooms[path], imports_of(source)
        for other in imports.rooms:
            if rooms[other].place >= room.place:
                yield f"{path} ({room.floor}) imports {other} ({rooms[other].floor}), which stands above it"
        for name in imports.third_parties - room.third_parties:
            yield f"{path} imports {name}, which does not belong into that room"
        for name in room.third_parties - imports.third_parties:
            yield f"{path} may import {name} and does not"


SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
ROOMS = rooms_of((ROOT / "docs" / "design.md").read_text("utf-8"))


def test_every_file_of_the_package_is_in_the_table_and_every_row_is_a_file():
    assert set(ROOMS) == set(SOURCES)


def test_floors_stand_in_order():
    floors = [room.floor for room in ROOMS.values()]
    assert floors == sorted(floors)


def test_imports_go_down_and_third_parties_stay_in_their_rooms():
    assert list(wrong_imports(ROOMS, SOURCES)) == []


def test_words_and_rules_know_nothing_of_torch():
    decided = {path: room for path, room in ROOMS.items() if room.floor in {"F0", "F1"}}
    assert {"ladder.py", "rungs.py", "oom.py", "descent.py"} <= set(decided)
    assert all("torch" not in imports_of(SOURCES[path]).third_parties for path in decided)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("from adaptive_trainer.trainer import AdaptiveTrainer", "trainer.py (F5), which stands above"),
        ("def late():\n    from adaptive_trainer import memory", "memory.py (F2), which stands above"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import adaptive_trainer.loop",
            "loop.py (F5), which",
        ),
        ("from adaptive_trainer.ladder import decide", "ladder.py (F1), which stands above"),
        ("from adaptive_trainer import Plan", "__init__.py (F6), which stands above"),
        ("import torch.nn", "imports torch, which does not belong"),
        ("from rich import print", "imports rich, which does not belong"),
    ],
)
def test_a_wrong_import_is_found_wherever_it_stands(source, complaint):
    found = list(wrong_imports(ROOMS, {"ladder.py": source}))
    assert len(found) == 1
    assert complaint in found[0]


def test_no_room_is_too_large_to_live_in():
    sizes = {path: len(source.splitlines()) for path, source in SOURCES.items()}
    assert {path: size for path, size in sizes.items() if size > MAX_MODULE_LINES} == {}


def test_every_function_fits_a_glance():
    """From the first statement on: what a signature or a docstring says at length costs nobody a glance."""
    sizes = {
        f"{path}:{node.name}": size_of(node)
        for path, source in SOURCES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(sizes) > 100
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


def size_of(function):
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return function.end_lineno - body[0].lineno + 1 if body else 0
