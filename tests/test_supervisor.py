"""`fit --restarts N`, with real processes and real signals: what is started again, one rung lower, and what is not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from adaptive_trainer import cli, crash, oom
from adaptive_trainer.crash import Crash, is_lost
from adaptive_trainer.errors import LadderExhausted
from adaptive_trainer.plan import Plan
from adaptive_trainer.supervisor import supervise
from tests.laws.test_resume import trainer_of
from tests.zoo import same, state_of

MODULE = """
import os
import signal
import time
import torch

class Dying(torch.nn.Module):
    '''Ends its process in a forward of so many rows, from a step on; step and rows are counted over all processes.'''

    def __init__(self, how, rows=0, step=1):
        super().__init__()
        torch.manual_seed(1)
        self.inner = torch.nn.Linear(4, 1)
        self.how, self.rows, self.step = how, rows, step
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if len(x) > self.rows and self.samples >= 8 * (self.step - 1):
            self.end(len(x))
        self.samples += len(x)
        return self.inner(x)

    def end(self, rows):
        with open("deaths", "a") as file:
            file.write(f"{rows}\\n")
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "lost":
            torch.Tensor.copy_ = lost
            raise torch.AcceleratorError("CUDA error: out of memory")
        if self.how == "wrong":
            raise ValueError("out of ideas")
        while self.how == "waits":
            time.sleep(0.01)

def lost(*_):
    raise torch.AcceleratorError("CUDA error: out of memory")

def make_data():
    torch.manual_seed(0)
    inputs = torch.randn(32, 4)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
"""
RECIPE = """
model: {_target_: dying_parts.Dying, how: killed, rows: 2, step: 3}
data: {_target_: dying_parts.make_data}
loss: torch.nn.functional.mse_loss
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
batch_size: 8
checkpoint_steps: 1
device: cpu
run_dir: run
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "dying_parts.py").write_text(MODULE)
    (tmp_path / "demo.yaml").write_text(RECIPE)
    return tmp_path


