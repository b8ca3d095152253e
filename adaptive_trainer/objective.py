"""What is minimised: the user's loss or step on a batch, and what else is measured on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from adaptive_trainer.batches import length
from adaptive_trainer.errors import DataError
from adaptive_trainer.forward import call, loss_of
from adaptive_trainer.weights import ItemCounter, item_counter, loss_reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType


@dataclass(slots=True)  # not frozen: it is made in every step, and would take three times as long
class Measured:
    """A piece's loss, with what it was computed from.

    Attributes:
        loss: One element.
        weight: Items that the loss averages over, where only the user's step could tell; else None.
        output: What the model returned; None where the user's step kept it.
        targets: What the loss compared it with.
    """

    loss: Tensor
    weight: float | None = None
    output: Any = None
    targets: Any = None


@dataclass(frozen=True, kw_only=True)
class Objective:
    """How a batch becomes a loss.

    Attributes:
        loss: ``callable(output, targets)``, or None where the model's output carries the loss.
        step: ``callable(model, batch)`` in place of calling model and loss; or None.
        weight: The user's count of the items that the loss averages over; None for the default count.
        reduction: What the loss does over its items, ``"mean"`` or ``"sum"``.
        metrics: Further functions of output and targets, by name; each gives the mean over what it is given.
    """

    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[nn.Module, Any], Any] | None = None
    weight: Callable[[Any], float] | None = None
    reduction: str = "mean"
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = loss_reduction(self.loss)
        if found == "none":
            raise DataError(
                "loss: its reduction is 'none', so it gives one value for each item; type reduction='mean' or 'sum'"
            )

    @property
    def sums(self) -> bool:
        """Whether the loss is a sum over its items, and pieces simply add up."""
        return "sum" in {self.reduction, loss_reduction(self.loss)}

    @property
    def modules(self) -> list[nn.Module]:
        """Modules beside the model that a forward may change: a loss with a state, the owner of a step."""
        found = (self.loss, self.step, getattr(self.loss, "__self__", None), getattr(self.step, "__self__", None))
        return [entry for entry in found if isinstance(entry, nn.Module)]

    def counter(self, model: nn.Module, *, by_class: bool = True) -> ItemCounter:
        """How many items the loss averages over, as a function of any batch or piece of one."""
        return item_counter(model, self.loss, self.weight, by_class=by_class)

    def measure(self, model: nn.Module, piece: Any) -> Measured:
        """The loss of a piece that is on the device.

        Raises:
            DataError: There is no loss, or it has more than one element.
        """
        if self.step is None:
            output, targets = call(model, piece, self.loss)
            loss = _scalar(loss_of(output) if self.loss is None else self.loss(output, targets), "loss")
            _refuse_frozen(model, loss)
            return Measured(loss, output=output, targets=targets)
        found = self.step(model, piece)
        loss, weight = found if isinstance(found, tuple) else (found, None)
        loss = _scalar(loss, "step")
        _refuse_frozen(model, loss)
        return Measured(loss, weight=None if weight is None else float(weight))

    def score(self, measured: Measured) -> dict[str, float]:
        """The user's metrics of a piece.

        Raises:
            DataError: One gives something else than a number.
        """
        return {name: _score(name, metric, measured) for name, metric in self.metrics.items()}


def _refuse_frozen(model: nn.Module, loss: Tensor) -> None:
    """Refuse a model of which nothing would be trained, in words other than backward's.

    Raises:
        DataError: The loss has no gradient, because none of the model's parameters wants one.
    """
    if loss.requires_grad or not torch.is_grad_enabled():
        return
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise DataError(
            f"model: none of its {len(parameters)} parameters is trained, because each has requires_grad=False; type "
            "requires_grad_(True) for those that are to be trained, for example model.head.requires_grad_(True)"
        )


def _score(name: str, metric: Callable[[Any, Any], Any], measured: Measured) -> float:
    with _Named(name):
        found = metric(measured.output, measured.targets)
    if not isinstance(found, Tensor) or found.numel() == 1:
        try:
            return float(found)
        except (TypeError, ValueError):
            what = f"a {type(found).__name__}"
    else:
        what = f"a tensor of shape {tuple(found.shape)}"
    raise DataError(f"metrics: {name!r} gave {what}; it must give one number, the mean over what it is given")


class _Named:
    """Adds to whatever a metric raises which one it was; it passes through, the same object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"raised by the metric {self._name!r}")


def _scalar(loss: Any, key: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise DataError(f"{key}: it gave a {type(loss).__name__}; it must give a tensor with one element")
    if loss.numel() != 1:
        raise DataError(
            f"{key}: it gave a tensor of shape {tuple(loss.shape)}; it must have one element. "
            "Type for example loss.mean()"
        )
    return loss if loss.dim() == 0 else loss.reshape(())


def num_samples(batch: Any, expected: int | None) -> int | None:
    """Samples of a batch; None where nothing in it counts them."""
    return length(batch, expected)


def zero_gradients(parameters: list[nn.Parameter]) -> None:
    """Give every trainable parameter a gradient of zeros: a step without a single item contributes nothing."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
