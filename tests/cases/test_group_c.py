"""Batches, their pieces and what is accumulated: rows 43 to 61.

Rows 49 (resuming from disk), 52 and 63 (several processes) are not part of this version.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan, RecipeError
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import OOM, at_backward, at_forward, cap, regression, rows_of, rungs
from tests.cases.runs import assert_close, copied, data, rates, sgd, trainer_of
from tests.zoo import same


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def decay(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=6)


# Row 43: the effective batch.


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize(("largest", "micro_batch"), [(4, 4), (5, 4), (1, 1), (15, 8)])
def test_case_043_halving_doubles_the_accumulation_and_changes_nothing_else(optimizer, largest, micro_batch):
    plain = trainer_of(epochs=2, optimizer=optimizer, scheduler=decay)
    expected = plain.fit()
    model, stepped = regression(), []
    cap(model, largest)
    trainer = trainer_of(model, epochs=2, optimizer=optimizer, scheduler=decay)
    trainer._hooks.append(lambda event: stepped.append(event) if event.event == "step" else None)
    result = trainer.fit()
    assert result.plan == Plan(micro_batch=micro_batch)
    assert result.plan.accumulation(16) == 16 // micro_batch
    assert result.events[-1].as_dict()["plan"]["accumulation"] == 16 // micro_batch
    assert len(stepped) == result.steps == expected.steps == 8
    assert [event.num_samples for event in stepped] == [16] * 8
    assert rates(result) == rates(expected)
    assert result.losses == pytest.approx(expected.losses, abs=1e-6)
    assert_close(trainer, plain, atol=1e-5 if optimizer is adam else 1e-6)


# Rows 45 and 48: a size that is found is one that was tried in full.


def test_case_045_late_in_the_run_each_try_is_a_whole_forward_backward_and_step():
    """Memory is short from step 101 on: the size is found by doing that very step."""
    model, forwards, backwards, stepped = regression(), [], [], []

    def short(_module, args):
        forwards.append(len(args[0]))
        if len(stepped) >= 100 and len(args[0]) > 2:
            raise torch.OutOfMemoryError(OOM)

    model.register_forward_pre_hook(short)
    model[2].weight.register_hook(lambda _gradient: backwards.append(1))
    optimizer = sgd(model.parameters())
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    result = trainer_of(model, data(110 * 8), batch_size=8, optimizer=optimizer).fit()
    assert {event.step for event in result.fallbacks} == {100}
    assert forwards == [8] * 100 + [8, 8, 4] + [2] * 40
    assert len(backwards) == 100 + 40
    assert len(stepped) == result.steps == 110


def test_case_048_optimizer_state_that_comes_with_the_first_step_takes_its_room():
    """A model of memory: 16 rows fit without Adam's state and 8 with it."""
    plain = trainer_of(optimizer=adam)
    plain.fit()
    model = regression()
    optimizer = adam(model.parameters())

    def short(_module, args):
        if len(args[0]) > (8 if optimizer.state else 16):
            raise torch.OutOfMemoryError(OOM)

    model.register_forward_pre_hook(short)
    trainer = trainer_of(model, optimizer=optimizer)
    result = trainer.fit()
    assert [(event.rung, event.step) for event in result.fallbacks] == [("empty_cache", 1), ("halve_batch", 1)]
    assert result.plan == Plan(micro_batch=8)
    assert_close(trainer, plain, atol=1e-5)


def test_case_048_the_same_under_a_limit_that_counts():
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    peaks = [event.peak_bytes for event in rows_of(trainer_of(model, memory_limit="1MiB", optimizer=adam, batch_size=64, samples=data(256)).fit(), "step")]  # fmt: skip
    assert peaks[0] < peaks[1]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    limited = trainer_of(
        model, memory_limit=f"{(peaks[0] + peaks[1]) // 2}B", optimizer=adam, batch_size=64, samples=data(256)
    )
    result = limited.fit()
    assert {event.step for event in result.fallbacks} == {1}
    assert result.steps == 4


