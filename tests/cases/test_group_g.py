"""The rung amp: rows 88, 90, 91 and 94. The rest of it: tests/test_precision.py."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, OutOfMemory, Plan, memory
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import OOM, at_backward, at_forward, regression, rungs
from tests.zoo import ZOO, decay, loss, same, state_of


def small_loss(output, targets):
    """So small that no gradient overflows fp16, however far the scale grows here."""
    return functional.mse_loss(output, targets) / 1024


def trainer_of(model=None, **rest):
    generator = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator)
    )
    arguments = {
        "loss": small_loss, "batch_size": 8, "scheduler": decay, "progress": False,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    } | rest  # fmt: skip
    return AdaptiveTrainer(regression() if model is None else model, data, **arguments)


def scaler_of(trainer):
    return trainer._loop.workshop.state.scaler


@pytest.fixture
def grows_every_two_steps(monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, growth_interval=2))


@pytest.mark.usefixtures("grows_every_two_steps")
@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_case_088_a_rollback_gives_the_scaler_back(phase):
    """Scale, growth tracker and interval: 65536 doubles after every two of eight good steps."""
    plain, disturbed = (trainer_of(plan=Plan(precision="fp16")) for _ in range(2))
    plain.fit()
    with inject_oom(step=4, phase=phase), inject_oom(step=6, phase=phase):
        disturbed.fit()
    expected = {"scale": 65536.0 * 2**4, "growth_interval": 2, "_growth_tracker": 0}
    for trainer in (plain, disturbed):
        assert expected.items() <= scaler_of(trainer).items()
    assert same(state_of(disturbed), state_of(plain)) is None


@pytest.mark.usefixtures("grows_every_two_steps")
def test_case_088_another_engine_and_another_fit_go_on_with_the_same_scaler():
    """A rebuild at the second step and the end of a fit after the third: 131072 and not a fresh 65536."""
    kind = ZOO["mlp"]
    once, twice = (
        AdaptiveTrainer(kind.make(), kind.data(40), loss=loss, batch_size=8, steps=steps, plan=Plan(precision="fp16"), ladder=["gradient_checkpointing"], progress=False)
        for steps in (6, 3)
    )  # fmt: skip
    once.fit()
    with inject_oom(step=2):
        assert twice.fit().plan == Plan(precision="fp16", gradient_checkpointing=True)
    assert scaler_of(twice)["scale"] == 131072
    assert scaler_of(twice)["_growth_tracker"] == 1
    assert twice.fit().steps == 6
    assert same(scaler_of(twice), scaler_of(once)) is None
    assert same(state_of(twice)["model"], state_of(once)["model"]) is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_case_090_a_loss_scale_at_its_minimum_surfaces(precision):
    """The engine's own words are no out-of-memory, and no refusal of autocast either."""
    error = Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")

    def step(model, batch):
        raise error

    for ladder in (None, ["amp"]):
        trainer = trainer_of(loss=None, step=step, plan=Plan(precision=precision), ladder=ladder)
        with pytest.raises(Exception, match="already at minimum") as caught:
            trainer.fit()
        assert caught.value is error


def test_case_090_nor_is_it_answered_while_amp_is_on_by_the_ladder():
    error = Exception("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")

    def step(model, batch):
        if not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError(OOM)
        raise error

    with pytest.raises(Exception, match="already at minimum") as caught:
        trainer_of(loss=None, step=step, ladder=["amp"]).fit()
    assert caught.value is error


def needs_more_under_autocast(model, rows, fewer_rows):
    """Memory where autocast's copies of the weights cost more than half the activations give."""

    def check(_module, args):
        if len(args[0]) > (fewer_rows if torch.is_autocast_enabled("cpu") else rows):
            raise torch.OutOfMemoryError(OOM)

    model.register_forward_pre_hook(check)


def test_case_091_a_rung_that_did_not_help_is_left_on_and_the_walk_goes_on():
    model = regression()
    needs_more_under_autocast(model, 4, 2)
    result = trainer_of(model, ladder=["amp", "halve_batch"]).fit()
    assert rungs(result) == ["amp", "halve_batch", "halve_batch"]
    assert result.plan == Plan(micro_batch=2, precision="bf16")
    assert result.steps == 8


def test_case_091_and_it_ends_where_nothing_helps():
    model = regression()
    needs_more_under_autocast(model, 0, 0)
    with pytest.raises(LadderExhausted) as caught:
        trainer_of(model, ladder=["amp", "gradient_checkpointing", "halve_batch", "empty_cache"]).fit()
    plans = [event.plan for event in caught.value.trail if isinstance(event, OutOfMemory)]
    assert [plan.precision for plan in plans] == ["fp32", *["bf16"] * 5]
    assert len(set(plans)) == len(plans) - 1  # only empty_cache tries a plan twice
    assert caught.value.skipped["amp"] == "bf16 is on already"


@pytest.fixture
def without_bf16(monkeypatch):
    monkeypatch.setattr(memory, "bf16_supported", lambda _device: False)


@pytest.mark.usefixtures("without_bf16")
@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_094_without_bf16_the_rung_is_fp16_with_a_scaler(attach):
    model = regression()
    attach(model, 3)
    trainer = trainer_of(model, ladder=["amp"])
    result = trainer.fit()
    assert result.plan == Plan(precision="fp16")
    assert result.fallbacks[0].fidelity == "changed"
    assert result.steps == 8
    assert scaler_of(trainer)["_growth_tracker"] == 6
    assert all(math.isfinite(value) for value in result.losses)


@pytest.mark.usefixtures("without_bf16")
def test_case_094_an_optimizer_that_no_scaler_can_follow_skips_the_rung_with_the_reason():
    trainer = trainer_of(
        optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=2), scheduler=None, ladder=["amp"]
    )
    with inject_oom(), pytest.raises(LadderExhausted) as caught:
        trainer.fit()
    assert "LBFGS" in caught.value.skipped["amp"]
