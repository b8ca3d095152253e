"""Freeing and retrying: rows 23 to 42.

Rows 37 and 40 (checkpoints on disk, DeepSpeed's engines) are not part of this version.
"""

import gc
import logging
import math
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, Plan, history
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import OOM, At, at_backward, at_forward, cap, regression, rows_of, rungs
from tests.cases.runs import assert_close, copied, data, rates, sgd, trainer_of
from tests.zoo import ZOO, loss, same, state_of

MORE = ["empty_cache", "halve_batch", "halve_batch", "halve_batch", "halve_batch"]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)


# Row 23: what keeps a failed attempt alive.


class Chained(RuntimeError):
    """A library's own exception around the true one."""


def raise_plain():
    raise torch.OutOfMemoryError(OOM)


def raise_chained():
    try:
        raise_plain()
    except torch.OutOfMemoryError as error:
        raise Chained("the layer failed") from error


def raise_again_in_the_handler():
    try:
        raise_plain()
    except torch.OutOfMemoryError:
        raise Chained("the layer failed")  # noqa: B904  without a cause on purpose: it has a context


def raise_logged():
    try:
        raise_plain()
    except torch.OutOfMemoryError:
        logging.getLogger("theirs").exception("out of memory")
        raise


def raise_in_a_cycle():
    """The exception is a local of the frame that it comes from."""
    error = torch.OutOfMemoryError(OOM)
    frame = {"error": error}
    frame["frame"] = frame
    raise error


FAILURES = [raise_plain, raise_chained, raise_again_in_the_handler, raise_logged, raise_in_a_cycle]


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
@pytest.mark.parametrize("times", [1, 5])
def test_case_023_no_local_of_the_failing_forward_is_alive_in_the_next(fail, times):
    watched, alive = [], []

    def step(model, batch):
        alive.append(sum(reference() is not None for reference in watched))
        output = model(batch[0])
        local = output * 2
        if len(watched) < 2 * times:
            watched.extend([weakref.ref(output), weakref.ref(local)])
            fail()
        return functional.mse_loss(local, batch[1])

    result = trainer_of(step=step, batch_size=16).fit()
    assert rungs(result) == MORE[:times]
    assert len(alive) > times
    assert set(alive) == {0}


class Watched(RuntimeError):
    """An exception that can be watched."""


def test_case_023_no_exception_object_is_kept_in_the_history():
    watched = []

    def step(model, batch):
        if len(watched) < 3:
            error = Watched(OOM)
            watched.append(weakref.ref(error))
            raise error
        return functional.mse_loss(model(batch[0]), batch[1])

    trainer = trainer_of(step=step)
    result = trainer.fit()
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3
    assert [event.message for event in rows_of(result, "out_of_memory")] == [OOM] * 3


def test_case_023_in_an_evaluation_too():
    watched, alive = [], []
    model = regression()

    def fail(module, _args, output):
        if not module.training:
            alive.append(sum(reference() is not None for reference in watched))
            if len(watched) < 3:
                watched.append(weakref.ref(output))
                raise torch.OutOfMemoryError(OOM)

    model.register_forward_hook(fail)
    result = trainer_of(model, eval_data=data(16), steps=1).fit()
    assert len(result.fallbacks) == 3
    assert set(alive) == {0}


# Row 24: where the retry runs.


@pytest.mark.parametrize("times", [1, 5])
@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_024_the_retry_runs_after_the_handler_has_ended(times, attach):
    model, handled = regression(), []
    model.register_forward_pre_hook(lambda *_: handled.append(sys.exc_info()))
    attach(model, *range(1, times + 1))
    result = trainer_of(model).fit()
    assert rungs(result) == MORE[:times]
    assert len(handled) > times
    assert set(handled) == {(None, None, None)}


def test_case_024_training_again_in_the_handler_of_an_out_of_memory_is_a_run_like_any_other():
    """Python gives all that is raised there the handled exception as its context, which says nothing about it."""
    error = RuntimeError("mine")

    def step(model, batch):
        raise error

    try:
        with inject_oom(times=math.inf):
            trainer_of().fit()
    except LadderExhausted:
        seen = []
        with pytest.raises(RuntimeError) as caught:
            trainer_of(step=step, callbacks=[seen.append]).fit()
        assert caught.value is error
        assert [event.event for event in seen] == ["start"]
        with inject_oom():
            assert rungs(trainer_of().fit()) == ["empty_cache"]