# Rows 50, 53 and 54: what a piece counts for.


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def language(lengths, *, width=9):
    """Token ids and their labels; positions behind a sequence's end are -100."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(7, (len(lengths), width), generator=generator)
    labels = torch.randint(7, (len(lengths), width), generator=generator)
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return tokens, labels


def token_mean(output, labels):
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


class WithLoss(Lm):
    """Carries its loss, as Hugging Face models do."""

    def forward(self, tokens, labels):
        return {"loss": token_mean(super().forward(tokens), labels)}


def one_step(make, batch, *, largest=math.inf, size=len, **rest):
    """Parameters after a step, and its loss."""
    torch.manual_seed(1)
    model = make().double()
    cap(model, largest, size=size)
    trainer = AdaptiveTrainer(model, [batch], optimizer=sgd, progress=False, **rest)
    result = trainer.fit()
    return copied(model), result.loss, result


def assert_same_step(found, expected):
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-12)
    assert found[1] == pytest.approx(expected[1], abs=1e-12)


LENGTHS = [(9, 8, 1, 2), (1, 1, 1, 9), (9, 9, 0, 0), (0, 3, 0, 5)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("largest", [2, 1])
def test_case_050_a_mean_over_tokens_is_that_of_the_whole_batch(lengths, largest):
    """The mean of the pieces' means is another number, as the row says."""
    batch = language(lengths)
    expected = one_step(Lm, batch, loss=token_mean)
    found = one_step(Lm, batch, loss=token_mean, largest=largest)
    assert found[2].plan == Plan(micro_batch=largest)
    assert_same_step(found, expected)
    torch.manual_seed(1)
    model = Lm().double()
    means = [token_mean(model(tokens), labels) for tokens, labels in zip(batch[0].split(2), batch[1].split(2), strict=True)]  # fmt: skip
    naive = sum(means).item() / len(means)
    assert not abs(naive - expected[1]) < 1e-3  # also where it is not a number


def test_case_050_the_same_for_a_model_that_carries_its_loss():
    tokens, labels = language(LENGTHS[0])
    batch = {"tokens": tokens, "labels": labels}

    def run(**rest):
        torch.manual_seed(1)
        model = WithLoss().double()
        trainer = AdaptiveTrainer(model, [batch], optimizer=sgd, progress=False, **rest)
        result = trainer.fit()
        return copied(model), result.loss, result

    with inject_oom(times=3):
        found = run()
    assert found[2].plan == Plan(micro_batch=1)
    assert_same_step(found, run())


def test_case_050_a_loss_that_says_nothing_is_weighted_by_samples_or_by_the_users_count():
    """A mean over positive targets only: by samples it comes out wrong, with the user's count right."""

    def masked(output, targets):
        wanted = targets > 0
        return functional.mse_loss(output[wanted], targets[wanted])

    def count(batch):
        return int((batch[1] > 0).sum())

    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(8, 8, generator=generator).double(), torch.ones(8, 1).double()
    targets[1:4] = -1
    batch = inputs, targets
    expected = one_step(regression, batch, loss=masked)
    assert_same_step(one_step(regression, batch, loss=masked, weight=count, largest=4), expected)
    by_samples = one_step(regression, batch, loss=masked, largest=4)
    pieces = [one_step(regression, (inputs[rows], targets[rows]), loss=masked) for rows in (slice(4), slice(4, 8))]
    assert by_samples[1] == pytest.approx(sum(loss for _, loss, _ in pieces) / 2, abs=1e-12)
    assert abs(by_samples[1] - expected[1]) > 1e-3


def pairs(num=8):
    generator = torch.Generator().manual_seed(6)
    return torch.randn(num, 8, generator=generator).double(), torch.randn(num, 1, generator=generator).double()


def divided_by_the_whole(output, targets):
    """The user's own sum / N_total, for a batch of 8."""
    return (output - targets).square().sum() / 8


