"""A peak that only one long batch has costs only that step: the plan for ordinary steps stays. Row 123."""

import json
import math

import pytest
import torch
from torch import nn

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import OOM, at_forward, cap, rows_of, rungs
from tests.zoo import OPTIMIZERS, decay, loss

VOCABULARY = 13
USUAL, LONG, POSITION, NUM = 6, 48, 37, 40


class Tokens(nn.Module):
    """A model whose memory is a matter of tokens."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class TokenLabels(Tokens):
    """One label for each token."""

    def forward(self, tokens):
        return self.head(self.embed(tokens)).transpose(1, 2)


def tokens_of(batch):
    return batch.numel()


def batch_of(rows, length, seed, *, per_token=False):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, length) if per_token else (rows,)
    return (
        torch.randint(VOCABULARY, (rows, length), generator=generator),
        torch.randint(4, shape, generator=generator),
    )


def batches(*, num=NUM, rows=8, long=(POSITION,), length=LONG, usual=USUAL, **rest):
    """Batches of ``rows`` sequences; at the positions ``long``, counted from 1, they are longer."""
    return [batch_of(rows, length if at in long else usual, at, **rest) for at in range(1, num + 1)]


def run(data, largest, *, model=Tokens, plan=None, ladder=None, size=tokens_of, **rest):
    """Train under a cap of tokens. Returns result, model and the tokens of each forward."""
    torch.manual_seed(1)
    model = model()
    seen = cap(model, largest, size=size)
    trainer = AdaptiveTrainer(
        model, data, loss=loss, optimizer=OPTIMIZERS["sgd"], scheduler=decay, plan=plan, ladder=ladder, progress=False, **rest
    )  # fmt: skip
    return trainer.fit(), model, seen


def assert_close(model, other):
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("largest", [48, 50, 96, 200, 383])
def test_one_long_batch_at_position_37_of_40_costs_one_row_of_each_kind(largest, per_token, tmp_path):
    """384 tokens where 48 are usual. The one cut is at once as fine as what is known to fit."""
    data = batches(per_token=per_token)
    model = TokenLabels if per_token else Tokens
    expected, plain, _ = run(data, math.inf, model=model)
    result, cut, seen = run(data, largest, model=model, run_dir=tmp_path)
    (failure,), (fallback,) = rows_of(result, "out_of_memory"), rows_of(result, "fallback")
    assert (failure.step, failure.cause) == (36, "long_batch")
    assert (fallback.step, fallback.scope, fallback.rung) == (36, "step", "halve_batch")
    assert "longer" in fallback.skipped["empty_cache"]
    assert fallback.old == result.plan == Plan()
    assert fallback.new == Plan(micro_batch=1)
    assert not rows_of(result, "climb")
    assert seen[:36] == [48] * 36
    assert seen[36] == 384
    assert seen[-3:] == [48] * 3
    assert max(seen[37:]) <= largest
    assert sum(seen[37:-3]) == 384
    assert_close(cut, plain)
    assert result.losses == pytest.approx(expected.losses, abs=1e-6)
    assert [event.lr for event in rows_of(result, "step")] == [event.lr for event in rows_of(expected, "step")]
    assert [event.step for event in rows_of(result, "step")] == list(range(1, 41))
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    told = [row for row in rows if row["event"] in {"fallback", "climb"}]
    assert [(row["scope"], row["new"]["micro_batch"], row["new"]["accumulation"]) for row in told] == [("step", 1, 8)]


def test_the_cut_is_no_finer_than_needed():
    """Twice as long as usual, so half as many rows: two pieces."""
    result, _, seen = run(batches(length=12), 50)
    assert [event.new.micro_batch for event in result.fallbacks] == [4]
    assert seen[36:40] == [96, 48, 48, 48]


def test_what_a_longer_batch_has_shown_to_fit_is_used_for_the_next_one():
    """At position 5 comes one of 80 tokens that fits; the one of 160 is then cut in two and not into more."""
    data = batches(long=(37,), length=20)
    data[4] = batch_of(8, 10, 5)
    result, _, seen = run(data, 80)
    assert [(event.rung, event.scope, event.new.micro_batch) for event in result.fallbacks] == [
        ("halve_batch", "step", 4)
    ]
    assert seen[36:40] == [160, 80, 80, 48]


def test_every_long_batch_costs_its_own_step_and_no_other():
    result, cut, seen = run(batches(long=(10, 20, 30)), 60)
    assert [(event.step, event.scope) for event in result.fallbacks] == [(9, "step"), (19, "step"), (29, "step")]
    assert result.plan == Plan()
    assert seen.count(48) == 37 + 3 * 8
    assert_close(cut, run(batches(long=(10, 20, 30)), math.inf)[1])


def test_a_long_batch_may_need_more_than_its_first_cut():
    """Memory that grows faster than tokens: the second cut is the step's own too."""
    result, _, seen = run(batches(length=12), 700, size=lambda batch: len(batch) * batch.shape[1] ** 2)
    assert [(event.rung, event.scope, event.new.micro_batch) for event in result.fallbacks] == [
        ("halve_batch", "step", 4)
    ]
    result, _, seen = run(batches(length=12), 300, size=lambda batch: len(batch) * batch.shape[1] ** 2)
    assert [(event.rung, event.scope, event.new.micro_batch) for event in result.fallbacks] == [
        ("halve_batch", "step", 4), ("halve_batch", "step", 2),
    ]  # fmt: skip
    assert result.plan == Plan()
    assert seen[-3:] == [288] * 3


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_long_batch_is_long_in_every_piece_and_phase(phase):
    data = batches(num=8, long=(6,))
    torch.manual_seed(1)
    trainer = AdaptiveTrainer(Tokens(), data, loss=loss, plan=Plan(micro_batch=4), progress=False)
    with inject_oom(step=6, phase=phase, micro_batch=1):
        result = trainer.fit()
    assert [(event.rung, event.scope) for event in result.fallbacks] == [("halve_batch", "step")]
    assert result.plan == Plan(micro_batch=4)


