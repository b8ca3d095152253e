"""What a thrown-away forward may have changed in modules and random streams, and how it is put back exactly.

Recorded are every module's attributes (buffers, flags, counters, references, hooks, submodules), one level of content
of plain containers among them, the values of buffers and plain tensor attributes, and where a module's own random
generators stand. Parameters are not copied, because only a commit moves them; which parameter a module has under which
name is recorded.

Not exact, because it cannot be seen from outside: values inside other objects (NumPy arrays, nested containers, tensors
in containers) when they are changed in place, sparse and nested buffers that are, and a large non-persistent buffer
that is written through ``.data``.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from adaptive_trainer.streams import is_generator, rewinding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

#: Tensors up to this size are copied without asking whether they changed.
SMALL_BYTES = 64 * 1024
# Copies above this size are kept on the host, where they take nothing from the memory that is short.
_NEAR_BYTES = 1024 * 1024
# Exactly these types: a subclass may do more on a write than its base, and is kept by reference.
_CONTAINERS = frozenset({dict, list, set, deque, OrderedDict, defaultdict})
_STANDARD = frozenset(nn.Module().__dict__)
_KEPT = frozenset(name for name, value in nn.Module().__dict__.items() if type(value) in _CONTAINERS)
_values = methodcaller("values")


def version(tensor: Tensor) -> int | None:
    """How often torch has seen the tensor written into; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001  torch names no other way to it