def started(*arguments, cwd):
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "adaptive_trainer", "fit", "demo.yaml", *arguments],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def fitted(*arguments, cwd):
    process = started(*arguments, cwd=cwd)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def rows_of(folder, *events):
    rows = [json.loads(line) for line in (folder / "run" / "journal.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] in events]


def micro_batches(rows, key="new"):
    return [row[key]["micro_batch"] for row in rows]


# The whole command.


def test_a_run_that_is_killed_goes_on_one_rung_lower_until_it_fits(folder):
    """Killed in step 3 at 8 and at 4 rows; at 2 it ends, with the two steps of before not done again."""
    code, out, err = fitted("--restarts", "3", "optimizer.lr=0.02", cwd=folder)
    assert code == 0, err
    assert "done: 4 steps in all" in out
    assert (folder / "deaths").read_text().split() == ["8", "4"]
    fallbacks, failures = rows_of(folder, "fallback"), rows_of(folder, "out_of_memory")
    assert micro_batches(fallbacks) == [4, 2]
    assert [row["rung"] for row in fallbacks] == ["halve_batch", "halve_batch"]
    assert all("killed by signal 9" in row["reason"] for row in fallbacks)
    assert all("dead" in row["skipped"]["empty_cache"] for row in fallbacks)
    assert {row["cause"] for row in failures} == {"host_memory"}
    starts = rows_of(folder, "start")
    assert [row["step"] for row in starts] == [0, 2, 2]
    assert micro_batches(starts, "plan") == [None, None, 4]
    assert [row["step"] for row in rows_of(folder, "step")] == [1, 2, 3, 4]
    assert [line.partition(":")[0] for line in err.splitlines() if line.startswith("restart")] == [
        "restart 1 of 3", "restart 2 of 3",
    ]  # fmt: skip
    warnings = [line for line in err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert all("halve_batch" in line for line in warnings)
    assert not (folder / "run" / crash.NAME).exists()


def test_a_run_that_loses_its_device_goes_on_and_ends_with_its_own_code_when_the_restarts_are_used_up(folder):
    code, _, err = fitted("model.how=lost", "model.step=1", "resume=never", "--restarts", "1", cwd=folder)
    assert code == 1
    assert (folder / "deaths").read_text().split() == ["8", "4"]
    assert err.count("AcceleratorError: CUDA error: out of memory") >= 2  # the child's own words are the terminal's
    (fallback,) = rows_of(folder, "fallback")
    assert fallback["new"]["micro_batch"] == 4
    assert "the device was lost (AcceleratorError: CUDA error: out of memory)" in fallback["reason"]
    assert rows_of(folder, "out_of_memory")[0]["cause"] == "unknown"
    assert "it is not started again: --restarts 1 is used up" in err.splitlines()[-1]
    assert crash.left(folder / "run").plan.micro_batch == 4


def test_where_no_rung_is_left_it_is_said_and_the_exit_code_is_3(folder):
    code, _, err = fitted("--restarts=5", "ladder=[empty_cache, gradient_checkpointing]", cwd=folder)
    assert code == 3
    assert (folder / "deaths").read_text().split() == ["8"]
    assert "No rung is left" in err
    assert "killed by signal 9" in err
    assert "Traceback" not in err


def test_what_is_no_matter_of_memory_passes_through(folder):
    code, _, err = fitted("model.how=wrong", "--restarts", "3", cwd=folder)
    assert code == 1
    assert (folder / "deaths").read_text().split() == ["8"]
    assert err.splitlines()[-1] == "ValueError: out of ideas"
    assert "restart" not in err
    assert not (folder / "run" / crash.NAME).exists()


def waited_for(path, process, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_reaches_the_child_once_and_its_code_is_the_supervisors(folder, number, code, to_group):
    """Sent to the supervisor alone, and to its whole group as terminals do; the step under way is finished."""
    (folder / "dying_parts.py").write_text(MODULE.replace('while self.how == "waits"', "for _ in range(150)"))
    environment = {"start_new_session": True} if to_group else {}
    process = subprocess.Popen(
        [sys.executable, "-m", "adaptive_trainer", "fit", "demo.yaml", "model.how=waits", "--restarts", "3"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **environment,
    )  # fmt: skip
    waited_for(folder / "deaths", process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert err.count("the step under way is finished first") == 1
    assert "restart" not in err
    assert [row["step"] for row in rows_of(folder, "checkpoint")] == [1, 2, 3]


# The supervisor alone, over commands that take no time.


def python(code):
    return [sys.executable, "-c", code]


def supervised(code, run_dir, restarts=2, again=None):
    said = []
    return supervise(python(code), python(again or code), run_dir, restarts, said.append), said


KILL = "import os; os.kill(os.getpid(), {})"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 7, 130])
def test_an_exit_code_passes_through(tmp_path, code):
    assert supervised(f"raise SystemExit({code})", tmp_path) == (code, [])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
def test_another_signal_gives_128_and_its_number(tmp_path, number):
    assert supervised(KILL.format(int(number)), tmp_path) == (128 + number, [])


def test_a_child_that_goes_on_dying_is_started_so_many_times(tmp_path):
    count = f"import os; open({str(tmp_path / 'starts')!r}, 'a').write('x'); "
    code, said = supervised(count + KILL.format(9), tmp_path / "run", restarts=3)
    assert code == 137
    assert (tmp_path / "starts").read_text() == "xxxx"
    assert [line.partition(":")[0] for line in said[:-1]] == [f"restart {n} of 3" for n in (1, 2, 3)]
    assert said[-1].endswith("it is not started again: --restarts 3 is used up")


def test_the_second_start_may_be_another_command(tmp_path):
    assert supervised(KILL.format(9), tmp_path, again="raise SystemExit(5)")[0] == 5


def test_a_mark_of_an_earlier_process_is_no_crash_of_this_one(tmp_path):
    Crash(pid=1, reason="earlier", plan=None, host=False).leave(tmp_path)
    assert supervised("raise SystemExit(1)", tmp_path) == (1, [])


def test_where_no_mark_can_be_left_nothing_is_started_again(tmp_path):
    (tmp_path / "run").write_text("a file where the folder should be")
    code, said = supervised(KILL.format(9), tmp_path / "run")
    assert code == 137
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_a_signal_before_the_child_is_there_reaches_it(tmp_path, monkeypatch):
    """It comes while the child is being started."""
    start = subprocess.Popen

    class Late(start):
        def __init__(self, *rest, **more):
            super().__init__(*rest, **more)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Late)
    assert supervised("import time; time.sleep(60)", tmp_path) == (143, [])


# The command line.


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_a_number_of_restarts_is_one_or_more(folder, capsys, number):
    assert cli.main(["fit", str(folder / "demo.yaml"), f"--restarts={number}"]) == 2
    assert "type 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("override", ["run_dir=null", "run_dir=''"])
def test_restarts_need_a_run_dir(folder, capsys, override):
    assert cli.main(["fit", str(folder / "demo.yaml"), "--restarts", "2", override]) == 2
    assert capsys.readouterr().err.endswith("type run_dir=runs/first\n")


def test_overrides_stand_on_both_sides_of_the_option(folder, monkeypatch):
    found = []
    monkeypatch.setattr(cli, "supervise", lambda *rest: found.append(rest) or 0)
    path = str(folder / "demo.yaml")
    assert cli.main(["fit", path, "epochs=2", "--restarts", "2", "seed=3", "resume=never"]) == 0
    command, again, run_dir, restarts, _ = found[0]
    assert command[-5:] == ["fit", path, "epochs=2", "seed=3", "resume=never"]
    assert again == [*command, "resume=auto"]
    assert (run_dir, restarts) == (Path("run"), 2)


def test_the_supervisor_holds_no_torch():
    code = "import sys, adaptive_trainer.supervisor, adaptive_trainer.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run(python(code), timeout=60, check=False).returncode == 0


# The mark.


@pytest.mark.parametrize("plan", [None, Plan(), Plan(micro_batch=3, precision="bf16", gradient_checkpointing=True)])
def test_a_mark_is_read_as_it_was_left_and_gone_when_it_is_taken(tmp_path, plan):
    left = Crash(pid=5, reason="it was so", plan=plan, host=True)
    left.leave(tmp_path / "run")
    assert crash.left(tmp_path / "run") == left
    assert crash.taken(tmp_path / "run") == left
    assert crash.taken(tmp_path / "run") is None
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "[" * 9999, "{}", '{"pid": 1, "reason": 2, "plan": null, "host": true}', "\xff",
        '{"pid": 1, "reason": "", "plan": {"micro_batch": 0}, "host": true}',
        '{"pid": 1, "reason": "", "plan": {"other": 0}, "host": true}',
    ],
)  # fmt: skip
def test_what_is_no_mark_is_none_and_is_cleared_away(tmp_path, text):
    (tmp_path / crash.NAME).write_text(text, encoding="latin-1")
    assert crash.taken(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_finds_a_mark_begins_with_the_fallback_and_ends_as_one_with_that_plan(tmp_path, caplog):
    """From the plan of the dead process, not from the checkpoint's."""
    trainer_of(run_dir=tmp_path, epochs=1).fit()
    Crash(pid=1, reason="it was so", plan=Plan(micro_batch=6), host=True).leave(tmp_path)
    resumed = trainer_of(run_dir=tmp_path)
    result = resumed.fit()
    assert [event.event for event in result.events[:4]] == ["start", "out_of_memory", "fallback", "step"]
    assert result.events[0].plan == Plan(micro_batch=6)
    assert result.events[1].plan == result.fallbacks[0].old == Plan(micro_batch=6)
    assert result.fallbacks[0].new == result.plan == Plan(micro_batch=2)
    assert [record.levelname for record in caplog.records if "it was so" in record.getMessage()].count("WARNING") == 1
    trainer_of(run_dir=tmp_path / "calm", epochs=1).fit()

    def go_down(event):
        if event.event == "start":
            calm._loop.descent.plan = Plan(micro_batch=2)

    calm = trainer_of(run_dir=tmp_path / "calm", callbacks=[go_down])
    calm.fit()
    assert same(state_of(resumed), state_of(calm)) is None


def test_a_run_that_begins_anew_has_nothing_to_do_with_the_mark(tmp_path):
    Crash(pid=1, reason="it was so", plan=Plan(micro_batch=2), host=True).leave(tmp_path)
    result = trainer_of(run_dir=tmp_path, resume="never", epochs=1).fit()
    assert not result.fallbacks
    assert result.plan == Plan()
    assert not (tmp_path / crash.NAME).exists()


# What says that a device is lost.

LOST = [
    "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    "CUDA error: context is destroyed\nCUDA kernel errors might be asynchronously reported",
    "Unable to determine the device handle for GPU0: 0000:01:00.0: GPU is lost. Reboot the system to recover this GPU",
    "CUDA error: invalid device context",
]
AFTER_MEMORY = ["CUDA error: out of memory", "CUDA error: unknown error", "CUDA error: initialization error"]
NOT_LOST = [
    "CUDA error: unspecified launch failure", "CUDA error: device-side assert triggered", "device lost its way",
    "CUDA error: an illegal memory access was encountered", "CUDA error: invalid configuration argument", "bad shape",
]  # fmt: skip


@pytest.mark.parametrize("after_memory", [False, True])
@pytest.mark.parametrize("text", LOST + AFTER_MEMORY + NOT_LOST)
def test_which_words_say_that_the_device_is_lost(text, after_memory):
    expected = text in LOST or (after_memory and text in AFTER_MEMORY)
    for kind in (RuntimeError, torch.AcceleratorError):
        assert is_lost(kind(text), after_memory=after_memory) is expected


def test_the_trainers_own_endings_and_interrupts_are_no_lost_device():
    exhausted = LadderExhausted("no rung is left")
    exhausted.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    interrupted = KeyboardInterrupt()
    interrupted.__context__ = exhausted.__cause__
    for error in (exhausted, interrupted, SystemExit(143)):
        assert not is_lost(error, after_memory=True)
    assert oom.recognise(RuntimeError(LOST[0])).flavour == "device lost"
