"""What a thrown-away attempt changed in modules and random streams comes back exactly."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import timeit
import weakref
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_trainer import streams
from adaptive_trainer.attributes import AttributeSnapshot
from adaptive_trainer.snapshot import ModuleSnapshot
from adaptive_trainer.streams import HostStreams, RandomStreams

CPU = torch.device("cpu")
LARGE = 40_000  # float32 elements, more than 64 KiB


@pytest.fixture(autouse=True)
def _single():
    torch.set_num_threads(1)


class Changing(nn.Module):
    """Changes in a forward whatever a forward can change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("rebound", torch.zeros(3))
        self.register_buffer("absent", None)
        self.register_buffer("mask", torch.ones(LARGE), persistent=False)
        self.plain = torch.zeros(2)
        self.table = torch.ones(LARGE)
        self.count = 1000
        self.flag = False
        self.items = [1, 2]
        self.mapping = {"a": 1}
        self.ordered = OrderedDict(b=1, a=2)
        self.grouped = defaultdict(list, x=[1])
        self.members = {1, 2}
        self.recent = deque([1, 2], maxlen=2)
        self.nothing = []

    def forward(self, x):
        y = self.norm(self.linear(x))
        self.written.data.add_(1)
        self.rebound = self.rebound + 1
        self.absent = torch.ones(1)
        self.mask.mul_(2)
        self.plain += 1
        self.table.mul_(2)
        self.count += 1
        self.flag = True
        self.items.append(3)
        self.mapping["b"] = 2
        self.ordered.move_to_end("b")
        self.grouped["y"].append(2)
        self.members.discard(1)
        self.recent.append(3)
        self.nothing += [y]
        self.stashed = y.square()
        self.register_buffer("late", torch.ones(2))
        self.extra = nn.Linear(2, 2)
        self.norm.eval()
        self.handle = self.linear.register_forward_hook(lambda *_: None)
        self.linear.weight, self.other = nn.Parameter(torch.zeros(4, 4)), self.linear.weight
        return y


def test_everything_a_forward_changed_comes_back_again_and_again():
    model = Changing()
    snapshot = ModuleSnapshot(model)
    weight, written, rebound, items = model.linear.weight, model.written, model.rebound, model.items
    mean = torch.arange(4.0)
    model.norm.running_mean.copy_(mean)
    names = list(model.__dict__), [name for name, _ in model.named_parameters()], list(model.state_dict())
    snapshot.take()
    for _ in range(3):
        model(torch.randn(8, 4))
        assert not torch.equal(model.norm.running_mean, mean)
        snapshot.restore()
        assert torch.equal(model.norm.running_mean, mean)
        assert model.norm.num_batches_tracked == 0
        assert model.written is written
        assert torch.equal(written, torch.zeros(3))
        assert model.rebound is rebound
        assert torch.equal(rebound, torch.zeros(3))
        assert model.absent is None
        assert torch.equal(model.mask, torch.ones(LARGE))
        assert torch.equal(model.table, torch.ones(LARGE))
        assert torch.equal(model.plain, torch.zeros(2))
        assert (model.count, model.flag, model.norm.training) == (1000, False, True)
        assert model.items is items
        assert items == [1, 2]
        assert model.mapping == {"a": 1}
        assert list(model.ordered.items()) == [("b", 1), ("a", 2)]
        assert dict(model.grouped) == {"x": [1]}
        assert model.members == {1, 2}
        assert (list(model.recent), model.recent.maxlen) == ([1, 2], 2)
        assert model.nothing == []
        assert model.linear.weight is weight
        assert not model.linear._forward_hooks
        after = list(model.__dict__), [name for name, _ in model.named_parameters()], list(model.state_dict())
        assert after == names


def test_a_later_take_remembers_the_later_state():
    model = Changing()
    snapshot = ModuleSnapshot(model)
    for step in range(1, 4):
        with torch.no_grad():
            for tensor in (model.written, model.mask, model.table, model.plain):
                tensor.fill_(step)
        model.rebound = torch.full((3,), float(step))
        model.count, model.items = step, [step]
        model.members.add(10 + step)
        snapshot.take()
        model(torch.randn(8, 4))
        snapshot.restore()
        for tensor in (model.written, model.mask, model.table, model.plain, model.rebound):
            assert torch.equal(tensor, torch.full_like(tensor, step))
        assert (model.count, model.items) == (step, [step])
        assert 10 + step in model.members


