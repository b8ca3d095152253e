"""Precision end to end: what autocast and scaler do to a run, what refuses them, and what is then done about it."""

import itertools
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from adaptive_trainer import AdaptiveTrainer, LadderExhausted, NonFiniteError, Plan, RecipeError, memory
from adaptive_trainer.precision import of
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import OOM, asserted_float32, at_backward, at_forward, cap, rows_of, rungs
from tests.zoo import OPTIMIZERS, ZOO, decay, loss, same, state_of

HALVES = ("bf16", "fp16")
TORCH_OF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def batches_of(kind, num=6, rows=8):
    inputs, targets = ZOO[kind].data(num * rows)[:]
    return list(zip(inputs.split(rows), targets.split(rows), strict=True))


def trainer_of(kind="mlp", data=None, *, model=None, **rest):
    arguments = {"optimizer": OPTIMIZERS["adam"], "scheduler": decay, "max_grad_norm": 0.5, "progress": False}
    arguments |= {} if "step" in rest else {"loss": loss}
    return AdaptiveTrainer(model or ZOO[kind].make(), data or batches_of(kind), **(arguments | rest))


def under_autocast():
    return torch.is_autocast_enabled("cpu")


# The loop as torch's documentation writes it.


def by_hand(kind, data, precision, *, pieces=1, fails=(), optimizer="adam"):
    """Model, optimizer, schedule, scaler, losses and rates of a loop without the trainer; some steps are inf."""
    model = ZOO[kind].make()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    schedule = decay(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses, rates = [], []
    torch.manual_seed(0)
    for number, (inputs, targets) in enumerate(data, 1):
        rates.append(optimizer.param_groups[0]["lr"])
        total = torch.zeros(())
        for x, y in zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True):
            with torch.autocast("cpu", TORCH_OF[precision]):
                value = loss(model(x), y)
            value = value * (len(x) / len(inputs)) if pieces > 1 else value
            value = value * math.inf if number in fails else value
            total = total + value.detach()
            scaler.scale(value).backward()
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if precision == "bf16" or scaler.get_scale() >= before:
            schedule.step()
            losses.append(total.item())
        optimizer.zero_grad()
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict(),
        "scaler": scaler.state_dict() if precision == "fp16" else {}, "losses": losses, "rates": rates,
    }  # fmt: skip


def by_trainer(trainer):
    result = trainer.fit()
    state = state_of(trainer)
    return {
        "model": state["model"], "optimizer": state["optimizer"], "scheduler": state["scheduler"],
        "scaler": trainer._loop.workshop.state.scaler, "losses": list(result.losses),
        "rates": [event.lr for event in rows_of(result, "step")],
    }  # fmt: skip


def infinite_at(*steps):
    """A loss that is infinite in these of its calls."""
    calls = []

    def infinite(output, targets):
        calls.append(1)
        value = loss(output, targets)
        return value * math.inf if len(calls) in steps else value

    return infinite


@pytest.mark.parametrize("kind", ["mlp", "cnn_batch_norm", "dropout_transformer", "tied_lm"])
@pytest.mark.parametrize("precision", HALVES)
def test_it_is_the_hand_written_loop_bit_for_bit(kind, precision):
    data = batches_of(kind)
    expected = by_hand(kind, data, precision)
    assert same(by_trainer(trainer_of(kind, data, plan=Plan(precision=precision))), expected) is None


@pytest.mark.parametrize("precision", HALVES)
def test_accumulating_is_the_hand_written_loop_too(precision):
    data = batches_of("mlp")
    expected = by_hand("mlp", data, precision, pieces=2)
    plan = Plan(precision=precision, micro_batch=4)
    assert same(by_trainer(trainer_of("mlp", data, plan=plan)), expected) is None


