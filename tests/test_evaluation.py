"""Evaluation: metrics of the whole set for any cut, a micro-batch and a walk of its own, and nothing disturbed."""

import json
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from adaptive_trainer import AdaptiveTrainer, DataError, LadderExhausted, Plan, RecipeError
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import OOM, at_forward, cap, rows_of, rungs
from tests.zoo import OPTIMIZERS, ZOO, decay, loss, same, state_of


def accuracy(output, targets):
    counted = targets != -100
    return (output.argmax(1) == targets)[counted].float().mean()


def trainer_of(kind="mlp", *, model=None, **rest):
    arguments = {"loss": loss, "batch_size": 8, "optimizer": OPTIMIZERS["adam"], "scheduler": decay, "progress": False}
    return AdaptiveTrainer(model or ZOO[kind].make(), ZOO[kind].data(24), **(arguments | rest))


def in_evaluation(module):
    return not module.training


def whole_set(model, data, measure, **rest):
    """A measure of a whole set at once, as nobody could cut it."""
    inputs, targets = data[:]
    flags = [module.training for module in model.modules()]
    with torch.no_grad():
        found = measure(model.eval()(inputs), targets, **rest).item()
    for module, flag in zip(model.modules(), flags, strict=True):
        module.training = flag
    return found


# Metrics.


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("batch", [1, 5, 8, 23])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_metrics_are_the_whole_sets_for_any_cut(kind, batch, micro_batch):
    data = ZOO[kind].data(23)
    trainer = trainer_of(kind, metrics={"accuracy": accuracy}, plan=Plan(micro_batch=micro_batch))
    found = trainer.evaluate(DataLoader(data, batch_size=batch))
    assert found["loss"] == pytest.approx(whole_set(trainer.model, data, loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(whole_set(trainer.model, data, accuracy), rel=1e-6)
    assert found.keys() == {"loss", "accuracy"}


@pytest.mark.parametrize("kind", ["mlp", "tied_lm"])
@pytest.mark.parametrize("micro_batch", [None, 1, 2, 3])
def test_masked_items_count_for_nothing(kind, micro_batch):
    """Samples of the one model, tokens of the other; the second batch has not a single item."""
    inputs, targets = ZOO[kind].data(15)[:]
    targets[[0, 3, 5, 6, 7, 8, 9, 14]] = -100
    targets.view(15, -1)[10:13, 0] = -100
    data = TensorDataset(inputs, targets)
    trainer = trainer_of(kind, metrics={"accuracy": accuracy}, plan=Plan(micro_batch=micro_batch))
    found = trainer.evaluate(DataLoader(data, batch_size=5))
    assert found["loss"] == pytest.approx(whole_set(trainer.model, data, loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(whole_set(trainer.model, data, accuracy), rel=1e-6)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_class_weights_weigh_the_loss_and_not_the_other_metrics(micro_batch):
    data = ZOO["mlp"].data(11)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0, 0.5, 3.0]))
    trainer = trainer_of(loss=weighted, metrics={"accuracy": accuracy}, plan=Plan(micro_batch=micro_batch))
    found = trainer.evaluate(DataLoader(data, batch_size=4))
    assert found["loss"] == pytest.approx(whole_set(trainer.model, data, weighted), rel=1e-5)
    assert found["accuracy"] == pytest.approx(whole_set(trainer.model, data, accuracy), rel=1e-6)


def test_a_loss_that_is_a_sum_is_the_whole_sets_sum():
    data = ZOO["mlp"].data(11)
    summed = nn.CrossEntropyLoss(reduction="sum")
    trainer = trainer_of(loss=summed, metrics={"accuracy": accuracy}, plan=Plan(micro_batch=2))
    found = trainer.evaluate(DataLoader(data, batch_size=4))
    assert found["loss"] == pytest.approx(whole_set(trainer.model, data, summed), rel=1e-5)
    assert found["accuracy"] == pytest.approx(whole_set(trainer.model, data, accuracy), rel=1e-6)


def test_a_step_that_returns_its_weight_is_weighted_by_it():
    def step(model, batch):
        wanted = batch[1] > 0
        return functional.cross_entropy(model(batch[0])[wanted], batch[1][wanted]), int(wanted.sum())

    data = ZOO["mlp"].data(13)
    trainer = trainer_of(loss=None, step=step, plan=Plan(micro_batch=3))

    def wanted(output, targets):
        return functional.cross_entropy(output[targets > 0], targets[targets > 0])

    found = trainer.evaluate(DataLoader(data, batch_size=6))
    assert found == {"loss": pytest.approx(whole_set(trainer.model, data, wanted), rel=1e-5)}


def test_metrics_beside_a_step_are_refused_because_nobody_has_the_output():
    with pytest.raises(RecipeError, match=r"metrics: .*step"):
        trainer_of(loss=None, step=lambda model, batch: model(batch[0]).mean(), metrics={"accuracy": accuracy})


# Where the data come from, and when.


def sources(data):
    batches = list(DataLoader(data, batch_size=5))

    class Stream(IterableDataset):
        def __iter__(self):
            return iter([data[index] for index in range(len(data))])

    return {
        "dataset": data,
        "loader": DataLoader(data, batch_size=5),
        "shuffling_loader": DataLoader(data, batch_size=5, shuffle=True),
        "list_of_batches": batches,
        "generator": (batch for batch in batches),
        "iterable_dataset": Stream(),
    }


@pytest.mark.parametrize("kind", sources(ZOO["mlp"].data(2)))
def test_every_kind_of_data_is_evaluated_before_and_after_training(kind):
    data = ZOO["mlp"].data(13)
    trainer = trainer_of("mlp")
    for _ in range(2):
        found = trainer.evaluate(sources(data)[kind])
        assert found["loss"] == pytest.approx(whole_set(trainer.model, data, loss), rel=1e-5)
        trainer.fit()


def test_a_list_of_samples_beside_training_samples_is_a_list_of_samples():
    samples = [ZOO["mlp"].data(24)[index] for index in range(24)]
    held_out = [ZOO["mlp"].data(9)[index] for index in range(9)]
    trainer = AdaptiveTrainer(
        ZOO["mlp"].make(), samples, loss=loss, batch_size=8, eval_data=held_out, progress=False
    )  # fmt: skip
    seen = cap(trainer.model, math.inf, when=in_evaluation)
    result = trainer.fit()
    assert seen == [8, 1]
    assert result.metrics["loss"] == pytest.approx(whole_set(trainer.model, ZOO["mlp"].data(9), loss), rel=1e-5)


def test_before_training_in_between_and_afterwards():
    data = ZOO["mlp"].data(10)
    trainer = trainer_of(eval_data=data, epochs=2)
    before = trainer.evaluate()
    assert before["loss"] == pytest.approx(whole_set(ZOO["mlp"].make(), data, loss), rel=1e-5)
    result = trainer.fit()
    assert [(event.event, event.step) for event in result.events if event.event in {"step", "evaluate"}] == [
        ("step", 1), ("step", 2), ("step", 3), ("evaluate", 3), ("step", 4), ("step", 5), ("step", 6), ("evaluate", 6),
    ]  # fmt: skip
    assert result.metrics == trainer.evaluate()
    assert result.metrics["loss"] < before["loss"]


def test_every_so_many_steps():
    trainer = trainer_of(eval_data=ZOO["mlp"].data(10), epochs=2, eval_steps=2)
    result = trainer.fit()
    assert [event.step for event in rows_of(result, "evaluate")] == [2, 4, 6]
    assert result.metrics == rows_of(result, "evaluate")[-1].metrics


def test_a_run_that_ends_within_an_epoch_is_evaluated_at_its_end():
    result = trainer_of(eval_data=ZOO["mlp"].data(10), steps=4).fit()
    assert [event.step for event in rows_of(result, "evaluate")] == [3, 4]


def test_evaluating_other_data_does_not_stand_in_for_the_runs_own_evaluation():
    """Also where a callback does it at the very step at which the epoch ends."""
    other, own = ZOO["mlp"].data(7), ZOO["mlp"].data(10)
    seen = []

    def callback(event):
        if event.event == "step" and event.step == 3:
            seen.append(trainer.evaluate(other))

    trainer = trainer_of(eval_data=own, callbacks=[callback])
    result = trainer.fit()
    assert len(rows_of(result, "evaluate")) == 2
    assert result.metrics["loss"] == pytest.approx(whole_set(trainer.model, own, loss), rel=1e-5)
    assert seen[0]["loss"] == pytest.approx(whole_set(trainer.model, other, loss), rel=1e-5)
    trainer.evaluate(other)
    assert trainer.fit().metrics["loss"] == pytest.approx(whole_set(trainer.model, own, loss), rel=1e-5)


def test_a_callback_may_evaluate_in_the_middle_of_a_run():
    plain, watched = trainer_of("dropout_transformer"), None
    plain.fit()

    def callback(event):
        if event.event == "step":
            watched.evaluate(ZOO["dropout_transformer"].data(5))

    watched = trainer_of("dropout_transformer", callbacks=[callback])
    with inject_oom(step=2, phase="backward"):
        watched.fit()
    assert same(state_of(watched), state_of(plain)) is None


def test_the_journal_has_a_row_for_each_evaluation_of_the_run(tmp_path):
    trainer = trainer_of(eval_data=ZOO["mlp"].data(10), epochs=2, run_dir=tmp_path)
    result = trainer.fit()
    after = trainer.evaluate()
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if row["event"] == "evaluate"]
    assert [row["metrics"] for row in evaluations][:2] == [event.metrics for event in rows_of(result, "evaluate")]
    assert after == evaluations[1]["metrics"]