def test_batch_norm_statistics_come_back_although_their_version_does_not_tell():
    model = nn.BatchNorm1d(4)
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    version = model.running_mean._version
    model(torch.randn(8, 4))
    assert model.running_mean._version == version
    assert not torch.equal(model.running_mean, torch.zeros(4))
    snapshot.restore()
    assert torch.equal(model.running_mean, torch.zeros(4))
    assert torch.equal(model.running_var, torch.ones(4))


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"])
def test_spectral_norm_replays_bit_for_bit(norm):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(6, 6)), nn.Tanh(), norm(nn.Linear(6, 2)))
    x = torch.randn(5, 6)
    snapshot = ModuleSnapshot(model)
    model(x).sum().backward()
    snapshot.take()
    first = model(x)
    first_loss = first.detach().clone()
    del first
    model(x)
    snapshot.restore()
    assert torch.equal(model(x), first_loss)


def test_values_of_parameters_are_left_alone():
    model = nn.Linear(2, 2)
    model.unregistered = torch.ones(2, requires_grad=True)
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    with torch.no_grad():
        model.weight.fill_(7)
        model.unregistered.fill_(7)
    snapshot.restore()
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))
    assert torch.equal(model.unregistered, torch.full((2,), 7.0))


def test_names_that_changed_over_the_same_values_come_back():
    model = nn.Module()
    model.found, model.table = None, {"found": 1}
    model.last = None
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    del model.last
    model.lost = None
    model.table["lost"] = model.table.pop("found")
    snapshot.restore()
    assert model.last is None
    assert not hasattr(model, "lost")
    assert model.table == {"found": 1}


def test_case_026_a_flag_that_a_hook_set_comes_back():
    class Gathered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.gathered = False
            self.fail = True

        def forward(self, x):
            if self.fail:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.linear(x)

    def gather(module, _):
        assert not module.gathered
        module.gathered = True

    def release(module, *_):
        module.gathered = False

    inner = Gathered()
    inner.register_forward_pre_hook(gather)
    inner.register_forward_hook(release)
    model = nn.Sequential(inner)
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(1, 2))
    assert inner.gathered
    snapshot.restore()
    assert not inner.gathered
    inner.fail = False
    assert model(torch.ones(1, 2)).shape == (1, 2)


def test_modules_and_buffers_that_come_and_go_between_takes_are_followed():
    model = nn.Sequential(nn.BatchNorm1d(4))
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    model.append(nn.BatchNorm1d(4))
    model[0].register_buffer("more", torch.zeros(1))
    snapshot.take()
    model(torch.randn(8, 4))
    model[0].more.add_(1)
    snapshot.restore()
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert torch.equal(model[0].more, torch.zeros(1))
    added = weakref.ref(model[1])
    del model[1]
    del model[0].more
    snapshot.take()
    gc.collect()
    assert added() is None
    model(torch.randn(8, 4))
    snapshot.restore()
    assert torch.equal(model[0].running_mean, torch.zeros(4))
    assert len(model) == 1
    assert not hasattr(model[0], "more")


def test_a_submodule_exchanged_for_another_between_takes_is_seen():
    model = nn.Sequential(nn.BatchNorm1d(4))
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    model[0] = nn.BatchNorm1d(4)
    snapshot.take()
    model(torch.randn(8, 4))
    snapshot.restore()
    assert torch.equal(model[0].running_mean, torch.zeros(4))


def test_several_roots_are_one_snapshot_and_shared_modules_and_buffers_are_no_trouble():
    shared = nn.BatchNorm1d(4)
    first, second, loss = nn.Sequential(shared), nn.Sequential(shared, nn.BatchNorm1d(4)), nn.BCELoss(torch.ones(1))
    second[1].running_mean = shared.running_mean
    snapshot = ModuleSnapshot(first, second, loss)
    snapshot.take()
    second(first(torch.randn(8, 4)))
    loss.weight.fill_(3)
    snapshot.restore()
    assert torch.equal(shared.running_mean, torch.zeros(4))
    assert torch.equal(second[1].running_var, torch.ones(4))
    assert torch.equal(loss.weight, torch.ones(1))