def test_case_024_a_run_inside_another_runs_step_answers_its_own_failures():
    """A nested retry: the inner run's out-of-memory is answered there, and the outer one sees none."""
    inner = []

    def step(model, batch):
        if not inner:
            at_forward(other := regression(), 1, 2)
            inner.append(trainer_of(other, steps=1).fit())
        return functional.mse_loss(model(batch[0]), batch[1])

    result = trainer_of(step=step).fit()
    assert rungs(inner[0]) == ["empty_cache", "halve_batch"]
    assert rungs(result) == []
    assert result.steps == 4


# Row 26: what a framework leaves half-way.


class Gathers(nn.Module):
    """Gathers its weight for a forward, as a sharded module does, and notes everything about it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gathered = False
        self.handles = []
        self.full = None

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("times", [1, 4])
def test_case_026_hooks_that_were_cut_off_leave_no_flag_and_no_gathered_weight(times):
    torch.manual_seed(1)
    first = Gathers()
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(8, 1))
    seen = []

    def gather(module, _args):
        seen.append((module.gathered, len(module.handles), module.full is not None))
        module.gathered, module.full = True, module.linear.weight.detach().clone()
        module.handles.append("gather")
        module.late = True

    def scatter(module, _args, _output):
        module.gathered, module.full = False, None
        module.handles.pop()
        del module.late

    first.register_forward_pre_hook(gather)
    first.register_forward_hook(scatter)
    at = At(*range(1, times + 1))
    first.linear.register_forward_pre_hook(at)
    result = trainer_of(model).fit()
    assert rungs(result) == MORE[:times]
    assert set(seen) == {(False, 0, False)}
    assert not hasattr(first, "late")


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("passages", [(1,), (2,), (2, 3, 4)])
def test_case_026_a_weight_that_was_gathered_in_place_is_a_shard_again(rows, passages):
    """A hook puts another storage, of another size too, in the place of the parameter's own."""
    ends = []
    for fail in ((), passages):
        model = regression()
        first = model[0].requires_grad_(False)
        first.shard = None

        def gather(module, _args):
            assert module.shard is None
            module.shard = module.weight.data
            module.weight.data = torch.cat([module.shard * 2, module.shard])[:rows]

        def scatter(module, _args, _output):
            module.weight.data, module.shard = module.shard, None

        first.register_forward_pre_hook(gather)
        first.register_forward_pre_hook(At(*fail))
        first.register_forward_hook(scatter)
        model.insert(1, nn.Linear(rows, 8))
        nn.init.constant_(model[1].weight, 0.1)
        first.bias = None
        trainer = trainer_of(model)
        assert rungs(trainer.fit()) == MORE[: len(fail)]
        ends.append(trainer)
    assert ends[1].model[0].weight.shape == (8, 8)
    assert torch.equal(ends[1].model[0].weight, ends[0].model[0].weight)
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize("fail", [at_forward, at_backward])
def test_case_026_parametrized_weights_come_back(fail):
    """Spectral norm moves its vectors in each forward; a parametrization keeps what it has computed."""
    ends = []
    for passages in ((), (2,)):
        model = regression()
        parametrizations.spectral_norm(model[0])
        fail(model, *passages)

        def step(module, batch):
            with parametrize.cached():
                return functional.mse_loss(module(batch[0]), batch[1])

        trainer = trainer_of(model, step=step)
        trainer.fit()
        assert parametrize._cache == {}
        ends.append(state_of(trainer))
    assert same(ends[1], ends[0]) is None


# Row 27: the gradient scaler.


@pytest.mark.parametrize("ladder", [["empty_cache"], ["gradient_checkpointing"]], ids=["same_engine", "rebuilt"])
@pytest.mark.parametrize("at", [1, 3])
def test_case_027_a_failure_after_unscaling_leaves_the_scaler_as_it_was(monkeypatch, ladder, at):
    original, ends = torch.nn.utils.clip_grad_norm_, []
    for passages in ((), (at,)):
        fail = At(*passages)

        def clip(parameters, max_norm, *, fail=fail):
            fail()
            return original(parameters, max_norm)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        member = ZOO["mlp"]
        trainer = AdaptiveTrainer(
            member.make(), member.data(40), loss=loss, batch_size=8, optimizer=sgd, max_grad_norm=1.0,
            plan=Plan(precision="fp16"), ladder=[*ladder, lambda plan: plan], progress=False,
        )  # fmt: skip
        result = trainer.fit()
        assert len(result.fallbacks) == len(passages)
        ends.append((state_of(trainer), trainer._loop.workshop.state.scaler))
    assert ends[1][1]["_growth_tracker"] == 5
    assert same(ends[1], ends[0]) is None


