"""The gradient over pieces is the gradient of the whole batch, whatever its loss averages over."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adaptive_trainer.batches import cut, sizes
from adaptive_trainer.errors import DataError
from adaptive_trainer.forward import call, loss_of
from adaptive_trainer.weights import item_counter, loss_reduction, shares

TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _double_precision():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def loss_on(model, batch, loss):
    output, targets = call(model, batch, loss)
    return loss_of(output) if loss is None else loss(output, targets)


def whole(model, batch, loss=None):
    """The loss and the gradients of the batch at once."""
    model.zero_grad()
    value = loss_on(model, batch, loss)
    value.backward()
    return value.item(), gradients(model)


def in_pieces(model, batch, num_samples, pieces, loss=None, weight=None):
    """The same from pieces, of which those without an item are left out."""
    model.zero_grad()
    count = item_counter(model, loss, weight)
    cuts = cut(batch, num_samples, pieces)
    total = 0.0
    for piece, share in zip(
        cuts, shares([count(piece) for piece in cuts], loss_reduction(loss) or "mean"), strict=True
    ):
        if share:
            value = loss_on(model, piece, loss) * share
            value.backward()
            total += value.item()
    return total, gradients(model)


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=0, abs=TOLERANCE)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine - theirs).abs().max() <= TOLERANCE


# The numbers of the field.


class Line(nn.Module):
    """The loss mean((x w)^2), of which the gradient at w = 1 is 2 mean(x^2)."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.w).square().mean()


def gradient_of_pieces(pieces, weights):
    model = Line()
    x = torch.arange(1.0, 11.0)
    for piece, weight in zip(cut((x,), 10, pieces), weights, strict=True):
        (model(*piece) * weight).backward()
    return model.w.grad.item()


@pytest.mark.parametrize(
    ("pieces", "naive"), [((5, 5), 77.0), ((4, 4, 2), 94.0 + 1 / 3), ((8, 2), 116.0), ((4, 3, 3), None)]
)
def test_case_050_unequal_pieces_give_the_gradient_of_the_whole(pieces, naive):
    counts = [item_counter(Line(), None, None)(piece) for piece in cut((torch.arange(10.0),), 10, pieces)]
    assert counts == list(pieces)
    assert gradient_of_pieces(pieces, shares(counts, "mean")) == pytest.approx(77.0, abs=TOLERANCE)
    if naive is not None:
        assert gradient_of_pieces(pieces, [1 / len(pieces)] * len(pieces)) == pytest.approx(naive, abs=1e-10)


def test_case_054_a_last_window_of_one_piece_is_divided_by_what_it_holds():
    model = Line()
    (piece,) = cut((torch.tensor([5.0]),), 1, sizes(1, 4))
    (share,) = shares([item_counter(model, None, None)(piece)], "mean")
    (model(*piece) * share).backward()
    assert model.w.grad.item() == 50.0
    assert model.w.grad.item() / 4 == 12.5


# Every split.


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("num_samples", range(1, 18))
def test_every_split_of_every_batch_gives_its_gradient(num_samples, reduction):
    model = nn.Linear(3, 2)
    batch = (torch.randn(num_samples, 3), torch.randn(num_samples, 2))
    loss = nn.MSELoss(reduction=reduction)
    wanted = whole(model, batch, loss)
    for micro_batch in range(1, num_samples + 1):
        assert_close(in_pieces(model, batch, num_samples, sizes(num_samples, micro_batch), loss), wanted)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_case_050_masked_tokens_count_for_nothing_and_masked_pieces_are_left_out(reduction):
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    ids, labels = torch.randint(11, (8, 5)), torch.randint(11, (8, 5))
    labels[torch.rand(8, 5) < 0.4] = -100
    labels[2:5] = -100
    loss = nn.CrossEntropyLoss(reduction=reduction)

    def token_loss(output, targets):
        return loss(output.flatten(0, -2), targets.flatten())

    token_loss.reduction = reduction
    wanted = whole(model, (ids, labels), token_loss)
    for micro_batch in range(1, 9):
        found = in_pieces(model, (ids, labels), 8, sizes(8, micro_batch), token_loss)
        assert np.isfinite(found[0])
        assert_close(found, wanted)


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, lambda **words: partial(F.cross_entropy, **words)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_and_another_ignored_label_are_exact(make, smoothing):
    model = nn.Linear(3, 4)
    targets = torch.tensor([0, 1, 2, 3, 3, 0, 2])
    loss = make(weight=torch.tensor([0.5, 1.0, 7.0, 0.1]), ignore_index=1, label_smoothing=smoothing)
    batch = (torch.randn(7, 3), targets)
    wanted = whole(model, batch, loss)
    for micro_batch in range(1, 8):
        assert_close(in_pieces(model, batch, 7, sizes(7, micro_batch), loss), wanted)