def test_steps_that_overflow_move_scale_and_tracker_as_torch_moves_them(monkeypatch):
    """Steps 1, 4 and 5 overflow; the scale doubles after every second good step."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, growth_interval=2))
    data = batches_of("mlp", num=9)
    expected = by_hand("mlp", data, "fp16", fails=(1, 4, 5))
    assert expected["scaler"]["scale"] == 65536 / 2 * 2 / 4 * 4
    found = by_trainer(trainer_of("mlp", data, plan=Plan(precision="fp16"), loss=infinite_at(1, 4, 5)))
    assert same(found, expected) is None


# Steps that are skipped.


def test_a_skipped_step_is_no_step_but_its_batch_is_used():
    used = []

    def watched(output, targets):
        used.append(targets)
        return infinite_at(1)(output, targets) if len(used) in (2, 3) else loss(output, targets)

    data = batches_of("mlp")
    result = trainer_of("mlp", data, loss=watched, plan=Plan(precision="fp16")).fit()
    rows = rows_of(result, "step")
    assert [row.skipped for row in rows] == [False, True, True, False, False, False]
    assert [row.as_dict()["skipped"] for row in rows] == [row.skipped for row in rows]
    assert [row.step for row in rows] == [1, 1, 1, 2, 3, 4]
    assert rows[1].lr == rows[2].lr == rows[3].lr != rows[4].lr
    assert result.steps == len(result.losses) == 4
    assert all(torch.equal(seen, targets) for seen, (_, targets) in zip(used, data, strict=True))


@pytest.mark.parametrize("precision", HALVES)
def test_a_failure_in_the_retry_of_a_skipped_step_changes_nothing(precision):
    ends = []
    for disturbed in (False, True):
        data = [(x * (math.inf if index == 2 else 1), y) for index, (x, y) in enumerate(batches_of("mlp"))]
        trainer = trainer_of("mlp", data, plan=Plan(precision=precision))
        with ExitStack() as stack:
            if disturbed:
                stack.enter_context(inject_oom(step=3, phase="optimizer"))
            result = trainer.fit()
        assert [row.skipped for row in rows_of(result, "step")] == [False, False, True, False, False, False]
        ends.append((state_of(trainer), trainer._loop.workshop.state.scaler))
    assert same(ends[1], ends[0]) is None


@pytest.mark.parametrize("precision", HALVES)
def test_non_finite_for_ever_under_the_users_own_plan_is_an_error(precision):
    trainer = trainer_of(data=batches_of("mlp") * 10, loss=infinite_at(*range(1, 99)), plan=Plan(precision=precision))
    events = []
    trainer._hooks.append(events.append)
    with pytest.raises(NonFiniteError, match="25 steps in a row"):
        trainer.fit()
    assert [event.skipped for event in events if event.event == "step"] == [True] * 25
    assert trainer._loop.track.step == 0
    assert same(dict(trainer.model.state_dict()), dict(ZOO["mlp"].make().state_dict())) is None


def test_twenty_four_in_a_row_are_borne_and_counted_anew():
    bad = [*range(2, 26), *range(27, 51)]
    result = trainer_of(data=batches_of("mlp", num=52), loss=infinite_at(*bad), plan=Plan(precision="bf16")).fit()
    assert result.steps == 4


@pytest.mark.parametrize("bf16", [True, False])
def test_non_finite_for_ever_takes_amp_back_if_it_was_the_ladders(monkeypatch, bf16):
    monkeypatch.setattr(memory, "bf16_supported", lambda _device: bf16)

    def overflowing(output, targets):
        return loss(output, targets) * (math.inf if under_autocast() else 1)

    model = ZOO["mlp"].make()
    at_forward(model, 1)
    result = trainer_of(
        data=batches_of("mlp", num=40), model=model, loss=overflowing, ladder=["amp", "halve_batch"]
    ).fit()
    told = [event for event in result.events if event.event in {"step", "fallback"}]
    kinds = [getattr(event, "rung", None) or ("skipped" if event.skipped else "step") for event in told]
    assert kinds == ["amp", *["skipped"] * 25, "undo:amp", "halve_batch", *["step"] * 15]
    assert "25 steps in a row" in result.fallbacks[1].reason
    assert result.plan == Plan(micro_batch=4)
    assert all(map(math.isfinite, result.losses))


def test_a_step_without_a_single_item_passes_through_the_scaler():
    """The scaler says "No inf checks were recorded" where nothing has a gradient."""
    data = batches_of("mlp", num=3)
    data[0] = (data[0][0], torch.full_like(data[0][1], -100))
    result = trainer_of(data=data, plan=Plan(precision="fp16")).fit()
    assert result.steps == 3
    assert result.losses[0] == 0


def test_pieces_overflow_no_sooner_than_the_whole_batch():
    """A piece's loss is scaled by its part of the batch before its backward, also where only the step knows its weight."""

    def step(model, batch):
        return loss(model(batch[0]), batch[1])

    def weighing(model, batch):
        return step(model, batch), batch[1].numel() * 2.0

    data = batches_of("tied_lm", num=4, rows=128)
    ends = [
        trainer_of("tied_lm", data, step=function, plan=Plan(precision="fp16", micro_batch=micro_batch))
        for function, micro_batch in ((step, None), (step, 16), (weighing, 16))
    ]
    whole, pieces, weighed = (trainer.fit() for trainer in ends)
    for result in (pieces, weighed):
        assert [row.skipped for row in rows_of(result, "step")] == [row.skipped for row in rows_of(whole, "step")]
        assert result.losses == pytest.approx(whole.losses, rel=1e-3)


