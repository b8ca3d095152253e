"""The model called with a batch, and the loss that its output carries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from adaptive_trainer.errors import DataError
from adaptive_trainer.nesting import entries_of


def call(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> tuple[Any, Any]:
    """The model's output for a batch, and the targets to compare it with (None where there are none).

    With a loss, a pair is inputs and targets, and a mapping has its targets under ``"labels"``; anything else is input
    and target at once. Without one, everything in the batch is the model's: ``model(*batch)`` or ``model(**batch)``.

    Raises:
        DataError: There is a loss, and the batch is a mapping without ``"labels"``; or the model's ``forward`` does not
            take as many arguments as the batch has entries, or not of these names.
    """
    if isinstance(batch, Mapping):
        targets = batch.get("labels")
        if loss is not None and targets is None:
            keys = ", ".join(repr(key) for key in batch) or "nothing"
            raise DataError(
                f"data: loss= is given, but the batch has no 'labels' to compare with; it has {keys}. {_AS_PAIRS}"
            )
        return _called(model, (), batch), targets
    if isinstance(batch, list | tuple) and entries_of(batch) is not None:
        if loss is None:
            return _called(model, batch, {}), None
        if len(batch) == 2:
            return model(batch[0]), batch[1]
    return model(batch), None if loss is None else batch


#: What serves loss and metrics whatever the keys of a mapping are.
_AS_PAIRS = (
    'Let the data give pairs such as (sample["x"], sample["y"]), which are read as model(x) and loss(output, y), with '
    "metrics too; or type step= with a function of model and batch that returns the loss"
)


def _called(model: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """The model's output, where the whole batch becomes its arguments.

    Raises:
        DataError: ``forward`` does not take them. Any other TypeError is the user's own, and passes through.
    """
    try:
        return model(*args, **keywords)
    except TypeError:  # asked afterwards, because looking at a signature takes as long as a small layer
        legal = _parameters_unless_taken(model, args, keywords)
        if legal is None:
            raise
    takes = f"{type(model).__name__}.forward takes {', '.join(legal) or 'nothing'}"
    if keywords:
        raise DataError(
            f"data: the model gets the batch's keys as arguments, {', '.join(keywords)}, and {takes}. {_AS_PAIRS}"
        )
    raise DataError(
        f"loss: none is given, so the model gets all {len(args)} entries of the batch as arguments, and {takes}. For "
        "pairs of inputs and targets type for example loss=torch.nn.MSELoss(), a function of output and targets; "
        "or type step="
    )


def _parameters_unless_taken(model: nn.Module, args: Sequence[Any], keywords: Mapping[str, Any]) -> list[str] | None:
    """The names that a model's ``forward`` takes, if it cannot be called like this; None if it can."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        return None
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return list(signature.parameters)
    return None


def loss_of(output: Any) -> Tensor:
    """The loss that a model's output carries or is: one element.

    It is ``output.loss``, ``output["loss"]``, a tensor, or the first of a tuple.

    Raises:
        DataError: There is none, or it has more than one element.
    """
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, tuple) and not hasattr(output, "loss"):
        found = output[0] if output else None
    else:
        found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise DataError(
            f"loss: the model gave a {type(output).__name__} without a loss in it. Type loss= with a function of "
            "output and targets, or step=, or give the model the labels from which it computes its loss"
        )
    if found.numel() != 1:
        raise DataError(
            f"loss: the model gave a tensor of shape {tuple(found.shape)} where a loss of one element is needed. "
            "Give reduction='mean' to the loss in the model, or type loss= if this is the model's output"
        )
    return found
