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
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from adaptive_trainer.allocations import Allocations, Storages, dense_parts, storage_of, storages_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from torch import Tensor, UntypedStorage

    from adaptive_trainer.phases import Passage


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
        storages = {id(storage): storage for tensor in tensors for storage in storages_of(tensor)}.values()
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
            storage = storage_of(part)
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