# Refusals.


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.dtype is not torch.float32:
            raise RuntimeError("expected scalar type Float but found BFloat16")
        return gradient


def says(error):
    def refuse(hidden):
        if hidden.dtype is not torch.float32:
            raise error
        return hidden

    return refuse


def mismatched(hidden):
    with torch.autocast("cpu", enabled=False):
        return hidden @ torch.eye(4)


#: What people's models say when they are put under autocast: torch's own words, or an operation of their own.
REFUSALS = {
    "unsafe": says(
        RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
            "Many models use a sigmoid layer right before the binary cross entropy layer."
        )
    ),
    "users_words": says(TypeError("this operator takes float32 only")),
    "users_assertion": asserted_float32,
    "tensor_types": says(
        RuntimeError("Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same")
    ),
    "not_implemented": lambda hidden: hidden + 0 * torch.special.bessel_j0(hidden),
    "matmul": mismatched,
    "scatter": lambda hidden: torch.zeros(hidden.shape).masked_scatter(torch.ones(hidden.shape).bool(), hidden),
    "numpy": lambda hidden: hidden + 0 * float(hidden.detach().numpy().sum()),
    "complex": lambda hidden: torch.complex(hidden, torch.zeros_like(hidden)).real,
    "in_backward": InBackward.apply,
}


def step_with(refuse, seen=None):
    def step(model, batch):
        hidden = model(batch[0])
        if seen is not None:
            seen.append(under_autocast())
        return loss(refuse(hidden), batch[1])

    return step


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_takes_amp_back_and_the_next_rung_is_taken(refusal):
    plain = trainer_of(step=step_with(REFUSALS[refusal]))
    plain.fit()
    seen, model = [], ZOO["mlp"].make()
    at_forward(model, 3)
    trainer = trainer_of(model=model, step=step_with(REFUSALS[refusal], seen), ladder=["amp", "gradient_checkpointing"])
    result = trainer.fit()
    assert rungs(result) == ["amp", "undo:amp", "gradient_checkpointing"]
    amp, undo, _ = result.fallbacks
    assert (amp.new.precision, undo.old.precision, undo.new.precision) == ("bf16", "bf16", "fp32")
    assert result.plan == Plan(gradient_checkpointing=True)
    assert seen == [False, False, True, False, False, False, False]
    assert same(state_of(trainer), state_of(plain)) is None