@pytest.mark.parametrize("largest", [4, 3, 1])
@pytest.mark.parametrize(
    ("loss", "rest"),
    [
        (divided_by_the_whole, {"reduction": "sum"}),
        (nn.MSELoss(reduction="sum"), {}),
        (nn.MSELoss(reduction="sum"), {"reduction": "sum"}),
        (nn.MSELoss(), {}),
        (functional.mse_loss, {"reduction": "mean"}),
    ],
)
def test_case_053_a_loss_is_divided_once_or_not_at_all_and_so_it_is_logged(loss, rest, largest):
    expected = one_step(regression, pairs(), loss=loss, **rest)
    found = one_step(regression, pairs(), loss=loss, largest=largest, **rest)
    assert found[2].plan.accumulation(8) == 8 // found[2].plan.micro_batch > 1
    assert_same_step(found, expected)
    assert rows_of(found[2], "step")[0].loss == found[1]


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_case_054_the_last_batch_is_divided_by_what_it_holds(largest):
    """10 rows in batches of 4: the last one has two, and fewer pieces than the others."""
    plain = trainer_of(samples=data(10), batch_size=4, epochs=2)
    expected = plain.fit()
    model = regression()
    cap(model, largest)
    trainer = trainer_of(model, samples=data(10), batch_size=4, epochs=2)
    result = trainer.fit()
    assert [event.num_samples for event in rows_of(result, "step")] == [4, 4, 2] * 2
    assert result.losses == pytest.approx(expected.losses, abs=1e-6)
    assert_close(trainer, plain)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (x * self.w).square().mean()


def gradients_of_line(samples, **rest):
    """The gradient of each step, at w = 1."""
    model, seen = Line(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.w.grad.item()))
    AdaptiveTrainer(model, samples, optimizer=optimizer, progress=False, **rest).fit()
    return seen


def test_case_054_a_last_window_of_one_row_gives_50_and_not_12_and_a_half():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    expected = [15.0, 50.0]
    assert gradients_of_line(list(x), batch_size=4, shuffle=False) == expected
    assert gradients_of_line(list(x), batch_size=4, shuffle=False, plan=Plan(micro_batch=1)) == expected
    assert gradients_of_line(list(x.split(4)), plan=Plan(micro_batch=1)) == expected


@pytest.mark.parametrize("micro_batch", [4, 8, 5, 3, None])
def test_case_050_case_054_the_gradient_of_ten_is_77_whatever_the_pieces(micro_batch):
    x = torch.arange(1.0, 11.0)
    assert gradients_of_line([x], plan=Plan(micro_batch=micro_batch)) == [pytest.approx(77.0, abs=1e-5)]


