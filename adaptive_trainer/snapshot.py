"""What a thrown-away forward may have changed in modules and random streams, and how it is put back exactly.

Beside what `AttributeSnapshot` records, these are the values of buffers and plain tensor attributes.

Not exact, because it cannot be seen from outside: sparse and nested buffers that are changed in place, and a large
non-persistent buffer that is written through ``.data``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adaptive_trainer.attributes import SMALL_BYTES, AttributeSnapshot, same
from adaptive_trainer.values import TensorCopy, places

if TYPE_CHECKING:
    from torch import Tensor, nn


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
        self._copies: dict[tuple[int, str], TensorCopy] = {}
        self._steady: list[tuple[list[Tensor], list[Tensor]]] = []  # clones and what they are of, by where clones live
        self._watched: list[TensorCopy] = []
        self._placed: list[Tensor] = []
        self._places = places([])

    def take(self) -> None:
        """Record everything as it is now."""
        moved = self._attributes.take()
        buffers = self._attributes.buffers()
        if moved or not same(buffers, self._buffers) or places(self._placed) != self._places:
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
                copy = TensorCopy(tensor)
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
        self._places = places(self._placed)

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