def test_inference_and_expanded_buffers_do_not_stand_in_the_way():
    model = nn.Module()
    with torch.inference_mode():
        model.register_buffer("frozen", torch.zeros(2))
    model.register_buffer("wide", torch.zeros(1).expand(10))
    snapshot = ModuleSnapshot(model)
    for value in (1.0, 2.0):
        with torch.inference_mode():
            model.frozen.fill_(value)
        snapshot.take()
        with torch.inference_mode():
            model.frozen.fill_(9)
        wide, model.wide = model.wide, torch.ones(10)
        snapshot.restore()
        assert torch.equal(model.frozen, torch.full((2,), value))
        assert model.wide is wide


def test_a_model_with_a_scripted_part_is_remembered():
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(4)), nn.BatchNorm1d(4))
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    snapshot.take()
    model(torch.randn(8, 4))
    snapshot.restore()
    assert torch.equal(model[0].running_mean, torch.zeros(4))
    assert torch.equal(model[1].running_mean, torch.zeros(4))


class Operations(TorchDispatchMode):
    """Counts copies by their number of elements, and everything that makes a new tensor."""

    def __init__(self):
        super().__init__()
        self.copied = Counter()
        self.made = Counter()

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.copied[args[0].numel()] += 1
        elif func is torch.ops.aten._foreach_copy_.default:
            self.copied.update(tensor.numel() for tensor in args[0])
        else:
            self.made[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_large_non_persistent_buffer_is_copied_only_when_it_changed():
    model = nn.Module()
    model.register_buffer("mask", torch.ones(LARGE), persistent=False)
    model.register_buffer("kept", torch.ones(LARGE + 1))
    model.register_buffer("small", torch.ones(5), persistent=False)
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    with Operations() as calm:
        snapshot.take()
    assert calm.copied == {LARGE + 1: 1, 5: 1}
    model.mask = torch.zeros(LARGE)  # another tensor of the same version
    with Operations() as rebound:
        snapshot.take()
    assert rebound.copied[LARGE] == 1
    model.mask.add_(1)
    with Operations() as changed:
        snapshot.take()
    assert changed.copied[LARGE] == 1
    model.mask.add_(1)
    snapshot.restore()
    assert torch.equal(model.mask, torch.ones(LARGE))
    with Operations() as restored:
        snapshot.take()
    assert LARGE not in restored.copied


def test_a_buffer_that_grew_is_remembered_in_its_new_size():
    model = nn.Module()
    snapshot = ModuleSnapshot(model)
    for value in (torch.zeros(3), torch.zeros(5), torch.zeros(5, dtype=torch.float64)):
        model.register_buffer("cache", value)
        snapshot.take()
        value.add_(1)
        snapshot.restore()
        assert torch.equal(model.cache, torch.zeros_like(value))


def test_nothing_is_allocated_after_the_first_take():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)])
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    model(torch.randn(8, 4))
    model[0][1].running_mean = torch.zeros(4)
    with Operations() as mode:
        snapshot.take()
        snapshot.restore()
    assert mode.made.keys() <= {"aten.detach.default"}  # a second name for a storage that is there


def test_a_take_costs_microseconds_a_module():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(50)])
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    seconds = min(timeit.repeat(snapshot.take, number=5, repeat=10)) / 5
    assert seconds / len(list(model.modules())) < 10e-6


