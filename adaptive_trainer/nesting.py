"""The containers that a batch is made of: what they hold, and a new one like the old with other things in it.

Mappings, lists, tuples, named tuples and dataclasses are containers. Everything else is a leaf: tensors, arrays,
scalars, and objects of which nothing is known.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

#: Tuples by class, but not containers of anything that a batch would hold.
_LEAVES = (PackedSequence, torch.Size)
#: The usual leaves of long lists, such as token numbers: known at a glance, where asking for a Mapping takes long.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def is_array(value: Any) -> TypeGuard[Tensor | np.ndarray[Any, Any]]:
    """Whether this is a tensor or a NumPy array."""
    return isinstance(value, Tensor | np.ndarray)


def is_rows(value: Any) -> TypeGuard[Tensor | np.ndarray[Any, Any]]:
    """Whether this is an array with a first dimension; a nested tensor has none that Python's ``len`` could tell."""
    return is_array(value) and value.ndim > 0 and not getattr(value, "is_nested", False)


def has_arrays(value: Any) -> bool:
    """Whether this is an array, or holds one at any depth."""
    if isinstance(value, list):
        return any(type(entry) not in _PLAIN and has_arrays(entry) for entry in value)
    return is_array(value) or any(has_arrays(entry) for _, entry in entries_of(value) or ())


def is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    """Whether this is a list, or a tuple whose entries have no names."""
    if isinstance(value, tuple):
        return not (isinstance(value, _LEAVES) or hasattr(value, "_fields") or hasattr(value, "n_fields"))
    return isinstance(value, list)


def entries_of(value: Any) -> list[tuple[Hashable, Any]] | None:
    """What a container holds, by key, field or position; None for a leaf."""
    if type(value) in _PLAIN:
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value) if hasattr(value, field.name)]
    if isinstance(value, list | tuple) and not isinstance(value, _LEAVES):
        return list(enumerate(value))
    return None


def rebuilt(value: Any, entries: Sequence[Any]) -> Any:
    """A new container like ``value`` with other entries, in the order of `entries_of`.

    No constructor runs: it may want arguments, or compute fields from others that are entries already. What a mapping
    or dataclass has beside its entries is shared, except cached properties, which were computed from the old ones.
    """
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, dict(zip(value, entries, strict=True)))
    if isinstance(value, tuple):
        # torch.return_types refuse the base class's constructor and have a plain one of their own.
        return type(value)(entries) if hasattr(value, "n_fields") else tuple.__new__(type(value), entries)
    new = copy.copy(value)
    if isinstance(value, list):
        new[:] = entries
        return new
    for (name, _), entry in zip(entries_of(value) or (), entries, strict=True):
        object.__setattr__(new, cast("str", name), entry)  # a frozen dataclass refuses its own way
    for name in [name for name in getattr(new, "__dict__", ()) if _is_cached(value, name)]:
        del new.__dict__[name]
    return new


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), cached_property)


def _rebuilt_mapping(value: Mapping[Any, Any], entries: dict[Any, Any]) -> Mapping[Any, Any]:
    # A shallow copy of any other mapping might write into the store of the old one.
    has_own_store = isinstance(value, dict | UserDict) or hasattr(type(value), "__copy__")
    if not isinstance(value, MutableMapping) or not has_own_store:
        return entries
    new = copy.copy(value)
    if getattr(value, "__dict__", None) is value:  # the dict whose attributes are its keys
        cast("Any", new).__dict__ = new
    for key, entry in entries.items():
        new[key] = entry
    return new


def fresh(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """New containers all the way down, with ``leaf`` of every leaf, or the very same ones."""
    entries = entries_of(value)
    if entries is None:
        return value if leaf is None else leaf(value)
    return rebuilt(value, [fresh(entry, leaf) for _, entry in entries])


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf in order, with its place, such as ``"0.input_ids"``."""
    entries = [("data", value.data)] if isinstance(value, PackedSequence) else entries_of(value)
    if entries is None:
        yield place, value
        return
    for name, entry in entries:
        yield from leaves(entry, f"{place}.{name}" if place else str(name))


def spelled(place: str, container: Any, name: Hashable) -> str:
    """An entry's place as Python writes it, such as ``batch[0]["input_ids"].mask``."""
    if isinstance(container, Mapping | list | tuple):
        return f'{place}["{name}"]' if isinstance(name, str) else f"{place}[{name!r}]"
    return f"{place}.{name}"