# Row 29: side effects.


class Counting(nn.Module):
    """Counts in every way in which a metric may be kept."""

    def __init__(self):
        super().__init__()
        self.inner = regression()
        self.register_buffer("seen", torch.zeros(()))
        self.count, self.history, self.by_size = 0, [], {}

    def forward(self, x):
        self.seen += len(x)
        self.count += len(x)
        self.history.append(float(x.sum()))
        self.by_size[len(x)] = self.by_size.get(len(x), 0) + 1
        return self.inner(x)


@pytest.mark.parametrize("attach", [at_forward, at_backward])
@pytest.mark.parametrize("times", [1, 2])
def test_case_029_metrics_and_callbacks_count_a_step_once(attach, times):
    ends = []
    for passages in ((), range(3, 3 + times)):
        model, lines = Counting(), []
        attach(model, *passages)
        ladder = ["empty_cache", lambda plan: plan]
        result = trainer_of(model, ladder=ladder, callbacks=[lambda event, lines=lines: lines.append(event)]).fit()
        assert [event.step for event in lines if event.event == "step"] == [1, 2, 3, 4]
        times_of = [event.time for event in lines]
        assert times_of == sorted(times_of)
        assert [event.step for event in lines] == sorted(event.step for event in lines)
        assert len(result.fallbacks) == len(passages)
        ends.append((float(model.seen), model.count, model.history, model.by_size))
    assert ends[1] == ends[0]
    assert ends[0][:2] == (64.0, 64)


