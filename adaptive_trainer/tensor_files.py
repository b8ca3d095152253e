"""Tensors in a safetensors file, written in pieces and read one by one.

The library's own writer wants all tensors on the host, and each with a memory of its own. A model that just fits would
then need its size again to be saved. So the file is written by hand, which is eight bytes of length, a header in JSON
and the numbers; tied weights are written under each of their names, as `load_state_dict` asks for them.

The format has no code for some dtypes (complex128, for one). They are written as bytes along one dimension more, and
named in the header's metadata, so that `TensorFile` gives them back as what they were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adaptive_trainer import storages

if TYPE_CHECKING:
    from pathlib import Path

#: What passes through host memory at once.
CHUNK_BYTES = 16 * 2**20

_CODES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.uint16: "U16", torch.int16: "I16",
    torch.uint32: "U32", torch.int32: "I32", torch.uint64: "U64", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_METADATA = "__metadata__"


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A file of these tensors, in pieces of at most `CHUNK_BYTES` beside its header.

    The tensors may be on any device and lie in any order; none may have an `adaptive_trainer.storages.oddity`. A piece
    is to be used before the next one is asked for.

    Raises:
        ValueError: A name is one that the format cannot hold.
    """
    # As the library does it: then every tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    yield _header({name: tensors[name] for name in names})
    for name in names:
        for piece in _in_order(_as_integers(storages.bare(tensors[name]))):
            on_host = piece.to("cpu").contiguous()
            if on_host.numel():
                # A single element counts as contiguous whatever its stride is, but is no row of bytes then.
                yield on_host.as_strided((on_host.numel(),), (1,)).view(torch.uint8).numpy().data


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    uncoded = {name: str(tensor.dtype) for name, tensor in tensors.items() if tensor.dtype not in _CODES}
    header: dict[str, Any] = {_METADATA: {"format": "pt", "dtypes": json.dumps(uncoded)}}
    end = 0
    for name, tensor in tensors.items():
        if name == _METADATA:
            raise ValueError(f"{name!r} cannot name a tensor: the format keeps it for itself")
        shape = [*tensor.shape, tensor.itemsize] if name in uncoded else list(tensor.shape)
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _CODES.get(tensor.dtype, "U8"), "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_integers(tensor: Tensor) -> Tensor:
    """The same bytes as numbers that can be copied everywhere, which not every dtype can."""
    numbers = torch.view_as_real(tensor) if tensor.itemsize not in _INTEGERS else tensor
    return numbers.view(_INTEGERS[numbers.itemsize])


def _in_order(tensor: Tensor) -> Iterator[Tensor]:
    """Views of at most `CHUNK_BYTES`, in the order in which a contiguous tensor would have them."""
    if tensor.nbytes <= CHUNK_BYTES:
        yield tensor
    elif rows := CHUNK_BYTES // tensor[0].nbytes:
        yield from torch.split(tensor, rows)
    else:
        for row in tensor:
            yield from _in_order(row)


def _opened(path: Path) -> Any:  # the library's stubs have no types
    return safe_open(str(path), framework="pt")


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file by name, each read when it is asked for, into memory of its own.

    Raises:
        ValueError: The file is damaged or foreign.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = _opened(path)
            names, metadata = self._file.keys(), self._file.metadata() or {}
            self._uncoded = {
                name: storages.DTYPES[code] for name, code in json.loads(metadata.get("dtypes", "{}")).items()
            }
            shapes = {name: self._file.get_slice(name).get_shape() for name in self._uncoded}
        except (SafetensorError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{path.name} is no file of tensors ({error})") from None
        if any(shapes[name][-1:] != [dtype.itemsize] for name, dtype in self._uncoded.items()):
            raise ValueError(f"{path.name} is no file of tensors (its header contradicts itself)")
        self._names = dict.fromkeys(names)
        self._path = path

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            # What the library gives may be the file itself, which can change or go away.
            tensor: Tensor = self._file.get_tensor(name).clone()
        except SafetensorError as error:
            raise ValueError(f"{name} in {self._path} cannot be read ({error})") from None
        if name not in self._uncoded:
            return tensor
        return tensor.view(self._uncoded[name]).reshape(tensor.shape[:-1])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
