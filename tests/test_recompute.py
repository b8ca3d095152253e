"""Gradient checkpointing: bit-equal gradients, side effects once, less memory, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import subprocess
import sys
import types
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from adaptive_trainer import AdaptiveTrainer, recompute
from adaptive_trainer.recompute import Recomputation, find_blocks, has_switch, possible
from adaptive_trainer.testing import inject_oom

WIDTH = 8


@pytest.fixture(autouse=True)
def _quiet_and_single():
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Residual(nn.Module):
    """A block: two layers and a sum."""

    def __init__(self, *middle):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), *middle, nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.inner(x)


class Stack(nn.Module):
    """Blocks in a ModuleList, called by a loop of the model's own."""

    def __init__(self, *blocks):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(self.linear(x))


class OldSpectral(Spectral):
    def __init__(self):
        nn.Module.__init__(self)
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Experts(nn.Module):
    """A mixture that keeps its auxiliary loss, counts its calls and draws from all streams."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.register_buffer("load", torch.zeros(2))
        self.register_buffer("rebound", torch.zeros(()))
        self.calls = 0
        self.history = []

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        self.aux = (weights.mean(0) ** 2).sum() * (1 + self.rebound)
        self.load += weights.detach().sum(0)
        self.rebound = self.rebound + 1
        self.calls += 1
        self.history.append(self.calls)
        return sum(weights[..., i : i + 1] * expert(x).tanh() for i, expert in enumerate(self.experts))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.lstm(x.unsqueeze(1))[0].squeeze(1)


class RandomDepth(nn.Module):
    """Skips itself by Python's and NumPy's streams."""

    def __init__(self):
        super().__init__()
        self.inner = Residual(nn.Dropout(0.3))

    def forward(self, x):
        scale = 1.0 + float(np.random.rand())  # noqa: NPY002  what users write
        return self.inner(x) * scale if random.random() < 0.6 else x * torch.sigmoid(self.inner(x))


class FirstInPlace(nn.Module):
    """Writes into its own input before it reads it, as blocks that begin with ReLU(inplace=True) do."""

    def __init__(self):
        super().__init__()
        self.act = nn.LeakyReLU(0.2, inplace=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.act(x)) + x


class Scratch(nn.Module):
    """A large non-persistent buffer that is written into without being copied at every forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(20_000, 1), persistent=False)

    def forward(self, x):
        y = torch.tanh(self.linear(x) * self.table[:1].clone())
        with torch.no_grad():
            self.table.mul_(0.5)
        return y


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@dataclass
class Box:
    value: torch.Tensor
    note: str = ""


class Structured(nn.Module):
    """Takes keywords and nested structures, gives a structure of the given kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, *, scale, extra=None, flag=True):
        y = self.drop(torch.tanh(self.linear(x) * scale))
        if flag:
            y = y + extra["shift"][0]
        if self.kind == "dict":
            return {"value": y, "note": "n"}
        return {"tuple": (y, None), "named": Pair(y, 1), "box": Box(y, "n")}[self.kind]


class Structures(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Structured(kind) for kind in ("dict", "tuple", "named", "box")])
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        for block in self.blocks:
            out = block(x, scale=self.scale, extra={"shift": [x * 0.5]})
            x = out["value"] if isinstance(out, dict) else out.value if isinstance(out, Box) else out[0]
        return x


class SharedStash(nn.Module):
    """All blocks share a router on which they add up a loss, in place from the second on."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList([SharedStashBlock(self.router) for _ in range(3)])

    def forward(self, x):
        self.router.total = x.new_zeros(())
        for block in self.blocks:
            x = block(x)
        return x + self.router.total


