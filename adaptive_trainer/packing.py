"""A nested Python value as JSON and tensors, and back: what a checkpoint holds beside the weights.

Pickle would run whatever a file asks for, so nothing is pickled. Each kind of value is one row of a table: its tag in
the file, the simpler value that it is taken apart into, and how it is put together again. A file can only name a tag,
so it reaches no class that is not in the table. What has no row is refused when it is written, with its place: a
checkpoint that silently leaves something out would not continue the run that it was taken from.

JSON's own values stand for themselves as far as they are exact; everything else is an object with one tag.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from adaptive_trainer import storages

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

#: Deep enough for any state, and flat enough for the recursion of Python's JSON.
_MAX_DEPTH = 64
#: Integers below this are exact in every reader of JSON; larger ones are written in hexadecimal, which has no limit.
_EXACT = 2**53
#: NumPy's kinds whose bytes are their value: no objects, no pointers, no records.
_ARRAY_KINDS = frozenset("biufcSUmM")
#: What the functions of the table, and torch, raise for what was not written by `pack`.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, struct.error)
_FACTORIES: dict[str, Any] = {"dict": dict, "float": float, "int": int, "list": list, "set": set}


class Unpackable(TypeError):  # noqa: N818  it says what the value is
    """A value that no checkpoint can hold. The message begins with its place inside what was given."""


def pack(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """What ``json.dumps`` takes, and the tensors that it refers to, by name.

    The tensors are the value's own memory, not copies. A tensor that is there twice, or two that look at the same
    memory, are so again when they are unpacked. Where they live is not kept: they come back where they are read to.

    Raises:
        Unpackable: Something inside is of a kind that has no row in the table, is nested too deeply or holds itself.
    """
    packer = _Packer()
    structure = packer.packed(value)
    rows, tensors = storages.laid_out(packer.tensors)
    return {"value": structure, "tensors": rows}, tensors


def unpack(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that `pack` took apart; its tensors are views of those given.

    Raises:
        ValueError: This is not what `pack` gives, or a tensor is missing or too small.
    """
    try:
        return _Unpacker(storages.put_back(structure["tensors"], tensors)).value(structure["value"])
    except torch.OutOfMemoryError:
        raise
    except _MALFORMED as error:
        raise ValueError(f"not a packed structure ({type(error).__name__}: {error})") from None


# The table.


