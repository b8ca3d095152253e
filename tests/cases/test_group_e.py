"""Data position and random streams: rows 70, 72 and 73."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adaptive_trainer import AdaptiveTrainer, Plan
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import at_backward, at_forward, rungs
from tests.zoo import ZOO, loss, same, state_of

NUM_SAMPLES = 8


class Numbered(Dataset):
    """Samples that say which they are; with ``noise``, each is augmented from all random streams."""

    def __init__(self, *, noise=False):
        self.noise = noise
        self.fetched = []

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        self.fetched.append(index)
        noise = random.random() + float(np.random.rand()) + float(torch.rand(())) if self.noise else 0.0  # noqa: NPY002
        return torch.tensor([float(index), noise])


class Seen:
    """A step that remembers what got through; failed attempts are forgotten."""

    def __init__(self):
        self.rows, self._attempt = [], []

    def __call__(self, model, batch):
        self._attempt.append(batch.clone())
        return model(batch).pow(2).mean()

    def __eq__(self, other):
        return same(self.rows, other.rows) is None

    __hash__ = None

    def on_event(self, event):
        if event.event == "step":
            self.rows.append(torch.cat(self._attempt))
        if event.event in {"step", "out_of_memory"}:
            self._attempt = []

    @property
    def indices(self):
        return [[int(index) for index in rows[:, 0]] for rows in self.rows]


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def run(data, *, fail=(), phase="forward", epochs=2, **rest):
    torch.manual_seed(1)
    model, seen = Dropping(), Seen()
    if fail:
        (at_forward if phase == "forward" else at_backward)(model, *fail)
    trainer = AdaptiveTrainer(model, data, step=seen, callbacks=[seen], epochs=epochs, progress=False, **rest)
    return seen, trainer.fit(), trainer


class CountedLoader(DataLoader):
    """Says how often it was started."""

    starts = 0

    def __iter__(self):
        self.starts += 1
        return super().__iter__()


@pytest.mark.parametrize("ladder", [["empty_cache"], ["gradient_checkpointing"]], ids=["same_engine", "rebuilt"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_case_070_a_loader_that_shuffles_from_the_global_stream_goes_on_where_it_was(ladder, phase):
    ends = []
    for fail in ((), (3,)):
        loader = CountedLoader(Numbered(), batch_size=2, shuffle=True)
        seen, result, trainer = run(loader, fail=fail, phase=phase, ladder=ladder)
        ends.append((seen, state_of(trainer)))
        assert loader.starts == 2
        assert rungs(result) == (ladder if fail else [])
    (plain, expected), (disturbed, found) = ends
    assert disturbed.indices == plain.indices
    assert sorted(itertools.chain(*disturbed.indices[:4])) == list(range(NUM_SAMPLES))
    assert disturbed.indices[:4] != disturbed.indices[4:]
    assert same(found, expected) is None


def test_case_070_a_sampler_that_draws_while_it_goes_is_asked_once_for_each_sample():
    """Another sampler than torch's: each index is drawn when it is needed, from Python's stream."""

    class Drawn:
        def __init__(self):
            self.given = []

        def __iter__(self):
            left = list(range(NUM_SAMPLES))
            while left:
                self.given.append(left.pop(random.randrange(len(left))))
                yield self.given[-1]

        def __len__(self):
            return NUM_SAMPLES

    samplers = Drawn(), Drawn()
    plain, _, _ = run(DataLoader(Numbered(), batch_size=3, sampler=samplers[0]))
    disturbed, _, _ = run(DataLoader(Numbered(), batch_size=3, sampler=samplers[1]), fail=(2, 3, 4))
    assert samplers[0].given == samplers[1].given
    assert disturbed.indices == plain.indices


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(NUM_SAMPLES):
            yield torch.tensor([float(index), 0.0])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("at", [1, 3, 4])
def test_case_072_a_stream_loses_nothing_that_was_read_ahead(workers, at):
    loader = DataLoader(Stream(), batch_size=2, num_workers=workers)
    seen, result, _ = run(loader, fail=(at, at + 1), epochs=1)
    assert seen.indices == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rungs(result) == ["empty_cache", "halve_batch"]
    assert result.steps == 4


def test_case_072_a_generator_is_advanced_once_for_each_step():
    given = []

    def batches():
        for start in range(0, NUM_SAMPLES, 2):
            given.append(start)
            yield torch.tensor([[float(start), 0.0], [start + 1.0, 0.0]])

    seen, result, _ = run(batches(), fail=(3, 4, 5, 6), epochs=1)
    assert given == [0, 2, 4, 6]
    assert seen.indices == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert result.steps == 4


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_case_073_a_retry_starts_from_the_random_streams_of_the_steps_begin(phase):
    """Dropout, and augmentation of the data from all three streams: bit for bit the run without the failure."""
    ends = []
    for disturbed in (False, True):
        torch.manual_seed(1)
        seen = Seen()
        trainer = AdaptiveTrainer(
            Dropping(), DataLoader(Numbered(noise=True), batch_size=2, shuffle=True), step=seen, callbacks=[seen], epochs=2, progress=False,
        )  # fmt: skip
        if disturbed:
            with inject_oom(step=3, phase=phase) as injected:
                result = trainer.fit()
            assert injected.fired == 1
            assert result.plan == Plan()
        else:
            trainer.fit()
        ends.append((seen, state_of(trainer)))
    assert ends[1][0] == ends[0][0]
    assert same(ends[1][1], ends[0][1]) is None


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda generator: float(torch.rand((), generator=generator))),
    "numpy": (lambda: np.random.default_rng(1), lambda generator: generator.random()),
    "numpy_legacy": (lambda: np.random.RandomState(1), lambda generator: generator.rand()),
    "python": (lambda: random.Random(1), lambda generator: generator.random()),
}


class OwnGenerator(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        make, self.draw = GENERATORS[kind]
        self.generator = make()

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.draw(self.generator))


@pytest.mark.parametrize("ladder", [["empty_cache"], ["gradient_checkpointing"]], ids=["again", "recomputed"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_case_073_generators_that_a_module_has_of_its_own_come_back_too(kind, ladder):
    """Rows 73 and 82: in a retry, and in the recomputation of a block."""
    ends = []
    for fail in ((), (3,)):
        torch.manual_seed(1)
        model = nn.Sequential(OwnGenerator(kind), OwnGenerator(kind), nn.Linear(6, 4))
        at_backward(model, *fail)
        trainer = AdaptiveTrainer(model, ZOO["mlp"].data(40), loss=loss, batch_size=8, ladder=ladder, progress=False)
        assert rungs(trainer.fit()) == (ladder if fail else [])
        ends.append(state_of(trainer))
    assert same(ends[1], ends[0]) is None


class Noisy(nn.Module):
    """Draws in its forward from Python's and NumPy's streams as well, as augmentation on the device does."""

    def __init__(self):
        super().__init__()
        self.inner = ZOO["mlp"].make()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.inner(self.drop(x) * random.uniform(0.5, 1) + float(np.random.randn()))  # noqa: NPY002


def test_case_073_python_and_numpy_streams_come_back_too_and_after_several_failures():
    ends = []
    for fail in ((), (3, 4, 5)):
        model = Noisy()
        at_backward(model, *fail)
        ladder = ["empty_cache", "gradient_checkpointing", lambda plan: plan]
        trainer = AdaptiveTrainer(model, ZOO["mlp"].data(40), loss=loss, batch_size=8, ladder=ladder, progress=False)
        assert len(trainer.fit().fallbacks) == len(fail)
        ends.append(state_of(trainer))
    assert same(ends[1], ends[0]) is None
