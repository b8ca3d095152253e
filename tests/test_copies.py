"""What an optimizer keeps comes back in the objects that it was in, whatever a step has done to them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
from torch import nn

from adaptive_trainer.copies import Copier, Session
from adaptive_trainer.state import StateCopy


class Pair(NamedTuple):
    first: object
    second: object


class Box:
    """Stands for the optimizer: where the structure hangs."""

    def __init__(self, value, kept=()):
        self.value = value
        self._copier = Copier()
        self._copier.keep(kept)
        self._copy = self._copier.copied(value)
        self._copier.finish()

    def restore(self):
        self.value = Session(self._copier).put(self.value, self._copy)


CONTAINERS = {
    "dict": lambda: {"a": torch.ones(2), "b": 1},
    "defaultdict": lambda: defaultdict(list, a=[torch.ones(2)]),
    "OrderedDict": lambda: OrderedDict(b=torch.ones(2), a=2),
    "Counter": lambda: Counter(a=2, b=1),
    "list": lambda: [torch.ones(2), 1],
    "deque": lambda: deque([torch.ones(2), 1], maxlen=2),
    "set": lambda: {1, 2},
}


def told(value):
    """A structure as something that can be compared: types, order and values."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.tolist())
    if isinstance(value, dict):
        return (type(value), [(key, told(entry)) for key, entry in value.items()])
    if isinstance(value, set):
        return (set, sorted(value))
    return (type(value), [told(entry) for entry in value]) if isinstance(value, list | tuple | deque) else value


def disturb(value):
    if isinstance(value, dict):
        for entry in value.values():
            disturb(entry)
        value["new"] = torch.zeros(1)
        value.pop("a")
    elif isinstance(value, list | deque):
        for entry in value:
            disturb(entry)
        value.append(3)
    elif isinstance(value, set):
        value.add(3)
    elif isinstance(value, torch.Tensor):
        value.add_(1)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_is_refilled_and_stays_the_object_that_it_is(kind):
    box = Box(CONTAINERS[kind]())
    container, before = box.value, told(box.value)
    for _ in range(2):
        disturb(container)
        assert told(container) != before
        box.restore()
        assert box.value is container
        assert told(container) == before


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_that_was_exchanged_comes_back_as_one_of_its_kind(kind):
    box = Box(CONTAINERS[kind]())
    before = told(box.value)
    for other in (None, {"a": 3}, [1, 2]):
        box.value = other
        box.restore()
        assert told(box.value) == before


def test_a_defaultdict_and_a_deque_keep_factory_and_length():
    box = Box({"lists": defaultdict(list, a=[torch.ones(1)]), "last": deque([torch.ones(1)], maxlen=2)})
    box.value = None
    box.restore()
    assert box.value["lists"]["new"] == []
    assert box.value["last"].maxlen == 2
    box.value["last"] = deque(box.value["last"], maxlen=5)
    box.restore()
    assert box.value["last"].maxlen == 2


def test_two_names_for_one_object_stay_two_names_for_one():
    shared, tensor = {"m": torch.ones(2)}, torch.ones(3)
    box = Box({"a": shared, "b": shared, "c": [tensor], "d": tensor})
    box.value["b"] = {"m": torch.zeros(2)}
    box.value["d"] = tensor + 1
    shared["m"].add_(1)
    box.restore()
    assert box.value["a"] is box.value["b"] is shared
    assert torch.equal(shared["m"], torch.ones(2))
    assert box.value["c"][0] is box.value["d"] is tensor


def test_two_objects_that_a_step_made_one_are_two_again():
    for make in (lambda: torch.ones(2), lambda: [torch.ones(2)]):
        a, b = make(), make()
        disturb(b)
        before = told({"a": a, "b": b})
        box = Box({"a": a, "b": b})
        box.value["b"] = a
        box.restore()
        assert told(box.value) == before
        assert box.value["a"] is not box.value["b"]