def test_soft_targets_and_float_targets_count_samples():
    model = nn.Linear(3, 4)
    soft = (torch.randn(5, 3), torch.rand(5, 4).softmax(-1))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 7.0, 0.1]))
    assert_close(in_pieces(model, soft, 5, (3, 2), loss), whole(model, soft, loss))
    assert item_counter(model, loss, None)(soft) == 5
    assert item_counter(model, None, None)({"x": torch.rand(5, 3), "labels": torch.rand(5, 3)}) == 5
    assert item_counter(model, None, None)((torch.rand(5, 3), torch.ones(5, 2, dtype=torch.bool))) == 5


# Counting.


@pytest.mark.parametrize(
    ("batch", "items"),
    [
        ({"ids": torch.zeros(2, 3), "labels": torch.tensor([[1, -100, 2], [-100, -100, 0]])}, 3),
        ((torch.zeros(4, 3), torch.tensor([0, 1, -100, 1])), 3),
        ([torch.zeros(4, 3), torch.tensor([0, 1, 2, 3], dtype=torch.uint8)], 4),
        ((torch.zeros(4, 3), torch.zeros(4, 8, 8, dtype=torch.int32)), 256),
        ((torch.zeros(4, 3),), 4),
        (torch.zeros(4, 3), 4),
        ({"x": torch.zeros(4, 3)}, 4),
        ((torch.zeros(4, 3), [{"boxes": torch.zeros(k, 4)} for k in (1, 2, 3, 5)]), 4),
        ({"scale": 2.0}, 1),
        ({"labels": torch.full((2, 3), -100)}, 0),
    ],
)
def test_items_are_valid_labels_or_else_samples(batch, items):
    assert item_counter(nn.Identity(), None, None)(batch) == items


def test_the_losses_own_ignored_label_is_used():
    batch = (torch.zeros(4, 3), torch.tensor([0, 1, 255, -100]))
    for loss in (nn.CrossEntropyLoss(ignore_index=255), partial(F.cross_entropy, ignore_index=255)):
        assert item_counter(nn.Identity(), loss, None)(batch) == 3
    assert item_counter(nn.Identity(), F.cross_entropy, None)(batch) == 3


def test_the_users_function_decides():
    count = item_counter(nn.Identity(), nn.CrossEntropyLoss(), lambda batch: torch.tensor(2.5) * len(batch[0]))
    assert count((torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))) == 10.0


def test_samples_are_those_of_the_targets_or_as_told_where_the_batch_misleads():
    count = item_counter(nn.Identity(), None, None)
    tables = {"one": torch.zeros(3), "two": torch.zeros(3)}
    assert count({**tables, "labels": torch.rand(2, 4)}) == 2
    assert count({**tables, "x": torch.zeros(2, 4)}, num_samples=2) == 2


def test_a_loss_tells_its_reduction():
    assert [loss_reduction(nn.MSELoss(reduction=word)) for word in ("mean", "sum", "none")] == ["mean", "sum", "none"]
    assert loss_reduction(nn.KLDivLoss(reduction="batchmean")) == "mean"
    assert loss_reduction(partial(F.mse_loss, reduction="sum")) == "sum"
    assert loss_reduction(F.mse_loss) is None
    assert loss_reduction(None) is None


# Shares.


def test_shares_of_a_mean_are_parts_and_of_a_sum_are_ones():
    assert shares([4, 3, 3], "mean") == [0.4, 0.3, 0.3]
    assert shares([4, 3, 3], "sum") == [1.0, 1.0, 1.0]
    assert shares([2, 0, 2], "mean") == [0.5, 0.0, 0.5]


def test_a_single_piece_counts_in_full_exactly():
    assert all(shares([weight], "mean") == [1.0] for weight in (1, 3, 0.1, 1e-300, 7e200, 10**6))


def test_a_step_without_a_single_item_has_no_share_and_no_nan():
    assert shares([0, 0], "mean") == [0.0, 0.0]
    assert shares([], "mean") == []


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_no_count_is_refused(weight):
    with pytest.raises(DataError, match=r"weight: it gave .* 0 or more"):
        shares([1, weight], "mean")


# Models with their own loss.


TINY = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def gpt2(transformers):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=13, n_embd=8, n_layer=1, n_head=2))


