"""The order of an epoch: the trainer's own, and what of a user's loader has a say in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator


class Order(Sampler[list[int]]):
    """The index lists of one epoch: a permutation that depends on seed and epoch alone, cut into batches.

    Attributes:
        epoch: Which permutation it is.
        start: The batch to begin with, where an epoch is gone on with.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int, *, shuffle: bool) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return math.ceil(self._num_samples / self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self.epoch)
            order = torch.randperm(self._num_samples, generator=generator)
        indices = order.tolist()
        for start in range(self.start * self._batch_size, self._num_samples, self._batch_size):
            yield indices[start : start + self._batch_size]


def parts(loader: Any) -> list[Any]:
    """What of a loader may want to be told the epoch."""
    parts = (getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return [part for part in (*parts, inner) if part is not None]


def generators(loader: Any) -> list[torch.Generator]:
    """The generators of their own that a loader and its samplers draw from."""
    found = [getattr(part, "generator", None) for part in (loader, *parts(loader))]
    return list(dict.fromkeys(entry for entry in found if isinstance(entry, torch.Generator)))
