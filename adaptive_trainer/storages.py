"""Tensors as what they are in memory: rows that say how each looks at a storage, and the storages to keep for them.

Most tensors are alone in their storage and lie in it in their own order; they are kept as they are. Where several look
at one storage (the flat buffer of a fused optimizer and its views, say), the bytes between the first and the last are
kept once, and each row says where its tensor lies in them. So what is changed through one is seen through the others
again. The same is done for a tensor in another order (channels last), which would otherwise come back in the usual one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: By the names under which files know them.
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
#: The bytes of the largest element there is (complex128). From a multiple of it on, any element can begin.
_LARGEST = 16


def oddity(tensor: Tensor) -> str | None:
    """Why a tensor is more than numbers in memory, as a noun that names it; None if that is all it is."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}, which computes its numbers itself,"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a tensor without data (it is on the meta device)"
    return f"a quantized tensor ({tensor.dtype})" if tensor.is_quantized else None


def bare(tensor: Tensor) -> Tensor:
    """The same memory without a graph or a class of its own. What is conjugated or negated lazily is copied."""
    return tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()


def laid_out(tensors: Sequence[Tensor]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """A row that JSON takes for each tensor, and the memory that the rows refer to, by name: not copied."""
    memories = [bare(tensor) for tensor in tensors]
    spans = _spans(memories)
    rows: list[dict[str, Any]] = []
    kept: dict[str, Tensor] = {}
    for number, (tensor, memory) in enumerate(zip(tensors, memories, strict=True)):
        row: dict[str, Any] = {"requires_grad": tensor.requires_grad, "parameter": type(tensor) is nn.Parameter}
        span = spans.get(number)
        name = f"{number:06d}" if span is None else span.name
        kept[name] = memory if span is None else span.memory
        if span is not None:
            row |= {"dtype": str(memory.dtype), "size": list(memory.shape)}
            row |= {"stride": list(memory.stride()), "offset": span.offset_of(memory)}
        rows.append({"name": name} | row)
    return rows, kept


def put_back(rows: Sequence[Mapping[str, Any]], kept: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of some rows, looking at the memory that was kept for them.

    Raises:
        LookupError, RuntimeError, TypeError, ValueError: The rows are not those of `laid_out`, or do not fit.
    """
    # A mapping that reads from a file gives new memory at every look.
    memories = {name: kept[name] for name in dict.fromkeys(row["name"] for row in rows)}
    return [_put_back(row, memories[row["name"]]) for row in rows]


def _put_back(row: Mapping[str, Any], memory: Tensor) -> Tensor:
    tensor = memory.detach()
    if "dtype" in row:
        dtype = DTYPES[row["dtype"]]
        whole = tensor[: tensor.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        tensor = whole.as_strided(row["size"], row["stride"], whole.storage_offset() + row["offset"])
    return (
        nn.Parameter(tensor, row["requires_grad"]) if row["parameter"] else tensor.requires_grad_(row["requires_grad"])
    )


@dataclass(frozen=True)
class _Span:
    """The part of one storage that some tensors look at, as bytes."""

    name: str
    low: int
    memory: Tensor

    @classmethod
    def over(cls, name: str, tensors: Sequence[Tensor]) -> _Span:
        bounds = [_bounds_of(tensor) for tensor in tensors]
        low = min(low for low, _ in bounds) // _LARGEST * _LARGEST
        size = max(high for _, high in bounds) - low
        nothing = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        return cls(name, low, nothing.set_(tensors[0].untyped_storage(), low, (size,), (1,)))

    def offset_of(self, tensor: Tensor) -> int:
        return int(tensor.storage_offset()) - self.low // tensor.itemsize


def _bounds_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor with elements looks at: the first, and the one behind the last."""
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + (last + 1) * tensor.itemsize


def _spans(tensors: Sequence[Tensor]) -> dict[int, _Span]:
    """The span of each tensor, by its number, that is not alone in its storage or lies there in another order."""
    by_storage: dict[tuple[str, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            by_storage.setdefault((str(tensor.device), tensor.untyped_storage().data_ptr()), []).append(number)
    spans: dict[int, _Span] = {}
    for numbers in by_storage.values():
        members = [tensors[number] for number in numbers]
        if len(members) > 1 or _is_permuted(members[0]):
            spans |= dict.fromkeys(numbers, _Span.over(f"{numbers[0]:06d}", members))
    return spans


def _is_permuted(tensor: Tensor) -> bool:
    low, high = _bounds_of(tensor)
    return not tensor.is_contiguous() and high - low == tensor.numel() * tensor.itemsize
