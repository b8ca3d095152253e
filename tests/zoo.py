"""Small models of every kind that matters, with data and losses, and the state of a run as one value."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 13


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CnnBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(2, 4)

    def forward(self, x):
        return self.head(self.blocks(x).mean((2, 3)))


class DropoutTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class TiedLm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(6, 6, batch_first=True) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1])


class PartlyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.2))
        self.base.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = self.base(x)
        for adapter in self.adapters:
            x = x + adapter(x)
        return self.head(x)


def _rows(shape):
    return lambda n, g: torch.randn(n, *shape, generator=g)


def _tokens(length):
    return lambda n, g: torch.randint(VOCABULARY, (n, length), generator=g)


@dataclass(frozen=True)
class Kind:
    """One member of the zoo: how to make its model, inputs and targets."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    targets: Callable[[int, torch.Generator], Tensor]

    def make(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(1)
        return self.model().to(dtype)

    def data(self, num_samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
        generator = torch.Generator().manual_seed(2)
        inputs = self.inputs(num_samples, generator)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        return TensorDataset(inputs, self.targets(num_samples, generator))


def _classes(n, g):
    return torch.randint(4, (n,), generator=g)


ZOO = {
    "mlp": Kind(Mlp, _rows((6,)), _classes),
    "cnn_batch_norm": Kind(CnnBatchNorm, _rows((2, 5, 5)), _classes),
    "dropout_transformer": Kind(DropoutTransformer, _tokens(5), _classes),
    "tied_lm": Kind(TiedLm, _tokens(5), _tokens(5)),
    "lstm": Kind(Lstm, _rows((4, 6)), _classes),
    "partly_frozen": Kind(PartlyFrozen, _rows((6,)), _classes),
}

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
}


def decay(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)


def loss(output, targets):
    return functional.cross_entropy(output, targets)


def streams() -> dict[str, Any]:
    """Where the random streams stand; as text where they are hundreds of numbers, which compares quicker."""
    name, words, *place = np.random.get_state()  # noqa: NPY002
    numpy = (name, words.tobytes(), *place)
    return {"python": repr(random.getstate()), "numpy": repr(numpy), "torch": torch.get_rng_state()}


def state_of(trainer) -> dict[str, Any]:
    """All that a run leaves behind: parameters, buffers, optimizer, schedule, random streams."""
    state = trainer._loop.workshop.state
    return {
        "model": {name: value.clone() for name, value in state.model.state_dict().items()},
        "flags": [module.training for module in state.model.modules()],
        "optimizer": None if state.optimizer is None else state.optimizer.state_dict(),
        "scheduler": None if state.scheduler is None else state.scheduler.state_dict(),
        "streams": streams(),
        "step": trainer._loop.track.step,
    }


def same(a: Any, b: Any, where: str = "state") -> str | None:
    """The first place where two states differ, bit for bit; None if they do not."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        alike = isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return None if alike else where
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {sorted(map(str, a))} and {sorted(map(str, b))}"
        found = (same(a[key], b[key], f"{where}.{key}") for key in a)
        return next((place for place in found if place is not None), None)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{where}: lengths {len(a)} and {len(b)}"
        found = (same(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((place for place in found if place is not None), None)
    return None if a == b else f"{where}: {a!r} and {b!r}"