@dataclass(frozen=True)
class _Kind:
    """One row.

    Attributes:
        tag: Its name in the file, never to be changed.
        apart: A value of the kind -> a simpler value, down to JSON's own.
        together: The simpler value -> the value.
    """

    tag: str
    apart: Callable[[Any], Any]
    together: Callable[[Any], Any]


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _float_of(bits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def _text_bytes(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").hex()


def _text_of(code: str) -> str:
    return bytes.fromhex(code).decode("utf-8", "surrogatepass")


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    if value.default_factory is None:
        return None
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return name
    raise Unpackable(f"a defaultdict of {value.default_factory!r}")


def _array_parts(array: np.ndarray[Any, Any]) -> list[Any]:
    memory = bytearray(array.nbytes)
    np.copyto(np.ndarray(array.shape, _plain_dtype(array.dtype), memory), array)
    data = torch.frombuffer(memory, dtype=torch.uint8) if memory else torch.empty(0, dtype=torch.uint8)
    return [array.dtype.str, list(array.shape), data]


def _array_of(parts: list[Any]) -> np.ndarray[Any, Any]:
    code, shape, data = parts
    # NumPy has no arrays over a memory that moves, so it gets one of its own, which can be written to.
    return np.ndarray(shape, _plain_dtype(np.dtype(code)), bytearray(data.cpu().numpy()))


def _scalar_parts(scalar: np.generic) -> list[Any]:
    # An array would drop zeros at their ends, and so does `str` of the one.
    if isinstance(scalar, np.str_):
        return ["str_", "".join(scalar)]
    if isinstance(scalar, np.bytes_):
        return ["bytes_", bytes(scalar)]
    return [_plain_dtype(scalar.dtype).str, scalar.tobytes()]


def _scalar_of(parts: list[Any]) -> Any:
    code, data = parts
    if code in ("str_", "bytes_"):
        return np.str_(data) if code == "str_" else np.bytes_(data)
    return np.ndarray((), _plain_dtype(np.dtype(code)), data)[()]


def _plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    # Types that other libraries have registered (2) are not known again by their short names.
    if dtype.kind not in _ARRAY_KINDS or dtype.isbuiltin == 2:
        raise Unpackable(f"a NumPy value of dtype {dtype}")
    return dtype


_ARRAY = _Kind("numpy.ndarray", _array_parts, _array_of)
_SCALAR = _Kind("numpy.generic", _scalar_parts, _scalar_of)

#: Kinds that are made of JSON's own values, or of kinds in this table.
_VALUES: dict[type, _Kind] = {
    int: _Kind("int", hex, lambda code: int(code, 16)),
    float: _Kind("float", _float_bits, _float_of),
    complex: _Kind("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    str: _Kind("str", _text_bytes, _text_of),
    bytes: _Kind("bytes", lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    torch.dtype: _Kind("torch.dtype", str, storages.DTYPES.__getitem__),
    torch.device: _Kind("torch.device", str, torch.device),
    torch.Size: _Kind("torch.Size", list, torch.Size),
    np.ndarray: _ARRAY,
}

#: Kinds that hold others in an order: the entries, after what the container is beside them.
_SEQUENCES: dict[type, _Kind] = {
    tuple: _Kind("tuple", lambda _: [], tuple),
    set: _Kind("set", lambda _: [], set),
    frozenset: _Kind("frozenset", lambda _: [], frozenset),
    deque: _Kind("deque", lambda value: [value.maxlen], lambda parts: deque(parts[1:], parts[0])),
}

#: Kinds that hold others by key: the pairs, after what the mapping is beside them.
_MAPPINGS: dict[type, _Kind] = {
    dict: _Kind("dict", lambda _: [], dict),
    OrderedDict: _Kind("OrderedDict", lambda _: [], OrderedDict),
    Counter: _Kind("Counter", lambda _: [], lambda pairs: Counter(dict(pairs))),
    defaultdict: _Kind(
        "defaultdict",
        lambda value: [_factory_name(value)],
        lambda parts: defaultdict(parts[0] and _FACTORIES[parts[0]], parts[1:]),
    ),
}

_BY_TAG = {kind.tag: kind for kind in chain(_VALUES.values(), _SEQUENCES.values(), _MAPPINGS.values(), [_SCALAR])}


# There.

#: Places inside a value that have no key of their own.
_MEMBER, _KEY = object(), object()


class _Packer:
    """One walk through a value.

    Attributes:
        tensors: Those found, each once, in order.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._place: list[Any] = []
        self._around: set[int] = set()

    def packed(self, value: Any) -> Any:
        kind = type(value)
        if _is_json(value):
            return value
        if kind is Tensor or kind is nn.Parameter:
            return {"tensor": self._number(value)}
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind].tag: [*self._apart(_MAPPINGS[kind], value), *self._inside(value, self._pairs)]}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind].tag: [*self._apart(_SEQUENCES[kind], value), *self._inside(value, self._entries)]}
        if kind is list:
            return self._inside(value, self._entries)
        row = _VALUES.get(kind) or (_SCALAR if isinstance(value, np.generic) else None)
        if row is None:
            raise self._refusal(_with_article(kind.__name__))
        return {row.tag: self.packed(self._apart(row, value))}

    def _apart(self, row: _Kind, value: Any) -> Any:
        try:
            return row.apart(value)
        except Unpackable as error:
            raise self._refusal(str(error)) from None

    def _inside(self, value: Any, walk: Callable[[Any], list[Any]]) -> list[Any]:
        if id(value) in self._around:
            raise self._refusal(f"{_with_article(type(value).__name__)} that holds itself")
        if len(self._around) == _MAX_DEPTH:
            raise self._refusal(f"{_with_article(type(value).__name__)} inside {_MAX_DEPTH} others")
        self._around.add(id(value))
        walked = walk(value)
        self._around.remove(id(value))
        return walked

    def _entries(self, entries: Iterable[Any]) -> list[Any]:
        has_order = not isinstance(entries, set | frozenset)
        return [self._at(place if has_order else _MEMBER, entry) for place, entry in enumerate(entries)]

    def _pairs(self, mapping: Mapping[Hashable, Any]) -> list[Any]:
        return [[self._at(_KEY, key), self._at(key, entry)] for key, entry in mapping.items()]

    def _at(self, place: Any, value: Any) -> Any:
        self._place.append(place)
        packed = self.packed(value)
        self._place.pop()
        return packed

    def _number(self, tensor: Tensor) -> int:
        known = self._numbers.get(id(tensor))
        if known is None:
            if (oddity := storages.oddity(tensor)) is not None:
                raise self._refusal(oddity)
            known = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return known

    def _refusal(self, what: str) -> Unpackable:
        return Unpackable(f"{_spelled(self._place)}: {what} cannot be kept in a checkpoint")


def _is_json(value: Any) -> bool:
    """Whether JSON gives exactly this value back."""
    kind = type(value)
    if kind is str:
        return value.isascii() or _is_unicode(value)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool or (kind is int and -_EXACT < value < _EXACT)


def _is_unicode(text: str) -> bool:
    """Whether it has no half of a surrogate pair: JSON would join two of them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def _spelled(place: list[Any]) -> str:
    """A place as people write it: ``optimizer.state[0]['x']``, names first and keys after them."""
    words = ""
    is_dotted = True
    for key in place:
        is_dotted = is_dotted and isinstance(key, str) and key.isidentifier()
        if is_dotted:
            words += f".{key}" if words else key
        else:
            words += "{a member}" if key is _MEMBER else " (a key)" if key is _KEY else f"[{key!r}]"
    return words or "the value"


# And back.


class _Unpacker:
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(entry) for entry in node]
        if not isinstance(node, dict):
            return node
        ((tag, inside),) = node.items()
        if tag == "tensor":
            return self._tensors[inside]
        return _BY_TAG[tag].together(self.value(inside))
