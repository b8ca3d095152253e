"""What a thrown-away forward may have changed in modules and random streams, and how it is put back exactly.

Beside what `AttributeSnapshot` records, these are the values of buffers and plain tensor attributes.

Not exact, because it cannot be seen from outside: sparse and nested buffers that are changed in place, and a large
non-persistent buffer that is written through ``.data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adaptive_trainer.attributes import SMALL_BYTES, AttributeSnapshot, same, version

if TYPE_CHECKING:
    from torch import Tensor, nn

# Copies above this size are kept on the host, where they take nothing from the memory that is short.
_NEAR_BYTES = 1024 * 1024


class _Copy:
    """The value of one tensor, in storage that is made once."""

    __slots__ = ("clone", "seen", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        near = tensor.nbytes <= _NEAR_BYTES or tensor.device.type in {"cpu", "meta"}
        self.tensor = tensor
        self.clone = torch.empty_like(tensor, device=tensor.device if near else "cpu", requires_grad=False)
        self.seen: int | None = None

    def fits(self, tensor: Tensor) -> bool:
        mine = self.tensor
        return (mine.shape, mine.dtype, mine.device, mine.layout) == (
            tensor.shape, tensor.dtype, tensor.device, tensor.layout,
        )  # fmt: skip

    def follow(self, tensor: Tensor) -> None:
        if tensor is not self.tensor:
            self.tensor, self.seen = tensor, None

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

    def take(self) -> None:
        """Record everything as it is now."""
        moved = self._attributes.take()
        buffers = self._attributes.buffers()
        if moved or not same(buffers, self._buffers):
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

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as the last `take` found it: the same tensor objects with the values they had then."""
        self._attributes.restore()
        for clones, tensors in self._steady:
            torch._foreach_copy_(tensors, clones)
        for copy in self._watched:
            copy.restore()
