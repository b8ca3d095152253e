"""Law 6, Release: when a retry begins, nothing of the failed attempt is alive."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn

from adaptive_trainer import AdaptiveTrainer, LadderExhausted
from adaptive_trainer.testing import inject_oom
from tests.zoo import ZOO, loss


class Greedy(nn.Module):
    """Fails its first attempts, and looks at each later one whether anything of those before is left."""

    def __init__(self, failures):
        super().__init__()
        self.inner = ZOO["mlp"].make()
        self.left = [failures]
        self.watched = []
        self.alive = []
        self.handled = []

    def forward(self, x):
        self.alive.append(sum(reference() is not None for reference in self.watched))
        self.handled.append(sys.exc_info())
        hidden = self.inner(x)
        local = hidden * 2
        self.stash = local
        if self.left[0]:
            self.left[0] -= 1
            self.watched.extend([weakref.ref(local), weakref.ref(hidden)])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return local


@pytest.mark.parametrize("failures", [1, 5])
def test_nothing_of_a_failed_forward_is_alive_in_the_next(failures):
    """Rows 23, 24: the traceback pins nothing, and the retry runs after the handler has ended."""
    model = Greedy(failures)
    names = ("watched", "alive", "handled", "left")
    seen = {name: _Shared(getattr(model, name)) for name in names}
    for name, value in seen.items():
        setattr(model, name, value)
    AdaptiveTrainer(model, ZOO["mlp"].data(16), loss=loss, batch_size=16, progress=False).fit()
    assert len(seen["watched"]) == 2 * failures
    assert len(seen["alive"]) > failures
    assert set(seen["alive"]) == {0}
    assert set(seen["handled"]) == {(None, None, None)}


class _Shared(list):
    """A list that the trainer does not rewind, because only plain lists are."""


class _Failing(torch.autograd.Function):
    """Gives its input, and fails in backward as long as it is told to; sees the gradient before."""

    @staticmethod
    def forward(ctx, x, fails, see):
        ctx.fails, ctx.see = fails, see
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails():
            ctx.see(gradient)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return gradient, None, None


def test_a_backward_that_fails_keeps_no_graph():
    """Row 82218 of torch: the intermediates of a failed backward are gone when the next attempt begins."""
    alive, watched = [], []

    def step(model, batch):
        alive.append(sum(reference() is not None for reference in watched))
        output = model(batch[0])
        watched.append(weakref.ref(output))
        return _Failing.apply(
            loss(output, batch[1]), lambda: len(alive) < 3, lambda gradient: watched.append(weakref.ref(gradient))
        )

    AdaptiveTrainer(ZOO["mlp"].make(), ZOO["mlp"].data(8), step=step, batch_size=8, progress=False).fit()
    assert len(alive) > 3
    assert set(alive) == {0}


def test_branches_that_a_failed_backward_had_not_come_to_yet_are_gone():
    """Torch leaves them in its queue, with all that they have saved, until somebody calls backward again."""
    alive, saved = [], []

    def step(model, batch):
        alive.append(sum(reference() is not None for reference in saved))
        output = model(batch[0])
        early = output.exp()
        saved.append(weakref.ref(early.untyped_storage()))
        return loss(early + _Failing.apply(output, lambda: len(alive) < 3, lambda _: None), batch[1])

    AdaptiveTrainer(ZOO["mlp"].make(), ZOO["mlp"].data(8), step=step, batch_size=8, progress=False).fit()
    assert len(alive) > 3
    assert set(alive) == {0}


def test_memory_is_measured_to_be_back_at_its_mark():
    trainer = AdaptiveTrainer(
        ZOO["mlp"].make(), ZOO["mlp"].data(512), loss=loss, batch_size=256, memory_limit="24KiB", progress=False,
    )  # fmt: skip
    result = trainer.fit()
    assert len(result.fallbacks) > 1
    assert [event.held_bytes for event in result.fallbacks] == [0] * len(result.fallbacks)
    assert result.peak_bytes <= 24 * 1024


def test_what_an_optimizer_has_made_since_the_last_step_is_not_held_by_a_failed_build():
    trainer = AdaptiveTrainer(
        ZOO["mlp"].make(), ZOO["mlp"].data(16), loss=loss, batch_size=8, steps=1, memory_limit="1MiB", progress=False,
    )  # fmt: skip
    trainer.fit()
    with inject_oom(phase="build"):
        result = trainer.fit()
    assert [event.held_bytes for event in result.fallbacks] == [None]


def test_at_the_end_of_the_ladder_the_first_failures_frames_are_dead():
    watched = []

    def step(model, batch):
        output = model(batch[0])
        watched.append(weakref.ref(output))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(LadderExhausted) as caught:
        AdaptiveTrainer(ZOO["mlp"].make(), ZOO["mlp"].data(8), step=step, batch_size=8, progress=False).fit()
    gc.collect()
    assert len(watched) > 3
    assert all(reference() is None for reference in watched)
    assert caught.value.__cause__.__traceback__ is None


def test_losses_keep_no_graph_from_step_to_step():
    """Row 35."""
    graphs = []

    def step(model, batch):
        output = model(batch[0])
        value = loss(output, batch[1])
        graphs.append(weakref.ref(output))
        assert sum(reference() is not None for reference in graphs) <= 1
        return value

    AdaptiveTrainer(ZOO["mlp"].make(), ZOO["mlp"].data(80), step=step, batch_size=8, progress=False).fit()
    assert len(graphs) == 10