@pytest.mark.parametrize(
    "text", ["could not create a primitive descriptor for the LSTM forward", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"]
)
@pytest.mark.parametrize("rows", [1, 8])
def test_what_a_smaller_piece_does_not_cure_is_amps_fault_while_it_is_on(text, rows):
    """Such words may mean memory, so first one smaller piece is tried, where there is one."""
    model, data = ZOO["mlp"].make(), batches_of("mlp", rows=rows)
    at_forward(model, 3)
    step = step_with(says(RuntimeError(text)))
    result = trainer_of(
        data=data, model=model, step=step, ladder=["amp", "halve_batch", "gradient_checkpointing"]
    ).fit()
    smaller, answer = (["halve_batch"], "halve_batch") if rows > 1 else ([], "gradient_checkpointing")
    assert rungs(result) == ["amp", *smaller, "undo:amp", answer]
    assert result.plan.precision == "fp32"
    assert result.steps == 6


def test_what_a_smaller_piece_does_not_cure_surfaces_where_amp_is_the_users():
    error = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
    with pytest.raises(RuntimeError) as caught:
        trainer_of(step=step_with(says(error)), plan=Plan(precision="bf16")).fit()
    assert caught.value is error


def test_a_refusal_is_told_with_the_operations_own_words():
    model = ZOO["mlp"].make()
    at_forward(model, 1)
    step = step_with(REFUSALS["unsafe"])
    result = trainer_of(model=model, step=step, ladder=["amp", "halve_batch"]).fit()
    assert "binary_cross_entropy" in result.fallbacks[1].reason
    assert len(rows_of(result, "out_of_memory")) == 1


@pytest.mark.parametrize("refusal", ["unsafe", "not_implemented", "in_backward"])
def test_without_another_rung_a_refusal_is_the_end_of_the_ladder(refusal):
    model = ZOO["mlp"].make()
    at_forward(model, 1)
    with pytest.raises(LadderExhausted) as caught:
        trainer_of(model=model, step=step_with(REFUSALS[refusal]), ladder=["amp"]).fit()
    assert [event.event for event in caught.value.trail] == ["out_of_memory", "fallback", "fallback"]
    assert caught.value.skipped == {"amp": "it was tried and taken back"}
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert str(caught.value.__cause__) == OOM


@pytest.mark.parametrize("ladder", [None, ["amp"]])
def test_a_refusal_under_the_users_own_plan_passes_through_untouched(ladder):
    error = RuntimeError("torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.")
    trainer = trainer_of(step=step_with(says(error)), plan=Plan(precision="bf16"), ladder=ladder)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit()
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def test_the_same_words_without_autocast_pass_through_untouched():
    error = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")

    def step(model, batch):
        raise error

    with pytest.raises(RuntimeError) as caught:
        trainer_of(step=step).fit()
    assert caught.value is error


def test_a_fault_of_another_kind_passes_through_while_amp_is_on():
    error = ValueError("the labels of sample 7 are missing")

    def step(model, batch):
        if under_autocast():
            raise error
        raise torch.OutOfMemoryError(OOM)

    with pytest.raises(ValueError, match="sample 7") as caught:
        trainer_of(step=step, ladder=["amp"]).fit()
    assert caught.value is error


def test_a_refusal_long_after_amp_was_taken_takes_it_back_for_good():
    model = ZOO["mlp"].make()
    at_forward(model, 1, 6)
    late = []

    def refuse(hidden):
        late.append(1)
        return REFUSALS["not_implemented"](hidden) if len(late) >= 4 else hidden

    trainer = trainer_of(model=model, step=step_with(refuse), ladder=["amp", "halve_batch"])
    result = trainer.fit()
    assert rungs(result) == ["amp", "undo:amp", "halve_batch", "halve_batch"]
    assert result.plan == Plan(micro_batch=2)
    assert result.steps == 6


def test_a_long_batchs_own_split_ends_with_it_although_amp_was_taken_back_in_it():
    data = batches_of("dropout_transformer", num=6, rows=2)
    data[4] = (data[4][0].repeat(1, 8), data[4][1])
    model = ZOO["dropout_transformer"].make()
    at_forward(model, 5, 6)
    trainer = trainer_of(
        data=data, model=model, step=step_with(REFUSALS["unsafe"]),
        ladder=["halve_batch", "amp", "gradient_checkpointing"],
    )  # fmt: skip
    result = trainer.fit()
    assert rungs(result) == ["halve_batch", "amp", "undo:amp", "gradient_checkpointing"]
    assert [event.scope for event in result.fallbacks] == ["step", "run", "run", "run"]
    assert result.plan == Plan(gradient_checkpointing=True)


# What a clip that fails leaves behind.


@pytest.mark.parametrize("at", [1, 3])
def test_a_failure_between_unscaling_and_stepping_leaves_the_scaler_as_it_was(monkeypatch, at):
    """Row 27: "unscale_() has already been called" is never heard."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, growth_interval=2))
    original, ends = torch.nn.utils.clip_grad_norm_, []
    for failing in ((), (at, at + 1)):
        calls = []

        def clip(parameters, max_norm, *, failing=failing, calls=calls):
            calls.append(1)
            if len(calls) in failing:
                raise torch.OutOfMemoryError(OOM)
            return original(parameters, max_norm)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        trainer = trainer_of(plan=Plan(precision="fp16"), ladder=["empty_cache", lambda plan: plan])
        result = trainer.fit()
        assert len(result.fallbacks) == len(failing)
        assert {event.phase for event in rows_of(result, "out_of_memory")} <= {"optimizer"}
        ends.append((state_of(trainer), trainer._loop.workshop.state.scaler))
    assert ends[0][1]["scale"] > 65536
    assert same(ends[1], ends[0]) is None


# Gradient checkpointing.


class Fickle(nn.Module):
    """Saves more for backward in every second computation, which torch's check of the recomputation notices."""

    def __init__(self, calls):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.next = calls.__next__

    def forward(self, x):
        more = self.next() % 2
        x = torch.tanh(self.linear(x))
        return x.exp().log() if more else x


def fickle():
    torch.manual_seed(1)
    # An iterator that the blocks share and that no snapshot can put back.
    calls = iter(range(1000))
    return nn.Sequential(Fickle(calls), Fickle(calls), Fickle(calls), nn.Linear(6, 4))


def test_a_recomputation_that_differs_takes_gradient_checkpointing_back():
    model = fickle()
    at_forward(model, 2)
    result = trainer_of(model=model, ladder=["gradient_checkpointing", "halve_batch"]).fit()
    assert rungs(result) == ["gradient_checkpointing", "undo:gradient_checkpointing", "halve_batch"]
    assert result.plan == Plan(micro_batch=4)
    assert result.steps == 6
    assert len(rows_of(result, "out_of_memory")) == 1


def test_a_recomputation_that_differs_under_the_users_own_plan_passes_through():
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        trainer_of(model=fickle(), plan=Plan(gradient_checkpointing=True)).fit()


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *itertools.product(["mlp", "cnn_batch_norm", "dropout_transformer", "partly_frozen"], HALVES),
        ("lstm", "bf16"),  # a CPU has no fp16 LSTM
    ],
)
def test_autocast_with_gradient_checkpointing_is_bit_equal_to_autocast_without(kind, precision):
    ends = []
    for checkpointed in (False, True):
        plan = Plan(precision=precision, gradient_checkpointing=checkpointed)
        ends.append(by_trainer(trainer_of(kind, plan=plan)))
    assert same(ends[1], ends[0]) is None