def test_with_dropout_the_samples_are_still_each_used_once():
    result, _, seen = run(batches(num=10, long=(7,)), 60, model=lambda: Tokens(dropout=0.3))
    assert result.steps == 10
    assert result.fallbacks[0].fidelity == "statistical"
    assert sum(seen) - seen[6] == 9 * 48 + 384


# What is no long batch.


def test_a_batch_that_is_hardly_longer_lowers_the_plan_for_good():
    result, _, seen = run(batches(num=10, long=(5,), length=8), 60)
    assert rungs(result) == ["empty_cache", "halve_batch"]
    assert {event.scope for event in result.fallbacks} == {"run"}
    assert result.plan == Plan(micro_batch=4)
    assert seen[-1] == 24


def test_the_first_batch_is_not_long_because_nothing_is_known_yet():
    result, _, _ = run(batches(num=10, long=(1,)), 60)
    assert {event.cause for event in rows_of(result, "out_of_memory")} == {"activations"}
    assert result.plan == Plan(micro_batch=1)


def test_more_samples_in_pieces_of_the_usual_size_are_not_long():
    """32 samples where 8 are usual, but always 4 at a time: what failed is no larger than what went before."""
    data = [batch_of(32 if at == 6 else 8, USUAL, at) for at in range(1, 9)]
    torch.manual_seed(1)
    model = Tokens()
    at_forward(model, 12)
    result = AdaptiveTrainer(model, data, loss=loss, plan=Plan(micro_batch=4), progress=False).fit()
    assert [event.cause for event in rows_of(result, "out_of_memory")] == ["activations"]
    assert rungs(result) == ["empty_cache"]
    assert result.plan == Plan(micro_batch=4)


def test_a_long_batch_under_a_plan_that_was_lowered_is_measured_by_that_plan():
    """At first 8 rows at a time, then 4: of the long batch even 4 are more than usual."""
    data = batches(num=20, long=(15,), length=12)
    torch.manual_seed(1)
    model = Tokens()
    seen = cap(model, 30, size=tokens_of)
    result = AdaptiveTrainer(model, data, loss=loss, progress=False).fit()
    assert [(event.rung, event.scope) for event in result.fallbacks] == [
        ("empty_cache", "run"), ("halve_batch", "run"), ("halve_batch", "step"),
    ]  # fmt: skip
    assert result.plan == Plan(micro_batch=4)
    assert seen[-10:] == [24] * 10


# Where it cannot be cut.


def test_a_long_batch_that_may_not_be_cut_takes_the_next_rung_for_the_run():
    data = batches(num=10, long=(7,))

    def largest(model):
        return 400 if "forward" in model.blocks[0].__dict__ else 60

    torch.manual_seed(1)
    model = Tokens()

    def check(module, args):
        if args[0].numel() > largest(module):
            raise torch.OutOfMemoryError(OOM)

    model.register_forward_pre_hook(check)
    result = AdaptiveTrainer(model, data, loss=loss, separable=False, progress=False).fit()
    assert [(event.rung, event.scope) for event in result.fallbacks] == [("gradient_checkpointing", "run")]
    assert result.plan == Plan(gradient_checkpointing=True)


def test_a_build_rung_on_top_of_a_long_batchs_cut_leaves_the_micro_batch_of_the_others():
    data = batches(num=10, long=(7,), rows=2)
    torch.manual_seed(1)
    model = Tokens()
    seen = cap(model, math.inf)
    at_forward(model, 7, 8)
    result = AdaptiveTrainer(model, data, loss=loss, progress=False).fit()
    assert [(event.rung, event.scope) for event in result.fallbacks] == [
        ("halve_batch", "step"), ("gradient_checkpointing", "run"),
    ]  # fmt: skip
    assert result.plan == Plan(gradient_checkpointing=True)
    assert seen == [2] * 7 + [1, 1, 1] + [2] * 3


def test_one_sample_that_never_fits_is_the_end_and_the_plan_of_the_run_is_as_it_was():
    torch.manual_seed(1)
    model = Tokens()
    cap(model, 47, size=tokens_of)
    trainer = AdaptiveTrainer(
        model, batches(num=10, long=(7,), rows=2), loss=loss, progress=False, ladder=["halve_batch"]
    )
    with pytest.raises(LadderExhausted) as caught:
        trainer.fit()
    assert trainer._loop.track.step == 6
    assert trainer._loop.descent.plan == Plan()
    assert "one sample" in caught.value.skipped["halve_batch"]