class _Faded:
    """A tensor that an earlier forward made, kept without that forward's graph.

    Held as it is, it would keep the activations of that forward alive through the next one. The tensor itself comes
    back as long as somebody else keeps it unchanged; after that a small one (an auxiliary loss) comes back by value,
    and a large one (an attention map) as None.
    """

    __slots__ = ("_reference", "_value", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._reference = weakref.ref(tensor)
        self._version = version(tensor)
        self._value: Tensor | None = None
        if tensor.layout is torch.strided and tensor.nbytes <= SMALL_BYTES:
            self._value = tensor.detach().clone().requires_grad_()

    def tensor(self) -> Tensor | None:
        original = self._reference()
        if original is not None and version(original) == self._version:
            return original
        with torch.enable_grad():  # no leaf, as the original was none: it can be added to in place
            return None if self._value is None else self._value.clone()


def _fade(value: Any) -> Any:
    return _Faded(value) if isinstance(value, Tensor) and value.grad_fn is not None else value


def _unfade(value: Any) -> Any:
    return value.tensor() if type(value) is _Faded else value


def _same(one: Any, other: Any) -> bool:
    """Whether two sized iterables hold the same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one, other))


def _content(container: Any, *, histories: bool) -> Any:
    """The content of one of `_CONTAINERS`, as something `_refill` takes."""
    if histories or Tensor not in map(type, container.values() if isinstance(container, dict) else container):
        return container.copy()
    if isinstance(container, dict):
        return {key: _fade(value) for key, value in container.items()}
    return [_fade(value) for value in container]


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back, in place, so that whoever else holds the container sees it."""
    if isinstance(container, dict):
        content = {key: _unfade(value) for key, value in content.items()}
        if not (_same(container, content) and _same(container.values(), content.values())):
            container.clear()
            container.update(content)
        return
    content = [_unfade(value) for value in content]
    if _same(container, content):
        return
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(content)


class _Record:
    """The attributes of one module: everything in its ``__dict__``.

    Attributes:
        entries: The ``__dict__`` itself.
        quick: Reads what a forward may bind anew, in one call: all but the containers in which every module keeps its
            parameters, buffers, submodules and hooks, which are changed and not exchanged.
        seen: What that gave when the module was read.
        plain: Its tensors, by name, that are no parameters and have no history.
        generators: Its own random streams.
    """

    __slots__ = ("_names", "_saved", "entries", "generators", "plain", "quick", "seen")

    def __init__(self, module: nn.Module, *, histories: bool) -> None:
        self.entries = module.__dict__
        self.read(histories=histories)

    def read(self, *, histories: bool) -> None:
        self._names = [*self.entries]
        values = self.entries.values()
        self._saved = [*values] if histories else [_fade(value) for value in values]
        saved = dict(zip(self._names, self._saved, strict=True))
        quick = [name for name in self._names if name not in _KEPT] or ["_modules"]
        self.quick: Callable[[Any], Any] = itemgetter(*quick, quick[0])  # of two at least, so that it gives a tuple
        self.seen = self.quick(saved)
        self.plain = [
            (name, value)
            for name, value in self.entries.items()
            if isinstance(value, Tensor) and value.grad_fn is None and not value.requires_grad
        ]
        self.generators = [value for value in self.entries.values() if is_generator(value)]

    def stands(self) -> bool:
        """Whether nothing was bound anew since it was read."""
        return [*self.entries] == self._names and all(map(is_, self.entries.values(), self._saved))

    def restore(self) -> None:
        if self.stands():
            return
        for name in self.entries.keys() - set(self._names):
            del self.entries[name]
        for name, value in zip(self._names, self._saved, strict=True):
            self.entries[name] = _unfade(value)


class StateTensor(NamedTuple):
    """A buffer or a plain tensor attribute: ``mapping[name] is tensor``."""

    mapping: MutableMapping[str, Any]
    name: str
    tensor: Tensor
    persistent: bool


class AttributeSnapshot:
    """The attributes of all modules below some roots and what their plain containers hold, by reference.

    Args:
        roots: Modules; those below them are found at each `take`.
        histories: Whether tensors made by an earlier forward are kept with their graph. Without it they come back as
            `_Faded` says, and no graph is kept alive.
    """

    def __init__(self, *roots: nn.Module, histories: bool = False) -> None:
        self._roots = roots
        self._histories = histories
        self._records: dict[nn.Module, _Record] = {}
        self._lengths: list[int] = []
        self._seen: list[Any] = []
        self._generators: list[Any] = []
        self._children: list[nn.Module | None] = []
        self._trees: list[MutableMapping[str, nn.Module | None]] = []
        self._buffers: list[MutableMapping[str, Tensor | None]] = []
        self._empty: list[Any] = []
        self._own: list[Any] = []
        self._users: list[Any] = []
        self._contents: list[Any] = []
        self._rewinds: list[Callable[[], object]] = []

    def take(self) -> bool:
        """Record the attributes as they are; whether any was bound anew since the last time."""
        # Modules came or went exactly if the known modules' children, one after the other, are other objects now.
        moved = not self._is_as_read() or not _same([*chain.from_iterable(map(_values, self._trees))], self._children)
        if moved or any(self._empty):
            self._read()
        self._contents = [container.copy() for container in self._own]
        self._contents += [_content(container, histories=self._histories) for container in self._users]
        self._rewinds = [rewinding(generator) for generator in self._generators]
        return moved

    def _is_as_read(self) -> bool:
        """Whether no module has got another attribute since it was read. Asked before every step, of all modules."""
        records = self._records.values()
        if not records or [len(record.entries) for record in records] != self._lengths:
            return False
        try:
            now = [record.quick(record.entries) for record in records]
        except KeyError:
            return False
        return all(map(is_, chain.from_iterable(now), self._seen))

    def _read(self) -> None:
        """Read anew whatever is not as it was, and sort what there is."""
        known = self._records
        self._records = {}
        for module in dict.fromkeys(chain.from_iterable(root.modules() for root in self._roots)):
            record = known.get(module) or _Record(module, histories=self._histories)
            if not record.stands():
                record.read(histories=self._histories)
            self._records[module] = record
        records = self._records.values()
        self._lengths = [len(record.entries) for record in records]
        self._seen = [*chain.from_iterable(record.seen for record in records)]
        self._generators = [*chain.from_iterable(record.generators for record in records)]
        self._trees = [tree for record in records if (tree := record.entries["_modules"])]
        self._children = [*chain.from_iterable(map(_values, self._trees))]
        self._buffers = [buffers for record in records if (buffers := record.entries["_buffers"])]
        found = [item for record in records for item in record.entries.items() if type(item[1]) in _CONTAINERS]
        self._own = [value for name, value in found if name in _STANDARD and value]
        self._empty = [value for name, value in found if name in _STANDARD and not value]
        self._users = [value for name, value in found if name not in _STANDARD]

    def restore(self) -> None:
        """Put back what `take` recorded; whatever was added since is dropped."""
        for record in self._records.values():
            record.restore()
        for container, content in zip([*self._own, *self._users], self._contents, strict=True):
            _refill(container, content)
        for container in filter(None, self._empty):
            container.clear()
        for rewind in self._rewinds:
            rewind()

    def buffers(self) -> list[Tensor | None]:
        """All buffers, module after module."""
        return [*chain.from_iterable(map(_values, self._buffers))]

    def state_tensors(self) -> Iterator[StateTensor]:
        """All buffers and plain tensor attributes that can be written into."""
        for record in self._records.values():
            passing = record.entries["_non_persistent_buffers_set"]
            for name, tensor in record.entries["_buffers"].items():
                if tensor is not None and not _is_read_only(tensor):
                    yield StateTensor(record.entries["_buffers"], name, tensor, name not in passing)
            for name, tensor in record.plain:
                if not _is_read_only(tensor):
                    yield StateTensor(record.entries, name, tensor, persistent=False)


def _is_read_only(tensor: Tensor) -> bool:
    """Whether it is kept by reference alone: its elements share memory (an expanded tensor), or it is no plain array.

    Torch refuses to write into the former; sparse and nested buffers (adjacency matrices, ragged tables) are constants.
    """
    if tensor.layout is not torch.strided:
        return True
    return any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _place(tensor: Tensor) -> Tensor | None:
    """A second name for the storage of a tensor, which keeps address and shape when the tensor is given others.

    None where there is no address.
    """
    has_address = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    return tensor.data if has_address else None


def _places(tensors: list[Tensor]) -> tuple[list[int], list[torch.Size]]:
    """Where tensors have their values, and in what shape: ``.data = other`` and ``resize_`` change that."""
    # Asked before every step, of all buffers: two lists cost half of what one of pairs would.
    return [tensor.data_ptr() for tensor in tensors], [tensor.shape for tensor in tensors]


class _Copy:
    """The value of one tensor, in storage that is made once, and where the tensor had its own."""

    __slots__ = ("clone", "place", "seen", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        near = tensor.nbytes <= _NEAR_BYTES or tensor.device.type in {"cpu", "meta"}
        self.tensor = tensor
        self.clone = torch.empty_like(tensor, device=tensor.device if near else "cpu", requires_grad=False)
        self.seen: int | None = None
        self.place = _place(tensor)

    def fits(self, tensor: Tensor) -> bool:
        # The clone, because the tensor may be the same one in another shape.
        mine, device = self.clone, self.tensor.device
        return (mine.shape, mine.dtype, device, mine.layout) == (
            tensor.shape, tensor.dtype, tensor.device, tensor.layout,
        )  # fmt: skip

    def follow(self, tensor: Tensor) -> None:
        if tensor is not self.tensor or not self._is_in_place():
            self.tensor, self.seen = tensor, None
            self.place = _place(tensor)

    def _is_in_place(self) -> bool:
        return self.place is None or _places([self.tensor]) == _places([self.place])

    def put_in_place(self) -> None:
        """Give the tensor the storage and the shape that it had.

        Only its values would not do: there may be no room for them, or they would go into what somebody else holds.
        """
        if self.place is not None and not self._is_in_place():
            with torch.inference_mode(self.tensor.is_inference()):
                self.tensor.data = self.place

    def take(self) -> None:
        now = version(self.tensor)
        if now is None or now != self.seen:
            self.clone.copy_(self.tensor)
            self.seen = now

    def restore(self) -> None:
        if self.tensor.is_inference():
            with torch.inference_mode():  # the only place where torch lets one be written into
                self.tensor.copy_(self.clone)
        elif version(self.tensor) != self.seen:
            self.tensor.copy_(self.clone)
            self.seen = version(self.tensor)


class ModuleSnapshot:
    """Everything that a forward and a backward may change in some modules, parameters' values apart.

    `take` is called before every optimizer step. It costs about a microsecond a module and half of one a buffer, and
    allocates nothing after the first time.

    Which buffers are copied: persistent ones and those up to `SMALL_BYTES` at every `take`, because BatchNorm moves its
    statistics without raising their version counter. A large non-persistent one (causal masks, rotary tables) only when
    it is another tensor or has another version than at the last copy.
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._attributes = AttributeSnapshot(*roots)
        self._buffers: list[Tensor | None] = []
        self._copies: dict[tuple[int, str], _Copy] = {}
        self._steady: list[tuple[list[Tensor], list[Tensor]]] = []  # clones and what they are of, by where clones live
        self._watched: list[_Copy] = []
        self._placed: list[Tensor] = []
        self._places = _places([])

    def take(self) -> None:
        """Record everything as it is now."""
        moved = self._attributes.take()
        buffers = self._attributes.buffers()
        if moved or not _same(buffers, self._buffers) or _places(self._placed) != self._places:
            self._match()
            self._buffers = buffers
        if self._steady or self._watched:
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        for clones, tensors in self._steady:
            torch._foreach_copy_(clones, tensors)
        for copy in self._watched:
            copy.take()

    def _match(self) -> None:
        """Find the tensors to copy, and for each the storage of its last copy or a new one."""
        known, self._copies = self._copies, {}
        near: tuple[list[Tensor], list[Tensor]] = ([], [])
        far: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._watched = []
        for mapping, name, tensor, persistent in self._attributes.state_tensors():
            copy = known.get((id(mapping), name))
            if copy is None or not copy.fits(tensor):
                copy = _Copy(tensor)
            copy.follow(tensor)
            self._copies[id(mapping), name] = copy
            if tensor.is_inference() or not (persistent or tensor.nbytes <= SMALL_BYTES):
                self._watched.append(copy)
                continue
            clones, tensors = near if copy.clone.device == tensor.device else far
            clones.append(copy.clone)
            tensors.append(tensor)
        self._steady = [group for group in (near, far) if group[0]]
        self._placed = [copy.tensor for copy in self._copies.values() if copy.place is not None]
        self._places = _places(self._placed)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as the last `take` found it: the same tensor objects with the values they had then."""
        self._attributes.restore()
        for copy in self._copies.values():
            copy.put_in_place()
        for clones, tensors in self._steady:
            torch._foreach_copy_(tensors, clones)
        for copy in self._watched:
            copy.restore()
