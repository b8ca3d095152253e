"""Plain structures with tensors in them, copied to the host and put back into the very objects that they were in.

What is met twice (two names for one dict) is copied once and put back as one. A tensor goes back into the one that it
was copied from, as long as that is alive; else into the one that is in its place now, if it fits, so that nothing is
allocated where memory is short; else it is made anew. Containers are refilled and stay the objects that they are.
Objects of other kinds are kept by reference.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host."""
    return tensor.detach().to("cpu", copy=True)


class _Value:
    """What a tensor held. The tensor itself is not kept: it would take memory that its optimizer may have let go."""

    __slots__ = ("_device", "_original", "_value")

    def __init__(self, tensor: Tensor) -> None:
        self._value, self._device = to_host(tensor), tensor.device
        self._original = weakref.ref(tensor)

    @property
    def pins(self) -> bool:
        return True

    @property
    def original(self) -> Tensor | None:
        return self._original()

    def put(self, now: Any, session: Session) -> Any:
        for place in (self.original, now if session.is_free(now) else None):
            if isinstance(place, Tensor) and self._fits(place):
                return place.copy_(self._value)
        return self._value.to(self._device, copy=True)

    def _fits(self, place: Tensor) -> bool:
        return (place.shape, place.dtype, place.device) == (self._value.shape, self._value.dtype, self._device)


class _Contents:
    """What a dict, list, deque or set held.

    Attributes:
        original: The container itself, where that keeps no tensor alive.
    """

    __slots__ = ("_empty", "_entries", "original", "pins")

    def __init__(self, container: Any) -> None:
        self._empty = copy.copy(container)  # with a deque's length and a defaultdict's factory
        self._empty.clear()
        self._entries: Any = ()
        self.original: Any = None
        self.pins = True

    def read(self, container: Any, copier: Copier) -> None:
        if isinstance(container, dict):
            self._entries = {key: copier.copied(entry) for key, entry in container.items()}
        else:
            self._entries = [copier.copied(entry) for entry in container]
        self.pins = _pin(self._entries.values() if isinstance(container, dict) else self._entries)
        self.original = None if self.pins else container

    def put(self, now: Any, session: Session) -> Any:
        live = self.original
        if live is None:
            live = now if session.is_free(now) and self._is_alike(now) else copy.copy(self._empty)
        session.settle(self, live)
        # Read before anything is taken out: tensors are put back into what is there now.
        if isinstance(live, dict):
            old = now if isinstance(now, dict) else {}
            # dict.get, because asking a defaultdict for what it lacks makes it.
            found: Any = {key: session.put(dict.get(old, key), entry) for key, entry in self._entries.items()}
        else:
            found = _put_row(now, self._entries, session)
        live.clear()
        (live.extend if isinstance(live, list | deque) else live.update)(found)
        return live

    def _is_alike(self, now: Any) -> bool:
        options = ("maxlen", "default_factory")
        return type(now) is type(self._empty) and all(
            getattr(now, name, None) == getattr(self._empty, name, None) for name in options
        )


class _Row:
    """What a tuple, named or not, held."""

    __slots__ = ("_entries", "_kind", "original", "pins")

    def __init__(self, row: tuple[Any, ...]) -> None:
        self._kind = type(row)
        self._entries: list[Any] = []
        self.original = None
        self.pins = True

    def read(self, row: tuple[Any, ...], copier: Copier) -> bool:
        """Copy the entries; whether there was anything to copy."""
        self._entries = [copier.copied(entry) for entry in row]
        self.pins = _pin(self._entries)
        return any(isinstance(entry, _COPIES) for entry in self._entries)

    def put(self, now: Any, session: Session) -> Any:
        entries = _put_row(now, self._entries, session)
        if type(now) is self._kind and len(now) == len(entries) and all(map(is_, now, entries)):
            return now
        return getattr(self._kind, "_make", self._kind)(entries)  # a named tuple's class takes entries one by one


_COPIES = (_Value, _Contents, _Row)


def _pin(entries: Iterable[Any]) -> bool:
    """Whether to hold the originals of these would keep a tensor alive."""
    return any(isinstance(entry, _COPIES) and entry.pins for entry in entries)


def _put_row(now: Any, entries: list[Any], session: Session) -> list[Any]:
    """The entries of a list or the like. What is at the same place now is used where their number is the same."""
    old = [*now] if isinstance(now, list | tuple | deque) else []
    old = old if len(old) == len(entries) else [None] * len(entries)
    return [session.put(before, entry) for before, entry in zip(old, entries, strict=True)]


class Copier:
    """Copies structures, so that what they share is shared in the copies.

    Attributes:
        kept: Objects that are kept by reference, wherever they are met.
        made: The copies.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.made: list[Any] = []
        self._known: dict[int, Any] = {}
        self._met: list[Any] = []  # alive as long as their ids are asked for

    def keep(self, entries: Iterable[Any]) -> None:
        """Keep these by reference."""
        entries = list(entries)
        self.kept += entries
        self._known.update((id(entry), entry) for entry in entries)

    def keeps(self, value: Any) -> bool:
        """Whether an object is one of those."""
        return self._known.get(id(value)) is value

    def copied(self, value: Any) -> Any:
        """A copy of plain structures, tensors on the host, as `Session.put` takes it."""
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Tensor):
            return self._note(value, _Value(value))
        if isinstance(value, dict | list | deque | set):
            contents = self._note(value, _Contents(value))
            contents.read(value, self)
            return contents
        if isinstance(value, tuple):
            row = self._note(value, _Row(value))
            if not row.read(value, self):
                self._known[id(value)] = value
        return self._known.get(id(value), value)

    def _note(self, value: Any, copied: Any) -> Any:
        self._known[id(value)] = copied
        self._met.append(value)
        self.made.append(copied)
        return copied

    def finish(self) -> None:
        """Let go of what was copied."""
        self._known.clear()
        self._met.clear()


class Session:
    """One time that copies are put back.

    Args:
        copier: Has made them.
    """

    def __init__(self, copier: Copier) -> None:
        self._settled: dict[int, Any] = {}
        # Held and not only named, because a name (an id) is given again when its object is gone.
        originals = [made.original for made in copier.made]
        self._taken = {id(entry): entry for entry in (*copier.kept, *originals) if entry is not None}

    def is_free(self, now: Any) -> bool:
        """Whether an object may be written into for another one's sake."""
        return id(now) not in self._taken

    def settle(self, copied: Any, live: Any) -> None:
        """``live`` is what a copy is put back into."""
        self._settled[id(copied)] = self._taken[id(live)] = live

    @torch.no_grad()
    def put(self, now: Any, copied: Any) -> Any:
        """The live object that a copy was made of, as it was; ``now`` is what is in its place."""
        if not isinstance(copied, _COPIES):
            return copied
        if id(copied) not in self._settled:
            self.settle(copied, copied.put(now, self))
        return self._settled[id(copied)]