# Row 56: clipping.


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (x @ self.w).float().mean()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_case_056_one_clip_after_the_last_piece_and_after_unscaling(monkeypatch, precision, micro_batch):
    """(2, 0) and (0, 2) to a norm of 1: (.707, .707); a clip for each piece would give (.447, .894).

    All in quarters, because fp16 has no room for the scale of the loss otherwise.
    """
    original, norms, moved = torch.nn.utils.clip_grad_norm_, [], []

    def clip(parameters, max_norm):
        norms.append(original(parameters, max_norm).item())

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: moved.append(model.w.grad.clone()))
    batch = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    plan = Plan(precision=precision, micro_batch=micro_batch)
    AdaptiveTrainer(model, [batch], optimizer=optimizer, max_grad_norm=0.25, plan=plan, progress=False).fit()
    assert norms == [pytest.approx(math.sqrt(8) / 4, abs=1e-3)]
    torch.testing.assert_close(moved[0] * 4, torch.tensor([0.7071, 0.7071]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_056_a_failure_clips_nothing_twice(attach):
    plain = trainer_of(max_grad_norm=0.1)
    plain.fit()
    model = regression()
    attach(model, 2, 3, 4)
    trainer = trainer_of(model, max_grad_norm=0.1)
    assert len(trainer.fit().fallbacks) == 3
    assert_close(trainer, plain)


# Rows 57 and 59: what couples the rows of a batch.


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return functional.normalize(x, dim=1)


def info_nce(model, batch):
    left, right = batch
    scores = model(left) @ model(right).T / 0.1
    return functional.cross_entropy(scores, torch.arange(len(left)))


def contrastive(ladder=None, largest=math.inf, **rest):
    torch.manual_seed(1)
    model = Encoder()
    seen = cap(model, largest)
    generator = torch.Generator().manual_seed(7)
    samples = torch.utils.data.TensorDataset(*(torch.randn(24, 8, generator=generator) for _ in range(2)))
    trainer = AdaptiveTrainer(model, samples, step=info_nce, optimizer=sgd, batch_size=8, ladder=ladder, progress=False, **rest)  # fmt: skip
    return trainer, seen


def test_case_057_a_loss_that_is_not_separable_is_never_cut_and_the_reason_is_told():
    plain, _ = contrastive()
    expected = plain.fit()
    trainer, seen = contrastive(separable=False)
    with inject_oom(step=2, times=2):
        result = trainer.fit()
    assert rungs(result) == ["empty_cache", "gradient_checkpointing"]
    assert "separable=False" in result.fallbacks[1].skipped["halve_batch"]
    assert set(seen) == {8}
    assert result.losses == expected.losses
    assert same(copied(trainer.model), copied(plain.model)) is None


def test_case_057_where_nothing_else_is_left_it_is_refused_with_that_reason():
    trainer, seen = contrastive(separable=False, largest=4, ladder=["empty_cache", "halve_batch"])
    with pytest.raises(LadderExhausted, match="separable=False"):
        trainer.fit()
    assert set(seen) == {8}


def test_case_057_evaluation_and_suspicion_cut_nothing_either():
    model = Encoder()
    seen = cap(model, math.inf)
    samples = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 8))

    def loss(output, targets):
        return functional.cross_entropy(output @ targets.T, torch.arange(len(output)))

    trainer = AdaptiveTrainer(
        model, samples, loss=loss, batch_size=8, separable=False, eval_data=samples, progress=False
    )
    with inject_oom(phase="evaluate"), inject_oom(phase="evaluate"), pytest.raises(LadderExhausted):
        trainer.fit()
    with (
        inject_oom(message="RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        pytest.raises(RuntimeError, match="CUDNN"),
    ):
        trainer.fit()
    assert set(seen) <= {8}


def test_case_057_nor_may_a_rung_of_the_users_own_cut():
    trainer, seen = contrastive(separable=False, ladder=[lambda plan: replace(plan, micro_batch=4)])
    with inject_oom(), pytest.raises(LadderExhausted, match="separable=False"):
        trainer.fit()
    assert set(seen) <= {8}


def test_case_057_a_plan_that_cuts_is_refused_before_training():
    with pytest.raises(RecipeError, match="separable=False"):
        contrastive(separable=False, plan=Plan(micro_batch=4))


def test_case_057_nor_may_a_plan_cut_the_batches_of_a_loader():
    """Their sizes are known only when they come."""
    batches = [(torch.randn(8, 8), torch.randn(8, 8))]
    with pytest.raises(RecipeError, match="micro_batch 4 cuts larger batches, which separable=False forbids"):
        AdaptiveTrainer(Encoder(), batches, step=info_nce, separable=False, plan=Plan(micro_batch=4), progress=False)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)) for _ in range(2)))

    def forward(self, x):
        return self.blocks(x)


def normed_batch():
    torch.manual_seed(0)
    return torch.randn(8, 2) + torch.arange(8.0)[:, None]


