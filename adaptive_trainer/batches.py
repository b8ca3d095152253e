"""A step's batch as the user gave it: how many samples it has, its pieces, its move to the device.

Nothing in a batch says which dimension counts samples, and a list in it may hold fields (a tensor for each input) or
rows (an entry for each sample). So a list is read as rows only where three things agree: it is as long as the batch,
its entries are of one kind, and they are not themselves as long as the batch. Whoever gets a piece gets containers of
its own, so that nothing that a user's code does to them reaches the next attempt; tensors are never copied.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from enum import Enum
from itertools import accumulate, pairwise
from numbers import Number
from pathlib import PurePath
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaptive_trainer.errors import DataError
from adaptive_trainer.nesting import (
    entries_of,
    fresh,
    has_arrays,
    is_array,
    is_rows,
    is_sequence,
    leaves,
    rebuilt,
    spelled,
)
from adaptive_trainer.plan import sizes

__all__ = [
    "Uncuttable", "cut", "length", "num_elements", "shapes", "sizes", "tensors_of", "to_device",
]  # fmt: skip

#: What every piece gets as it is. Any other leaf that is no array cannot be cut.
_SCALARS = (
    type(None), str, bytes, Number, np.generic, Enum, date, time, timedelta, PurePath, type, FunctionType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype,
)  # fmt: skip
_WAYS_OUT = "train with step= and cut it there, or give a ladder without halve_batch"


class Uncuttable(DataError):  # noqa: N818  a reason for a rung to be passed over, not a fault of anyone
    """The batch cannot be cut into pieces; the message is the reason, for a person."""


def length(batch: Any, expected: int | None = None) -> int | None:
    """How many samples a batch has; None where nothing in it tells.

    The size that most of its fields share along dimension 0; if several are as common, that of the labels (``"labels"``
    of a mapping, the second of a pair), else the first. A list or tuple inside a batch is one field.

    Args:
        batch: As the loader gave it.
        expected: Samples of the loader's full batches. It is right if anything in the batch has this length, unless
            the labels are fewer: then this is an epoch's last batch.
    """
    # Asked once a step, of plain tensors that all have the length which the loader says.
    if (
        type(batch) in {tuple, list}
        and batch
        and all(type(field) is Tensor and field.shape[:1] == (expected,) for field in batch)
    ):
        return expected
    counts = Counter(size for field in _readings(batch) for size in field)
    rows = len(batch) if is_sequence(batch) and batch and _alike(batch) else None
    targets = list(_readings_of_targets(batch))
    if expected is not None and (expected in counts or expected == rows) and max(targets, default=expected) >= expected:
        return expected
    common = [size for size, count in counts.items() if count == max(counts.values())]
    likely = next((size for size in targets if size in common), common[0] if common else None)
    if rows is not None and (likely is None or _num_spanning(batch, likely) <= rows / 2):
        return rows
    # Samples that nobody has put together: what is longer than a full batch is within them (time, say).
    if rows is not None and expected is not None and rows <= expected < (likely or 0) and not is_array(batch[0]):
        return rows
    return likely


def cut(batch: Any, num_samples: int, sizes: Sequence[int]) -> list[Any]:
    """The batch in ``len(sizes)`` pieces of so many samples each, in order.

    Dense tensors and arrays are views of the batch's, containers are new objects of the same classes. A single piece
    is the whole batch, whatever is in it.

    Args:
        batch: As the loader gave it; it is not changed.
        num_samples: Its `length`.
        sizes: Samples of each piece; together ``num_samples``.

    Raises:
        Uncuttable: More than one piece is asked for, and something in the batch cannot be cut.
    """
    assert sum(sizes) == num_samples, "pieces use each sample once"  # noqa: S101  our own invariant
    if len(sizes) == 1:
        plain = type(batch) in {tuple, list} and all(type(field) is Tensor for field in batch)  # asked once a step
        return [type(batch)(batch) if plain else fresh(batch)]
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    _refuse_ragged_tuple(batch)
    knife = _Knife(num_samples, bounds, rows_elsewhere=_has_rows_of_arrays(batch, num_samples))
    pieces = knife.cut(batch, "batch", top=True)
    if not knife.num_cut:
        raise Uncuttable(f"nothing in the batch has the length of its {num_samples} samples; {_WAYS_OUT}")
    return pieces


def _refuse_ragged_tuple(batch: Any) -> None:
    """Refuse a tuple of arrays of which no two are equally long: its fields, cut as rows or one alone, come out wrong.

    A list of them is what a loader without a collate function gives, so that one is rows.
    """
    if isinstance(batch, tuple) and is_sequence(batch) and len(batch) > 1:
        lengths = {len(field) for field in batch if is_rows(field)}
        if len(lengths) == len(batch):
            shown = " and ".join(str(tuple(field.shape)) for field in batch)
            raise Uncuttable(
                f"batch is a tuple of arrays of shapes {shown}, which have no first dimension in common; {_WAYS_OUT}"
            )


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``: new containers; tensors that are there already stay the very same objects.

    An object of another kind is moved by its own ``to`` method, if it has one.
    """
    if device.type == "cpu" and type(batch) in {tuple, list} and all(type(e) is Tensor and e.is_cpu for e in batch):
        return type(batch)(batch)

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            pinned = value.device.type == "cpu" and device.type != "cpu" and value.is_pinned()
            return value.to(device, non_blocking=pinned)
        if isinstance(value, _SCALARS) or not callable(getattr(value, "to", None)):
            return value
        # A copy, because many such methods change the object itself, and the batch may have to be moved again.
        return copy.copy(value).to(device)

    return fresh(batch, moved)


