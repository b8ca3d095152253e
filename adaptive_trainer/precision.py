"""What a precision does to a step: the context of the forward, the backward, and how the optimizer moves.

The base case does nothing, so the step itself never asks which precision it runs in.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from adaptive_trainer.plan import Precision


def clip(parameters: Iterable[Tensor], max_grad_norm: float | None) -> Tensor | None:
    """Scale all gradients so that their common norm is at most ``max_grad_norm``; None clips nothing.

    Returns:
        The norm before, one element; None where nothing was clipped.
    """
    return None if max_grad_norm is None else torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)


class FullPrecision:
    """fp32, or whatever the model's own parameters are."""

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward and loss."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss``."""
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own

    def step(self, optimizer: Optimizer, parameters: list[Tensor], max_grad_norm: float | None, loss: Tensor) -> bool:
        """Clip and move the optimizer. Returns whether it moved."""
        del loss
        clip(parameters, max_grad_norm)
        optimizer.step()
        return True

    def reset(self, optimizer: Optimizer) -> None:
        """Forget what a step that is thrown away left half-way."""

    def state(self) -> dict[str, Any]:
        """What has to outlive the engine."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave."""


class BFloat16(FullPrecision):
    """Autocast to bf16. It needs no scaler; a loss or a gradient norm that is not finite moves nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16)

    def step(self, optimizer: Optimizer, parameters: list[Tensor], max_grad_norm: float | None, loss: Tensor) -> bool:
        norm = clip(parameters, max_grad_norm)
        if not (math.isfinite(loss.item()) and (norm is None or math.isfinite(norm.item()))):
            return False
        optimizer.step()
        return True


class Float16(FullPrecision):
    """Autocast to fp16 with a gradient scaler, whose state is part of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.load({})

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.float16)

    def backward(self, loss: Tensor) -> None:
        super().backward(self._scaler.scale(loss))

    def step(self, optimizer: Optimizer, parameters: list[Tensor], max_grad_norm: float | None, loss: Tensor) -> bool:
        del loss
        before = self._scaler.get_scale()
        self._scaler.unscale_(optimizer)
        clip(parameters, max_grad_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        # A scale that went down is how torch tells that the step was skipped.
        return self._scaler.get_scale() >= before

    def reset(self, optimizer: Optimizer) -> None:
        # A fused optimizer that failed still carries what the scaler told it, and would obey it in another precision.
        for name in ("grad_scale", "found_inf"):
            vars(optimizer).pop(name, None)
        # The scaler remembers by optimizer that it has unscaled, and refuses to do it again. Scale and growth move
        # only in `update`, the last thing a step does, so a new scaler of the same state is the one from before.
        self.load(self.state())

    def state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        scaler = torch.amp.GradScaler(self._device.type)
        # Torch makes the scale with the first loss, and a step without a single item has none.
        scaler.scale(torch.zeros((), device=self._device))
        if state:
            scaler.load_state_dict(state)
        self._scaler = scaler  # last, so that a reset which failed half-way can be done again


def of(precision: Precision, device: torch.device) -> FullPrecision:
    """The behaviour of a plan's precision on ``device``."""
    if precision == "fp32":
        return FullPrecision()
    return BFloat16(device) if precision == "bf16" else Float16(device)
