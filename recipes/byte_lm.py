"""For whoever wants to see the trainer at work on real text without downloading any.

A small GPT that reads bytes, trained on text that every machine with Python has: the source of Python's own standard
library. Everything is made from the files' names and sizes, so the same Python gives the same data.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

NUM_BYTES = 256
#: Every so many-th file is held out for evaluation.
HELD_OUT = 20
#: Folders that are no source of the library, or that hold tables and broken files on purpose.
PASSED_OVER = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"})


class Block(nn.Module):
    """Attention and a multilayer perceptron, each normalised before and added after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """From ``(batch, time, width)`` to the same shape."""
        x = x + self.attended(self._attend(self.before_attention(x)))
        mixed: Tensor = x + self.mlp(self.before_mlp(x))
        return mixed

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads).transpose(1, 3)
        queries, keys, values = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class ByteGpt(nn.Module):
    """A GPT over bytes; the head is the token embedding."""

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """From ``(batch, time)`` bytes to ``(batch, time, 256)`` logits of the byte that follows each."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.last(x))
        return logits


def _initialise(module: nn.Module) -> None:
    # So small that the first guess is uniform over the bytes: a loss of ln 256 = 5.55.
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def make_model(context: int = 256, width: int = 128, depth: int = 4, heads: int = 4) -> ByteGpt:
    """The model: ``depth`` blocks of ``width`` features, for texts of ``context`` bytes at most."""
    return ByteGpt(context, width, depth, heads)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Texts of ``context`` bytes, one after the other, from one long text.

    A sample is a text and, at each of its places, the byte that comes next; both ``(context,)``.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._context
        window = self._text[start : start + self._context + 1].long()
        return window[:-1], window[1:]


def make_data(context: int = 256, max_bytes: int = 4_000_000) -> Windows:
    """What is trained on: the library's files without those held out, cut off at ``max_bytes``."""
    return Windows(_text(max_bytes, held_out=False), context)


def make_eval_data(context: int = 256, max_bytes: int = 32_000) -> Windows:
    """What is held out, cut off at ``max_bytes``."""
    return Windows(_text(max_bytes, held_out=True), context)


def _text(max_bytes: int, *, held_out: bool) -> bytes:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    files = [path for path in files if PASSED_OVER.isdisjoint(path.parts)]
    chosen = [path for index, path in enumerate(files) if (index % HELD_OUT == 0) is held_out]
    text = bytearray()
    for path in chosen:
        if len(text) >= max_bytes:
            break
        text += (library / path).read_bytes()
    if not text:
        raise FileNotFoundError(f"there is no Python source in {library}, which this recipe trains on")
    return bytes(text[:max_bytes])


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats, the mean over all bytes of the batch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
