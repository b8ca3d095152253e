"""Where and when memory runs out: rows 118, 123, 124, 125 and 127.

Row 128 (a driver that spills to host memory raises nothing, so nothing can be answered) is a matter of the
documentation.
"""

import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan, loop
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import at_backward, at_forward, cap, regression, rows_of, rungs
from tests.zoo import ZOO, loss, same, state_of


def data(num_samples=64):
    generator = torch.Generator().manual_seed(2)
    return torch.utils.data.TensorDataset(
        torch.randn(num_samples, 8, generator=generator), torch.randn(num_samples, 1, generator=generator)
    )


def trainer_of(model=None, **rest):
    arguments = {
        "loss": functional.mse_loss, "batch_size": 16, "progress": False,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    } | rest  # fmt: skip
    return AdaptiveTrainer(regression() if model is None else model, data(), **arguments)


def test_case_118_evaluation_that_does_not_fit_is_cut_and_the_training_is_not():
    """A cap of 5 rows in evaluation only, 37 rows in batches of 16: whole-set means, and the training's plan stays."""
    recorded = []

    def note(module, _args, output):
        if not module.training:
            recorded.append(output.requires_grad)

    plain = trainer_of(eval_data=data(37), metrics={"error": functional.l1_loss})
    expected = plain.fit()
    model = regression()
    model.register_forward_hook(note)
    seen = cap(model, 5, when=lambda module: not module.training)
    capped = trainer_of(model, eval_data=data(37), metrics={"error": functional.l1_loss})
    result = capped.fit()
    assert result.plan == Plan()
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-6)
    inputs, targets = data(37)[:]
    with torch.no_grad():
        whole = functional.mse_loss(model(inputs), targets).item()
    assert result.metrics["loss"] == pytest.approx(whole, rel=1e-6)
    assert {event.scope for event in result.fallbacks} == {"evaluation"}
    assert rungs(result) == ["empty_cache", "halve_batch", "halve_batch"]
    assert seen == [16, 16, 8, *[4] * 8, 3, 2]
    assert recorded[0] is False
    assert not any(recorded)
    for mine, theirs in zip(capped.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert (
        same(capped._loop.workshop.state.optimizer.state_dict(), plain._loop.workshop.state.optimizer.state_dict())
        is None
    )


def test_case_118_a_training_that_was_cut_evaluates_whole_batches_and_goes_on_as_it_was():
    """The other way round: the training's micro-batch is none of the evaluation's business."""
    model = regression()
    sizes = cap(model, 4, when=lambda module: module.training)
    evaluated = cap(model, math.inf, when=lambda module: not module.training)
    result = trainer_of(model, eval_data=data(32), eval_steps=2).fit()
    assert result.plan == Plan(micro_batch=4)
    assert evaluated == [16] * 4
    assert sizes[-8:] == [4] * 8


def test_case_118_outputs_of_one_piece_are_gone_before_the_next_one_runs():
    alive, counts = [], []
    model = regression()

    def count(module, _args):
        if not module.training:
            counts.append(sum(reference() is not None for reference in alive))

    def watch(module, _args, output):
        if not module.training:
            alive.append(weakref.ref(output))

    model.register_forward_pre_hook(count)
    model.register_forward_hook(watch)
    trainer_of(model, eval_data=data(64)).fit()
    assert counts == [0] * 4


def tokens_of(batch):
    return batch.numel()


def long_at(position, *, num=40, rows=4, usual=6, long=48):
    """Batches of token ids, one of them long."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randint(13, (rows, long if index == position else usual), generator=generator),
            torch.randint(4, (rows,), generator=generator),
        )
        for index in range(1, num + 1)
    ]


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)).mean(1))


@pytest.mark.parametrize("epochs", [1, 2])
def test_case_123_one_long_batch_late_in_the_epoch_costs_one_step(epochs):
    """A cap of 64 tokens, at position 37 of 40 there are 192, in each epoch."""
    ends = []
    for capped in (False, True):
        torch.manual_seed(1)
        model = Tokens()
        seen = cap(model, 64 if capped else math.inf, size=tokens_of)
        trainer = AdaptiveTrainer(model, long_at(37), loss=loss, epochs=epochs, progress=False)
        ends.append((trainer.fit(), model, seen))
    (expected, plain, _), (result, cut, seen) = ends
    assert result.steps == expected.steps == 40 * epochs
    assert [(event.rung, event.scope, event.step) for event in result.fallbacks] == [
        ("halve_batch", "step", 36 + 40 * epoch) for epoch in range(epochs)
    ]
    assert {event.cause for event in rows_of(result, "out_of_memory")} == {"long_batch"}
    assert result.plan == Plan()
    assert seen[36:41] == [192, 48, 48, 48, 48]
    assert set(seen[41:]) == {24} if epochs == 1 else seen.count(24) == 78
    for mine, theirs in zip(cut.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_case_123_a_long_batch_is_more_samples_too():
    """Another kind of long: the user's sampler gives one batch of many short samples."""
    batches = long_at(0, num=12)
    batches[8] = (batches[8][0].repeat(6, 1), batches[8][1].repeat(6))
    torch.manual_seed(1)
    model = Tokens()
    seen = cap(model, 10)
    result = AdaptiveTrainer(model, batches, loss=loss, progress=False).fit()
    assert [(event.rung, event.scope) for event in result.fallbacks] == [("halve_batch", "step")]
    assert seen[8:14] == [24, 4, 4, 4, 4, 4]
    assert seen[-1] == 4
    assert result.plan == Plan()


HELD_BY_OTHERS = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity; 612.00 MiB already allocated; "
    "14.00 MiB free; 620.00 MiB reserved in total by PyTorch)"
)
HELD_BY_A_NAMED_ONE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 31.75 GiB of which 14.00 MiB is "
    "free. Process 4242 has 31.12 GiB memory in use. Including non-PyTorch memory, this process has 634.00 MiB memory "
    "in use. Of the allocated memory 612.00 MiB is allocated by PyTorch, and 8.00 MiB is reserved by PyTorch but "
    "unallocated."
)