class Stashing(nn.Module):
    """Keeps small and large tensors of its last forward, with their graph."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.losses = []

    def forward(self, x):
        hidden = self.linear(x)
        self.graph = weakref.ref(hidden.untyped_storage())
        self.attention = functional.pad(hidden.exp(), (0, LARGE))
        self.aux = hidden.exp().mean()
        self.losses[:] = [hidden.square().sum()]  # its graph holds hidden itself
        return hidden


def test_remembering_keeps_no_graph_of_the_step_before_alive():
    model = Stashing()
    snapshot = ModuleSnapshot(model)
    model(torch.randn(1, 4))
    graph, attention = model.graph, weakref.ref(model.attention)
    value, listed = model.aux.detach().clone(), model.losses[0].detach().clone()
    snapshot.take()
    model(torch.randn(1, 4))
    gc.collect()
    assert graph() is None
    assert attention() is None
    dropped = model.graph
    snapshot.restore()
    gc.collect()
    assert dropped() is None
    assert torch.equal(model.aux, value)
    assert torch.equal(model.losses[0], listed)
    assert model.attention is None
    model.aux += 1  # as before, it may be added to in place


def test_a_stashed_tensor_that_was_not_touched_stays_the_same_object():
    model = Stashing()
    snapshot = ModuleSnapshot(model)
    model(torch.randn(1, 4))
    aux, attention = model.aux, model.attention
    snapshot.take()
    model.aux = None
    model.other = 1
    snapshot.restore()
    assert model.aux is aux
    assert model.attention is attention


def test_with_histories_the_very_graphs_come_back():
    model = Stashing()
    model(torch.randn(1, 4))
    aux = id(model.aux)
    snapshot = AttributeSnapshot(model, histories=True)
    snapshot.take()
    model(torch.randn(1, 4))
    snapshot.restore()
    assert id(model.aux) == aux
    model.aux.backward()
    assert model.linear.weight.grad is not None


# Random streams


def draw():
    legacy = np.random.randn(), np.random.rand()  # noqa: NPY002  the global stream is what users draw from
    return [random.random(), random.gauss(0, 1), *legacy, *torch.randn(3).tolist(), *torch.rand(2).tolist()]


def test_all_streams_continue_from_where_they_were_taken():
    draw()
    streams = RandomStreams.take(CPU)
    first = draw()
    assert draw() != first
    streams.restore()
    assert draw() == first
    streams.restore()
    assert draw() == first


def test_half_used_normal_numbers_are_part_of_the_stream():
    np.random.seed(0)  # noqa: NPY002  as above
    np.random.randn()  # noqa: NPY002  it makes two and keeps one
    random.gauss(0, 1)
    streams = RandomStreams.take(CPU)
    first = np.random.randn(), random.gauss(0, 1)  # noqa: NPY002
    draw()
    streams.restore()
    assert (np.random.randn(), random.gauss(0, 1)) == first  # noqa: NPY002


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.rand(), lambda: torch.rand(1)])  # noqa: NPY002, PLW0108
def test_whether_anything_was_drawn_is_told(draw):
    taken = RandomStreams.take(CPU)
    assert not taken.moved()
    draw()
    assert taken.moved()
    taken.restore()
    assert not taken.moved()


@pytest.mark.parametrize("move", [random.random, np.random.rand, lambda: np.random.randn(1)])  # noqa: NPY002
def test_host_streams_are_equal_until_one_is_drawn_from(move):
    np.random.seed(3)  # noqa: NPY002
    taken = HostStreams.take()
    assert taken.equal_to(HostStreams.take())
    move()
    assert not taken.equal_to(HostStreams.take())


def test_numpy_is_not_imported_for_it():
    code = (
        "import sys, torch; from adaptive_trainer.streams import RandomStreams;"
        "loaded = 'numpy.random' in sys.modules; s = RandomStreams.take(torch.device('cpu')); s.restore();"
        "print(loaded or 'numpy.random' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("draws", [0, 1, 2, 3, 623, 624, 625, 1248])
@pytest.mark.parametrize("draw", ["random", "standard_normal"])
def test_numpys_stream_is_read_right_although_numpy_is_not_always_asked(draw, draws):
    numpy_random = np.random
    numpy_random.seed(5)
    getattr(numpy_random, draw)()
    for _ in range(3):
        HostStreams.take()
        for _ in range(draws):
            getattr(numpy_random, draw)()
        streams, asked = HostStreams.take(), numpy_random.get_state(legacy=False)
        assert streams.numpy["has_gauss"] == asked["has_gauss"]
        assert streams.numpy["gauss"] == asked["gauss"]
        assert streams.numpy["state"]["pos"] == asked["state"]["pos"]
        assert streams.numpy["state"]["key"].tolist() == asked["state"]["key"].tolist()


def test_a_kept_half_of_a_normal_pair_that_is_used_up_is_noticed():
    numpy_random = np.random
    numpy_random.seed(5)
    numpy_random.standard_normal()
    HostStreams.take()
    numpy_random.standard_normal()
    assert HostStreams.take().numpy["has_gauss"] == 0


def test_the_kept_half_of_a_normal_pair_comes_back_each_time():
    """Using it up moves nothing in the generator's own memory, so only NumPy itself knows that it is back."""
    numpy_random = np.random
    numpy_random.seed(3)
    numpy_random.standard_normal()
    first = HostStreams.take()
    drawn = numpy_random.standard_normal()
    assert not first.equal_to(HostStreams.take())
    for _ in range(2):
        first.restore()
        second = HostStreams.take()
        assert second.equal_to(first)
        assert numpy_random.standard_normal() == drawn
        second.restore()
        assert numpy_random.standard_normal() == drawn
        HostStreams.take()