@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_amp_taken_in_mid_run_equals_amp_from_that_step_on(attach):
    model = ZOO["dropout_transformer"].make()
    attach(model, 4)
    switched = trainer_of("dropout_transformer", model=model, ladder=["amp"])
    assert switched.fit().plan == Plan(precision="bf16")
    by_itself = trainer_of("dropout_transformer", steps=3)
    by_itself.fit()
    by_itself._loop.descent.plan = Plan(precision="bf16")
    by_itself.fit()
    assert same(state_of(switched), state_of(by_itself)) is None


# Models and optimizers that autocast is not for.


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(torch.bfloat16, "torch.bfloat16 already"), (torch.float16, "torch.float16 already"), (torch.float64, "float64")],
)
def test_models_of_another_precision_skip_amp_with_the_reason(dtype, words):
    data = [(x.to(dtype), y) for x, y in batches_of("mlp")]
    trainer = trainer_of(data=data, model=ZOO["mlp"].make(dtype), ladder=["amp", "halve_batch"])
    with inject_oom(step=2):
        result = trainer.fit()
    assert rungs(result) == ["halve_batch"]
    assert words in result.fallbacks[0].skipped["amp"]
    assert trainer._loop.workshop.state.scaler == {}


def test_fp16_is_refused_for_an_optimizer_that_evaluates_the_loss_itself():
    """Its gradients would be scaled and never unscaled."""
    before = dict(ZOO["mlp"].make().state_dict())
    trainer = trainer_of(optimizer=torch.optim.LBFGS, scheduler=None, plan=Plan(precision="fp16"))
    with pytest.raises(RecipeError, match=r"LBFGS.*bf16"):
        trainer.fit()
    assert same(dict(trainer.model.state_dict()), before) is None