def tensors_of(batch: Any) -> list[Tensor]:
    """Every tensor in the batch, in order."""
    return [value for _, value in leaves(batch) if isinstance(value, Tensor)]


def shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by its place: ``"labels"``, ``"0.input_ids"``; ``"batch"`` if it is all there is."""
    return {
        place or "batch": (value.size(0),) if value.is_nested else tuple(value.shape)
        for place, value in leaves(batch)
        if isinstance(value, Tensor)
    }


def num_elements(batch: Any) -> int:
    """Elements of all the batch's tensors together: how long a batch is, beside others of as many samples."""
    plain = type(batch) in {tuple, list} and all(type(field) is Tensor for field in batch)  # asked once a step
    return sum(tensor.numel() for tensor in (batch if plain else tensors_of(batch)))


class _Knife:
    """Cuts all of a batch at the same places, and counts what it has cut."""

    def __init__(self, num_samples: int, bounds: list[tuple[int, int]], *, rows_elsewhere: bool) -> None:
        self.num_cut = 0
        self._num_samples = num_samples
        self._bounds = bounds
        self._rows_elsewhere = rows_elsewhere

    def cut(self, value: Any, place: str, *, top: bool = False) -> list[Any]:
        """A piece of ``value`` for each pair of bounds; ``place`` is for the reader of an error."""
        if isinstance(value, _SCALARS):
            return [value] * len(self._bounds)
        if is_array(value):
            return self._cut_array(value, place)
        if is_sequence(value) and self._holds_rows(value, top=top):
            self.num_cut += 1
            return [rebuilt(value, fresh(list(value[start:stop]))) for start, stop in self._bounds]
        entries = entries_of(value)
        if entries is None:
            name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            raise Uncuttable(f"{place} is a {name}, which cannot be cut into samples; {_WAYS_OUT}")
        columns = [self.cut(entry, spelled(place, value, name)) for name, entry in entries]
        return [rebuilt(value, [column[piece] for column in columns]) for piece in range(len(self._bounds))]

    def _cut_array(self, value: Any, place: str) -> list[Any]:
        layout = value.layout if isinstance(value, Tensor) else torch.strided
        if layout not in _SLICES or (isinstance(value, Tensor) and value.is_nested):
            kind = "a nested tensor" if value.is_nested else f"a tensor of layout {layout}"
            raise Uncuttable(f"{place} is {kind}, which cannot be cut into samples; {_WAYS_OUT}")
        if not _has_length(value, self._num_samples):
            return [value] * len(self._bounds)
        self.num_cut += 1
        return [_SLICES[layout](value, start, stop) for start, stop in self._bounds]

    def _holds_rows(self, entries: Sequence[Any], *, top: bool) -> bool:
        if len(entries) != self._num_samples or not _alike(entries):
            return False
        spanning = _num_spanning(entries, self._num_samples)
        if top:
            # Fields are the rule here: of ragged rows, only few happen to be as long as the batch.
            return spanning <= len(entries) / 2
        # As many entries as samples, each as long as the batch: the two states of a batch of two, or three images of
        # three channels. Another list that can only hold rows decides for rows, as in detection; else they are fields.
        return spanning < len(entries) or self._rows_elsewhere