class SharedStashBlock(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.router = router
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        aux = self.router(x).logsumexp(-1).mean()
        if self.router.total.grad_fn is None:
            self.router.total = self.router.total + aux
        else:
            self.router.total += aux
        return torch.tanh(self.linear(x)) * torch.exp(-self.router.total)


def tied():
    model = Stack(*[Residual() for _ in range(3)])
    model.blocks[2].inner[0].weight = model.blocks[0].inner[0].weight
    model.blocks[1].inner[0] = model.blocks[0].inner[0]
    return model


def frozen_embedding():
    model = Stack(*[Residual(nn.Dropout(0.1)) for _ in range(3)])
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


MODELS = {
    "plain": lambda: Stack(*[Residual() for _ in range(3)]),
    "dropout": lambda: Stack(*[Residual(nn.Dropout(0.4)) for _ in range(3)]),
    "batch_norm": lambda: Stack(*[Residual(nn.BatchNorm1d(2 * WIDTH)) for _ in range(3)]),
    "cumulative_batch_norm": lambda: Stack(*[Residual(nn.BatchNorm1d(2 * WIDTH, momentum=None)) for _ in range(3)]),
    "spectral_norm": lambda: Stack(*[Spectral() for _ in range(3)]),
    "old_spectral_norm": lambda: Stack(*[OldSpectral() for _ in range(3)]),
    "experts": lambda: Stack(*[Experts() for _ in range(3)]),
    "lstm": lambda: Stack(*[Recurrent() for _ in range(3)]),
    "random_depth": lambda: Stack(*[RandomDepth() for _ in range(4)]),
    "first_in_place": lambda: Stack(*[FirstInPlace() for _ in range(3)]),
    "scratch": lambda: Stack(*[Scratch() for _ in range(3)]),
    "structures": Structures,
    "shared_stash": SharedStash,
    "tied": tied,
    "frozen": frozen_embedding,
    "all_blocks_one": lambda: Stack(*[Residual(nn.BatchNorm1d(2 * WIDTH))] * 3),
    "nested": lambda: Stack(*[nn.Sequential(Residual(nn.Dropout(0.2)), Residual(nn.BatchNorm1d(16))) for _ in range(2)]),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Residual(nn.Dropout(0.2)) for _ in range(2)]),
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    ),
}  # fmt: skip


def seeded(factory):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002  what users write
    torch.manual_seed(1)
    return factory()


def attributes(model):
    """All that modules hold beside parameters, as comparable values."""
    found = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in {"forward", "_modules", "_parameters", "_buffers"} and "hooks" not in name:
                found[path, name] = value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in module._buffers.items():
            found[path, "buffer", name] = None if value is None else value.detach().clone()
    return found


def observe(model, *, steps=2, autocast=False, train=True, backward_twice=False):
    """Two steps' outputs and gradients, then everything else that a step leaves behind."""
    model.train(train)
    seen = []
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        x = torch.randn(6, WIDTH, generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)
        loss = out.float().square().mean()
        loss = loss + sum(m.aux for m in model.modules() if isinstance(m, Experts))
        if backward_twice:
            loss.backward(retain_graph=True)
        loss.backward()
        seen += [loss.detach(), *[p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]]
    state = attributes(model)
    streams = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]]  # noqa: NPY002
    return [*seen, state, streams]


def assert_bit_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_bit_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_bit_equal(left, right)
    elif not callable(one):
        assert one == other or type(one).__eq__ is object.__eq__


