"""A memory limit for machines without an accelerator: the bytes of all living tensor storages, counted.

On an accelerator the allocator itself can be told where to stop. The allocator of a CPU cannot, so `Budget` counts:
a dispatch mode sees what every operation returns, in the forward pass, in backward (which on a CPU runs in the calling
thread) and in the optimizer's step, and a weak reference to each storage tells when its bytes are free again. When the
next allocation does not fit, a genuine ``torch.OutOfMemoryError`` is raised in CUDA's words, so that everything above
this room takes the same path as on a GPU.

Counted is what tensors hold. Not seen are the scratch memory inside a kernel and storages that no operation makes, such
as those of a deep copy; who keeps one adopts it. An allocation is refused after its operation has run, so the process
itself may for that moment be larger than the limit.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from adaptive_trainer.phases import Passage

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


def _storage_of(tensor: Tensor) -> UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # opaque tensors, such as oneDNN's, have none that can be had
        return None


def _storages_of(tensor: Tensor) -> list[UntypedStorage]:
    """The storages that hold a tensor's data; a meta tensor has none that takes memory."""
    if type(tensor) is Tensor and tensor.layout is torch.strided:  # the usual case, asked several times an operation
        storage = None if tensor.is_meta else _storage_of(tensor)
        return [] if storage is None else [storage]
    found = (_storage_of(part) for part in dense_parts(tensor) if part.device.type != "meta")
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
        if type(outputs) is Tensor and self._is_seen(_storage_of(outputs)):
            return outputs
        storages = [storage for output in _tensors_in((outputs,)) for storage in _storages_of(output)]
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
            shared = {id(storage) for tensor in _tensors_in(inputs) for storage in _storages_of(tensor)}
        for storage in changed:
            if self._is_seen(storage) or (id(storage) in shared and self._seen.get(storage) is None):
                continue
            if storage.nbytes():
                self._on_allocate(storage)
            self.see(storage)


class Budget:
    """A limit on the living bytes of tensors, kept while a run is in one of its phases.

    It is a guard of `phases.Track`: what operations make inside a phase is charged, from each storage's making to its
    death, whenever that is. What is made outside, by the user's data loader for instance, is the host's and free.

    Args:
        limit_bytes: How much may live at once.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._charged = Storages()
        self._held_bytes = 0
        self._peak_bytes = 0
        self._num_paused = 0
        self._lock = threading.RLock()
        self._allocations = Allocations(self._charge)

    @property
    def live_bytes(self) -> int:
        """What lives now."""
        return self._charged.total_bytes + self._held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that lived at once since the last `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Let the peak begin anew at what lives now."""
        self._peak_bytes = self.live_bytes

    @contextmanager
    def __call__(self, _passage: Passage, /) -> Iterator[None]:
        """Count inside the block; within a block that counts already in this thread, nothing more happens."""
        if self._allocations in _get_current_dispatch_mode_stack():
            yield
            return
        with self._allocations:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside the block stays uncounted for good: copies that on an accelerator are the host's."""
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Charge the storages of tensors that exist already, each once, for as long as they live.

        Raises:
            torch.OutOfMemoryError: They do not fit; then none of them is charged.
        """
        storages = {id(storage): storage for tensor in tensors for storage in _storages_of(tensor)}.values()
        with self._lock:
            self._claim(sum(self._missing_bytes(storage) for storage in storages))
            for storage in storages:
                self._allocations.see(storage)
                self._charged.put(storage, storage.nbytes())

    def hold(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Charge a batch while the context is open, as if it had been copied to a device.

        Each tensor costs its own elements, not the storage that it looks at. One whose storage is charged already is on
        the "device", so it costs nothing.

        Raises:
            torch.OutOfMemoryError: On entering the context: they do not fit, and nothing is charged.
        """
        parts = {id(part): part for tensor in tensors for part in dense_parts(tensor)}
        return self._holding(list(parts.values()))

    @contextmanager
    def _holding(self, parts: list[Tensor]) -> Iterator[None]:
        num_bytes = 0
        for part in parts:
            storage = _storage_of(part)
            if storage is None or self._charged.get(storage) is None:
                num_bytes += part.numel() * part.element_size()
            if storage is not None:
                self._allocations.see(storage)
        with self._lock:
            self._claim(num_bytes)
            self._held_bytes += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._held_bytes -= num_bytes

    def _charge(self, storage: UntypedStorage) -> None:
        if self._num_paused:
            return
        with self._lock:
            self._claim(self._missing_bytes(storage))
            self._charged.put(storage, storage.nbytes())

    def _missing_bytes(self, storage: UntypedStorage) -> int:
        return storage.nbytes() - (self._charged.get(storage) or 0)

    def _claim(self, num_bytes: int) -> None:
        live_bytes = self.live_bytes
        if live_bytes + num_bytes > self.limit_bytes and num_bytes > 0:
            raise _out_of_memory(num_bytes, live_bytes, self.limit_bytes)
        self._peak_bytes = max(self._peak_bytes, live_bytes + num_bytes)


def _out_of_memory(requested_bytes: int, live_bytes: int, limit_bytes: int) -> torch.OutOfMemoryError:
    """CUDA's wording, so that one reader of messages reads both."""
    free_bytes = max(0, limit_bytes - live_bytes)
    return torch.OutOfMemoryError(
        f"CPU out of memory. Tried to allocate {_cuda_size(requested_bytes)}. CPU 0 has a total capacity of "
        f"{_cuda_size(limit_bytes)} of which {_cuda_size(free_bytes)} is free. Of the allocated memory "
        f"{_cuda_size(live_bytes)} is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. "
        "This capacity is the trainer's memory_limit, not the machine's."
    )


def _cuda_size(num_bytes: int) -> str:
    if num_bytes <= 1024:
        return f"{num_bytes} bytes"
    for unit, factor in (("KiB", 1024), ("MiB", 1024**2)):
        if num_bytes <= factor * 1024:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes / 1024**3:.2f} GiB"
