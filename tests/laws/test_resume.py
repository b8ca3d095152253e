"""A run that goes on from a checkpoint ends as the undisturbed run does, bit for bit, wherever it was cut off."""

import json
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adaptive_trainer import AdaptiveTrainer, CheckpointError, LadderExhausted, Plan
from adaptive_trainer.signals import SUPERVISOR
from adaptive_trainer.testing import inject_oom
from tests.laws.test_optimizer_step import Factored, Plain
from tests.zoo import OPTIMIZERS, ZOO, decay, loss, same, state_of


class Stop(Exception):
    """Ends a run from a callback."""


def stopping(at):
    def stop(event):
        if event.event == "step" and event.step == at:
            raise Stop

    return stop


def trainer_of(kind="mlp", **rest):
    arguments = {
        "loss": loss, "batch_size": 8, "optimizer": OPTIMIZERS["adam"], "scheduler": decay, "progress": False,
        "epochs": 2,
    }  # fmt: skip
    arguments |= rest
    data = arguments.pop("data", None) or ZOO[kind].data(28)
    if arguments["batch_size"] is None:
        del arguments["batch_size"]
    return AdaptiveTrainer(arguments.pop("model", None) or ZOO[kind].make(), data, **arguments)


def cut_off_and_resumed(tmp_path, at, **rest):
    """The end of a run that is cut off after a step, whose checkpoint another trainer finds."""
    first = trainer_of(run_dir=tmp_path, checkpoint_steps=1, callbacks=[stopping(at)], **rest)
    with pytest.raises(Stop):
        first.fit()
    torch.manual_seed(999)
    second = trainer_of(run_dir=tmp_path, checkpoint_steps=1, **rest)
    result = second.fit()
    assert result.events[0].resumed_from.endswith(f"step-{at - 1:08d}")
    return second, result


@pytest.mark.parametrize("at", [2, 3, 5, 8])
@pytest.mark.parametrize("kind", ZOO)
def test_models(tmp_path, kind, at):
    plain = trainer_of(kind)
    expected = plain.fit()
    resumed, result = cut_off_and_resumed(tmp_path, at, kind=kind)
    assert same(state_of(resumed), state_of(plain)) is None
    assert result.steps == expected.steps
    assert result.losses == expected.losses[at - 1 :]
    assert result.epochs == 2


@pytest.mark.parametrize("name", ["factored", "own", *OPTIMIZERS])
def test_optimizers(tmp_path, name):
    optimizer = {"factored": Factored, "own": Plain}.get(name) or OPTIMIZERS[name]
    plain = trainer_of(optimizer=optimizer)
    plain.fit()
    resumed, _ = cut_off_and_resumed(tmp_path, 6, optimizer=optimizer)
    assert same(state_of(resumed), state_of(plain)) is None
    mine, theirs = (vars(entry._loop.workshop.state.optimizer) for entry in (resumed, plain))
    assert {name: mine.get(name) for name in ("calls", "seen")} == {n: theirs.get(n) for n in ("calls", "seen")}


@pytest.mark.parametrize("plan", [Plan(precision="fp16"), Plan(precision="bf16", micro_batch=3)], ids=str)
def test_plans(tmp_path, plan):
    plain = trainer_of(plan=plan)
    plain.fit()
    resumed, _ = cut_off_and_resumed(tmp_path, 5, plan=plan)
    assert same(state_of(resumed), state_of(plain)) is None
    assert resumed._loop.workshop.state.scaler == plain._loop.workshop.state.scaler


class Noisy(Dataset):
    """Draws while it is read, from the steps' stream."""

    def __len__(self):
        return 28

    def __getitem__(self, index):
        return torch.randn(8) + index, index % 3


class Streamed(IterableDataset):
    def __iter__(self):
        for index in range(28):
            yield torch.full((8,), float(index)) + torch.randn(8), index % 3


def loader(**rest):
    return DataLoader(Noisy(), batch_size=8, **rest)


class Stateful:
    """A loader that can be told where to go on, as torchdata's."""

    def __init__(self):
        self.next = 0
        self.reads = 0

    def __iter__(self):
        while self.next < 4:
            index, self.next = self.next, self.next + 1
            self.reads += 1
            yield torch.full((8, 8), float(index)), torch.arange(8) % 3
        self.next = 0

    def state_dict(self):
        return {"next": self.next, "by": {"tensor": torch.tensor(3)}}

    def load_state_dict(self, state):
        self.next = state["next"]


DATA = {
    "own order": Noisy,
    "a loader that shuffles": lambda: loader(shuffle=True),
    "a loader with a generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "a loader whose last batch is full": lambda: DataLoader(
        Noisy(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "a loader that does not": loader,
    "a stream": Streamed,
    "a list": lambda: [(torch.full((8, 8), float(index)), torch.arange(8) % 3) for index in range(4)],
    "stateful": Stateful,
}


def classes(width=8):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 8), nn.Dropout(0.2), nn.Linear(8, 3))


