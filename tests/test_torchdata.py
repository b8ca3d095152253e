"""torchdata's own loader: a run that is stopped and started again goes on at its very batch, with the same order."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.laws.test_resume import Stop, classes, stopping, trainer_of
from tests.zoo import same, state_of

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")


class Counting(Dataset):
    """Remembers which samples were read in this process."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 28

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((8,), float(index)), index % 3


class Drawing(Counting):
    """Draws, in its worker, from the stream that the loader has seeded there."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.randn(8), target


def loader(data, **rest):
    return stateful_dataloader.StatefulDataLoader(data, batch_size=8, shuffle=True, **rest)


LOADERS = {
    "in this process": {"num_workers": 0},
    "two workers": {"num_workers": 2},
    "two workers that stay": {"num_workers": 2, "persistent_workers": True},
}
IN_PROCESS = "in this process"


def trained(data, *, seed, kind=IN_PROCESS, **rest):
    """A trainer over torchdata's loader; with a seed, the loader has a generator of its own."""
    options = LOADERS[kind] | ({} if seed is None else {"generator": torch.Generator().manual_seed(seed)})
    torch.manual_seed(7)  # torchdata seeds a sampler from the global stream when it is made
    made = loader(data, **options)
    return trainer_of(model=classes(), data=made, batch_size=None, loss=nn.CrossEntropyLoss(), **rest)


CASES = [
    *[(IN_PROCESS, seed, at) for seed in (None, 5) for at in (2, 4, 5, 7)],
    ("two workers", 5, 3), ("two workers", 5, 5), ("two workers", None, 7), ("two workers that stay", 5, 5),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "seed", "at"), CASES)
@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")
def test_a_run_that_is_stopped_ends_as_the_undisturbed_one(tmp_path, kind, seed, at):
    """Stopped after step ``at``, started again from the checkpoint before it; step 4 ends the first of three epochs."""
    plain = trained(Counting(), kind=kind, seed=seed, epochs=3)
    expected = plain.fit()
    with pytest.raises(Stop):
        trained(
            Counting(), kind=kind, seed=seed, epochs=3, run_dir=tmp_path, checkpoint_steps=1, callbacks=[stopping(at)]
        ).fit()
    data = Counting()
    resumed = trained(data, kind=kind, seed=seed, epochs=3, run_dir=tmp_path)
    result = resumed.fit()
    assert result.events[0].resumed_from.endswith(f"step-{at - 1:08d}")
    assert result.losses == expected.losses[at - 1 :]
    assert same(state_of(resumed), state_of(plain)) is None
    if kind == IN_PROCESS:
        assert len(data.read) == 3 * 28 - 8 * (at - 1) + (4 if at > 4 else 0)  # those before it are not read again


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")
@pytest.mark.parametrize("seed", [None, 5])
def test_a_run_whose_steps_end_with_an_epoch_goes_on_with_the_next(tmp_path, seed):
    plain = trained(Counting(), seed=seed, epochs=None, steps=9)
    plain.fit()
    trained(Counting(), seed=seed, epochs=None, steps=4, run_dir=tmp_path).fit()
    resumed = trained(Counting(), seed=seed, epochs=None, steps=9, run_dir=tmp_path)
    assert resumed.fit().steps == 9
    assert same(state_of(resumed), state_of(plain)) is None


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")
def test_what_workers_draw_is_the_same_from_the_next_epoch_on(tmp_path):
    """Within an epoch torchdata seeds workers anew; from the next on they are seeded as they would have been."""
    plain = trained(Drawing(), seed=None, kind="two workers")
    plain.fit()
    with pytest.raises(Stop):
        trained(Drawing(), seed=None, kind="two workers", run_dir=tmp_path, callbacks=[stopping(5)]).fit()
    resumed = trained(Drawing(), seed=None, kind="two workers", run_dir=tmp_path)
    resumed.fit()
    assert same(state_of(resumed), state_of(plain)) is None