@pytest.mark.parametrize("options", [{}, {"autocast": True}, {"train": False}, {"backward_twice": True}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_buffers_attributes_and_streams_are_bit_equal(name, options):
    plain = seeded(MODELS[name])
    expected = observe(plain, **options)
    model = seeded(MODELS[name])
    recomputation = Recomputation.put_on(model)
    assert any("forward" in block.__dict__ for block in find_blocks(model))
    observed = observe(model, **options)
    recomputation.take_off()
    assert_bit_equal(observed, expected)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_blocks_really_are_computed_again():
    model = seeded(MODELS["plain"])
    calls = Counter()
    for block in model.blocks:
        block.inner[0].register_forward_hook(lambda *_: calls.update(["forward"]))
    Recomputation.put_on(model)
    loss = model(torch.randn(6, WIDTH)).sum()
    assert calls["forward"] == 3
    loss.backward()
    assert calls["forward"] == 6


class LivePeak(TorchDispatchMode):
    """Bytes of the storages made inside that are alive, and the most there were."""

    def __init__(self, model):
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def drop(self, key, num_bytes):
        self.known.discard(key)
        self.live -= num_bytes

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out


def peak_of(model, rows=512):
    x = torch.randn(rows, WIDTH)
    with LivePeak(model) as mode:
        model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    return mode.peak


@pytest.mark.parametrize("name", ["deep", "deep_batch_norm"])
def test_peak_memory_falls_from_the_first_step_on(name):
    middle = (lambda: nn.BatchNorm1d(2 * WIDTH)) if name == "deep_batch_norm" else nn.Identity
    model = seeded(lambda: Stack(*[Residual(middle()) for _ in range(12)]))
    before = peak_of(model)
    recomputation = Recomputation.put_on(model)
    first, second = peak_of(model), peak_of(model)
    recomputation.take_off()
    assert first < 0.5 * before
    assert second < 0.5 * before
    assert peak_of(model) == before


def test_nothing_of_a_dropped_forward_stays_alive():
    model = seeded(MODELS["first_in_place"])
    Recomputation.put_on(model)
    for _ in range(2):
        x = torch.randn(6, WIDTH)
        out = model(x)
        watch = weakref.ref(x.untyped_storage()), weakref.ref(out)
        with LivePeak(model) as mode:
            again = model(torch.randn(6, WIDTH))
            del again
        del x, out
        assert [ref() for ref in watch] == [None, None]
        assert mode.live == 0


def test_two_micro_batches_can_be_in_flight():
    def run(model):
        a, b = model(torch.ones(4, WIDTH)), model(2 * torch.ones(4, WIDTH))
        (a * 2).sum().backward()
        b.sum().backward()
        return [p.grad for p in model.parameters()]

    expected = run(seeded(MODELS["batch_norm"]))
    model = seeded(MODELS["batch_norm"])
    Recomputation.put_on(model)
    assert_bit_equal(run(model), expected)


def test_without_gradients_the_block_is_called_straight(monkeypatch):
    model = seeded(MODELS["dropout"])
    x = torch.randn(6, WIDTH)
    torch.manual_seed(3)
    expected = model(x).detach()
    Recomputation.put_on(model)
    monkeypatch.setattr(recompute, "run", None)
    for context in (torch.no_grad(), torch.inference_mode()):
        torch.manual_seed(3)
        with context:
            observed = model(x)
        assert torch.equal(observed, expected)
        assert not observed.requires_grad


def test_case_076_batch_norm_statistics_move_once():
    model = seeded(MODELS["batch_norm"])
    Recomputation.put_on(model)
    model(torch.randn(6, WIDTH)).sum().backward()
    assert [block.inner[1].num_batches_tracked.item() for block in model.blocks] == [1, 1, 1]


def test_case_079_every_trainable_parameter_behind_a_frozen_embedding_has_a_gradient():
    model = seeded(frozen_embedding)
    Recomputation.put_on(model)
    model(torch.randn(6, WIDTH)).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {
        name for name, p in model.named_parameters() if not p.requires_grad
    }


def test_case_080_a_wholly_frozen_block_is_harmless():
    model = seeded(MODELS["dropout"])
    model.requires_grad_(False)
    Recomputation.put_on(model)
    assert not model(torch.randn(6, WIDTH)).requires_grad
    model.head.requires_grad_(True)
    model(torch.randn(6, WIDTH)).sum().backward()
    assert model.head.weight.grad is not None


def test_case_082_dropout_masks_are_the_same_in_both_computations():
    expected = observe(seeded(MODELS["dropout"]), steps=1)
    model = seeded(MODELS["dropout"])
    Recomputation.put_on(model)
    assert_bit_equal(observe(model, steps=1), expected)


def test_case_084_each_gradient_hook_fires_once_with_tied_weights():
    def fired(model):
        fired = Counter()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update([name]))
        model(torch.randn(6, WIDTH)).sum().backward()
        return fired

    model = seeded(tied)
    Recomputation.put_on(model)
    counts = fired(model)
    assert set(counts.values()) == {1}
    assert counts.keys() == dict(model.named_parameters()).keys()


def test_case_087_no_warning_comes_from_it():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = seeded(MODELS["structures"])
        with_it = Recomputation.put_on(model)
        model(torch.randn(6, WIDTH)).sum().backward()
        with_it.take_off()
    assert caught == []


def test_names_state_class_and_identity_stay():
    model = seeded(MODELS["batch_norm"])
    before = [(name, id(module), type(module)) for name, module in model.named_modules()]
    names = [name for name, _ in model.named_parameters()], list(model.state_dict())
    recomputation = Recomputation.put_on(model)
    assert [(name, id(module), type(module)) for name, module in model.named_modules()] == before
    assert ([name for name, _ in model.named_parameters()], list(model.state_dict())) == names
    recomputation.take_off()
    recomputation.take_off()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_putting_it_on_twice_computes_again_once_and_the_first_owner_takes_it_off():
    model = seeded(MODELS["plain"])
    calls = Counter()
    model.blocks[0].inner[0].register_forward_hook(lambda *_: calls.update([1]))
    first = Recomputation.put_on(model)
    forward = model.blocks[0].forward
    second = Recomputation.put_on(model)
    assert model.blocks[0].forward is forward
    model(torch.randn(6, WIDTH)).sum().backward()
    assert calls[1] == 2
    second.take_off()
    assert all("forward" in block.__dict__ for block in model.blocks)
    first.take_off()
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_an_instance_forward_that_was_there_before_runs_and_comes_back():
    model = seeded(MODELS["plain"])
    block = model.blocks[1]
    own = types.MethodType(lambda self, x: 2 * self.inner(x), block)
    block.forward = own
    x = torch.randn(6, WIDTH)
    expected = model(x).detach()
    recomputation = Recomputation.put_on(model)
    assert torch.equal(model(x), expected)
    recomputation.take_off()
    assert block.__dict__["forward"] is own


def test_what_somebody_wrapped_around_it_meanwhile_stays():
    model = seeded(MODELS["plain"])
    recomputation = Recomputation.put_on(model)
    inner = model.blocks[0].forward
    outer = lambda x: inner(x) + 1  # noqa: E731  as patching code does
    model.blocks[0].forward = outer
    recomputation.take_off()
    calls = Counter()
    model.blocks[0].inner[0].register_forward_hook(lambda *_: calls.update([1]))
    model(torch.randn(6, WIDTH)).sum().backward()
    assert model.blocks[0].__dict__["forward"] is outer
    assert calls[1] == 1


def test_a_deep_copy_is_independent_and_still_recomputes():
    model = seeded(MODELS["batch_norm"])
    recomputation = Recomputation.put_on(model)
    twin = copy.deepcopy(model)
    expected = observe(seeded(MODELS["batch_norm"]), steps=1)
    recomputation.take_off()
    calls = Counter()
    twin.blocks[0].inner[0].register_forward_hook(lambda *_: calls.update([1]))
    torch.manual_seed(1)
    observed = observe(twin, steps=1)
    assert_bit_equal(observed[:-2], expected[:-2])
    assert calls[1] == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.blocks[0].inner[1].num_batches_tracked == 0


def test_a_saved_model_loads_and_computes_the_same():
    model = seeded(MODELS["plain"])
    x = torch.randn(6, WIDTH)
    Recomputation.put_on(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for loaded in (torch.load(stream, weights_only=False), pickle.loads(pickle.dumps(model))):  # noqa: S301  our own bytes
        assert torch.equal(loaded(x), model(x))
        assert loaded.blocks[0].forward.__self__ is loaded.blocks[0]


def test_a_pickle_does_not_name_this_package(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    Recomputation.put_on(model)
    assert "forward" in model[0].__dict__
    (tmp_path / "model.pt").write_bytes(pickle.dumps(model))
    code = "import pickle, sys, torch; sys.modules['adaptive_trainer'] = None; m = pickle.load(open('model.pt', 'rb'));"
    code += "m(torch.ones(1, 2)).sum().backward(); print(m[0][0].weight.grad is not None)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_an_input_changed_between_forward_and_backward_is_refused_and_never_computed_with():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.tanh(self.linear(x + 1))

    model = nn.ModuleList([Adds(), Adds()])
    Recomputation.put_on(model)
    x = torch.randn(6, WIDTH)
    out = model[0](x)
    x.add_(1)
    with pytest.raises(CheckpointError, match=r"shape \(6, 8\).*changed in place"):
        out.sum().backward()
    model[0](x).sum().backward()
    assert model[0].linear.weight.grad is not None


def test_out_of_memory_in_the_second_computation_puts_everything_back():
    model = seeded(MODELS["experts"])
    Recomputation.put_on(model)
    block = model.blocks[1]
    short = []

    def fail(*_):
        if short:
            raise torch.OutOfMemoryError("CUDA out of memory")

    block.experts[1].register_forward_hook(fail)
    loss = model(torch.randn(6, WIDTH)).sum()
    short.append(True)
    before, aux, load = attributes(model), block.aux, block.load
    state = torch.get_rng_state(), random.getstate()
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert block.aux is aux
    assert block.load is load
    assert_bit_equal(attributes(model), before)
    assert_bit_equal((torch.get_rng_state(), random.getstate()), state)


def test_out_of_memory_on_the_way_back_puts_everything_back(monkeypatch):
    model = seeded(MODELS["shared_stash"])
    Recomputation.put_on(model)
    loss = model(torch.randn(6, WIDTH)).sum()
    before, total = attributes(model), model.router.total

    def fail(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("adaptive_trainer.attributes._Faded.tensor", fail)
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert model.router.total is total
    assert_bit_equal(attributes(model), before)


def test_stashed_losses_stay_those_of_the_forward_and_keep_their_graph():
    model = seeded(MODELS["experts"])
    Recomputation.put_on(model)
    out = model(torch.randn(6, WIDTH))
    stashed = [block.aux for block in model.blocks]
    out.sum().backward(retain_graph=True)
    assert all(block.aux is aux for block, aux in zip(model.blocks, stashed, strict=True))
    gate = model.blocks[0].gate.weight
    gate.grad = None
    sum(stashed).backward()
    assert gate.grad is not None


@pytest.mark.parametrize("name", ["batch_norm", "random_depth", "first_in_place"])
def test_compiled_models_train_with_it_and_stay_exact(name):
    def run(model):
        for _ in range(2):
            torch.compile(model, backend="eager")(torch.ones(6, WIDTH)).sum().backward()
        return [p.grad for p in model.parameters()], attributes(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        expected = run(seeded(MODELS[name]))
        torch.compiler.reset()
        model = seeded(MODELS[name])
        Recomputation.put_on(model)
        assert_bit_equal(run(model), expected)


class Stashing(nn.Module):
    """Keeps a large tensor of its forward, with its graph, that nothing else holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        self.attention = y.repeat(1, 4000)
        return y


def test_a_large_stash_that_only_the_block_holds_survives_the_second_computation():
    model = Stack(*[Stashing() for _ in range(2)])
    Recomputation.put_on(model)
    for _ in range(2):
        out = model(torch.randn(6, WIDTH))
        before = [id(block.attention) for block in model.blocks]
        out.sum().backward(retain_graph=True)
        assert [id(block.attention) for block in model.blocks] == before
        model.zero_grad()
        model.blocks[0].attention.sum().backward()
        assert model.blocks[0].linear.weight.grad is not None


class Aliased(nn.Module):
    """One buffer in two modules and one input under two names, each written under one and read under the other."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.linear.register_buffer("same", self.seen)

    def forward(self, x, again):
        self.seen += 1
        x.mul_(0.5)
        return torch.tanh(self.linear(again)) * torch.exp(-self.linear.same.clone() * x)


class AliasedStack(Stack):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x * 1
            x = block(x, x)
        return x


def test_tensors_under_two_names_stay_one_in_the_second_computation():
    expected = observe(seeded(lambda: AliasedStack(Aliased(), Aliased())))
    model = seeded(lambda: AliasedStack(Aliased(), Aliased()))
    Recomputation.put_on(model)
    assert_bit_equal(observe(model), expected)


def test_an_input_that_was_written_into_later_is_freed_with_its_forward():
    model = nn.ModuleList([Residual(), Residual()])
    Recomputation.put_on(model)
    for _ in range(2):
        x = torch.randn(6, WIDTH, requires_grad=True) * 1
        x.add_(model[0](x))
        watch = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        assert watch() is None


# Which blocks


def test_the_plain_multilayer_perceptron_has_no_blocks():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert find_blocks(model) == ()
    assert "no repeated blocks" in possible(model)
    recomputation = Recomputation.put_on(model)
    assert "forward" not in model[0].__dict__
    recomputation.take_off()


def test_members_of_one_class_with_parameters_are_blocks_even_if_they_are_simple():
    model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    assert find_blocks(model) == tuple(model)
    assert find_blocks(nn.ModuleList([nn.ReLU(), nn.ReLU()])) == ()
    assert find_blocks(nn.ModuleList([Residual()])) == ()


def test_in_a_mixed_container_composite_members_of_a_repeated_class_are_blocks():
    first, second, other = Residual(), Residual(), Spectral()
    model = nn.Sequential(nn.Linear(8, 8), first, nn.LayerNorm(8), other, second, nn.Linear(8, 8))
    assert find_blocks(model) == (first, second)
    assert possible(model) is None


def test_outermost_blocks_are_taken_and_their_inside_is_not_searched():
    stages = [nn.Sequential(Residual(), Residual()) for _ in range(2)]
    assert find_blocks(nn.Sequential(*stages)) == tuple(stages)
    assert find_blocks(nn.ModuleDict({"trunk": nn.ModuleList(stages)})) == tuple(stages)


def test_lists_of_lists_are_searched_because_a_list_has_no_forward():
    inner = [nn.ModuleList([Residual(), Residual()]) for _ in range(2)]
    assert find_blocks(nn.ModuleList(inner)) == (*inner[0], *inner[1])


def test_one_block_registered_twice_is_one_block():
    block = Residual()
    assert find_blocks(nn.ModuleList([block, block])) == (block,)


# Models with a switch


def tiny(name, *, cache=False):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=16,
            n_layer=3,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=cache,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def language_step(model, *, hook=None):
    model.train()
    torch.manual_seed(5)
    ids = torch.randint(0, 64, (2, 12))
    labels = ids if "GPT2" in type(model).__name__ else torch.tensor([0, 1])
    loss = model(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids)).loss
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_hugging_face_model_is_switched_and_stays_bit_equal(name):
    expected = language_step(tiny(name))
    model = tiny(name)
    calls = Counter()
    for path, module in model.named_modules():
        if path.endswith(("ln_1", "attention.self")):
            module.register_forward_hook(lambda *_, path=path: calls.update([path]))
    before = {path: {k: v for k, v in m.__dict__.items() if "checkpointing" in k} for path, m in model.named_modules()}
    assert has_switch(model)
    recomputation = Recomputation.put_on(model)
    assert model.is_activation_checkpointing
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert_bit_equal(language_step(model), expected)
    assert set(calls.values()) == {2}
    recomputation.take_off()
    assert not model.is_activation_checkpointing
    after = {path: {k: v for k, v in m.__dict__.items() if "checkpointing" in k} for path, m in model.named_modules()}
    assert after == before
    assert not any(m._forward_hooks for p, m in model.named_modules() if "embed" in p)


@pytest.mark.parametrize(("cache", "fidelity"), [(True, "rounding"), (False, "bit")])
def test_a_model_that_loses_its_cache_with_the_switch_is_only_equal_up_to_rounding(cache, fidelity):
    ids = torch.arange(24).reshape(2, 12)
    model, data = tiny("gpt2", cache=cache), [{"input_ids": ids, "labels": ids}] * 2
    plain = tiny("gpt2", cache=cache)
    AdaptiveTrainer(plain, data, optimizer=partial(torch.optim.SGD, lr=0.1)).fit()
    trainer = AdaptiveTrainer(
        model, data, optimizer=partial(torch.optim.SGD, lr=0.1), ladder=["gradient_checkpointing"]
    )
    with inject_oom(step=1, phase="forward"):
        result = trainer.fit()
    assert [(event.rung, event.fidelity) for event in result.fallbacks] == [("gradient_checkpointing", fidelity)]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-8)
        assert cache or torch.equal(mine, theirs)


def test_a_switch_that_the_user_threw_stays_as_it_is():
    model = tiny("gpt2")
    model.activation_checkpointing_enable({"use_reentrant": False, "early_stop": False})
    functions = [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()]
    assert "on already" in possible(model)
    recomputation = Recomputation.put_on(model)
    assert [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()] == functions
    recomputation.take_off()
    assert model.is_activation_checkpointing


def test_a_hugging_face_model_inside_a_users_module_is_switched_too():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = tiny("gpt2")
            self.extra = nn.ModuleList([Residual(), Residual()])

        def forward(self, input_ids, labels, attention_mask):
            return self.backbone(input_ids=input_ids, labels=labels, attention_mask=attention_mask)

    model = Wrapped()
    assert not has_switch(model)
    assert possible(model) is None
    recomputation = Recomputation.put_on(model)
    assert model.backbone.is_activation_checkpointing
    assert all("forward" not in module.__dict__ for module in model.backbone.modules())
    assert all("forward" in block.__dict__ for block in model.extra)
    recomputation.take_off()
    assert not model.backbone.is_activation_checkpointing


def test_an_adapter_around_a_model_with_a_switch_has_one():
    class Adapter(nn.Module):
        """As peft's: hands on the model it is wrapped around."""

        def __init__(self, base):
            super().__init__()
            self.base_model = base

        def get_base_model(self):
            return self.base_model

    model = Adapter(tiny("gpt2"))
    for parameter in model.base_model.transformer.wte.parameters():
        parameter.requires_grad_(False)
    assert has_switch(model)
    recomputation = Recomputation.put_on(model)
    assert model.base_model.is_activation_checkpointing
    language_step(model.base_model)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    recomputation.take_off()
    assert not model.base_model.is_activation_checkpointing


def test_a_switched_model_moves_batch_norm_once_and_can_be_copied_and_pickled():
    model = tiny("bert")
    for layer in model.bert.encoder.layer:
        layer.intermediate.dense = nn.Sequential(layer.intermediate.dense, Transposed(32))
    Recomputation.put_on(model)
    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    language_step(model)
    counters = [m.num_batches_tracked.item() for m in model.modules() if isinstance(m, nn.BatchNorm1d)]
    assert counters == [1, 1, 1]
    assert [m.num_batches_tracked.item() for m in twin.modules() if isinstance(m, nn.BatchNorm1d)] == [0, 0, 0]


class Transposed(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def test_a_block_called_by_a_bound_method_is_recognised_by_the_switch():
    block = Residual(nn.BatchNorm1d(16))
    recompute.run_switched(block.__call__, torch.randn(6, WIDTH)).sum().backward()
    assert block.inner[1].num_batches_tracked == 1
    out = recompute.run_switched(lambda x: block(x) + 1, torch.randn(6, WIDTH))
    out.sum().backward()
    assert torch.isfinite(block.inner[0].weight.grad).all()