@pytest.mark.parametrize("at", [2, 4, 5, 7])
@pytest.mark.parametrize("name", DATA)
def test_data(tmp_path, name, at):
    rest = {"batch_size": 8 if name in {"own order", "a stream"} else None, "loss": nn.CrossEntropyLoss()}
    plain = trainer_of(model=classes(), data=DATA[name](), **rest)
    plain.fit()
    first = trainer_of(
        model=classes(), data=DATA[name](), run_dir=tmp_path, checkpoint_steps=1, callbacks=[stopping(at)], **rest
    )
    with pytest.raises(Stop):
        first.fit()
    data = DATA[name]()
    resumed = trainer_of(model=classes(), data=data, run_dir=tmp_path, **rest)
    resumed.fit()
    assert same(state_of(resumed), state_of(plain)) is None
    assert name != "stateful" or data.reads == 8 - (at - 1)


@pytest.mark.parametrize("same_trainer", [True, False])
@pytest.mark.parametrize("name", DATA)
def test_a_run_that_was_to_end_with_an_epoch_goes_on_as_one_that_was_not(tmp_path, name, same_trainer):
    """A shuffling loader's generator draws when the epoch's end is asked for, as a loop by hand asks for it."""
    rest = {
        "batch_size": 8 if name in {"own order", "a stream"} else None, "loss": nn.CrossEntropyLoss(), "epochs": None,
    }  # fmt: skip
    plain = trainer_of(model=classes(), data=DATA[name](), steps=8, **rest)
    plain.fit()
    parts = trainer_of(model=classes(), data=DATA[name](), steps=4, run_dir=tmp_path, **rest)
    assert parts.fit().steps == 4
    if not same_trainer:
        parts = trainer_of(model=classes(), data=DATA[name](), steps=8, run_dir=tmp_path, **rest)
    assert parts.fit().steps == 8
    assert same(state_of(parts), state_of(plain)) is None