@pytest.mark.parametrize("entries", [(torch.ones(2), 1), (1, [torch.ones(2)]), (1, 2)])
def test_tuples_with_names_and_without_come_back(entries):
    for row in (tuple(entries), Pair(*entries), torch.max(torch.ones(2, 2), dim=0), torch.Size([2, 3])):
        box = Box({"row": row})
        before = told(row)
        for entry in row:
            disturb(entry)
        box.value["row"] = type(row)(*row) if isinstance(row, Pair) else type(row)(row)
        box.restore()
        assert type(box.value["row"]) is type(row)
        assert told(box.value["row"]) == before


def test_what_holds_itself_is_copied():
    ring = [torch.ones(1)]
    ring.append(ring)
    box = Box(ring)
    ring[0].add_(1)
    ring[1] = None
    box.restore()
    assert ring[1] is ring
    assert ring[0].item() == 1


def test_a_tensor_that_moved_on_in_its_container_comes_back_to_its_place():
    tensors = [torch.full((2,), float(value)) for value in range(3)]
    box = Box(deque(tensors, maxlen=3))
    box.value.append(torch.full((2,), 3.0))
    box.restore()
    assert all(a is b for a, b in zip(box.value, tensors, strict=True))
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2]


def test_what_is_kept_by_reference_is_never_written_into_for_another():
    parameter = nn.Parameter(torch.ones(2))
    box = Box({"slow": torch.zeros(2), "parameters": [parameter]}, kept=[parameter])
    box.value["slow"], box.value["parameters"] = parameter, []
    box.restore()
    assert box.value["parameters"][0] is parameter
    assert torch.equal(parameter, torch.ones(2))
    assert torch.equal(box.value["slow"], torch.zeros(2))


def test_a_copy_keeps_no_tensor_alive():
    box = Box({"past": [torch.ones(2)], "pair": Pair(torch.ones(2), 1)})
    gone = [weakref.ref(box.value["past"][0]), weakref.ref(box.value["pair"].first)]
    box.value = {"past": [torch.zeros(2)], "pair": Pair(torch.zeros(2), 1)}
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    now = box.value["past"][0]
    box.restore()
    assert box.value["past"][0] is now
    assert torch.equal(now, torch.ones(2))


# With an optimizer around it.


class Wrapping(torch.optim.SGD):
    """Keeps another optimizer, and shares its groups and its state."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.Adam(self.param_groups)
        self.others = {"again": self.inner, "last": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)}
        self.param_groups = self.inner.param_groups
        self.state = self.cache = self.inner.state

    def step(self, closure=None):
        self.inner.step()
        parameter = self.others["last"].param_groups[0]["params"][0]
        parameter.grad = torch.ones(1)
        self.others["last"].step()


def test_optimizers_within_an_optimizer_and_what_they_share_come_back():
    model = nn.Linear(3, 2)
    optimizer = Wrapping(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    groups, entries = optimizer.param_groups, [*optimizer.param_groups]
    last = next(iter(optimizer.others["last"].state.values()))["momentum_buffer"]
    copy, before, momentum = StateCopy(model.parameters(), optimizer), told(dict(optimizer.state)), last.clone()
    for _ in range(2):
        optimizer.param_groups = optimizer.param_groups[:0]
        optimizer.step()
        optimizer.cache = {}
        optimizer.inner.param_groups[0]["lr"] = 7
        optimizer.late = [1]
        copy.restore()
        assert optimizer.param_groups is optimizer.inner.param_groups is groups
        assert [*map(id, groups)] == [*map(id, entries)]
        assert groups[0]["lr"] == 0.1
        assert optimizer.cache is optimizer.state is optimizer.inner.state
        assert isinstance(optimizer.state, defaultdict)
        assert {id(key): told(value) for key, value in optimizer.state.items()} == {
            id(key): value for key, value in before[1]
        }
        assert torch.equal(last, momentum)
        assert not hasattr(optimizer, "late")
