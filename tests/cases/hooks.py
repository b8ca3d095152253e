"""Models of memory for the cases: a cap on a micro-batch, and a failure at one passage of one place."""

from __future__ import annotations

import gc

import torch
from torch import nn

torch.set_num_threads(1)
# Each failure collects garbage; what the imports have made need not be looked through every time.
gc.freeze()

OOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


def cap(model, largest, *, size=len, when=lambda _module: True):
    """Let every forward of more than ``largest`` rows (or whatever ``size`` counts) fail. Returns the sizes seen."""
    seen = []

    def check(module, args):
        if not when(module):
            return
        seen.append(size(args[0]))
        if seen[-1] > largest:
            raise torch.OutOfMemoryError(OOM)

    model.register_forward_pre_hook(check)
    return seen


class At:
    """Fails at the given passages, counted from 1 over all attempts."""

    def __init__(self, *passages, message=OOM, error=torch.OutOfMemoryError):
        self.passed = 0
        self._passages, self._message, self._error = passages, message, error

    def __call__(self, *_args):
        self.passed += 1
        if self.passed in self._passages:
            raise self._error(self._message)


def at_forward(model, *passages, **rest):
    """Let the forward of ``model`` fail at these passages."""
    at = At(*passages, **rest)
    model.register_forward_pre_hook(at)
    return at


def at_backward(model, *passages, **rest):
    """Let the backward of ``model`` fail at these passages, from within autograd."""
    at = At(*passages, **rest)

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            at()
            return gradient

    model.register_forward_hook(lambda _module, _args, output: Identity.apply(output))
    return at


def asserted_float32(x):
    """An operation that takes float32 only and says so without a word. (Here, because pytest words those of tests.)"""
    assert x.dtype is torch.float32
    return x


def regression():
    """The tiny model of the cases."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def rungs(result):
    """The names of the rungs that a run has taken."""
    return [event.rung for event in result.fallbacks]


def rows_of(result, event):
    """The journal rows of one kind."""
    return [entry for entry in result.events if entry.event == event]
