"""Law 2, Samples: every sample of an epoch once, in the same order, whatever the plan and whatever fails."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from adaptive_trainer import AdaptiveTrainer, DataError, Plan
from adaptive_trainer.testing import inject_oom

NUM_SAMPLES = 22


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


class Numbered(Dataset):
    """Samples that say which they are."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)])


class Recorder:
    """A step that remembers the samples of the pieces that it saw through, and forgets those of failed attempts."""

    def __init__(self):
        self.attempt, self.steps = [], []

    def __call__(self, model, batch):
        self.attempt.append([int(row) for row in batch[:, 0].tolist()])
        return model(batch).pow(2).mean()

    def on_event(self, event):
        if event.event == "step":
            self.steps.append(self.attempt)
            self.attempt = []
        if event.event == "out_of_memory":
            self.attempt = []

    @property
    def samples(self):
        return [sorted(flat(pieces)) for pieces in self.steps]

    @property
    def order(self):
        return [flat(pieces) for pieces in self.steps]


def run(data, *, inject=None, model=None, **rest):
    recorder = Recorder()
    model = model or torch.nn.Linear(1, 1)
    arguments = {"epochs": 2, "progress": False} | rest
    trainer = AdaptiveTrainer(model, data, step=recorder, callbacks=[recorder], **arguments)
    if inject is None:
        result = trainer.fit()
    else:
        with inject:
            result = trainer.fit()
    return recorder, result


DATA = {
    "dataset": lambda: {"data": Numbered(), "batch_size": 8},
    "loader": lambda: {"data": DataLoader(Numbered(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))},
    "batch_sampler": lambda: {"data": DataLoader(Numbered(), batch_sampler=BatchSampler(SequentialSampler(range(NUM_SAMPLES)), 8, drop_last=False))},
    "list_of_batches": lambda: {"data": [torch.arange(a, min(a + 8, NUM_SAMPLES)).float()[:, None] for a in range(0, NUM_SAMPLES, 8)]},
    "workers": lambda: {"data": Numbered(), "batch_size": 8, "num_workers": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_every_sample_once_an_epoch_in_the_same_order(kind, phase):
    """Rows 30, 61, 70, 72."""
    plain, _ = run(**DATA[kind]())
    disturbed, result = run(**DATA[kind](), inject=inject_oom(step=2, phase=phase, times=3))
    assert len(result.fallbacks) == 3
    assert disturbed.order == plain.order
    assert len(disturbed.steps) == 6
    for epoch in (disturbed.samples[:3], disturbed.samples[3:]):
        assert sorted(flat(epoch)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("micro_batch", [1, 3, 5, 8, 100])
def test_the_plan_changes_no_sample_no_step_and_no_learning_rate(micro_batch):
    """Rows 43, 54, 64, 69: the last partial batch included."""

    def decay(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)

    ends = [run(Numbered(), batch_size=8, plan=plan, scheduler=decay) for plan in (None, Plan(micro_batch=micro_batch))]
    (plain, expected), (cut, result) = ends
    assert cut.order == plain.order
    assert [event.lr for event in result.events if event.event == "step"] == [
        event.lr for event in expected.events if event.event == "step"
    ]
    assert [event.num_samples for event in result.events if event.event == "step"] == [8, 8, 6] * 2


def test_the_order_follows_from_the_seed_alone():
    orders = [run(Numbered(), batch_size=8, seed=seed)[0].order for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:3] != orders[0][3:]


def test_an_iterator_without_length_is_read_once_and_to_its_end():
    fetched = []

    def batches():
        for start in range(0, NUM_SAMPLES, 8):
            fetched.append(start)
            yield torch.arange(start, min(start + 8, NUM_SAMPLES)).float()[:, None]

    recorder, result = run(batches(), epochs=1, inject=inject_oom(step=2, times=3))
    assert fetched == [0, 8, 16]
    assert flat(recorder.order) == list(range(NUM_SAMPLES))
    assert result.steps == 3


def test_an_iterable_data_set_is_put_into_batches():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(Numbered()[index] for index in range(NUM_SAMPLES))

    recorder, _ = run(Stream(), batch_size=8, epochs=1, inject=inject_oom(step=2, times=2))
    assert flat(recorder.order) == list(range(NUM_SAMPLES))


def test_set_epoch_is_called_once_an_epoch_and_never_for_a_retry():
    class Told(Numbered):
        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    data = Told()
    run(data, batch_size=8, epochs=3, inject=inject_oom(step=1, times=2))
    assert data.epochs == [0, 1, 2]


def test_a_failing_data_set_passes_through_and_is_not_laddered():
    """Rows 10, 11: whatever its text, what the user's loader raises is not the device's memory."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    class Failing(Numbered):
        def __getitem__(self, index):
            if index == 20:
                raise error
            return super().__getitem__(index)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(Failing(), batch_size=8, shuffle=False)
    assert caught.value is error


def test_steps_and_epochs_end_at_the_first_reached():
    assert run(Numbered(), batch_size=8, steps=4, epochs=None)[1].steps == 4
    assert run(Numbered(), batch_size=8, steps=4, epochs=1)[1].steps == 3
    assert run(Numbered(), batch_size=8, steps=2, epochs=1)[1].epochs == 0
    assert run(Numbered(), batch_size=8, steps=3, epochs=None)[1].epochs == 1


def test_fit_again_goes_on_where_the_first_stopped():
    recorder = Recorder()
    trainer = AdaptiveTrainer(
        torch.nn.Linear(1, 1), Numbered(), step=recorder, callbacks=[recorder], batch_size=8, steps=2, progress=False
    )
    trainer.fit()
    assert trainer.fit().steps == 4
    once, _ = run(Numbered(), batch_size=8, steps=4, epochs=None)
    assert recorder.order == once.order


def test_a_data_set_that_ends_an_epoch_early_is_refused_and_loses_nothing_silently():
    class Short(Numbered):
        def __getitem__(self, index):
            if index == 12:
                raise StopIteration
            return super().__getitem__(index)

    with pytest.raises(DataError, match="after 1 of 3 batches"):
        run(Short(), batch_size=8, shuffle=False)


def test_samples_that_nobody_put_together_are_rows_in_the_last_batch_too():
    """Five samples of sixteen moments each are five samples, not sixteen."""
    seen = []

    def step(model, batch):
        seen.append(len(batch))
        return torch.stack([model(noisy).mean() - clean.mean() for noisy, clean in batch]).pow(2).mean()

    samples = [(torch.randn(16, 1), torch.randn(16, 1)) for _ in range(13)]
    loader = DataLoader(samples, batch_size=8, collate_fn=lambda rows: rows)
    result = AdaptiveTrainer(torch.nn.Linear(1, 1), loader, step=step, plan=Plan(micro_batch=4), progress=False).fit()
    assert seen == [4, 4, 3, 2]
    assert [event.num_samples for event in result.events if event.event == "step"] == [8, 5]
