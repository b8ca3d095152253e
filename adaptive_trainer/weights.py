"""How many items a loss averages over, and what each piece's loss therefore counts for.

The mean over a batch is not the mean of its pieces' means: a piece counts for as many items as its own mean is over,
and these are samples only as long as every sample has one. Where labels say which positions count, they are counted
as the loss counts them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adaptive_trainer.batches import length
from adaptive_trainer.errors import DataError
from adaptive_trainer.nesting import is_array

#: What torch's and Hugging Face's losses leave out if nobody says otherwise.
_IGNORE_INDEX = -100
#: torch's losses whose mean over weighted classes is divided by the targets' weights.
_CLASS_WEIGHTED = (nn.CrossEntropyLoss, nn.NLLLoss)
_CLASS_WEIGHTED_FUNCTIONS = (nn.functional.cross_entropy, nn.functional.nll_loss)
_REDUCTIONS = {"mean": "mean", "batchmean": "mean", "sum": "sum", "none": "none"}


class ItemCounter(Protocol):
    """How many items the loss of a batch, or of a piece of one, averages over."""

    def __call__(self, batch: Any, num_samples: int | None = None, *, whole: bool = False) -> float:
        """The count; ``num_samples`` is used where samples are counted, instead of asking the batch.

        Of a ``whole`` batch, which no other piece is weighed against, it only matters whether there is an item at all:
        then any positive number may come.
        """


def item_counter(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor] | None,
    user_weight: Callable[[Any], float] | None,
    *,
    by_class: bool = True,
) -> ItemCounter:
    """How to count the items of a batch: as the user says, or else by its labels, or else by its samples.

    Labels are integers under ``"labels"`` of a mapping, or the second of a pair. Those that the loss ignores do not
    count, nor do the first of each sequence where the model shifts its labels; where classes are weighted, a label
    counts as much as its class, unless ``by_class`` is False.
    """
    if user_weight is not None:

        def weigh(batch: Any, num_samples: int | None = None, *, whole: bool = False) -> float:
            del num_samples, whole
            return float(user_weight(batch))

        return weigh
    rule = _Rule(loss, by_class=by_class) if loss is not None else _rule_of(_unwrapped(model))

    def count(batch: Any, num_samples: int | None = None, *, whole: bool = False) -> float:
        labels = _labels(batch)
        if rule.by_labels and isinstance(labels, Tensor) and _is_integer(labels):
            if whole and rule.begins_with_an_item(labels):
                return 1
            return rule.count(labels)
        if num_samples is None:
            has_samples = is_array(labels) and labels.ndim > 0
            num_samples = len(labels) if has_samples else length(batch)
        return 1 if num_samples is None else num_samples

    return count


def loss_reduction(loss: Callable[..., Any] | None) -> str | None:
    """What a loss says of itself: ``"mean"``, ``"sum"`` or ``"none"``; None where it has no ``reduction``."""
    return _REDUCTIONS.get(str(_setting(loss, "reduction")))


def shares(weights: Sequence[float], reduction: str) -> list[float]:
    """What each piece's loss is multiplied with, so that their sum is the loss of the whole.

    Args:
        weights: Items of each piece.
        reduction: ``"mean"``: each counts for its part of all items, and for nothing if there are none.
            ``"sum"``: each counts in full.

    Raises:
        DataError: A weight is negative or not finite.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise DataError(
                f"weight: it gave {weight!r}; give the number of items that the loss averages over, 0 or more"
            )
    if reduction == "sum":
        return [1.0] * len(weights)
    total = math.fsum(weights)
    return [weight / total if total else 0.0 for weight in weights]


