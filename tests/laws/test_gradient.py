"""Law 3, Gradient: the gradient of a step is that of the loss over its whole batch, however the batch is cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from adaptive_trainer import AdaptiveTrainer, Plan

TIGHT = {"rtol": 0, "atol": 1e-12}


def gradients(batch, loss, micro_batch, *, model=None, **rest):
    """The gradients of one step, seen by an optimizer that only looks, and the step's loss."""
    torch.manual_seed(0)
    model = model or nn.Linear(3, 4).double()
    seen = []

    class Look(torch.optim.SGD):
        def step(self, closure=None):
            seen.extend(parameter.grad.clone() for parameter in model.parameters())

    trainer = AdaptiveTrainer(
        model, [batch], loss=loss, optimizer=lambda parameters: Look(parameters, lr=0.1),
        plan=Plan(micro_batch=micro_batch), progress=False, **rest,
    )  # fmt: skip
    return seen, trainer.fit().loss


def assert_same(found, expected):
    for mine, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(mine, theirs, **TIGHT)
    assert found[1] == pytest.approx(expected[1], abs=1e-6)


def classes(n, *, ignored=()):
    torch.manual_seed(n)
    targets = torch.randint(4, (n,))
    targets[list(ignored)] = -100
    return torch.randn(n, 3).double(), targets


@pytest.mark.parametrize("n", range(1, 18))
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_cut_gives_the_whole_batchs_gradient(n, reduction):
    """Rows 50, 53, 54."""
    loss = nn.CrossEntropyLoss(reduction=reduction)
    expected = gradients(classes(n), loss, None, reduction=reduction)
    for micro_batch in range(1, n + 1):
        assert_same(gradients(classes(n), loss, micro_batch, reduction=reduction), expected)


@pytest.mark.parametrize("ignored", [(0,), (0, 1, 2, 3), (5, 6), (0, 2, 4, 6, 8)])
def test_masked_items_and_empty_pieces_count_for_nothing(ignored):
    batch = classes(9, ignored=ignored)
    expected = gradients(batch, nn.CrossEntropyLoss(), None)
    for micro_batch in range(1, 9):
        found = gradients(batch, nn.CrossEntropyLoss(), micro_batch)
        assert all(torch.isfinite(gradient).all() for gradient in found[0])
        assert_same(found, expected)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_step_without_a_single_item_is_a_step_with_gradients_of_zero(micro_batch):
    batch = classes(6, ignored=range(6))
    found, value = gradients(batch, nn.CrossEntropyLoss(), micro_batch)
    assert value == 0
    assert len(found) == 2
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in found)


def test_class_weights_are_what_the_mean_is_over():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]).double())
    expected = gradients(classes(7), loss, None)
    assert_same(gradients(classes(7), loss, 2), expected)


def test_the_weight_that_the_users_step_returns_is_used():
    """A step may only know afterwards how many items its loss averaged over."""

    def step(model, batch):
        inputs, targets = batch
        wanted = targets != 0
        return functional.cross_entropy(model(inputs)[wanted], targets[wanted]), int(wanted.sum())

    batch = classes(8)
    expected = gradients(batch, None, None, step=step)
    for micro_batch in (1, 2, 3, 5):
        assert_same(gradients(batch, None, micro_batch, step=step), expected)


def test_the_users_count_is_used():
    def loss(output, targets):
        mask = targets > 1
        return (output.pow(2).sum(1) * mask).sum() / mask.sum()

    def weight(batch):
        return int((batch[1] > 1).sum())

    batch = classes(9)
    expected = gradients(batch, loss, None, weight=weight)
    for micro_batch in (2, 4):
        assert_same(gradients(batch, loss, micro_batch, weight=weight), expected)


def test_clipping_happens_once_over_the_whole_gradient():
    """Row 56: (2, 0) and (0, 2) clipped to 1 give (.707, .707) and not (.447, .894)."""
    model = nn.Linear(2, 1, bias=False)
    batch = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    found, _ = gradients(batch, None, 1, model=model, step=lambda m, b: m(b).mean(), max_grad_norm=1.0)
    torch.testing.assert_close(found[0], torch.tensor([[0.7071, 0.7071]]), rtol=0, atol=1e-4)


def test_the_numbers_of_unequal_pieces():
    """Row 54: loss mean((x w)^2), x = 1..10: 77, whatever the pieces."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(model.weight)
    x = torch.arange(1, 11).double()[:, None]
    for micro_batch in (None, 4, 8, 5, 3):
        found, _ = gradients(x, None, micro_batch, model=model, step=lambda m, b: m(b).pow(2).mean())
        assert found[0].item() == pytest.approx(77.0, abs=1e-12)
