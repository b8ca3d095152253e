"""Data as newcomers give them: what is refused and how, and what an interrupt while they are read does."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from adaptive_trainer import AdaptiveTrainer, DataError, RecipeError
from adaptive_trainer.data import Source
from adaptive_trainer.testing import inject_oom

X, Y = torch.randn(12, 4), torch.randn(12, 1)
LABELS = torch.arange(12) % 2


def refusal(data, key="data", **options):
    with pytest.raises(DataError) as caught:
        Source(data, key=key, **options)
    return str(caught.value)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize(
    ("data", "shapes"),
    [
        ((X, Y), "(12, 4) and (12, 1)"),
        ((Y, Y), "(12, 1) and (12, 1)"),
        ([X, LABELS], "(12, 4) and (12,)"),
        ((X.numpy(), Y.numpy()), "(12, 4) and (12, 1)"),
        (X, "(12, 4)"),
        (np.zeros((12, 4)), "(12, 4)"),
    ],
    ids=["tuple", "tuple of two alike", "list", "numpy tuple", "tensor", "numpy"],
)
def test_arrays_of_all_samples_are_refused_with_their_shapes(data, shapes, batch_size):
    for key in ("data", "eval_data"):
        found = refusal(data, key, batch_size=batch_size)
        assert found.startswith(f"{key}: ")
        assert shapes in found
        assert "give torch.utils.data.TensorDataset(X, y)" in found


def test_fit_refuses_a_pair_of_tensors_before_the_first_step():
    trainer = AdaptiveTrainer(nn.Linear(4, 1), (X, Y), loss=nn.MSELoss(), batch_size=4, device="cpu")
    with pytest.raises(DataError, match="TensorDataset"):
        trainer.fit()


@pytest.mark.parametrize(
    ("data", "batch_size"),
    [
        ([X, X, X], None),  # batches of inputs
        (list(X), 4),
        (tuple(X), 4),
        ([(X, Y), (X, Y)], None),
        ([(X, Y)] * 2, 4),
        ([[X[0, :3], X[1, :2]]], None),  # a batch of two ragged rows
        ([{"x": X, "temperature": 0.5}], None),
        (DataLoader([(X, 3)], batch_size=None), None),
    ],
)  # fmt: skip
def test_what_may_be_batches_or_samples_is_taken_as_it_is(data, batch_size):
    source = Source(data, batch_size=batch_size)
    source.begin_epoch(0)
    assert source.next() is not None


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ((X[0], 3), "a pair with a single number as its target"),
        ((X[0], torch.tensor(3)), "a pair with a single number as its target"),
        ([X[0], 0.5], "a pair with a single number as its target"),
        ((X[0], np.int64(3)), "a pair with a single number as its target"),
        ({"x": X[0], "labels": 3}, "a mapping with a single number as 'labels'"),
        ((X[0], Y[0]), "shapes (4,) and (1,)"),
        (0.5, "a single number"),
        (torch.tensor(0.5), "a single number"),
    ],
)
def test_a_list_of_samples_without_a_batch_size_asks_for_it(sample, expected):
    found = refusal([sample] * 5)
    assert expected in found
    assert "batch_size=32" in found
    assert "DataLoader(data, batch_size=None)" in found
    source = Source([sample] * 5, batch_size=5)
    source.begin_epoch(0)
    assert source.next().expected == 5


class Countless(Dataset):
    def __getitem__(self, index):
        return X[index], Y[index]


def test_a_data_set_without_a_length_says_what_to_define():
    assert "Countless has no __len__" in refusal(Countless(), batch_size=4)


def test_a_batch_size_larger_than_the_data_is_warned_of_once(caplog):
    trainer = AdaptiveTrainer(
        nn.Linear(4, 1), TensorDataset(X, Y), loss=nn.MSELoss(), batch_size=64, epochs=2, device="cpu",
        eval_data=TensorDataset(X, Y),
    )  # fmt: skip
    trainer.fit()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == "batch_size: 64 is more than the 12 samples of data, so each epoch is one step of 12 samples"


# An interrupt while data are read.


class Fragile(Dataset):
    """Its sample ``at`` cannot be read the first time."""

    def __init__(self, error, at):
        self.error, self.at, self.read, self.epochs = error, at, [], []

    def __len__(self):
        return 12

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __getitem__(self, index):
        if len(self.read) == self.at and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.read.append(index)
        return X[index], Y[index]


def fit_twice(data, error, **options):
    seen = []

    def step(model, batch):
        seen.extend(batch[0][:, 0].tolist())
        return (model(batch[0]) - batch[1]).square().mean()

    trainer = AdaptiveTrainer(nn.Linear(4, 1), data, step=step, device="cpu", ladder=[], **options)
    with pytest.raises(type(error)) as caught:
        trainer.fit()
    assert caught.value is error
    result = trainer.fit()
    return seen, result


@pytest.mark.parametrize("at", [0, 4, 6, 8])
@pytest.mark.parametrize("make", [KeyboardInterrupt, lambda: OSError("the disk")])
def test_an_epoch_of_the_trainers_own_order_goes_on_at_the_batch_that_was_asked_for(make, at, caplog):
    error = make()
    data = Fragile(error, at)
    seen, result = fit_twice(data, error, batch_size=4)
    assert sorted(seen) == sorted(X[:, 0].tolist())
    assert (result.steps, result.epochs) == (3, 1)
    assert data.epochs == [0]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_order_of_the_epoch_that_goes_on_and_of_the_next_one_is_that_of_an_undisturbed_run():
    error = KeyboardInterrupt()
    broken, whole = Fragile(error, 5), Fragile(None, 0)
    fit_twice(broken, error, batch_size=4, epochs=2)
    AdaptiveTrainer(nn.Linear(4, 1), whole, loss=nn.MSELoss(), device="cpu", batch_size=4, epochs=2).fit()
    assert broken.read[:4] + broken.read[5:24] == whole.read[:23]


def test_a_users_own_loader_begins_the_epoch_anew_and_one_warning_says_so(caplog):
    error = KeyboardInterrupt()
    seen, result = fit_twice(DataLoader(Fragile(error, 8), batch_size=4), error)
    assert len(seen) == 8 + 12
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "data: epoch 1 was broken off after 2 batches" in line
    assert "DataLoader" in line
    assert result.steps == 5


def test_a_loader_that_failed_before_its_first_batch_has_nothing_to_warn_of(caplog):
    error = KeyboardInterrupt()
    fit_twice(DataLoader(Fragile(error, 0), batch_size=4), error)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# Loss, metrics and models as newcomers give them.


def make_trainer(model=None, data=None, **options):
    return AdaptiveTrainer(
        model or nn.Linear(4, 1), TensorDataset(X, Y) if data is None else data, batch_size=4, device="cpu", **options
    )


def test_pairs_without_a_loss_ask_for_it():
    with pytest.raises(DataError, match="loss: none is given"):
        make_trainer().fit()


def test_the_messages_about_a_mapping_and_about_metrics_lead_to_what_works():
    samples = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    metrics = {"mae": nn.functional.l1_loss}
    with pytest.raises(DataError, match=r"it has 'x', 'y'\. Let the data give pairs.*with metrics too"):
        make_trainer(data=samples, loss=nn.MSELoss(), metrics=metrics, eval_data=samples).fit()
    with pytest.raises(RecipeError, match=r"drop metrics, or give loss instead of step, with data that give pairs"):
        make_trainer(data=samples, step=lambda model, batch: 0, metrics=metrics, eval_data=samples)
    pairs = [(sample["x"], sample["y"]) for sample in samples]
    assert "mae" in make_trainer(data=pairs, loss=nn.MSELoss(), metrics=metrics, eval_data=pairs).fit().metrics


def test_a_metrics_own_error_passes_through_with_its_name_and_without_another_steps_failure():
    error = ValueError("mine")

    def failing(output, targets):
        raise error

    def step_fails(event):
        if event.event == "fallback":
            raise KeyboardInterrupt

    trainer = make_trainer(
        loss=nn.MSELoss(), metrics={"accuracy": failing}, eval_data=TensorDataset(X, Y), callbacks=[step_fails]
    )
    with inject_oom(step=1, phase="forward"), pytest.raises(KeyboardInterrupt):
        trainer.fit()
    with pytest.raises(ValueError, match="mine") as caught:
        trainer.evaluate()
    assert caught.value is error
    assert caught.value.__notes__ == ["raised by the metric 'accuracy'"]


@pytest.mark.parametrize(
    ("given", "what"), [(torch.zeros(3), r"a tensor of shape \(3,\)"), (None, "a NoneType"), ("x", "a str")]
)
def test_a_metric_that_gives_no_number_is_named(given, what):
    trainer = make_trainer(
        loss=nn.MSELoss(), metrics={"mine": lambda output, targets: given}, eval_data=TensorDataset(X, Y)
    )
    with pytest.raises(DataError, match=f"^metrics: 'mine' gave {what}; it must give one number"):
        trainer.fit()


@pytest.mark.parametrize("objective", [{"loss": nn.MSELoss()}, {"step": lambda model, batch: model(batch[0]).mean()}])
def test_a_model_of_which_nothing_is_trained_is_refused(objective):
    model = nn.Linear(4, 1).requires_grad_(requires_grad=False)
    with pytest.raises(DataError, match="model: none of its 2 parameters is trained"):
        make_trainer(model, **objective).fit()
    assert make_trainer(model, **objective).evaluate(TensorDataset(X, Y))["loss"] is not None


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_metrics_that_fit_has_nothing_to_evaluate_on_are_warned_of_once(caplog):
    trainer = make_trainer(loss=nn.MSELoss(), metrics={"mae": nn.functional.l1_loss})
    trainer.evaluate(TensorDataset(X, Y))
    assert warnings_of(caplog) == []
    trainer.fit()
    trainer.fit()
    assert warnings_of(caplog) == [
        "metrics: fit() evaluates nothing without eval_data; give it, or call evaluate(data)"
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_first_loss_of_a_run_that_is_not_finite_is_warned_of_once(value, caplog):
    def step(model, batch):
        return model(batch[0]).square().mean() * (value if trainer._loop.track.step else 1.0)

    trainer = make_trainer(step=step, epochs=2, ladder=[])
    trainer.fit()
    (line,) = warnings_of(caplog)
    assert line.startswith(f"step 2: its loss is {value}, the first of this run")
    trainer.fit()
    assert len(warnings_of(caplog)) == 2