def test_without_data_or_batches_it_says_so():
    with pytest.raises(RecipeError, match="eval_data"):
        trainer_of().evaluate()
    with pytest.raises(DataError, match="eval_data"):
        trainer_of().evaluate([])


def test_a_generator_that_a_second_evaluation_would_find_empty_is_refused_before_training():
    def batches():
        yield ZOO["mlp"].data(4)[:]

    with pytest.raises(DataError, match=r"eval_data.*once"):
        trainer_of(eval_data=batches(), epochs=2).fit()
    assert trainer_of(eval_data=batches(), epochs=1).fit().metrics.keys() == {"loss"}


# What it leaves alone.


@pytest.mark.parametrize("kind", ZOO)
def test_flags_streams_buffers_optimizer_and_plan_are_untouched(kind):
    """A run with evaluations, some of which run out of memory, is bit for bit the run without."""
    plain = trainer_of(kind, epochs=2)
    plain.fit()
    model = ZOO[kind].make()
    seen = cap(model, 3, when=in_evaluation)
    evaluated = trainer_of(
        kind, model=model, epochs=2, eval_data=DataLoader(ZOO[kind].data(10), 5, shuffle=True), eval_steps=2
    )
    result = evaluated.fit()
    assert rungs(result) == ["empty_cache", "halve_batch"]
    assert {event.scope for event in result.fallbacks} == {"evaluation"}
    assert result.plan == Plan()
    assert seen == [5, 5, *[3, 2] * 6]
    assert same(state_of(evaluated), state_of(plain)) is None