@pytest.mark.parametrize(("micro_batch", "counted", "mean"), [(8, 1, 0.3633), (4, 2, 0.7137), (2, 4, 1.3574)])
def test_case_059_batch_norm_statistics_move_once_for_each_piece(micro_batch, counted, mean):
    """What halving means for such a model, in numbers: it is why the fallback says that it is changed."""
    batch = normed_batch()
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    trainer = AdaptiveTrainer(
        model, [batch], step=lambda module, rows: module(rows).square().mean(), plan=Plan(micro_batch=micro_batch), progress=False,
    )  # fmt: skip
    trainer.fit()
    assert model[0].num_batches_tracked.item() == counted
    assert model[0].running_mean[0].item() == pytest.approx(mean, abs=1e-4)


def test_case_059_gradient_checkpointing_comes_first_and_halving_says_that_it_changes(caplog):
    model = Normed()
    trainer = AdaptiveTrainer(
        model, [normed_batch()] * 3, step=lambda module, rows: module(rows).square().mean(), progress=False
    )
    with caplog.at_level(logging.WARNING, logger="adaptive_trainer"), inject_oom(step=2, times=3):
        result = trainer.fit()
    assert rungs(result) == ["empty_cache", "gradient_checkpointing", "halve_batch"]
    assert [event.fidelity for event in result.fallbacks] == ["bit", "bit", "changed"]
    assert "fidelity changed" in caplog.records[2].getMessage()
    assert model.blocks[0][0].num_batches_tracked.item() == 1 + 2 + 2


def test_case_059_no_piece_of_one_row_is_made():
    """One row has no batch statistics: 5 rows end as 3 and 2, and 7 as 3, 2 and 2."""
    for rows, sizes in ((5, [3, 2]), (7, [3, 2, 2]), (3, [3])):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        seen = cap(model, 3)
        trainer = AdaptiveTrainer(
            model, [torch.randn(rows, 2)], step=lambda module, piece: module(piece).square().mean(), progress=False
        )
        trainer.fit()
        assert seen[-len(sizes) :] == sizes


def test_case_059_batch_norm_in_evaluation_mode_couples_nothing():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1))
    model[0].eval()
    seen = cap(model, 1)
    result = trainer_of(model, batch_size=4).fit()
    assert rungs(result) == ["empty_cache", "halve_batch", "halve_batch"]
    assert {event.fidelity for event in result.fallbacks[1:]} == {"rounding"}
    assert seen[-1] == 1


# Row 60: what a batch may be.


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    temperature: float = 2.0


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    rest: dict


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    name: str


def rows_of_numbers(num):
    generator = torch.Generator().manual_seed(num)
    return torch.randn(num, 8, generator=generator), torch.randn(num, 1, generator=generator)


def mean_square(model, x, y):
    return functional.mse_loss(model(x), y)


def scaled_by_words(model, batch):
    """Each row's loss is weighted by the length of its text, so a text in the wrong piece shows."""
    lengths = torch.tensor([float(len(text)) for text in batch["texts"]])[:, None]
    return ((model(batch["x"]) - batch["y"]).square() * lengths).mean()


