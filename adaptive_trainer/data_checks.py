"""Data that can be read, but not as their owner means them: refused before training, with what to type instead.

A pair of arrays has a length and items, as a list of two batches has; a list of samples can be iterated over, as a list
of batches can. Both would train without a word on something else than was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

from adaptive_trainer.errors import DataError
from adaptive_trainer.nesting import is_array, is_rows, is_sequence

_TARGET_NAMES = ("labels", "label", "targets", "target")


def refuse_columns(key: str, data: Any) -> None:
    """Refuse arrays that hold all samples between them.

    Raises:
        DataError: It is a bare array, or several beside each other.
    """
    if is_array(data):
        columns, ways = [data], ", or list(X) and batch_size where samples have no targets"
    elif is_sequence(data) and _are_columns(data):
        columns, ways = list(data), ""
    else:
        return
    shapes = " and ".join(str(tuple(column.shape)) for column in columns)
    what = "an array of shape" if len(columns) == 1 else f"a {type(data).__name__} of {len(columns)} arrays of shapes"
    raise DataError(
        f"{key}: it is {what} {shapes}, and arrays by themselves are not read as samples; "
        f"give torch.utils.data.TensorDataset(X, y), of tensors, and batch_size{ways}"
    )


def _are_columns(entries: Any) -> bool:
    """Whether a list or tuple holds all inputs and all targets, rather than batches of one kind."""
    if len(entries) < 2 or not all(is_rows(entry) for entry in entries):
        return False
    kinds = {(type(entry), entry.dtype, tuple(entry.shape[1:])) for entry in entries}
    alike_as_pairs_are = isinstance(entries, tuple) and len(entries) == 2
    return len({len(entry) for entry in entries}) == 1 and (len(kinds) > 1 or alike_as_pairs_are)


def refuse_samples(key: str, data: Any) -> None:
    """Refuse a list whose first item is plainly a sample where batches are expected.

    Raises:
        DataError: It is one.
    """
    if not is_sequence(data) or not data:
        return
    found = _why_a_sample(data[0])
    if found is not None:
        raise DataError(
            f"{key}: its first item is {found}, so it is a list of samples and not of batches; type for example "
            "batch_size=32 (samples per optimizer step), or, if these are batches, give "
            f"DataLoader({key}, batch_size=None)"
        )


def _why_a_sample(item: Any) -> str | None:
    """What makes an item a sample, in words; None where it may be a batch."""
    if _is_scalar(item):
        return "a single number"
    if isinstance(item, Mapping):
        name = next((name for name in _TARGET_NAMES if name in item and _is_scalar(item[name])), None)
        return None if name is None else f"a mapping with a single number as {name!r}"
    if is_sequence(item) and len(item) == 2 and _is_scalar(item[1]):
        return "a pair with a single number as its target"
    if isinstance(item, tuple) and is_sequence(item) and all(is_rows(field) for field in item):
        lengths = {len(field) for field in item}
        if 1 < len(lengths) == len(item):
            shapes = " and ".join(str(tuple(field.shape)) for field in item)
            return f"a tuple of arrays of shapes {shapes}, which have no first dimension in common"
    return None


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Number) or (is_array(value) and value.ndim == 0)


def refuse_used_up(key: str, data: Any, *, again: bool) -> None:
    """Refuse what can be gone through once only where it is needed again.

    Raises:
        DataError: It is such data.
    """
    if again and isinstance(data, Iterator):
        raise DataError(
            f"{key}: a {type(data).__name__} can be gone through once only, and this run needs it more than once; "
            "give a DataLoader or a list, or type epochs=1"
        )