class TooShort:
    """Has a batch more than it says."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([(torch.full((8, 8), float(index)), torch.arange(8) % 3) for index in range(3)])


def test_batches_beyond_the_length_are_the_next_ones():
    ends = []
    for steps in ([6], [2, 4]):
        trainer = trainer_of(
            model=classes(), data=TooShort(), batch_size=None, loss=nn.CrossEntropyLoss(), epochs=None, steps=steps[0]
        )
        for more in steps:
            trainer._goal = type(trainer._goal)(more, None)
            trainer.fit()
        ends.append(state_of(trainer))
    assert same(*ends) is None


def test_the_plan_in_force_is_in_the_checkpoint(tmp_path):
    first = trainer_of(run_dir=tmp_path, checkpoint_steps=1, callbacks=[stopping(4)])
    with inject_oom(step=2, phase="forward", times=3), pytest.raises(Stop):
        first.fit()
    second = trainer_of(run_dir=tmp_path)
    result = second.fit()
    assert result.events[0].plan.micro_batch == 2
    assert not result.fallbacks


def test_a_run_that_is_complete_is_not_done_again(tmp_path):
    first = trainer_of(run_dir=tmp_path)
    expected = first.fit()
    again = trainer_of(run_dir=tmp_path)
    result = again.fit()
    assert (result.steps, result.epochs, result.losses) == (expected.steps, 2, ())
    assert same(state_of(again)["model"], state_of(first)["model"]) is None
    longer = trainer_of(run_dir=tmp_path, epochs=3)
    assert longer.fit().steps == expected.steps * 3 // 2


def test_the_checkpoints_that_are_due(tmp_path):
    trainer_of(run_dir=tmp_path, checkpoint_steps=3, keep_checkpoints=99).fit()
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "checkpoint"] == [3, 4, 6, 8]
    assert all(row["num_bytes"] > 0 and row["seconds"] > 0 for row in rows if row["event"] == "checkpoint")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (3, 4, 6, 8)
    ]


def test_weights_load_into_the_plain_model(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    trainer = trainer_of("tied_lm", run_dir=tmp_path)
    trainer.fit()
    [newest] = sorted((tmp_path / "checkpoints").iterdir())[-1:]
    model = ZOO["tied_lm"].make()
    model.load_state_dict(safetensors.load_file(newest / "model.safetensors"), strict=True)
    assert same(dict(model.state_dict()), dict(trainer.model.state_dict())) is None


FOREIGN = {
    "names": ({"model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))}, "another model's: it lacks"),
    "shapes": ({"model": classes(9)}, "another model's: 0.weight is"),
    "optimizer": ({"optimizer": OPTIMIZERS["sgd"]}, "the checkpoint holds the state of"),
    "batch size": ({"batch_size": 4}, "batch_size=8"),
    "seed": ({"seed": 3}, "seed=0"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_foreign_is_refused_and_the_model_left_as_it_is(tmp_path, name):
    data, mean = {"data": Noisy()}, {"loss": nn.CrossEntropyLoss()}
    first = trainer_of(model=classes(), run_dir=tmp_path, checkpoint_steps=2, callbacks=[stopping(3)], **mean, **data)
    with pytest.raises(Stop):
        first.fit()
    other, message = FOREIGN[name]
    rest = {"model": classes()} | mean | data | other
    before = {key: value.clone() for key, value in rest["model"].state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer_of(run_dir=tmp_path, **rest).fit()
    assert "\n" not in str(caught.value)
    assert same(before, dict(rest["model"].state_dict())) is None


def test_never_moves_them_aside_and_must_needs_one(tmp_path):
    with pytest.raises(CheckpointError, match="resume=auto"):
        trainer_of(run_dir=tmp_path, resume="must").fit()
    trainer_of(run_dir=tmp_path, epochs=1).fit()
    result = trainer_of(run_dir=tmp_path, epochs=1, resume="never").fit()
    assert result.events[0].resumed_from is None
    assert len(result.losses) == 4
    [aside] = [path for path in tmp_path.iterdir() if path.name.startswith("checkpoints.old-")]
    assert list(aside.iterdir())
    assert trainer_of(run_dir=tmp_path, epochs=2, resume="must").fit().events[0].resumed_from is not None


def test_an_exhausted_ladder_leaves_the_last_completed_step(tmp_path):
    first = trainer_of(run_dir=tmp_path, ladder=["empty_cache"])
    with inject_oom(step=6, phase="backward", times=9), pytest.raises(LadderExhausted):
        first.fit()
    plain = trainer_of()
    plain.fit()
    second = trainer_of(run_dir=tmp_path)
    result = second.fit()
    assert result.events[0].resumed_from.endswith("step-00000005")
    assert same(state_of(second), state_of(plain)) is None


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_finishes_the_step_and_leaves_a_checkpoint(tmp_path, number, error):
    def ask(event):
        if event.event == "step" and event.step == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(error) as caught:
        trainer_of(run_dir=tmp_path, callbacks=[ask]).fit()
    assert number == signal.SIGINT or caught.value.code == 143
    assert signal.getsignal(number) is before
    plain = trainer_of()
    plain.fit()
    resumed = trainer_of(run_dir=tmp_path)
    assert resumed.fit().events[0].resumed_from.endswith("step-00000003")
    assert same(state_of(resumed), state_of(plain)) is None


@pytest.mark.parametrize("supervised", [False, True])
def test_a_second_signal_ends_at_once_unless_a_supervisor_may_have_handed_on_the_first(
    tmp_path, monkeypatch, supervised
):
    def ask(event):
        if event.event == "step" and event.step == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setenv(SUPERVISOR, str(os.getppid() if supervised else os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        trainer_of(run_dir=tmp_path, callbacks=[ask]).fit()
    assert [path.name for path in tmp_path.glob("checkpoints/step-*")] == ["step-00000003"] * supervised


def test_a_run_in_a_thread_takes_no_signals(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(trainer_of(run_dir=tmp_path).fit().steps))
    thread.start()
    thread.join(60)
    assert found == [8]


def test_a_full_disk_ends_neither_the_training_nor_the_older_checkpoint(tmp_path, monkeypatch, caplog):
    from adaptive_trainer import saving

    write = saving.write

    def full(root, step, *rest, **more):
        if step > 2:
            raise OSError(28, "No space left on device")
        return write(root, step, *rest, **more)

    monkeypatch.setattr(saving, "write", full)
    result = trainer_of(run_dir=tmp_path, checkpoint_steps=2).fit()
    assert result.steps == 8
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert caplog.text.count("No space left on device") == 4


def test_saving_that_runs_out_of_memory_is_tried_again(tmp_path):
    with inject_oom(phase="checkpoint"):
        result = trainer_of(run_dir=tmp_path, epochs=1).fit()
    assert [event.step for event in result.events if event.event == "checkpoint"] == [4]
    assert not result.fallbacks


class Odd(torch.optim.SGD):
    """Keeps in its state what nobody can write down."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            self.state[group["params"][0]]["lock"] = threading.Lock()


def test_state_that_cannot_be_kept_is_said_and_training_goes_on(tmp_path, caplog):
    result = trainer_of(run_dir=tmp_path, optimizer=lambda parameters: Odd(parameters, lr=0.1), epochs=1).fit()
    assert result.steps == 4
    assert "lock" in caplog.text