# Evaluation.


@pytest.mark.parametrize("precision", HALVES)
def test_evaluation_runs_in_the_precision_of_the_training_and_leaves_it_alone(precision):
    seen = []
    model = ZOO["dropout_transformer"].make()
    model.register_forward_pre_hook(lambda module, _args: seen.append((module.training, under_autocast())) or None)
    rest = {"plan": Plan(precision=precision)}
    evaluated = trainer_of(
        "dropout_transformer", model=model, eval_data=batches_of("dropout_transformer", num=2), eval_steps=2, **rest
    )
    plain = trainer_of("dropout_transformer", **rest)
    result = evaluated.fit()
    plain.fit()
    assert seen.count((False, True)) == 6
    assert set(seen) == {(True, True), (False, True)}
    assert same(state_of(evaluated), state_of(plain)) is None
    assert same(evaluated._loop.workshop.state.scaler, plain._loop.workshop.state.scaler) is None
    in_full = AdaptiveTrainer(evaluated.model, [], loss=loss, progress=False).evaluate(
        batches_of("dropout_transformer", num=2)
    )
    assert result.metrics["loss"] == pytest.approx(in_full["loss"], rel=2e-2)


@pytest.mark.parametrize("bf16", [True, False])
def test_a_metric_that_refuses_amp_is_evaluated_without_it_and_the_training_keeps_it(monkeypatch, bf16):
    monkeypatch.setattr(memory, "bf16_supported", lambda _device: bf16)
    precision = "bf16" if bf16 else "fp16"

    def mean(output, targets):
        if output.dtype is not torch.float32:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return output.mean()

    def run(**rest):
        model = ZOO["mlp"].make()
        at_forward(model, 1)
        seen = []
        model.register_forward_hook(lambda module, _args, _output: seen.append((module.training, under_autocast())))
        trainer = trainer_of(model=model, epochs=2, ladder=["amp"], **rest)
        return trainer, trainer.fit(), seen

    plain, _, _ = run()
    trainer, result, seen = run(eval_data=batches_of("mlp", num=2), metrics={"mean": mean})
    assert rungs(result) == ["amp", "undo:amp"]
    assert result.fallbacks[1].scope == "evaluation"
    assert result.plan == Plan(precision=precision)
    assert set(seen) == {(True, True), (False, True), (False, False)}
    assert seen.count((False, True)) == 1
    assert len(rows_of(result, "evaluate")) == 2
    assert same(state_of(trainer), state_of(plain)) is None
    assert same(trainer._loop.workshop.state.scaler, plain._loop.workshop.state.scaler) is None


