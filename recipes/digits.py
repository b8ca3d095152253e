"""For whoever has images and BatchNorm: a small convolutional network on scikit-learn's handwritten digits.

The 1,797 images of 8 x 8 pixels come with scikit-learn (the extra ``digits``); nothing is downloaded. The last 360 are
held out.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 10
NUM_HELD_OUT = 360


def make_model(width: int = 32, depth: int = 3) -> nn.Sequential:
    """``depth`` convolutions with BatchNorm, then a linear layer: from ``(batch, 1, 8, 8)`` to ``(batch, 10)``."""
    return nn.Sequential(
        _convolution(1, width),
        nn.Sequential(*(_convolution(width, width) for _ in range(depth - 1))),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, NUM_CLASSES),
    )


def _convolution(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def make_data() -> TensorDataset:
    """Images ``(1, 8, 8)`` with values from 0 to 1, and their digits."""
    return _digits(slice(None, -NUM_HELD_OUT))


def make_eval_data() -> TensorDataset:
    """The same, of what is held out."""
    return _digits(slice(-NUM_HELD_OUT, None))


def _digits(part: slice) -> TensorDataset:
    images, digits = load_digits(return_X_y=True)
    pixels = torch.as_tensor(images[part], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(pixels, torch.as_tensor(digits[part]).long())


def accuracy(logits: Tensor, digits: Tensor) -> float:
    """The share of digits that are recognised."""
    return (logits.argmax(1) == digits).float().mean().item()