def test_flags_that_the_user_has_set_come_back():
    model = ZOO["dropout_transformer"].make()
    model.layers[0].eval()
    model.layers[1].dropout.eval()
    flags = [module.training for module in model.modules()]
    trainer = trainer_of("dropout_transformer", model=model)
    trainer.evaluate(ZOO["dropout_transformer"].data(5))
    assert [module.training for module in model.modules()] == flags
    with inject_oom(phase="evaluate", times=math.inf), pytest.raises(LadderExhausted):
        trainer.evaluate(ZOO["dropout_transformer"].data(5))
    assert [module.training for module in model.modules()] == flags


def test_evaluating_a_model_in_evaluation_mode_leaves_it_there_and_fit_trains_it():
    model = ZOO["dropout_transformer"].make().eval()
    trainer = trainer_of("dropout_transformer", model=model)
    trainer.evaluate(ZOO["dropout_transformer"].data(5))
    assert not any(module.training for module in model.modules())
    trainer.fit()
    assert all(module.training for module in model.modules())


def test_before_training_the_users_streams_are_untouched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    trainer = trainer_of("dropout_transformer")
    torch.set_rng_state(before)
    trainer.evaluate(DataLoader(ZOO["dropout_transformer"].data(9), batch_size=4, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_are_not_recorded_and_those_of_nobody_are_left():
    grads = []
    model = ZOO["mlp"].make()
    model.register_forward_hook(lambda _module, _args, output: grads.append(output.requires_grad))
    trainer_of(model=model).evaluate(ZOO["mlp"].data(10))
    assert grads
    assert not any(grads)
    assert all(parameter.grad is None for parameter in model.parameters())


# Its own micro-batch and its own walk.


def test_the_micro_batch_that_fits_is_remembered_for_the_next_evaluation():
    model = ZOO["mlp"].make()
    seen = cap(model, 4, when=in_evaluation)
    result = trainer_of(model=model, epochs=3, eval_data=DataLoader(ZOO["mlp"].data(16), batch_size=16)).fit()
    assert seen == [16, 16, 8, 4, 4, 4, 4, *[4] * 8]
    assert rungs(result) == ["empty_cache", "halve_batch", "halve_batch"]
    assert [event.new.micro_batch for event in result.fallbacks] == [None, 8, 4]


def test_evaluation_may_use_larger_pieces_than_training():
    model = ZOO["mlp"].make()
    cap(model, 2, when=lambda module: module.training)
    seen = cap(model, math.inf, when=in_evaluation)
    result = trainer_of(model=model, eval_data=DataLoader(ZOO["mlp"].data(16), batch_size=16)).fit()
    assert result.plan == Plan(micro_batch=2)
    assert seen == [16]


def test_it_starts_from_the_users_plan_and_runs_under_the_trainings_build():
    model = ZOO["mlp"].make()
    seen = cap(model, math.inf, when=in_evaluation)
    at_forward(model, 1)
    result = trainer_of(
        model=model, plan=Plan(micro_batch=4), ladder=["gradient_checkpointing"],
        eval_data=DataLoader(ZOO["mlp"].data(16), batch_size=16),
    ).fit()  # fmt: skip
    assert result.plan == Plan(micro_batch=4, gradient_checkpointing=True)
    assert seen == [4] * 4


def test_one_row_that_does_not_fit_is_the_end_with_a_reason_for_each_rung():
    model = ZOO["mlp"].make()
    cap(model, 0, when=in_evaluation)
    trainer = trainer_of(model=model, eval_data=ZOO["mlp"].data(10))
    with pytest.raises(LadderExhausted, match="evaluate") as caught:
        trainer.fit()
    assert caught.value.skipped.keys() >= {"empty_cache", "halve_batch", "gradient_checkpointing", "amp"}
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert trainer._loop.track.step == 3
    assert trainer._loop.descent.plan == Plan()


@pytest.mark.parametrize("ladder", [["amp"], ["gradient_checkpointing"]])
def test_a_ladder_that_cannot_help_an_evaluation_ends_it_all_the_same(ladder):
    trainer = trainer_of(ladder=ladder)
    with inject_oom(phase="evaluate"), pytest.raises(LadderExhausted) as caught:
        trainer.evaluate(ZOO["mlp"].data(4))
    assert caught.value.skipped.keys() == set(ladder)


def test_without_a_ladder_the_failure_passes_through_untouched():
    error = torch.OutOfMemoryError(OOM)

    def fail(output, targets):
        raise error

    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer_of(loss=fail, ladder=[]).evaluate(ZOO["mlp"].data(4))
    assert caught.value is error


def test_a_users_rung_is_walked_and_may_not_change_the_build():
    def one_row(plan):
        return Plan(micro_batch=1, precision=plan.precision)

    def half(plan):
        return Plan(micro_batch=plan.micro_batch, precision="bf16")

    model = ZOO["mlp"].make()
    seen = cap(model, 1, when=in_evaluation)
    trainer = trainer_of(model=model, ladder=[half, one_row])
    trainer.evaluate(DataLoader(ZOO["mlp"].data(3), batch_size=3))
    assert seen == [3, 1, 1, 1]


# BatchNorm.


def test_batch_norm_is_evaluated_by_its_running_statistics_in_any_pieces():
    """One row is enough: nothing is normalised over it. In training two stay the least."""
    model = ZOO["cnn_batch_norm"].make()
    seen = cap(model, 1, when=in_evaluation)
    trained = cap(model, 2, when=lambda module: module.training)
    data = ZOO["cnn_batch_norm"].data(5)
    trainer = trainer_of("cnn_batch_norm", model=model, eval_data=DataLoader(data, batch_size=5), epochs=2)
    result = trainer.fit()
    assert seen == [5, 5, 3, 2, *[1] * 10]
    twin = ZOO["cnn_batch_norm"].make()
    twin.load_state_dict(model.state_dict())
    assert trained[-4:] == [2, 2, 2, 2]
    assert result.plan.micro_batch == 2
    assert result.metrics["loss"] == pytest.approx(whole_set(twin, data, loss), rel=1e-5)
    assert model.blocks[0][1].num_batches_tracked == 6 * 4


# Nothing piles up.


def test_outputs_do_not_pile_up():
    alive, counts = [], []
    model = ZOO["mlp"].make()

    def count(_module, _args):
        counts.append(sum(reference() is not None for reference in alive))

    model.register_forward_pre_hook(count)
    model.register_forward_hook(lambda _module, _args, output: alive.append(weakref.ref(output)))
    trainer = trainer_of(model=model, metrics={"accuracy": accuracy}, plan=Plan(micro_batch=2))
    trainer.evaluate(DataLoader(ZOO["mlp"].data(24), batch_size=8))
    assert len(counts) == 12
    assert set(counts) == {0}
    assert not any(reference() is not None for reference in alive)


def test_a_failed_evaluation_holds_nothing():
    data = TensorDataset(torch.randn(2048, 6), torch.zeros(2048, dtype=torch.long))
    trainer = trainer_of(model=nn.Linear(6, 4), memory_limit="24KiB")
    trainer.evaluate(DataLoader(data, batch_size=512))
    fallbacks = [event for event in trainer._journal.events if event.event == "fallback"]
    assert len(fallbacks) > 1
    assert {event.held_bytes for event in fallbacks} == {0}


def test_a_model_made_for_an_evaluation_is_the_one_that_the_seed_makes():
    member = ZOO["mlp"]
    ends = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        trainer = AdaptiveTrainer(member.model, member.data(16), loss=loss, batch_size=8, seed=5, progress=False)
        trainer.evaluate(member.data(8))
        ends.append(trainer.model.state_dict())
    assert same(*ends) is None


def test_an_evaluation_never_cuts_what_must_not_be_cut():
    seen = []

    def coupled(output, targets):
        seen.append(len(targets))
        return loss(output, targets)

    member = ZOO["mlp"]
    trainer = AdaptiveTrainer(
        member.make(),
        member.data(8),
        loss=coupled,
        batch_size=8,
        plan=Plan(micro_batch=8),
        separable=False,
        progress=False,
    )
    trainer.evaluate([member.data(32)[:]])
    assert seen == [32]


# Outside a run, and asked for within one.


def test_an_evaluation_after_a_run_has_a_row_and_is_told_to_callbacks(tmp_path):
    seen = []
    trainer = trainer_of(
        run_dir=tmp_path, callbacks=[lambda event: seen.append(event.event)], eval_data=ZOO["mlp"].data(9)
    )
    trainer.fit()
    before = seen.count("evaluate")
    trainer.evaluate()
    rows = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert seen.count("evaluate") == before + 1
    assert rows.count("evaluate") == before + 1
    assert rows[-1] == "evaluate"


def run_asking(*, asking):
    """A run whose callback asks for an evaluation at each step, or not; its end, and how many engines it had."""
    engines, made = set(), []

    def ask(event):
        if event.event == "step":
            engines.add(id(made[0]._loop.workshop.engine))
            if asking:
                made[0].evaluate(ZOO["mlp"].data(9))

    made.append(trainer_of(callbacks=[ask], plan=Plan(precision="fp16")))
    made[0].fit()
    return state_of(made[0]), len(engines)


def test_an_evaluation_that_a_callback_asks_for_leaves_the_run_as_it_is():
    (asked, engines), (plain, _) = run_asking(asking=True), run_asking(asking=False)
    assert engines == 1
    assert same(asked, plain) is None