def test_evaluating_under_amp_may_run_out_of_memory_too():
    model = ZOO["mlp"].make()
    at_forward(model, 1)
    cap(model, 3, when=lambda module: not module.training)
    result = trainer_of(model=model, ladder=["amp", "halve_batch"], eval_data=batches_of("mlp", num=2)).fit()
    assert [(event.rung, event.scope) for event in result.fallbacks] == [
        ("amp", "run"), ("halve_batch", "evaluation"), ("halve_batch", "evaluation"),
    ]  # fmt: skip
    assert result.plan == Plan(precision="bf16")
    assert functional.cross_entropy(torch.zeros(1, 4), torch.zeros(1).long()) > result.metrics["loss"] / 2


def test_a_fused_optimizer_that_failed_under_the_scaler_carries_nothing_of_it():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(65536.0), torch.tensor(0.0)
    of("fp16", torch.device("cpu")).reset(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_bf16_skips_a_step_whose_gradient_norm_is_not_finite():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for gradient, moved in ((math.inf, False), (1.0, True)):
        parameter.grad = torch.full((3,), gradient)
        assert of("bf16", torch.device("cpu")).step(optimizer, [parameter], 1.0, torch.tensor(1.0)) is moved
        assert torch.equal(parameter.detach(), torch.ones(3)) is not moved


# Rungs of the user's own that do what a rung of the table does.


def own_amp(plan):
    return replace(plan, precision="bf16")


def own_checkpointing(plan):
    return replace(plan, gradient_checkpointing=True)


def at_most(calls, rung):
    """A rung that ends the test where the walk would not end."""
    left = iter(range(calls))

    def counted(plan):
        assert next(left, None) is not None, "the rung was asked again and again"
        return rung(plan)

    counted.__name__ = rung.__name__
    return counted


def test_a_users_own_rung_that_autocast_refuses_is_taken_back_under_its_name_and_not_taken_again():
    model = ZOO["mlp"].make()
    at_forward(model, 3)
    ladder = [at_most(5, own_amp), "amp", "gradient_checkpointing"]
    trainer = trainer_of(model=model, step=step_with(REFUSALS["unsafe"]), ladder=ladder)
    result = trainer.fit()
    assert rungs(result) == ["own_amp", "undo:own_amp", "amp", "undo:amp", "gradient_checkpointing"]
    assert result.plan == Plan(gradient_checkpointing=True)
    assert result.steps == 6


def test_a_users_own_rung_whose_recomputation_differs_is_taken_back_under_its_name():
    model = fickle()
    at_forward(model, 2)
    result = trainer_of(model=model, ladder=[at_most(5, own_checkpointing), "halve_batch"]).fit()
    assert rungs(result) == ["own_checkpointing", "undo:own_checkpointing", "halve_batch"]
    assert result.plan == Plan(micro_batch=4)
    assert result.steps == 6


def test_a_users_own_rung_under_which_no_step_is_finite_is_taken_back_under_its_name():
    model, data = ZOO["mlp"].make(), batches_of("mlp", num=40)
    at_forward(model, 1)

    def step(model, batch):
        value = loss(model(batch[0]), batch[1])
        return value * math.inf if under_autocast() else value

    result = trainer_of(model=model, data=data, step=step, ladder=[at_most(5, own_amp), "halve_batch"]).fit()
    assert rungs(result) == ["own_amp", "undo:own_amp", "halve_batch"]


def test_an_evaluation_takes_the_trainings_own_rung_back_under_its_name():
    def mean(output, targets):
        if output.dtype is not torch.float32:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return output.mean()

    model = ZOO["mlp"].make()
    at_forward(model, 1)
    evaluated = {"eval_data": batches_of("mlp", num=2), "metrics": {"mean": mean}}
    result = trainer_of(model=model, epochs=2, ladder=[at_most(9, own_amp)], **evaluated).fit()
    assert [(event.rung, event.scope) for event in result.fallbacks] == [
        ("own_amp", "run"), ("undo:own_amp", "evaluation"),
    ]  # fmt: skip
    assert result.plan == Plan(precision="bf16")
