"""Law 1, Replay: a failed attempt leaves nothing behind, bit for bit."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan
from adaptive_trainer.testing import inject_oom
from tests.zoo import OPTIMIZERS, ZOO, decay, loss, same, state_of

STEPS = 5
HALVE_ONLY = ["halve_batch"]


def trainer_of(kind, *, steps=STEPS, optimizer="adam", plan=None, ladder=None, **rest):
    member = ZOO[kind]
    return AdaptiveTrainer(
        member.make(),
        member.data(40),
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        scheduler=decay,
        batch_size=8,
        steps=steps,
        plan=plan,
        ladder=ladder,
        max_grad_norm=1.0,
        progress=False,
        **rest,
    )


def took_the_plan_by_itself(kind, at, plan, *, steps=STEPS, **rest):
    """The state of a run that nothing disturbed, and that went on with ``plan`` from step ``at`` of its own accord."""
    trainer = trainer_of(kind, steps=at - 1, **rest)
    if at > 1:
        trainer.fit()
    trainer._loop.descent.plan = plan
    trainer._goal = type(trainer._goal)(steps - at + 1, None)
    trainer.fit()
    return state_of(trainer)


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
@pytest.mark.parametrize("kind", ZOO)
def test_a_failure_and_a_halving_equal_the_smaller_plan_taken_by_itself(kind, phase):
    """Rows 30, 72, 73."""
    trainer = trainer_of(kind, ladder=HALVE_ONLY)
    with inject_oom(step=3, phase=phase) as injected:
        result = trainer.fit()
    assert injected.fired == 1
    assert result.plan == Plan(micro_batch=4)
    assert same(state_of(trainer), took_the_plan_by_itself(kind, 3, Plan(micro_batch=4), ladder=HALVE_ONLY)) is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_a_failure_in_a_later_piece_gives_back_the_gradients_of_the_earlier_ones(optimizer, micro_batch):
    def run(*, disturbed):
        trainer = trainer_of("dropout_transformer", optimizer=optimizer, plan=Plan(micro_batch=4))
        if disturbed:
            with inject_oom(step=2, phase="backward", micro_batch=micro_batch):
                assert [event.rung for event in trainer.fit().fallbacks] == ["empty_cache"]
        else:
            trainer.fit()
        return state_of(trainer)

    assert same(run(disturbed=True), run(disturbed=False)) is None


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_passing_failure_is_the_undisturbed_run(kind, phase):
    """Rows 124 to 127: one more try of the same plan, and bit-equal to the run without the failure."""
    undisturbed, disturbed = trainer_of(kind), trainer_of(kind)
    expected = undisturbed.fit()
    with inject_oom(step=1, phase=phase):
        result = disturbed.fit()
    assert [event.rung for event in result.fallbacks] == ["empty_cache"]
    assert result.plan == Plan()
    assert result.losses == expected.losses
    assert same(state_of(disturbed), state_of(undisturbed)) is None


@pytest.mark.parametrize("kind", ["mlp", "dropout_transformer", "tied_lm", "lstm", "partly_frozen"])
def test_five_failures_in_a_row_equal_the_last_plan_taken_by_itself(kind):
    """Rows 23, 24, 30. Halved three times, checkpointed, and tried once more."""
    ladder = ["halve_batch", "gradient_checkpointing", "empty_cache"]
    trainer = trainer_of(kind, ladder=ladder)
    with inject_oom(step=2, phase="backward", times=5):
        result = trainer.fit()
    assert [event.rung for event in result.fallbacks] == [*["halve_batch"] * 3, "gradient_checkpointing", "empty_cache"]
    end = Plan(micro_batch=1, gradient_checkpointing=True)
    assert result.plan == end
    assert same(state_of(trainer), took_the_plan_by_itself(kind, 2, end, ladder=ladder)) is None


def test_five_failures_in_a_row_with_batch_norm():
    ladder = ["gradient_checkpointing", "halve_batch", "amp", "empty_cache"]
    trainer = trainer_of("cnn_batch_norm", ladder=ladder)
    with inject_oom(step=2, phase="backward", times=5):
        result = trainer.fit()
    end = Plan(micro_batch=2, gradient_checkpointing=True, precision="bf16")
    assert result.plan == end
    assert same(state_of(trainer), took_the_plan_by_itself("cnn_batch_norm", 2, end, ladder=ladder)) is None


@pytest.mark.parametrize("kind", ZOO)
def test_gradient_checkpointing_is_bit_equal_to_the_run_without_it(kind):
    """Rows 76, 79, 82. Switched on in mid-run, BatchNorm's statistics move once and dropout's masks are the same."""
    plain, recomputed = trainer_of(kind), trainer_of(kind, ladder=["gradient_checkpointing"])
    plain.fit()
    with inject_oom(step=3):
        assert recomputed.fit().plan == Plan(gradient_checkpointing=True)
    assert same(state_of(recomputed), state_of(plain)) is None


@pytest.mark.parametrize("kind", ["mlp", "cnn_batch_norm", "dropout_transformer"])
@pytest.mark.parametrize("k", range(1, 12, 3))
def test_any_allocation_may_fail_once(kind, k):
    for phase in ("forward", "backward", "optimizer"):
        undisturbed, disturbed = trainer_of(kind, steps=2), trainer_of(kind, steps=2)
        undisturbed.fit()
        with inject_oom(step=1, phase=phase, allocation=k):
            disturbed.fit()
        assert same(state_of(disturbed), state_of(undisturbed)) is None, (phase, k)


class Restless(nn.Module):
    """Changes all that a forward can change, before it fails."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mask", torch.ones(200, 200), persistent=False)
        self.calls = 0
        self.history = []
        self.gathered = False
        self.last = None

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.mask.mul_(1.5)
        self.history.append(self.calls)
        self.last = x * random.random() * float(np.random.rand())  # noqa: NPY002
        return self.linear(self.last) * float(self.mask[0, 0])