def _slice_strided(value: Any, start: int, stop: int) -> Any:
    return value[start:stop]


def _slice_coo(value: Tensor, start: int, stop: int) -> Tensor:
    return value.index_select(0, torch.arange(start, stop, device=value.device))


def _slice_csr(value: Tensor, start: int, stop: int) -> Tensor:
    crow, col, values = value.crow_indices(), value.col_indices(), value.values()
    if crow.dim() > 1:  # dimension 0 counts whole matrices
        crow, col, values = crow[start:stop], col[start:stop], values[start:stop]
    else:
        first, last = int(crow[start]), int(crow[stop])
        crow, col, values = crow[start : stop + 1] - first, col[first:last], values[first:last]
    return torch.sparse_csr_tensor(crow, col, values, (stop - start, *value.shape[1:]), check_invariants=False)


_SLICES: dict[torch.layout, Callable[[Any, int, int], Any]] = {
    torch.strided: _slice_strided,
    torch.sparse_coo: _slice_coo,
    torch.sparse_csr: _slice_csr,
}


# How a list is read. `spanning` entries are as long as the batch.


def _has_length(array: Any, num_samples: int) -> bool:
    return array.ndim > 0 and len(array) == num_samples


def _alike(entries: Sequence[Any]) -> bool:
    """Whether entries may be rows: they hold nothing but plain values, or are all of one kind."""
    return not has_arrays(entries) or len({_kind(entry) for entry in entries}) == 1


def _kind(value: Any) -> Hashable:
    if is_array(value):
        return type(value), value.dtype, value.ndim
    return type(value), frozenset(value) if isinstance(value, Mapping) else ()


def _num_spanning(entries: Sequence[Any], num_samples: int) -> int:
    return sum(set(_votes(entry, num_samples)) == {True} for entry in entries)


def _votes(value: Any, num_samples: int) -> Iterator[bool]:
    """For everything in ``value`` that has an opinion, whether ``value`` is as long as the batch."""
    if is_array(value):
        yield _has_length(value, num_samples)
    elif isinstance(value, Number):
        yield False
    elif is_sequence(value) and _alike(value) and (len(value) == num_samples or not has_arrays(value)):
        yield len(value) == num_samples
    else:
        for _, entry in entries_of(value) or ():
            yield from _votes(entry, num_samples)


def _has_rows_of_arrays(value: Any, num_samples: int, *, top: bool = True) -> bool:
    """Whether a list inside the batch can only hold rows, and these are or hold arrays."""
    if is_sequence(value) and not top and len(value) == num_samples and has_arrays(value) and _alike(value):
        return _num_spanning(value, num_samples) < num_samples
    return any(_has_rows_of_arrays(entry, num_samples, top=False) for _, entry in entries_of(value) or ())


def _readings(value: Any, *, top: bool = True) -> Iterator[dict[int, None]]:
    """For each field of a batch, the lengths that it may have, likeliest first."""
    if is_array(value):
        if value.ndim:
            yield {len(value): None}
    elif is_sequence(value) and not top:
        within = dict.fromkeys(size for entry in value for field in _readings(entry, top=False) for size in field)
        if value and _alike(value):
            as_fields = [size for size in within if _num_spanning(value, size) == len(value)]
            yield dict.fromkeys([*as_fields, len(value)])
        else:
            yield within
    else:
        for _, entry in entries_of(value) or ():
            yield from _readings(entry, top=False)


def _readings_of_targets(batch: Any) -> Iterator[int]:
    if isinstance(batch, Mapping):
        targets = batch.get("labels")
    else:
        targets = batch[-1] if isinstance(batch, list | tuple) and len(batch) == 2 else None
    for field in _readings(targets, top=False):
        yield from field
