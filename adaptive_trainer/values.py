"""One tensor's value, its shape and its place in memory, and how they are put back."""

from __future__ import annotations

import torch
from torch import Tensor

# Copies above this size are kept on the host, where they take nothing from the memory that is short.
_NEAR_BYTES = 1024 * 1024


def version(tensor: Tensor) -> int | None:
    """How often torch has seen the tensor written into; None for inference tensors, which do not count."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001  torch names no other way to it


def is_read_only(tensor: Tensor) -> bool:
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


def places(tensors: list[Tensor]) -> tuple[list[int], list[torch.Size]]:
    """Where tensors have their values, and in what shape: ``.data = other`` and ``resize_`` change that."""
    # Asked before every step, of all buffers: two lists cost half of what one of pairs would.
    return [tensor.data_ptr() for tensor in tensors], [tensor.shape for tensor in tensors]


class TensorCopy:
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
        return self.place is None or places([self.tensor]) == places([self.place])

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