def test_buffers_attributes_and_every_random_stream_come_back():
    """Rows 26, 29: counters, lists, flags, Python's and NumPy's streams."""
    ends = []
    for disturbed in (False, True):
        torch.manual_seed(0)
        model = Restless()
        trainer = AdaptiveTrainer(model, ZOO["mlp"].data(24), loss=loss, batch_size=8, progress=False)
        if disturbed:
            with inject_oom(step=2, phase="backward"):
                trainer.fit()
        else:
            trainer.fit()
        ends.append((state_of(trainer), model.calls, model.history, model.mask, model.last.detach()))
    assert same(ends[0], ends[1]) is None
    assert ends[1][1] == 3


class Remembering(nn.Module):
    """Lets a buffer grow with all that it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(6, 4)
        self.register_buffer("past", torch.zeros(1, 6))

    def forward(self, x):
        self.past.data = torch.cat([self.past, x.detach()])
        return self.linear(x + self.past.mean(0))


def test_a_buffer_that_grows_in_place_is_as_long_as_without_the_failure():
    states = []
    for failing in (False, True):
        trainer = AdaptiveTrainer(Remembering(), ZOO["mlp"].data(40), loss=loss, batch_size=8, progress=False)
        with inject_oom(step=3 if failing else 99, phase="backward"):
            assert len(trainer.fit().fallbacks) == failing
        states.append(state_of(trainer))
    assert len(states[0]["model"]["past"]) == 41
    assert same(*states) is None


def test_a_hook_that_sets_a_flag_and_was_cut_off_is_undone():
    """Row 26: a flag set before the forward and cleared after it is clear when the retry begins."""
    member = ZOO["mlp"]
    model = member.make()
    seen = []

    def gather(module, _args):
        seen.append(getattr(module, "gathered", False))
        module.gathered = True

    def scatter(module, _args, _output):
        module.gathered = False

    model.blocks[0].gathered = False
    model.blocks[0].register_forward_pre_hook(gather)
    model.blocks[0].register_forward_hook(scatter)
    failing = {"left": 2}

    def fail(_module, _args):
        if failing["left"]:
            failing["left"] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.blocks[0][1].register_forward_pre_hook(fail)
    AdaptiveTrainer(model, member.data(16), loss=loss, batch_size=8, progress=False).fit()
    assert len(seen) > 2
    assert not any(seen)


def test_the_first_optimizer_step_may_fail_half_way():
    """Two groups, the second of which runs out of memory: both advance exactly once."""
    ends = []
    for disturbed in (False, True):
        member = ZOO["mlp"]
        model = member.make()
        half = list(model.parameters())
        optimizer = torch.optim.Adam([{"params": half[:3]}, {"params": half[3:], "lr": 0.1}], lr=0.01)
        trainer = AdaptiveTrainer(model, member.data(16), loss=loss, batch_size=8, optimizer=optimizer, progress=False)
        if disturbed:
            with inject_oom(step=1, phase="optimizer", allocation=9) as injected:
                trainer.fit()
            assert injected.fired == 1
        else:
            trainer.fit()
        ends.append(state_of(trainer))
    assert same(ends[0], ends[1]) is None


class Noisy(torch.optim.SGD):
    """Draws numbers when it is made."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.05 * float(torch.rand(1) + random.random()))


