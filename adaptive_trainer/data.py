"""Data set, loader or any iterable -> a sequence of batches, one for each optimizer step.

A batch is fetched once and replayed from memory, so a failed step costs no sample. While the user's code produces a
batch nothing is caught: whatever it raises passes through untouched, and the iterator is not used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adaptive_trainer.data_checks import refuse_columns, refuse_samples
from adaptive_trainer.errors import DataError, RecipeError
from adaptive_trainer.order import Order, generators, parts
from adaptive_trainer.streams import RandomStreams

log = logging.getLogger("adaptive_trainer")

_HOST = torch.device("cpu")
_END = object()


@dataclass(slots=True)  # not frozen: it is made in every step, and would take three times as long
class Fetched:
    """The batch of one optimizer step.

    Attributes:
        batch: As the loader gave it.
        expected: Samples that the loader says it has; None where it does not say.
    """

    batch: Any
    expected: int | None


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What an epoch's order was drawn from: random streams, the steps' own for the first epoch, and generators."""

    streams: RandomStreams
    are_the_steps: bool
    generators: list[torch.Tensor]


class Source:
    """The batches of one epoch after the other.

    Attributes:
        num_taken: Batches taken from the present epoch.

    Args:
        data: A `Dataset`, a `DataLoader`, or any iterable of batches.
        key: What the user calls it, for messages.
        batch_size: Samples of a batch; for a data set only.
        shuffle: Whether a data set's order is drawn anew for each epoch.
        collate_fn: As `DataLoader` takes it; for a data set only.
        num_workers: As `DataLoader` takes it; for a data set only.
        seed: Of the order.

    Raises:
        RecipeError: ``batch_size`` is missing, or given where the data have their own.
        DataError: The data cannot be iterated over, or are empty.
    """

    def __init__(
        self,
        data: Any,
        *,
        key: str = "data",
        batch_size: int | None = None,
        shuffle: bool = True,
        collate_fn: Any = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        self._key = key
        self._data = data
        self._order: Order | None = None
        self._iterator: Iterator[Any] | None = None
        self._given_back: Fetched | None = None
        self._epoch = 0
        self._began: _Beginning | None = None
        self._is_broken_off = False
        self.num_taken = 0
        self._streams: RandomStreams | None = None
        self._batch_size = batch_size if isinstance(data, DataLoader) else None
        self.loader: Iterable[Any] = data
        refuse_columns(key, data)
        if isinstance(data, DataLoader) or not _holds_samples(data, batch_size):
            self._refuse_batch_size(batch_size)
            refuse_samples(key, data)
            return
        if batch_size is None:
            raise RecipeError(
                f"batch_size: missing, and {key} is a {type(data).__name__}; type for example batch_size=32 "
                "(samples per optimizer step), or give a DataLoader"
            )
        self._batch_size = batch_size
        options: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_workers}
        # A generator of its own, because iterating over a loader draws from the global stream otherwise.
        options["generator"] = torch.Generator().manual_seed(seed)
        if isinstance(data, IterableDataset):
            self.loader = DataLoader(data, batch_size=batch_size, **options)
            return
        self._order = Order(self._num_samples(data, batch_size), batch_size, seed, shuffle=shuffle)
        self.loader = DataLoader(data, batch_sampler=self._order, **options)

    @classmethod
    def for_evaluation(cls, data: Any, *, beside: Any = None, **options: Any) -> Source:
        """The batches of an evaluation set, in its own order.

        A batch size that belongs to the training data is only used where the evaluation data need one: a data set
        does, and a list where the training data, ``beside``, are a list of samples too.
        """
        as_samples = None if isinstance(beside, Dataset | DataLoader) else options.get("batch_size")
        if isinstance(data, DataLoader) or not _holds_samples(data, as_samples):
            options["batch_size"] = None
        elif options.get("batch_size") is None:
            options["batch_size"] = 1
        return cls(data, key="eval_data", shuffle=False, **options)

    def _refuse_batch_size(self, batch_size: int | None) -> None:
        name = type(self._data).__name__
        if isinstance(self._data, str | bytes | Mapping) or not hasattr(self._data, "__iter__"):
            raise DataError(f"{self._key}: a {name} is no Dataset, no DataLoader and no iterable of batches")
        if batch_size is not None:
            raise RecipeError(
                f"batch_size: {batch_size} was given, but {self._key} is a {name}, which makes "
                "its own batches; leave batch_size out, or give the Dataset itself"
            )
        self._batch_size = getattr(self._data, "batch_size", None) if isinstance(self._data, DataLoader) else None

    def _num_samples(self, data: Any, batch_size: int) -> int:
        if not hasattr(data, "__len__"):
            raise DataError(
                f"{self._key}: {type(data).__name__} has no __len__, so its samples cannot be counted; define __len__, "
                "or derive from torch.utils.data.IterableDataset and define __iter__"
            )
        found = len(data)
        if not found:
            raise DataError(f"{self._key}: it is empty (its length is 0)")
        # An evaluation has the training's batch size without anybody having asked for it.
        if found < batch_size and self._key == "data":
            log.warning(
                "batch_size: %d is more than the %d samples of data, so each epoch is one step of %d samples",
                batch_size, found, found,
            )  # fmt: skip
        return found

    @property
    def batch_size(self) -> int | None:
        """Samples of a full batch; None where only the batches themselves tell."""
        return self._batch_size

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None where they cannot be counted beforehand."""
        if not isinstance(self.loader, Sized) or isinstance(getattr(self.loader, "dataset", None), IterableDataset):
            return None
        try:
            return len(self.loader)
        except TypeError:  # a loader has a length only if its sampler has one
            return None

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch was begun that has batches left, or may have."""
        return self._iterator is not None

    def begin_epoch(self, epoch: int, start: int = 0) -> None:
        """Start epoch ``epoch``, counted from 0. Tells it to whatever of the user's wants to know.

        If this epoch was broken off while a batch was read, the trainer's own order goes on at that batch; else it
        begins at batch ``start``.
        """
        is_same, self._is_broken_off = self._is_broken_off and epoch == self._epoch, False
        self._epoch = epoch
        if not (is_same and self._order is not None):
            if is_same:
                self._warn_of_beginning_anew()
            self.num_taken = start
            self._tell(epoch)
            streams = self._streams or RandomStreams.take(_HOST)
            self._began = _Beginning(streams, self._streams is None, _states(self.loader))
        if self._order is not None:
            self._order.start = self.num_taken
        with self._own_streams():
            self._iterator = iter(self.loader)

    def position(self, entries: Callable[[RandomStreams], Any]) -> dict[str, Any]:
        """Where the next batch lies, as plain values; ``entries`` makes such of random streams."""
        began, loader = self._began, None
        if self._is_stateful and self._given_back is None:
            loader = self.loader.state_dict()  # type: ignore[attr-defined]  # asked for just now
        here = _states(self.loader)
        return {
            "in_epoch": self.in_epoch,
            "epoch": self._epoch,
            "num_done": self.num_taken - (self._given_back is not None),
            "streams": None if self._streams is None else entries(self._streams),
            "began": None if began is None else entries(began.streams),
            "began_with_steps": began is not None and began.are_the_steps,
            "generators": began.generators if began is not None and self.in_epoch else here,
            "loader": loader,
            "generators_now": here,
        }

    def resume(self, position: dict[str, Any], streams_of: Callable[[Any], RandomStreams]) -> None:
        """Go to where `position` was. What cannot be sought is read and dropped. Moves the steps' random streams."""
        _put(self.loader, position["generators"])
        is_told = position["loader"] is not None and self._is_stateful
        if is_told:
            self.loader.load_state_dict(position["loader"])  # type: ignore[attr-defined]  # as above
        if position["in_epoch"]:
            self._go_on(position, streams_of(position["began"]))
        elif is_told and isinstance(self.loader, DataLoader):
            iter(self.loader)  # takes up that its epoch is over; the next one comes from a fresh one
        if is_told:
            # torchdata's draws while it goes to its place, and less than it drew on the way there.
            _put(self.loader, position["generators_now"])
        self._epoch = position["epoch"]
        self._streams = None if position["streams"] is None else streams_of(position["streams"])

    def _go_on(self, position: dict[str, Any], began: RandomStreams) -> None:
        if position["began_with_steps"]:
            began.restore()
        else:
            self._streams = began
        num_done = position["num_done"]
        is_there = position["loader"] is not None and self._is_stateful
        seeks = self._order is not None and getattr(self.loader, "num_workers", 0) == 0
        self.begin_epoch(position["epoch"], num_done if seeks or is_there else 0)
        if self.num_taken < num_done:
            log.info("%s: %d batches of epoch %d are read and dropped", self._key, num_done, position["epoch"] + 1)
        while self.num_taken < num_done and self.next() is not None:
            pass

    @property
    def _is_stateful(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def _tell(self, epoch: int) -> None:
        if self._order is not None:
            self._order.epoch = epoch
        told: list[Any] = []
        for owner in (self.loader, *parts(self.loader)):
            if hasattr(owner, "set_epoch") and not any(owner is other for other in told):
                owner.set_epoch(epoch)
                told.append(owner)

    def _warn_of_beginning_anew(self) -> None:
        # What can be gone through once only goes on by itself.
        if self.num_taken and not isinstance(self._data, Iterator):
            log.warning(
                "%s: epoch %d was broken off after %d batches while the next one was read; a %s can only begin it "
                "anew, so they are used again (a Dataset with batch_size goes on where it was)",
                self._key, self._epoch + 1, self.num_taken, type(self._data).__name__,
            )  # fmt: skip

    @contextmanager
    def _own_streams(self) -> Iterator[None]:
        """Let the data draw from random streams of their own, where an epoch's order is drawn.

        From the steps' streams a user's loader would draw another order if the plan made the model draw more often. The
        first epoch's is drawn from them all the same, before any step, as a loop by hand would draw it.
        """
        if self._streams is None:
            yield
            return
        steps = RandomStreams.take(_HOST)
        self._streams.restore()
        try:
            yield
        finally:
            self._streams = RandomStreams.take(_HOST)
            steps.restore()

    def next(self) -> Fetched | None:
        """The next batch of the epoch, None at its end.

        Raises:
            DataError: No epoch was begun, its iterator has failed, or a data set ended it early.
        """
        if self._given_back is not None:
            fetched, self._given_back = self._given_back, None
            return fetched
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            raise DataError(f"{self._key}: its iterator has failed or has ended, and is not used again")
        self._is_broken_off = True  # unless a batch or the end comes out
        # Samplers draw the order with the first batch, loaders a seed for their workers before it.
        with self._own_streams() if self.num_taken == 0 else nullcontext():
            batch = next(iterator, _END)
        if batch is _END:
            if self._order is not None and self.num_taken < len(self._order):
                raise DataError(
                    f"{self._key}: its epoch ended after {self.num_taken} of {len(self._order)} batches, so a "
                    "StopIteration came out of __getitem__; let it raise IndexError, or nothing"
                )
            self._is_broken_off = False
            return None
        self._is_broken_off = False
        self._streams = self._streams or RandomStreams.take(_HOST)
        self._iterator = iterator
        self.num_taken += 1
        return Fetched(batch, self._batch_size)

    def give_back(self, fetched: Fetched) -> None:
        """Let the batch taken last be the next one again, as long as its step is not done."""
        self._given_back = fetched

    def keep(self) -> None:
        """The step of the batch taken last is done."""
        self._given_back = None


def _holds_samples(data: Any, batch_size: int | None) -> bool:
    """Whether ``data`` gives samples, that still have to be put together into batches."""
    if isinstance(data, Dataset):
        return True
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return batch_size is not None and has_items and not isinstance(data, str | bytes | Mapping)


def _states(loader: Any) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators(loader)]


def _put(loader: Any, states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators(loader), states, strict=False):
        generator.set_state(state)
