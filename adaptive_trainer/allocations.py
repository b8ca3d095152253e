"""Which tensor storages operations make, and how long each of them lives."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Their output shares its storage with the input, yet it is new: torch made the input out of every mode's sight.
_NEW_ALTHOUGH_SHARED = frozenset({torch.ops.aten.lift_fresh.default})

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that hold a tensor's data: itself, unless it is sparse or a wrapper around others."""
    wrapper: Any = tensor  # torch types a wrapper as something that no Tensor can be
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            yield from dense_parts(getattr(wrapper, name))
    elif tensor.layout in _SPARSE_PARTS:
        for name in _SPARSE_PARTS[tensor.layout]:
            yield getattr(tensor, name)()
    else:
        yield tensor


def storage_of(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # opaque tensors, such as oneDNN's, have none that can be had
        return None


def storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages that hold a tensor's data; a meta tensor has none that takes memory."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:  # the usual case, asked several times an operation
        storage = None if tensor.is_meta else storage_of(tensor)
        return [] if storage is None else [storage]
    found = (storage_of(part) for part in dense_parts(tensor) if part.device.type != "meta")
    return [storage for storage in found if storage is not None]


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


class _Entry(weakref.ref[UntypedStorage]):
    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


class Storages:
    """Living storages, each with a number of bytes.

    A storage's Python object lives exactly as long as the storage, so a weak reference tells when it is freed. That may
    be in any thread and at any moment, amid the counting too. So a dying storage only appends itself to a deque, which
    needs no lock, and whoever counts next takes it out of the sum.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._dead: deque[_Entry] = deque()
        self._total_bytes = 0
        self._lock = threading.RLock()

    @property
    def total_bytes(self) -> int:
        """The sum over all that live."""
        with self._lock:
            self._sweep()
            return self._total_bytes

    def get(self, storage: UntypedStorage) -> int | None:
        """The storage's number, None if it has none."""
        if self._dead:  # an id is given again only after its last owner has died, so what is swept cannot mislead
            with self._lock:
                self._sweep()
        entry = self._entries.get(id(storage))
        return None if entry is None else entry.num_bytes

    def put(self, storage: UntypedStorage, num_bytes: int) -> None:
        """Set the storage's number for as long as it lives."""
        with self._lock:
            self._sweep()
            entry = self._entries.get(id(storage))
            if entry is None:
                entry = _Entry(storage, self._dead.append)
                entry.key, entry.num_bytes = id(storage), 0
                self._entries[entry.key] = entry
            self._total_bytes += num_bytes - entry.num_bytes
            entry.num_bytes = num_bytes

    def _sweep(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            del self._entries[entry.key]
            self._total_bytes -= entry.num_bytes


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Reports each storage that an operation makes, once, and again when its size has changed.

    Views, in-place operations and other aliases are no allocations, also of tensors made outside the mode; nor are
    storages without bytes. What ``on_allocate`` raises comes out of the operation, and the storage counts as not seen.

    Args:
        on_allocate: Called with the storage after the operation and before anyone has its result.
    """

    #: Let operators with operators in them through, as if there were no mode; by default torch refuses them.
    supports_higher_order_operators = True

    def __init__(self, on_allocate: Callable[[UntypedStorage], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._on_allocate = on_allocate
        self._seen = Storages()

    def see(self, storage: UntypedStorage) -> None:
        """Take a storage as reported."""
        self._seen.put(storage, storage.nbytes())

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at what it returned."""
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        # This runs for every operation, so the most frequent answer, one plain tensor that is known, comes first.
        if type(outputs) is Tensor and self._is_seen(storage_of(outputs)):
            return outputs
        storages = [storage for output in _tensors_in((outputs,)) for storage in storages_of(output)]
        changed = [storage for storage in storages if not self._is_seen(storage)]
        if changed:
            self._report(changed, func, (*args, *kwargs.values()))
        return outputs

    def _is_seen(self, storage: UntypedStorage | None) -> bool:
        return storage is not None and self._seen.get(storage) == storage.nbytes()

    def _report(self, changed: list[UntypedStorage], func: Any, inputs: tuple[Any, ...]) -> None:
        # Operators say in their schema what aliases what, but the composite ones, which inference mode shows whole, say
        # "perhaps" (reshape) or nothing (dropout). Comparing with the inputs is right for all of them.
        shared: set[int] = set()
        if func not in _NEW_ALTHOUGH_SHARED:
            shared = {id(storage) for tensor in _tensors_in(inputs) for storage in storages_of(tensor)}
        for storage in changed:
            if self._is_seen(storage) or (id(storage) in shared and self._seen.get(storage) is None):
                continue
            if storage.nbytes():
                self._on_allocate(storage)
            self.see(storage)