@pytest.mark.parametrize("phase", ["load", "build"])
@pytest.mark.parametrize("allocation", [1, 2])
def test_a_model_and_an_optimizer_made_anew_are_those_of_the_first_try(phase, allocation):
    """What is drawn for weights that memory then runs out for is drawn again."""
    ends = []
    for disturbed in (False, True):
        trainer = AdaptiveTrainer(
            ZOO["mlp"].model, ZOO["mlp"].data(16), loss=loss, optimizer=Noisy, batch_size=8, progress=False
        )
        with inject_oom(step=1 if disturbed else 99, phase=phase, allocation=allocation):
            assert len(trainer.fit().fallbacks) == disturbed
        ends.append(state_of(trainer))
    assert same(*ends) is None


def test_lbfgs_is_replayed_exactly():
    ends = []
    for disturbed in (False, True):
        member = ZOO["mlp"]
        trainer = AdaptiveTrainer(
            member.make(), member.data(16), loss=loss, batch_size=8, progress=False,
            optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=4),
        )  # fmt: skip
        if disturbed:
            with inject_oom(step=2, phase="backward", times=1) as injected:
                trainer.fit()
            assert injected.fired == 1
        else:
            trainer.fit()
        ends.append(state_of(trainer))
    assert same(ends[0], ends[1]) is None


def test_training_flags_are_the_users():
    model = ZOO["mlp"].make()
    model.blocks[0].eval()
    flags = [module.training for module in model.modules()]
    trainer = AdaptiveTrainer(
        model, ZOO["mlp"].data(16), loss=loss, batch_size=8, eval_data=ZOO["mlp"].data(8), progress=False
    )
    with inject_oom(step=1, times=2):
        trainer.fit()
    assert [module.training for module in model.modules()] == flags


def test_a_model_that_arrives_in_evaluation_mode_is_trained():
    model = ZOO["dropout_transformer"].make().eval()
    AdaptiveTrainer(model, ZOO["dropout_transformer"].data(8), loss=loss, batch_size=8, progress=False).fit()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", ZOO)
def test_at_the_end_of_the_ladder_the_parameters_are_those_of_the_last_completed_step(kind):
    stopped, reached = trainer_of(kind), trainer_of(kind, steps=2)
    with inject_oom(step=3, phase="backward", times=math.inf), pytest.raises(LadderExhausted):
        stopped.fit()
    reached.fit()
    ends = state_of(stopped), state_of(reached)
    for end in ends:
        del end["streams"]
    assert same(*ends) is None