#: How a batch of so many rows is made, and how a step reads it.
STRUCTURES = {
    "pair": (lambda x, y: (x, y), lambda m, b: mean_square(m, *b)),
    "list_pair": (lambda x, y: [x, y], lambda m, b: mean_square(m, *b)),
    "scalar": (lambda x, y: {"x": x, "y": y, "temperature": 2.0}, lambda m, b: mean_square(m, b["x"], b["y"]) / b["temperature"]),
    "numpy_scalar": (lambda x, y: {"x": x, "y": y, "temperature": torch.tensor(2.0).numpy()[()]}, lambda m, b: mean_square(m, b["x"], b["y"]) / float(b["temperature"])),
    "zero_dimensional": (lambda x, y: {"x": x, "y": y, "temperature": torch.tensor(2.0)}, lambda m, b: mean_square(m, b["x"], b["y"]) / b["temperature"]),
    "other_length": (lambda x, y: {"x": x, "y": y, "mean": torch.full((8,), 0.5)}, lambda m, b: mean_square(m, b["x"] - b["mean"], b["y"])),
    "strings": (lambda x, y: {"x": x, "y": y, "texts": ["a" * (row + 1) for row in range(len(x))]}, scaled_by_words),
    "string_tuple": (lambda x, y: {"x": x, "y": y, "texts": tuple("a" * (row + 1) for row in range(len(x)))}, scaled_by_words),
    "one_string": (lambda x, y: {"x": x, "y": y, "split": "train"}, lambda m, b: mean_square(m, b["x"], b["y"]) * len(b["split"])),
    "nested": (lambda x, y: {"inputs": {"image": {"x": x}}, "more": [y, None]}, lambda m, b: mean_square(m, b["inputs"]["image"]["x"], b["more"][0])),
    "dict_of_lists": (lambda x, y: {"x": list(x), "y": [float(row) for row in y]}, lambda m, b: mean_square(m, torch.stack(b["x"]), torch.tensor(b["y"])[:, None])),
    "list_of_dicts": (lambda x, y: [{"x": a, "y": b} for a, b in zip(x, y, strict=True)], lambda m, b: mean_square(m, torch.stack([row["x"] for row in b]), torch.stack([row["y"] for row in b]))),
    "dataclass": (Sample, lambda m, b: mean_square(m, b.x, b.y) / b.temperature),
    "frozen_dataclass": (lambda x, y: Frozen(x, {"y": y, "none": None}), lambda m, b: mean_square(m, b.x, b.rest["y"])),
    "named_tuple": (lambda x, y: Named(x, y, "name"), lambda m, b: mean_square(m, b.x, b.y) * len(b.name)),
    "none": (lambda x, y: (x, None, y), lambda m, b: mean_square(m, b[0], b[2])),
    "csr": (lambda x, y: (x.to_sparse_csr(), y), lambda m, b: mean_square(m, b[0].to_dense(), b[1])),
    "coo": (lambda x, y: {"x": x.to_sparse(), "y": y}, lambda m, b: mean_square(m, b["x"].to_dense(), b["y"])),
    "numpy": (lambda x, y: {"x": x.numpy(), "y": y}, lambda m, b: mean_square(m, torch.as_tensor(b["x"]), b["y"])),
    "tensor": (lambda x, y: torch.cat((x, y), 1), lambda m, b: mean_square(m, b[:, :8], b[:, 8:])),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", STRUCTURES)
def test_case_060_every_kind_of_batch_is_cut_along_its_samples(kind):
    """Batches of 4, 2, 5 and 9 rows in pieces of at most two; with 2 rows and two fields nothing else tells."""
    make, step = STRUCTURES[kind]
    ends = []
    for largest in (math.inf, 2):
        model = regression()
        seen = cap(model, largest)
        batches = [make(*rows_of_numbers(num)) for num in (4, 2, 5, 9)]
        trainer = trainer_of(model, batches, step=step, batch_size=None)
        result = trainer.fit()
        ends.append((trainer, result, seen))
    (plain, expected, whole), (cut, result, seen) = ends
    assert whole == [4, 2, 5, 9]
    assert [rows for rows in seen if rows <= 2] == [2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 1]
    assert "halve_batch" in rungs(result)
    assert [event.num_samples for event in rows_of(result, "step")] == [4, 2, 5, 9]
    assert result.losses == pytest.approx(expected.losses, abs=1e-5)
    assert_close(cut, plain, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["pair", "list_pair", "dataclass", "named_tuple", "list_of_dicts", "dict_of_lists", "strings", "csr"])  # fmt: skip
def test_case_060_two_rows_are_cut_into_single_ones(kind):
    make, step = STRUCTURES[kind]
    ends = []
    for largest in (math.inf, 1):
        model = regression()
        seen = cap(model, largest)
        trainer = trainer_of(model, [make(*rows_of_numbers(2))] * 2, step=step, batch_size=None)
        trainer.fit()
        ends.append(trainer)
    assert seen == [2, 2, 1, 1, 1, 1]
    assert_close(ends[1], ends[0], atol=1e-5)


class Opaque:
    """A user's own kind of batch, of which nothing is known."""

    def __init__(self, num):
        self.x, self.y = rows_of_numbers(num)

    def __len__(self):
        return len(self.x)


def opaque_step(model, batch):
    return mean_square(model, batch["graph"].x, batch["graph"].y) + batch["x"].sum() * 0


def test_case_060_an_unknown_kind_is_refused_with_its_place_only_when_it_has_to_be_cut():
    batches = [{"graph": Opaque(4), "x": torch.ones(4, 1)}] * 2
    model = regression()
    seen = cap(model, math.inf)
    assert trainer_of(model, batches, step=opaque_step, batch_size=None).fit().steps == 2
    with inject_oom(times=2):
        result = trainer_of(model, batches, step=opaque_step, batch_size=None).fit()
    assert rungs(result) == ["empty_cache", "amp"]
    assert 'batch["graph"]' in result.fallbacks[1].skipped["halve_batch"]
    assert "Opaque" in result.fallbacks[1].skipped["halve_batch"]
    assert set(seen) == {4}
    with inject_oom(times=math.inf), pytest.raises(LadderExhausted, match="Opaque"):
        trainer_of(model, batches, step=opaque_step, batch_size=None).fit()


# Row 61: the user's own loaders.


class Lengthless:
    """A sampler that says no length."""

    def __iter__(self):
        return iter(range(10))


class Odd(BatchSampler):
    """Batches of many sizes."""

    def __init__(self):
        super().__init__(SequentialSampler(range(10)), 3, drop_last=False)

    def __iter__(self):
        return iter([[9, 0], [1, 2, 3, 4, 5], [6], [7, 8]])

    def __len__(self):
        return 4


LOADERS = {
    "batch_sampler": (lambda samples: DataLoader(samples, batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)), [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
    "dropping": (lambda samples: DataLoader(samples, batch_sampler=BatchSampler(SequentialSampler(range(10)), 3, drop_last=True)), [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
    "odd": (lambda samples: DataLoader(samples, batch_sampler=Odd()), [[9, 0], [1, 2, 3, 4, 5], [6], [7, 8]]),
    "lists": (lambda samples: DataLoader(samples, batch_sampler=[[0, 1, 2, 3], [9, 8]]), [[0, 1, 2, 3], [9, 8]]),
    "generator": (lambda samples: DataLoader(samples, batch_size=4, sampler=Lengthless()), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    "no_batches": (lambda samples: DataLoader(samples, batch_size=None, sampler=[[0, 1, 2], [3, 4]]), [[0, 1, 2], [3, 4]]),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOADERS)
def test_case_061_batches_come_exactly_as_the_users_sampler_gives_them(kind):
    make, expected = LOADERS[kind]
    inputs = torch.arange(10.0)[:, None].expand(10, 8).clone()
    samples = torch.utils.data.TensorDataset(inputs, torch.randn(10, 1))
    iterators, given = [], []

    class Counted(DataLoader):
        def __iter__(self):
            iterators.append(1)
            return super().__iter__()

    model = regression()

    def check(_module, args):
        given.append([int(row) for row in args[0][:, 0]])
        if len(args[0]) > 1:
            raise torch.OutOfMemoryError(OOM)

    model.register_forward_pre_hook(check)
    loader = make(samples)
    loader.__class__ = Counted
    result = trainer_of(model, loader, batch_size=None, epochs=2).fit()
    assert len(iterators) == 2
    assert result.steps == 2 * len(expected)
    assert [event.num_samples for event in rows_of(result, "step")] == [len(batch) for batch in expected] * 2
    assert [index for piece in given if len(piece) == 1 for index in piece] == sum(expected, []) * 2  # noqa: RUF017  a few