def llama(transformers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def t5(transformers):
    config = transformers.T5Config(
        vocab_size=13, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bart_decoder(transformers):
    config = transformers.BartConfig(
        vocab_size=13, d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8
    )
    return transformers.BartForCausalLM(config)


def bert(name, **more):
    return lambda transformers: getattr(transformers, name)(transformers.BertConfig(**TINY, **more))


#: Whether each shifts its labels.
MODELS = {
    "GPT2LMHeadModel": (gpt2, True),
    "LlamaForCausalLM": (llama, True),
    "BertLMHeadModel": (bert("BertLMHeadModel", is_decoder=True), True),
    "T5ForConditionalGeneration": (t5, False),
    "BartForCausalLM": (bart_decoder, False),
    "BertForMaskedLM": (bert("BertForMaskedLM"), False),
    "BertForTokenClassification": (bert("BertForTokenClassification", num_labels=13), False),
    "BertForSequenceClassification": (bert("BertForSequenceClassification", num_labels=3), False),
}


@pytest.fixture
def transformers(monkeypatch):
    library = pytest.importorskip("transformers")
    # Its losses round logits to float32, which would hide all differences below 1e-7.
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    return library


def masked_batch(model):
    ids = torch.randint(1, 13, (6, 5))
    if type(model).__name__.endswith("ForSequenceClassification"):
        return {"input_ids": ids, "labels": torch.tensor([0, 2, 1, -100, -100, 2])}
    labels = ids.clone()
    labels[torch.rand(6, 5) < 0.5] = -100
    labels[:3, 0], labels[0, 1:], labels[3:5] = 7, -100, -100  # the first row's only label is one that shifting drops
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_case_050_the_default_count_is_what_the_models_own_loss_averages_over(name, transformers):
    make, shifted = MODELS[name]
    model = make(transformers).double().eval()
    batch = masked_batch(model)
    labels = batch["labels"][..., 1:] if shifted else batch["labels"]
    assert item_counter(model, None, None)(batch) == (labels != -100).sum()
    wanted = whole(model, batch)
    for micro_batch in range(1, 7):
        assert_close(in_pieces(model, batch, 6, sizes(6, micro_batch)), wanted)


def test_multi_label_and_regression_heads_count_samples(transformers):
    for num_labels, labels in ((3, torch.rand(5, 3).round()), (1, torch.rand(5))):
        model = bert("BertForSequenceClassification", num_labels=num_labels)(transformers).double().eval()
        batch = {"input_ids": torch.randint(13, (5, 4)), "labels": labels}
        assert_close(in_pieces(model, batch, 5, (3, 2)), whole(model, batch))


def test_a_shifting_model_is_known_through_its_wrappers(transformers):
    class Adapted(nn.Module):
        """As peft wraps a model."""

        def __init__(self, model):
            super().__init__()
            self.base_model = model

        def get_base_model(self):
            return self.base_model

    model = llama(transformers)
    batch = {"labels": torch.zeros(2, 5, dtype=torch.int64)}
    for wrapped in (nn.DataParallel(model), torch.compile(model), Adapted(model), torch.compile(Adapted(model))):
        assert item_counter(wrapped, None, None)(batch) == 8


def test_a_users_own_model_with_shifted_labels_is_known():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(13, 4), nn.Linear(4, 13)

        def forward(self, input_ids, labels):
            logits = self.head(self.embed(input_ids))[:, :-1]
            shift_labels = labels[:, 1:]
            return {"loss": F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())}

    model = Own()
    batch = {"input_ids": torch.randint(13, (6, 5)), "labels": torch.randint(13, (6, 5))}
    batch["labels"][2:, 2:] = -100
    batch["labels"][4:, 0] = -100
    assert item_counter(model, None, None)(batch) == 12
    for micro_batch in range(1, 7):
        assert_close(in_pieces(model, batch, 6, sizes(6, micro_batch)), whole(model, batch))


def test_models_whose_mean_is_over_something_else_than_valid_labels():
    labels = torch.tensor([[3, 4, -100], [255, 1, 2]])
    ctc, segmentation = nn.Identity(), nn.Identity()
    ctc.loss_type, segmentation.loss_type = "ForCTC", "ForSemanticSegmentation"
    assert item_counter(ctc, None, None)({"labels": labels}) == 2
    assert item_counter(segmentation, None, None)({"labels": labels}) == 5
    segmentation.config = type("Config", (), {"semantic_loss_ignore_index": 1})
    assert item_counter(segmentation, None, None)({"labels": labels.abs() * 0 + 1}) == 0


def test_a_users_loss_on_a_shifting_model_sees_all_labels(transformers):
    labels = torch.zeros(2, 5, dtype=torch.int64)
    assert item_counter(llama(transformers), nn.CrossEntropyLoss(), None)({"labels": labels}) == 10


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_class_that_the_ignored_label_would_wrap_to_is_counted(dtype):
    labels = torch.tensor([100, 12, 100]).to(dtype) if dtype is torch.int8 else torch.tensor([156, 12, 156]).to(dtype)
    assert item_counter(nn.Linear(1, 1), nn.CrossEntropyLoss(), None)((torch.zeros(3, 1), labels)) == 3


def test_of_a_whole_batch_it_only_matters_whether_there_is_an_item():
    count = item_counter(nn.Linear(1, 1), nn.CrossEntropyLoss(), None)
    for labels in ([-100, -100, 2], [1, -100, 2], [-100, -100, -100], []):
        batch = (torch.zeros(len(labels), 1), torch.tensor(labels, dtype=torch.long))
        assert bool(count(batch, whole=True)) is bool(count(batch))
