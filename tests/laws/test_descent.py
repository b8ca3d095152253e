"""Law 4, Descent: the ladder is finite, and its end is told with the whole trail."""

import math

import pytest
import torch

from adaptive_trainer import AdaptiveTrainer, Fallback, LadderExhausted, OutOfMemory, Plan
from adaptive_trainer.testing import inject_oom
from tests.zoo import ZOO, loss


def trainer_of(kind="mlp", **rest):
    arguments = {"loss": loss, "batch_size": 8, "progress": False} | rest
    return AdaptiveTrainer(ZOO[kind].make(), ZOO[kind].data(24), **arguments)


def test_always_out_of_memory_ends_with_the_trail_and_the_first_failure_as_cause():
    """Rows 33, 34."""
    before = ZOO["mlp"].make().state_dict()
    trainer = trainer_of()
    with inject_oom(times=math.inf) as injected, pytest.raises(LadderExhausted) as caught:
        trainer.fit()
    trail = caught.value.trail
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert "2.00 GiB" in str(caught.value.__cause__)
    assert [event.rung for event in trail if isinstance(event, Fallback)] == [
        "empty_cache", "halve_batch", "halve_batch", "halve_batch", "gradient_checkpointing", "amp",
    ]  # fmt: skip
    assert injected.fired == len([event for event in trail if isinstance(event, OutOfMemory)]) == 7
    assert "one sample" in caught.value.skipped["halve_batch"]
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, before[name])


def test_without_a_ladder_the_original_passes_through_untouched():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def fail(model, batch):
        raise error

    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer_of(loss=None, step=fail, ladder=[]).fit()
    assert caught.value is error
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("phase", ["load", "build"])
def test_loading_and_building_are_laddered(phase):
    made = []

    def make():
        made.append(ZOO["mlp"].make())
        return made[-1]

    trainer = AdaptiveTrainer(make, ZOO["mlp"].data(8), loss=loss, batch_size=8, progress=False)
    with inject_oom(phase=phase):
        result = trainer.fit()
    assert [event.rung for event in result.fallbacks] == ["empty_cache"]
    assert trainer.model is made[-1]
    with inject_oom(phase=phase, times=math.inf), pytest.raises(LadderExhausted) as caught:
        AdaptiveTrainer(make, ZOO["mlp"].data(8), loss=loss, batch_size=8, progress=False).fit()
    assert phase in caught.value.skipped["halve_batch"]


def test_each_step_may_try_the_cache_once():
    trainer = trainer_of()
    with inject_oom(step=1), inject_oom(step=2), inject_oom(step=3):
        result = trainer.fit()
    assert [event.rung for event in result.fallbacks] == ["empty_cache"] * 3
    assert result.plan == Plan()


def test_a_model_that_fits_only_small_pieces_settles_on_them():
    """Row 43: the micro-batch is halved and the accumulation doubled; steps and learning rates stay."""
    model = ZOO["mlp"].make()

    def cap(_module, args):
        if len(args[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(cap)
    result = AdaptiveTrainer(model, ZOO["mlp"].data(24), loss=loss, batch_size=8, progress=False).fit()
    assert result.plan == Plan(micro_batch=2)
    assert result.steps == 3
    assert result.events[-1].as_dict()["plan"]["accumulation"] == 4


def test_a_users_rung_is_walked_in_a_run():
    def one_row(plan):
        return Plan(micro_batch=1)

    trainer = trainer_of(ladder=[one_row])
    with inject_oom(step=2):
        result = trainer.fit()
    assert [event.rung for event in result.fallbacks] == ["one_row"]
    assert result.plan == Plan(micro_batch=1)


def test_a_failure_in_evaluation_halves_the_evaluation_alone():
    """Row 118: metrics over the whole set; the training's plan stays."""
    plain, disturbed = (
        trainer_of(kind="dropout_transformer", eval_data=ZOO["dropout_transformer"].data(10)) for _ in range(2)
    )
    expected = plain.fit()
    with inject_oom(phase="evaluate", times=3):
        result = disturbed.fit()
    assert result.plan == Plan()
    assert {event.scope for event in result.fallbacks} == {"evaluation"}
    assert result.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)
    for name, value in disturbed.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name])


def test_case_019_an_error_after_an_out_of_memory_passes_through_and_names_both():
    """A device that is lost after an out-of-memory ends the run: the same object, with a note of what came before."""
    lost = RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)")
    raised = iter([torch.OutOfMemoryError("XPU out of memory. Tried to allocate 512.00 MiB."), lost])

    def step(model, batch):
        raise next(raised)

    with pytest.raises(RuntimeError) as caught:
        trainer_of(loss=None, step=step).fit()
    assert caught.value is lost
    assert "512.00 MiB" in lost.__notes__[0]


def test_an_error_that_nothing_came_before_gets_no_note():
    def step(model, batch):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError) as caught:
        trainer_of(loss=None, step=step).fit()
    assert not hasattr(caught.value, "__notes__")