@dataclass(frozen=True, slots=True)
class _Rule:
    """How labels are counted.

    Attributes:
        loss: The user's loss, for what it ignores and weights; None if the model has its own.
        ignored: The label that does not count, where the loss does not say.
        shifted: Whether the first label of each sequence predicts nothing.
        by_labels: False where the mean is over samples although there are labels.
        by_class: Whether a label counts as much as its class, where classes are weighted.
    """

    loss: Callable[..., Any] | None = None
    ignored: int = _IGNORE_INDEX
    shifted: bool = False
    by_labels: bool = True
    by_class: bool = True

    def begins_with_an_item(self, labels: Tensor) -> bool:
        """Whether the first label counts: far cheaper than counting, and nearly always true."""
        if self.shifted or not labels.numel() or (self.by_class and _class_weights(self.loss) is not None):
            return False
        return bool(labels[(0,) * labels.dim()].item() != self._ignored())

    def _ignored(self) -> int:
        ignored = _setting(self.loss, "ignore_index")
        return self.ignored if ignored is None else ignored

    def count(self, labels: Tensor) -> float:
        if self.shifted and labels.dim():
            labels = labels[..., 1:]
        ignored, kind = self._ignored(), torch.iinfo(labels.dtype)
        # Torch wraps what a type cannot hold: -100 is 156 to a uint8, which is a class like any other.
        counted = labels != ignored if kind.min <= ignored <= kind.max else torch.ones_like(labels, dtype=torch.bool)
        classes = _class_weights(self.loss) if self.by_class else None
        if classes is None:
            return int(counted.sum())
        # To the labels, which are on the host: the weights are few.
        return float(classes.detach().to(labels.device, torch.float64)[labels[counted].long()].sum())


def _rule_of(model: nn.Module) -> _Rule:
    """How a model with a loss of its own counts, as far as transformers' models tell."""
    kind = str(getattr(model, "loss_type", None))
    if kind == "ForCTC":
        return _Rule(by_labels=False)
    if kind == "ForSemanticSegmentation":
        return _Rule(ignored=getattr(getattr(model, "config", None), "semantic_loss_ignore_index", 255))
    return _Rule(shifted=_shifts_labels(model))


def _shifts_labels(model: nn.Module) -> bool:
    """Whether a model compares each position with the next one's label.

    No attribute tells: decoders of translation models are called "ForCausalLM" and do not shift, "LMHeadModel" and
    most "ForConditionalGeneration" do, and all of them have a ``loss_function`` that shifts, used or not. What tells
    is the code of ``forward``: it calls that function, or has the customary variable ``shift_labels``.
    """
    code = getattr(inspect.unwrap(model.forward), "__code__", None)
    if code is None:
        return False
    if "loss_function" in code.co_names:
        # Who hands over labels that are aligned already does so by this keyword.
        aligned = any(isinstance(words, tuple) and "shift_labels" in words for words in code.co_consts)
        return getattr(getattr(model, "loss_function", None), "__name__", "") == "ForCausalLMLoss" and not aligned
    return "shift_labels" in code.co_varnames


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, DistributedDataParallel and its like, and peft."""
    base = getattr(model, "get_base_model", None)
    for inner in (
        getattr(model, "_orig_mod", None),
        getattr(model, "module", None),
        base() if callable(base) else None,
    ):
        if isinstance(inner, nn.Module) and inner is not model:
            return _unwrapped(inner)
    return model


def _labels(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[1] if isinstance(batch, list | tuple) and len(batch) == 2 else None


def _is_integer(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool)


def _setting(loss: Callable[..., Any] | None, name: str) -> Any:
    """An attribute of a loss, or an argument that `functools.partial` has given to it."""
    return loss.keywords.get(name) if isinstance(loss, partial) else getattr(loss, name, None)


def _class_weights(loss: Callable[..., Any] | None) -> Tensor | None:
    function = loss.func if isinstance(loss, partial) else loss
    weight = _setting(loss, "weight")
    divides = isinstance(function, _CLASS_WEIGHTED) or function in _CLASS_WEIGHTED_FUNCTIONS
    return weight if divides and isinstance(weight, Tensor) else None
