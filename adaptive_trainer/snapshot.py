"""What a thrown-away forward may have changed in modules and random streams, and how it is put back exactly.

Beside what `AttributeSnapshot` records, these are the values of buffers and plain tensor attributes.

Not exact, because it cannot be seen from outside: sparse and nested buffers that are changed in place, and a large
non-persistent buffer that is written through ``.data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adaptive_trainer.attributes import SMALL_BYTES, AttributeSnapshot, same, version

if TYPE_CHECKING:
    from torch import nn

# Copies above this size are kept on the host, where they take nothing from the memory that is short.
_NEAR_BYTES = 1024 * 1024


def _has_place(tensor: Tensor) -> bool:
    """Whether it is a plain array at an address, which `.data = other` and `resize_` give another shape or address."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"


def _places(tensors: list[Tensor]) -> tuple[list[int], list[torch.Size]]:
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
        self.place: Tensor | None = None

    def fits(self, tensor: Tensor) -> bool:
        # The clone, because the tensor may be the same one in another shape.
        mine, device = self.clone, self.tensor.device
        return (mine.shape, mine.dtype, device, mine.layout) == (
            tensor.shape, tensor.dtype, tensor.device, tensor.layout,
        )  # fmt: skip

    def follow(self, tensor: Tensor) -> None:
        if tensor is not self.tensor or not self._is_in_place():
            self.tensor, self.seen = tensor, None
            self.place = tensor.data if _has_place(tensor) else None

    def _is_in_place(self) -> bool:
        return self.place is not None and _places([self.tensor]) == _places([self.place])

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
        if moved or not same(buffers, self._buffers) or _places(self._placed) != self._places:
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