def test_case_029_a_count_that_the_step_itself_keeps_belongs_to_a_module():
    """A step that is a module's method counts in that module, which is put back with the model."""

    class Task(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = 0

        def forward(self, model, batch):
            self.rows += len(batch[0])
            return functional.mse_loss(model(batch[0]), batch[1])

    for task, how in ((Task(), "__call__"), (Task(), "forward")):
        model = regression()
        at_backward(model, 3, 4)
        trainer_of(model, step=getattr(task, how)).fit()
        assert task.rows == 64


# Rows 30, 32, 34 and 42: where the run goes on.


def seen_batches(model):
    """The rows that went through whole forwards and backwards; failed attempts are dropped by `kept`."""
    pieces = []
    model.register_forward_pre_hook(lambda _module, args: pieces.append(args[0].detach().clone()))
    return pieces


def test_case_030_two_failures_in_a_row_use_the_fifth_batch_once():
    plain = trainer_of(batch_size=8)
    plain.fit()
    model = regression()
    pieces = seen_batches(model)
    at_forward(model, 5, 6)
    trainer = trainer_of(model, batch_size=8)
    result = trainer.fit()
    assert rungs(result) == ["empty_cache", "halve_batch"]
    assert [event.step for event in rows_of(result, "step")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {event.step for event in result.fallbacks} == {4}
    used = torch.cat([*pieces[:4], *pieces[6:]])  # without the two attempts that failed
    assert len(used) == 64
    assert len(torch.unique(used, dim=0)) == 64
    assert torch.equal(torch.cat(pieces[6:8]), pieces[4])
    assert_close(trainer, plain)


@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_032_an_out_of_memory_late_in_the_run_does_not_start_it_again(attach, caplog):
    model, told = regression(), []
    attach(model, 50, 51)
    with caplog.at_level(logging.WARNING, logger="adaptive_trainer"):
        result = trainer_of(model, data(60 * 4), batch_size=4, callbacks=[told.append]).fit()
    assert [event.step for event in rows_of(result, "step")] == list(range(1, 61))
    steps = [event.step for event in told]
    assert steps == sorted(steps)
    assert result.epochs == 1
    warning = caplog.records[1].getMessage()
    assert warning.startswith("step 50")
    assert "whole batch, fp32 -> micro-batch 2, fp32" in warning
    assert [event.step for event in result.fallbacks] == [49, 49]


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_033_always_out_of_memory_trains_nothing_and_ends(optimizer, attach):
    """Nor are gradients of zero stepped: weight decay and momentum would move the parameters."""
    model, stepped = regression(), []
    before = copied(model)
    at = attach(model, *range(1, 1000))

    def watched(parameters):
        made = optimizer(parameters)
        made.register_step_pre_hook(lambda *_: stepped.append(1))
        return made

    trainer = trainer_of(model, optimizer=watched)
    with pytest.raises(LadderExhausted) as caught:
        trainer.fit()
    assert at.passed == 7  # once, empty_cache, 8, 4, 2, 1, amp
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert str(caught.value.__cause__) == OOM
    assert stepped == []
    assert same(copied(model), before) is None
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("at", [1, 3, 4])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_case_033_a_run_that_goes_on_after_the_end_of_the_ladder_begins_with_the_batch_that_was_not_used(at, phase):
    plain = trainer_of()
    expected = plain.fit()
    trainer = trainer_of()
    with inject_oom(step=at, phase=phase, times=math.inf), pytest.raises(LadderExhausted):
        trainer.fit()
    trainer._loop.descent.plan = Plan()
    result = trainer.fit()
    assert result.steps == 4
    assert result.epochs == 1
    assert result.losses == expected.losses[at - 1 :]
    assert_close(trainer, plain, atol=0)


@pytest.mark.parametrize("attach", [at_forward, at_backward])
@pytest.mark.parametrize("passages", [(1,), (1, 2), (1, 2, 3)])
def test_case_034_the_first_step_is_a_step_like_any_other(attach, passages):
    plain = trainer_of()
    plain.fit()
    model = regression()
    attach(model, *passages)
    trainer = trainer_of(model)
    result = trainer.fit()
    assert rungs(result) == MORE[: len(passages)]
    assert result.steps == 4
    assert_close(trainer, plain)


@pytest.mark.parametrize("attach", [at_forward, at_backward])
@pytest.mark.parametrize("passages", [(7,), (7, 8), (7, 8, 9)])
def test_case_042_a_failure_in_the_second_epoch_goes_on_in_its_middle(attach, passages):
    """Four steps an epoch; also with two failures in epochs of their own."""
    plain = trainer_of(epochs=3, optimizer=adam, scheduler=warm_up)
    expected = plain.fit()
    model = regression()
    attach(model, 2, *(passage + 1 for passage in passages))
    trainer = trainer_of(model, epochs=3, optimizer=adam, scheduler=warm_up)
    result = trainer.fit()
    assert [event.step for event in result.fallbacks] == [1, *[6] * len(passages)]
    assert [event.step for event in rows_of(result, "step")] == list(range(1, 13))
    assert result.epochs == 3
    assert rates(result) == rates(expected)
    assert_close(trainer, plain)


# Row 35: what is kept from step to step.


def test_case_035_no_graph_of_a_step_is_alive_in_the_next():
    graphs, alive = [], []

    def step(model, batch):
        alive.append(sum(reference() is not None for reference in graphs))
        value = functional.mse_loss(model(batch[0]), batch[1])
        graphs.append(weakref.ref(value))
        return value

    result = trainer_of(step=step, samples=data(80), batch_size=8, memory_limit="1MiB").fit()
    assert alive == [0] * 10
    assert len({event.peak_bytes for event in rows_of(result, "step")[1:]}) == 1
    assert all(type(value) is float for value in result.losses)


def keeps(how, kept):
    """A step that keeps something of each step on the device."""

    def step(model, batch):
        output = model(batch[0])
        kept.append(model(batch[0]) if how == "graph" else torch.zeros(128))
        return functional.mse_loss(output, batch[1])

    return step


@pytest.mark.parametrize("how", ["graph", "tensor"])
def test_case_035_memory_that_grows_with_every_step_is_called_a_leak(how, caplog):
    trainer = trainer_of(step=keeps(how, []), memory_limit="20KiB", epochs=100)
    with pytest.raises(LadderExhausted, match=r"hold between steps has grown.*loss\.item\(\)") as caught:
        trainer.fit()
    failures = [event for event in caught.value.trail if event.event == "out_of_memory"]
    assert {event.cause for event in failures} == {"leak"}
    assert failures[0].step > 5
    rungs = [event.rung for event in caught.value.trail if event.event == "fallback"]
    assert [name for name in rungs if name != "empty_cache"] == ["halve_batch"]
    assert "lower plan was taken for that already" in caught.value.skipped["halve_batch"]
    assert "loss.item()" in caplog.records[0].getMessage()


def test_case_035_a_run_that_only_needs_more_is_no_leak():
    """The optimizer's state comes once; and small numbers that are kept are no cause."""
    kept = []

    def step(model, batch):
        value = functional.mse_loss(model(batch[0]), batch[1])
        kept.append(value.detach())
        return value

    model = regression()
    at_forward(model, 20)
    with pytest.raises(LadderExhausted):
        trainer_of(step=step, memory_limit="3KiB", epochs=10, optimizer=adam).fit()
    result = trainer_of(model, step=step, memory_limit="1MiB", epochs=10, optimizer=adam).fit()
    (failure,) = rows_of(result, "out_of_memory")
    assert failure.cause == "activations"


# Row 38: no optimizer state before its time.


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("ladder", [["empty_cache"], ["gradient_checkpointing"]], ids=["same_engine", "rebuilt"])
def test_case_038_optimizer_state_is_made_by_the_first_step_and_not_before(disturbed, ladder):
    """Also in the tries after a failure of that very step, in its forward and in the optimizer."""
    held = []
    model = ZOO["mlp"].make()
    optimizer = adam(model.parameters())
    model.register_forward_pre_hook(lambda *_: held.append(len(optimizer.state)))
    trainer = AdaptiveTrainer(
        model, ZOO["mlp"].data(24), loss=loss, optimizer=optimizer, batch_size=8, ladder=[*ladder, lambda plan: plan], progress=False,
    )  # fmt: skip
    if disturbed:
        with inject_oom(step=1, phase="backward"), inject_oom(step=1, phase="optimizer", allocation=3):
            trainer.fit()
        assert held == [0, 0, 0, 8, 8]
    else:
        trainer.fit()
        assert held == [0, 8, 8]


def test_case_038_a_rollback_holds_no_second_copy_on_the_device():
    """The peak of a disturbed run is that of the undisturbed one, under the limit that counts every storage."""
    peaks = []
    for passages in ((), (2, 3)):
        model = regression()
        at_backward(model, *passages, message="CPU out of memory. Tried to allocate 256 bytes.")
        result = trainer_of(
            model, memory_limit="1MiB", optimizer=adam, ladder=["empty_cache", lambda plan: plan], scheduler=warm_up,
        ).fit()  # fmt: skip
        peaks.append([event.peak_bytes for event in rows_of(result, "step")])
    assert peaks[1] == peaks[0]


# Row 39: engines that were replaced.


def test_case_039_engines_that_were_replaced_are_gone_and_leave_nothing_on_model_and_optimizer():
    """Three rebuilds, one of them a rung that is taken back, and a second run."""
    refused, engines = [], []
    member = ZOO["mlp"]
    model = member.make()
    optimizer = adam(model.parameters())
    at_forward(model, 2, 4)

    def step(module, batch):
        if torch.is_autocast_enabled("cpu") and not refused:
            refused.append(True)
            raise RuntimeError("\"mine\" not implemented for 'BFloat16'")
        return loss(module(batch[0]), batch[1])

    def watch(event):
        engine = trainer._loop.workshop.engine
        if engine is not None and engine not in [reference() for reference in engines]:
            engines.append(weakref.ref(engine))

    trainer = AdaptiveTrainer(
        model, member.data(48), step=step, optimizer=optimizer, batch_size=8, callbacks=[watch],
        ladder=["gradient_checkpointing", "amp", "halve_batch"], progress=False,
    )  # fmt: skip
    hooks = len(optimizer._optimizer_step_pre_hooks)
    result = trainer.fit()
    assert rungs(result) == ["gradient_checkpointing", "amp", "undo:amp", "halve_batch"]
    trainer.fit()
    gc.collect()
    assert len(engines) >= 4
    assert [reference() for reference in engines] == [None] * len(engines)
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert trainer._loop.workshop.state.optimizer is optimizer
    assert all("forward" not in vars(module) for module in model.modules())
    assert len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("allocation", [1, 5, 9, 12])
@pytest.mark.parametrize("times", [1, math.inf])
def test_case_039_an_engine_that_could_not_be_built_leaves_nothing_on_the_model(allocation, times):
    """Its own copies of the buffers and its scaler do not fit."""
    member = ZOO["cnn_batch_norm"]
    model = member.make()
    trainer = AdaptiveTrainer(
        model, member.data(24), loss=loss, optimizer=sgd, batch_size=8, plan=Plan(precision="fp16"),
        ladder=["gradient_checkpointing", "empty_cache"], progress=False,
    )  # fmt: skip
    with inject_oom(step=2), inject_oom(step=2, phase="build", allocation=allocation, times=times) as injected:
        if times == 1:
            assert rungs(trainer.fit()) == ["gradient_checkpointing", "empty_cache"]
        else:
            with pytest.raises(LadderExhausted):
                trainer.fit()
    assert injected.fired == min(times, 2)
    assert all("forward" not in vars(module) for module in model.modules())
    assert len(trainer._loop.workshop.state.optimizer._optimizer_step_pre_hooks) == 0


def test_case_039_a_model_that_a_function_makes_is_made_once_for_all_engines():
    made = []

    def make():
        model = ZOO["mlp"].make()
        made.append(weakref.ref(model))
        at_forward(model, 1, 2)
        return model

    member = ZOO["mlp"]
    ladder = ["gradient_checkpointing", "amp"]
    trainer = AdaptiveTrainer(make, member.data(16), loss=loss, batch_size=8, ladder=ladder, progress=False)
    assert rungs(trainer.fit()) == ladder
    assert len(made) == 1
    with inject_oom(phase="load", times=1):
        assert (
            rungs(AdaptiveTrainer(make, member.data(16), loss=loss, batch_size=8, progress=False).fit())[0]
            == "empty_cache"
        )
    del trainer
    gc.collect()
    assert [reference() for reference in made] == [None] * len(made)


def test_case_037_the_copy_to_go_back_to_is_on_the_host(monkeypatch):
    """And nothing is loaded from disk: a rollback in the process reads no file."""
    loaded, copies = [], []
    monkeypatch.setattr(torch, "load", lambda *args, **_: loaded.append(args))
    to = torch.Tensor.to

    def watch(tensor, *args, **rest):
        if args[:1] == ("cpu",):
            copies.append(rest)
        return to(tensor, *args, **rest)

    monkeypatch.setattr(torch.Tensor, "to", watch)
    trainer = trainer_of(optimizer=adam)
    with inject_oom(step=1, phase="optimizer", allocation=2):
        trainer.fit()
    assert loaded == []
    assert copies
    assert all(rest == {"copy": True} for rest in copies)


@pytest.mark.parametrize("phase", ["forward", "optimizer"])
def test_case_037_and_it_is_made_once_for_the_first_step_whatever_failed_there(monkeypatch, phase):
    made = []
    monkeypatch.setattr(history, "SHARE", 1e-9)  # the next one is not due before the run is over

    class Counted(history.StateCopy):
        def __init__(self, *args):
            made.append(1)
            super().__init__(*args)

    monkeypatch.setattr(history, "StateCopy", Counted)
    with inject_oom(step=1, phase=phase):
        result = trainer_of(optimizer=adam).fit()
    assert len(result.fallbacks) == 1
    assert len(made) == 1


def test_case_030_the_size_stays_small_after_a_halving():
    model = regression()
    seen = cap(model, 4)
    trainer_of(model).fit()
    assert seen == [16, 16, 8, *[4] * 16]


def test_a_batch_norm_that_a_callback_unfreezes_never_sees_a_single_row():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    data = torch.utils.data.TensorDataset(torch.randn(20, 4), torch.randn(20, 1))

    def unfreeze(event):
        if event.event == "step":
            model[1].train()

    plan = Plan(micro_batch=1)
    trainer = AdaptiveTrainer(model, data, loss=nn.MSELoss(), batch_size=5, plan=plan, callbacks=[unfreeze])
    assert trainer.fit().steps == 4


def test_start_and_finish_count_the_pieces_that_a_batch_norm_allows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    data = torch.utils.data.TensorDataset(torch.randn(10, 4), torch.randn(10, 1))
    result = AdaptiveTrainer(model, data, loss=nn.MSELoss(), batch_size=5, plan=Plan(micro_batch=1)).fit()
    ends = [event.as_dict()["plan"]["accumulation"] for event in result.events if event.event == "finish"]
    assert ends == [2]
