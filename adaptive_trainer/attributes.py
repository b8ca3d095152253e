"""What a forward may have bound anew in modules, recorded by reference and put back exactly.

Recorded are every module's attributes (buffers, flags, counters, references, hooks, submodules), one level of content
of plain containers among them, and where a module's own random generators stand. Parameters are not copied, because
only a commit moves them; which parameter a module has under which name is recorded.

Modules are looked at before every step, which costs as much as all the rest of what a step is prepared with. So torch's
own layers, whose forward binds nothing, are asked only now and then, once they were seen to stand still; what somebody
else does to them stays as it is. One that was seen to move all the same is asked for ever.

Not exact, because it cannot be seen from outside: values inside other objects (NumPy arrays, nested containers, tensors
in containers) when they are changed in place. Nor what a parent, or a hook that came later, first binds on one of
torch's own layers after it stood still: until that layer is asked again, a failed attempt's write stays.
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
from adaptive_trainer.values import is_read_only, version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

#: Tensors up to this size are copied without asking whether they changed.
SMALL_BYTES = 64 * 1024
#: Steps in which every module is asked, at the start and every so many later.
_FIRST, _EVERY = 3, 64
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Exactly these types: a subclass may do more on a write than its base, and is kept by reference.
_CONTAINERS = frozenset({dict, list, set, deque, OrderedDict, defaultdict})
_STANDARD = frozenset(nn.Module().__dict__)
_KEPT = frozenset(name for name, value in nn.Module().__dict__.items() if type(value) in _CONTAINERS)
_values = methodcaller("values")


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


def is_torchs_own(module: nn.Module) -> bool:
    """Whether it is one of torch's own layers, whose forward binds nothing."""
    return type(module).__module__.startswith("torch.nn.modules.")


def same(one: Any, other: Any) -> bool:
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
        if not (same(container, content) and same(container.values(), content.values())):
            container.clear()
            container.update(content)
        return
    content = [_unfade(value) for value in content]
    if same(container, content):
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
        users: Its containers that not every module has.
        moves: It is one of torch's own layers and was seen to move all the same, or it is somebody else's.
    """

    __slots__ = ("_names", "_saved", "entries", "generators", "moves", "plain", "quick", "seen", "users")

    def __init__(self, module: nn.Module, *, histories: bool) -> None:
        self.entries = module.__dict__
        self.moves = not is_torchs_own(module)
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
        self.users = [
            value for name, value in self.entries.items() if name not in _STANDARD and type(value) in _CONTAINERS
        ]

    @property
    def is_quiet(self) -> bool:
        """Whether it need not be asked in every step."""
        return not (self.moves or self.users or self.generators or any(self.entries[name] for name in _HOOKS))

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
        self._asked: list[_Record] = []
        self._num_taken = 0
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
        self._num_taken += 1
        if self._num_taken == _FIRST + 1 or self._num_taken % _EVERY <= 1:
            self._sort()
        # Modules came or went exactly if the known modules' children, one after the other, are other objects now.
        moved = not self._is_as_read() or not same([*chain.from_iterable(map(_values, self._trees))], self._children)
        if moved or any(self._empty):
            self._read()
        self._contents = [container.copy() for container in self._own]
        self._contents += [_content(container, histories=self._histories) for container in self._users]
        self._rewinds = [rewinding(generator) for generator in self._generators]
        return moved

    def _is_as_read(self) -> bool:
        """Whether no module has got another attribute since it was read. Asked before every step, of all modules."""
        if not self._records or [len(record.entries) for record in self._asked] != self._lengths:
            return False
        try:
            now = [record.quick(record.entries) for record in self._asked]
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
                record.moves = True
                record.read(histories=self._histories)
            self._records[module] = record
        records = self._records.values()
        self._generators = [*chain.from_iterable(record.generators for record in records)]
        self._trees = [tree for record in records if (tree := record.entries["_modules"])]
        self._children = [*chain.from_iterable(map(_values, self._trees))]
        self._buffers = [buffers for record in records if (buffers := record.entries["_buffers"])]
        self._users = [*chain.from_iterable(record.users for record in records)]
        self._sort()

    def _sort(self) -> None:
        """Choose the modules to ask, and what of theirs to look at."""
        all_of_them = self._num_taken <= _FIRST or self._num_taken % _EVERY == 0
        self._asked = [record for record in self._records.values() if all_of_them or not record.is_quiet]
        self._lengths = [len(record.entries) for record in self._asked]
        self._seen = [*chain.from_iterable(record.seen for record in self._asked)]
        found = [record.entries[name] for record in self._asked for name in _KEPT & record.entries.keys()]
        containers = [value for value in found if type(value) in _CONTAINERS]
        self._own = [value for value in containers if value]
        self._empty = [value for value in containers if not value]

    def restore(self) -> None:
        """Put back what `take` recorded; whatever was added since is dropped."""
        for record in self._asked:
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
                if tensor is not None and not is_read_only(tensor):
                    yield StateTensor(record.entries["_buffers"], name, tensor, name not in passing)
            for name, tensor in record.plain:
                if not is_read_only(tensor):
                    yield StateTensor(record.entries, name, tensor, persistent=False)