@pytest.mark.parametrize("draws", [0, 1, 2, 3, 623, 624, 625, 1248])
@pytest.mark.parametrize("draw", ["random", "gauss", "normalvariate"])
def test_pythons_stream_is_read_right_although_python_is_not_always_asked(draw, draws):
    random.seed(5)
    getattr(random, draw)(*([0, 1] if draw != "random" else []))
    for _ in range(3):
        HostStreams.take()
        for _ in range(draws):
            getattr(random, draw)(*([0, 1] if draw != "random" else []))
        assert HostStreams.take().python == random.getstate()
    random.seed(7)
    assert HostStreams.take().python == random.getstate()


def test_the_place_of_pythons_stream_was_found():
    assert streams._python._window is not None


# Buffers that grow or get another storage.


class Growing(nn.Module):
    """Keeps what it has seen: a cache of keys, a queue of negatives."""

    def __init__(self, how, *, persistent=True, rows=1):
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.arange(3.0 * rows).reshape(rows, 3).clone(), persistent=persistent)
        self.first = self.seen[:1]

    def forward(self, x):
        if self.how == "data":
            self.seen.data = torch.cat([self.seen, x])
        elif self.how == "prefix":
            pool = torch.cat([self.seen, x])
            self.seen.data = pool
            self.seen.data = pool[: len(pool) - 1]
        elif self.how == "bound":
            self.seen = torch.cat([self.seen, x])
        elif self.how == "resized":
            rows = len(self.seen)
            self.seen.resize_(rows + len(x), 3)[rows:] = x
        elif self.how == "one row":
            self.seen.data = self.seen[:1] + 1
        elif self.how == "other type":
            self.seen.data = self.seen.double() + 1
        elif self.how == "the batch itself":
            self.seen.data = x
        return self.seen.sum()


@pytest.mark.parametrize("rows", [2, LARGE])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("how", ["data", "prefix", "bound", "resized", "one row", "other type", "the batch itself"])
def test_a_buffer_that_grew_comes_back_with_shape_and_values(how, persistent, rows):
    model, x = Growing(how, persistent=persistent, rows=rows), torch.ones(2, 3)
    snapshot = ModuleSnapshot(model)
    for _ in range(3):
        snapshot.take()
        buffer, before = model.seen, model.seen.clone()
        model(x)
        model(x)
        snapshot.restore()
        assert model.seen is buffer
        assert model.seen.dtype is before.dtype
        assert torch.equal(model.seen, before)
        assert torch.equal(x, torch.ones(2, 3))
        snapshot.take()
        model(x)  # this step is done, and the next one starts from here


def test_a_buffer_in_its_old_storage_is_still_what_its_views_show():
    model = Growing("data")
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    model(torch.ones(2, 3))
    snapshot.restore()
    model.seen.add_(1)
    assert torch.equal(model.first, model.seen[:1])


def test_an_inference_buffer_that_grew_comes_back():
    with torch.inference_mode():
        model = Growing("data")
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    with torch.inference_mode():
        model(torch.ones(2, 3))
    snapshot.restore()
    assert model.seen.is_inference()
    assert torch.equal(model.seen, torch.arange(3.0)[None])


def test_a_storage_that_was_left_is_not_kept_beyond_the_next_step():
    model = Growing("data")
    snapshot = ModuleSnapshot(model)
    snapshot.take()
    old = torch.multiprocessing.reductions.StorageWeakRef(model.seen.untyped_storage())
    del model.first
    model(torch.ones(2, 3))
    snapshot.take()
    assert old.expired()