@pytest.mark.parametrize("message", [HELD_BY_OTHERS, HELD_BY_A_NAMED_ONE])
def test_case_124_a_device_that_others_hold_is_waited_for_once_and_then_said_so(message, monkeypatch):
    waited = []
    monkeypatch.setattr(loop.time, "sleep", waited.append)
    trainer = trainer_of()
    with (
        inject_oom(step=2, times=math.inf, message=message),
        pytest.raises(LadderExhausted, match=r"31\.1 GiB") as caught,
    ):
        trainer.fit()
    failures = [event for event in caught.value.trail if event.event == "out_of_memory"]
    assert len(failures) == 2
    assert {event.cause for event in failures} == {"other_process"}
    assert failures[0].other_processes_bytes == pytest.approx(31.1 * 2**30, rel=0.01)
    assert waited == [loop.WAIT_SECONDS]
    assert "other processes" in caught.value.skipped["halve_batch"]
    assert trainer._loop.descent.plan == Plan()


def test_case_124_others_that_give_the_device_back_cost_nothing(monkeypatch):
    monkeypatch.setattr(loop.time, "sleep", lambda _seconds: None)
    ends = []
    for disturbed in (False, True):
        trainer = trainer_of()
        if disturbed:
            with inject_oom(step=2, message=HELD_BY_OTHERS):
                result = trainer.fit()
            assert rungs(result) == ["empty_cache"]
            assert result.plan == Plan()
        else:
            trainer.fit()
        ends.append(state_of(trainer))
    assert same(ends[1], ends[0]) is None


FRAGMENTED = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 39.39 GiB of which 1.06 GiB is free. "
    "Process 11 has 38.33 GiB memory in use. Of the allocated memory 22.91 GiB is allocated by PyTorch, and 14.93 GiB "
    "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
FRAGMENTED_BEFORE = (
    "CUDA out of memory. Tried to allocate 4.00 GiB (GPU 0; 39.39 GiB total capacity; 22.91 GiB already allocated; "
    "1.06 GiB free; 37.84 GiB reserved in total by PyTorch) If reserved memory is >> allocated memory try setting "
    "max_split_size_mb to avoid fragmentation."
)


@pytest.mark.parametrize("message", [FRAGMENTED, FRAGMENTED_BEFORE])
@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_125_fragmentation_is_answered_by_freeing_the_cache_alone(attach, message):
    plain = trainer_of()
    plain.fit()
    model = regression()
    attach(model, 1, message=message)
    trainer = trainer_of(model)
    result = trainer.fit()
    (failure,) = rows_of(result, "out_of_memory")
    assert failure.cause == "fragmentation"
    assert rungs(result) == ["empty_cache"]
    assert result.plan == Plan()
    assert same(state_of(trainer)["optimizer"], state_of(plain)["optimizer"]) is None


def test_case_125_where_that_is_not_enough_the_walk_goes_on():
    model = regression()
    at_forward(model, 1, 2, message=FRAGMENTED)
    result = trainer_of(model).fit()
    assert rungs(result) == ["empty_cache", "halve_batch"]
    assert result.plan == Plan(micro_batch=8)


@pytest.mark.parametrize("attach", [at_forward, at_backward])
@pytest.mark.parametrize("passages", [(1,), (1, 3)])
def test_case_127_a_peak_of_the_first_iteration_shrinks_nothing(attach, passages):
    """Also where the first iteration after the first one peaks again."""
    model = ZOO["mlp"].make()
    attach(model, *passages)
    trainer = AdaptiveTrainer(model, ZOO["mlp"].data(32), loss=loss, batch_size=8, progress=False)
    result = trainer.fit()
    assert rungs(result) == ["empty_cache"] * len(passages)
    assert result.plan == Plan()
    plain = AdaptiveTrainer(ZOO["mlp"].make(), ZOO["mlp"].data(32), loss=loss, batch_size=8, progress=False)
    plain.fit()
    assert same(state_of(trainer), state_of(plain)) is None
