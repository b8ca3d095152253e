"""Random batches for properties: nested structures in which every field says which samples it holds.

A structure is a value (`Leaf`, `Node`), so that Hypothesis can print and shrink it. `make` builds a batch of the given
samples, `read` takes a batch or a piece of one apart, checks that all its fields hold the same samples, and gives these.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

#: Samples are numbered below this, so that the narrowest dtype can hold the number.
MAX_SAMPLES = 64


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Frozen:
    first: Any
    second: Any


@dataclass
class Record:
    first: Any
    second: Any


class Bag(dict):
    """A mapping of a class of its own, as tokenizers give."""


@dataclass(frozen=True)
class Leaf:
    kind: str


@dataclass(frozen=True)
class Node:
    kind: type
    entries: tuple[Leaf | Node, ...]


def _tensor(dtype, *shape):
    def make(ids):
        return torch.tensor(ids).reshape(-1, *(1 for _ in shape)).expand(-1, *shape).to(dtype)

    def read(value):
        assert value.dtype is dtype
        assert value.shape[1:] == shape
        rows = value.reshape(len(value), -1)
        assert (rows == rows[:, :1]).all()
        return [int(number) for number in rows[:, 0].tolist()]

    return make, read


def _bits(ids):
    return torch.tensor([[bool(index >> bit & 1) for bit in range(6)] for index in ids])


def _from_bits(value):
    assert value.dtype is torch.bool
    return [sum(bit << place for place, bit in enumerate(row)) for row in value.tolist()]


def _lengths(ids):
    """Of ragged rows. The first is longer than the batch, since rows all as long as it would be fields."""
    return [len(ids) + 1, *(1 + index % 4 for index in ids[1:])]


def _ragged(ids):
    return [torch.full((length,), index) for index, length in zip(ids, _lengths(ids), strict=True)]


def _from_ragged(value):
    assert type(value) is list
    assert all((row == row[0]).all() for row in value)
    return [int(row[0]) for row in value]


def _boxes(ids):
    return [
        {"name": f"s{index}", "boxes": torch.full((length, 4), float(index))}
        for index, length in zip(ids, _lengths(ids), strict=True)
    ]


def _from_boxes(value):
    assert all(row["name"] == f"s{int(row['boxes'][0, 0])}" for row in value)
    return [int(row["boxes"][0, 0]) for row in value]


#: Fields with a row for each sample: how they are made of samples' numbers, and read.
SAMPLED = {
    "float64": _tensor(torch.float64, 2),
    "float32": _tensor(torch.float32),
    "bfloat16": _tensor(torch.bfloat16, 1, 3),
    "float16": _tensor(torch.float16),
    "int64": _tensor(torch.int64),
    "int32": _tensor(torch.int32, 3),
    "uint8": _tensor(torch.uint8, 2, 2),
    "bool": (_bits, _from_bits),
    "array": (np.array, lambda value: value.tolist()),
    "array_rows": (lambda ids: np.array([[i, i] for i in ids], np.float32), lambda value: value[:, 1].astype(int).tolist()),
    "array_names": (lambda ids: np.array([f"s{i}" for i in ids]), lambda value: [int(name[1:]) for name in value]),
    "names": (lambda ids: [f"s{i}" for i in ids], lambda value: [int(name[1:]) for name in value]),
    "numbers": (list, list),
    "ragged": (_ragged, _from_ragged),
    "boxes": (_boxes, _from_boxes),
}  # fmt: skip
#: Those that are arrays: what is in a list or tuple of fields has to be told from rows by them.
ARRAYS = [kind for kind in SAMPLED if kind not in {"names", "numbers", "ragged", "boxes"}]
#: What every piece has to get as it is.
SHARED = {
    "text": "train",
    "number": 0.5,
    "none": None,
    "bytes": b"x",
    "dtype": torch.float16,
    "zero_dim": torch.tensor(7.5),
    "numpy_number": np.float32(2.5),
    "table": torch.arange(MAX_SAMPLES + 1),
}


def make(structure: Leaf | Node, ids: list[int]) -> Any:
    """A batch of these samples."""
    if isinstance(structure, Leaf):
        return SHARED[structure.kind] if structure.kind in SHARED else SAMPLED[structure.kind][0](ids)
    entries = [make(entry, ids) for entry in structure.entries]
    if issubclass(structure.kind, dict):
        return structure.kind(zip(_keys(structure), entries, strict=True))
    return structure.kind(entries) if structure.kind in {list, tuple} else structure.kind(*entries)


def _keys(structure):
    return [f"key{index}" for index in range(len(structure.entries))]


def read(structure: Leaf | Node, batch: Any) -> list[int]:
    """The samples of a batch or a piece of one, which all its fields agree about."""
    found = list(_fields(structure, batch))
    assert all(ids == found[0] for ids in found), found
    return found[0]


def _fields(structure, value):
    if isinstance(structure, Leaf):
        if structure.kind in SHARED:
            assert value is SHARED[structure.kind]
        else:
            yield SAMPLED[structure.kind][1](value)
        return
    assert type(value) is structure.kind
    if issubclass(structure.kind, dict):
        assert list(value) == _keys(structure)
        entries = list(value.values())
    elif structure.kind in {list, tuple}:
        entries = list(value)
    else:
        entries = [value.first, value.second]
    for inner, entry in zip(structure.entries, entries, strict=True):
        yield from _fields(inner, entry)


def _has_array(structure):
    if isinstance(structure, Leaf):
        return structure.kind in ARRAYS
    return any(_has_array(entry) for entry in structure.entries)


def structures(sizes: set[int]) -> st.SearchStrategy[Node]:
    """Batches of these sizes.

    A list of fields that has as many entries as the batch has samples could hold rows just as well (docs say how it is
    read then), so no list or tuple has one of these lengths; nor is one without an array in it.
    """
    lengths = [length for length in (1, 2, 3, 4, 5) if length not in sizes]

    def grown(inner):
        pairs = st.tuples(st.sampled_from([Pair, Frozen, Record]), st.tuples(inner, inner))
        mappings = st.tuples(
            st.sampled_from([dict, OrderedDict, Bag]), st.lists(inner, min_size=1, max_size=3).map(tuple)
        )
        lists = st.sampled_from(lengths).flatmap(lambda n: st.lists(inner, min_size=n, max_size=n)).map(tuple)
        fields = st.tuples(st.sampled_from([list, tuple]), lists.filter(lambda entries: any(map(_has_array, entries))))
        return st.one_of(pairs, mappings, fields).map(lambda drawn: Node(*drawn))

    leaves = st.sampled_from([*SAMPLED, *SHARED]).map(Leaf)
    # Two fields that count samples stand first, so that fields of other lengths never are in the majority.
    first = st.tuples(st.sampled_from(ARRAYS).map(Leaf), st.sampled_from(ARRAYS).map(Leaf))
    extra = st.recursive(leaves, grown, max_leaves=5)
    tops = st.sampled_from([dict, OrderedDict, Bag, *([list, tuple] if 3 not in sizes else [])])
    return st.builds(lambda kind, two, more: Node(kind, (*two, more)), tops, first, extra)
