"""The journal: nothing is lost, nothing is spoiled, and a step costs next to nothing."""

import json
import logging
import math
import os
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from adaptive_trainer import journal as room
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.events import Evaluate, Fallback, Fidelity, Finish, OutOfMemory, Start, Step
from adaptive_trainer.journal import Journal, describe, hook_of, read
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan

WHOLE, HALF = Plan(micro_batch=8), Plan(micro_batch=4)


def step(number, loss=0.5):
    return Step(step=number, loss=loss, seconds=0.01, num_samples=8, lr=0.1)


def start():
    return Start(step=0, plan=WHOLE, effective_batch=8, num_processes=1)


def out_of_memory(number=3, rank=0):
    return OutOfMemory(
        step=number, rank=rank, phase=Phase.BACKWARD, message="CUDA out of memory", plan=WHOLE,
        requested_bytes=2**21, allocated_bytes=2**24, free_bytes=2**20, total_bytes=2**25,
    )  # fmt: skip


def fallback(number=3, rank=0):
    return Fallback(
        step=number, rank=rank, rung="halve_batch", old=WHOLE, new=HALF, fidelity=Fidelity.ROUNDING, num_rows=8
    )


def finish():
    return Finish(step=9, plan=HALF, loss=0.25, seconds=2.0, peak_bytes=None, num_fallbacks=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "one" / "journal.jsonl"


def test_every_event_becomes_one_row_with_the_keys_of_the_contract(path):
    events = [start(), step(1), out_of_memory(), fallback(), finish()]
    with Journal(path) as journal:
        for event in events:
            journal.record(event)
    rows = read(path)
    assert [row["event"] for row in rows] == ["start", "step", "out_of_memory", "fallback", "finish"]
    assert all({"event", "time", "step", "rank"} <= row.keys() for row in rows)
    assert rows[3]["new"]["accumulation"] == 2
    assert journal.events == events


def test_numbers_that_are_not_finite_are_written_as_null(path):
    with Journal(path) as journal:
        journal.record(step(1, math.nan))
        journal.record(Evaluate(step=1, metrics={"loss": math.inf}))
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert read(path)[1]["metrics"] == {"loss": None}


def test_a_transition_is_on_disk_before_the_next_thing_happens(path):
    journal = Journal(path)
    journal.record(start())
    journal.record(step(1))
    journal.record(out_of_memory())
    assert [row["event"] for row in read(path)] == ["start", "step", "out_of_memory"]


def test_steps_are_written_at_most_once_a_second(path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(room.time, "monotonic", lambda: now)
    journal = Journal(path)
    journal.record(start())
    for number in range(1, 11):
        now += 0.25
        journal.record(step(number))
    assert [row["step"] for row in read(path)] == [0, *range(1, 9)]
    journal.close()
    assert [row["step"] for row in read(path)] == list(range(11))


def test_a_resumed_run_appends(path):
    for number in (1, 2):
        with Journal(path) as journal:
            journal.record(step(number))
    assert [row["step"] for row in read(path)] == [1, 2]


def test_a_row_that_a_crash_cut_short_spoils_no_other(path):
    with Journal(path) as journal:
        journal.record(step(1))
        journal.record(step(2))
    os.truncate(path, path.stat().st_size - 20)
    assert [row["step"] for row in read(path)] == [1]
    with Journal(path) as journal:
        journal.record(step(2))
    assert [row["step"] for row in read(path)] == [1, 2]
    assert len(path.read_bytes().splitlines()) == 3


def test_reading_passes_over_what_is_no_row(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"event": "start"}\n[1]\nnonsense\n\xff\xfe\n{"event": "finish"}')
    assert [row["event"] for row in read(path)] == ["start", "finish"]


def test_reading_what_is_not_there_says_what_to_give(path):
    with pytest.raises(RecipeError, match=r"journal.jsonl: no journal can be read there \(No such file"):
        read(path)


def test_a_folder_that_cannot_be_written_is_a_mistake_in_run_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="run_dir: "):
        Journal(tmp_path / "file" / "journal.jsonl")


class _FullDisk:
    """A file that takes ``room`` more bytes and then fails, as a full disk does."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        if self.room == 0:
            raise OSError(28, "No space left on device")
        taken = self.file.write(bytes(content[: self.room]))
        self.room -= taken
        return taken

    def close(self):
        self.file.close()


def test_a_full_disk_is_warned_of_once_and_loses_nothing_when_there_is_room_again(path, caplog):
    journal = Journal(path)
    disk = journal._file = _FullDisk(journal._file, room=50)
    for number in range(3):
        journal.record(out_of_memory(number))
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "cannot be written (No space left on device)" in caplog.text
    assert len(journal.events) == 3
    disk.room = 10_000
    journal.record(finish())
    journal.close()
    assert [row["event"] for row in read(path)] == ["out_of_memory"] * 3 + ["finish"]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Journal() as journal:
        journal.record(start())
    assert list(tmp_path.iterdir()) == []
    assert len(journal.events) == 1


def test_hooks_are_called_after_the_row_was_written_and_what_they_raise_passes_through(path):
    seen = []

    def hook(event):
        seen.append((event, len(read(path))))
        raise ZeroDivisionError

    journal = Journal(path, [hook])
    event = start()
    with pytest.raises(ZeroDivisionError):
        journal.record(event)
    assert seen == [(event, 1)]


def test_a_callback_is_a_function_or_has_on_event():
    class Listener:
        def on_event(self, event):
            return event

    listener = Listener()
    assert hook_of(print) is print
    assert hook_of(listener) == listener.on_event
    with pytest.raises(RecipeError, match="callbacks: an object of type int"):
        hook_of(3)


def test_a_calm_run_warns_of_nothing_and_logs_steps_at_debug(caplog):
    caplog.set_level(logging.DEBUG, "adaptive_trainer")
    journal = Journal()
    for event in (start(), step(1), Evaluate(step=1, metrics={"loss": 0.5}), finish()):
        journal.record(event)
    assert [record.levelname for record in caplog.records] == ["INFO", "DEBUG", "INFO", "INFO"]


def test_a_fallback_is_one_warning_with_all_that_changed_and_why(caplog):
    caplog.set_level(logging.INFO, "adaptive_trainer")
    journal = Journal()
    journal.record(out_of_memory())
    journal.record(fallback())
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    text = warning.getMessage()
    assert "\n" not in text
    for part in (
        "step 4", "backward", "asked 2.0 MiB", "allocated 16.0 MiB", "free 1.0 MiB of 32.0 MiB", "halve_batch",
        "micro-batch 8, fp32 -> micro-batch 4, fp32", "rounding",
    ):  # fmt: skip
        assert part in text
    assert warning.event is journal.events[1]


def test_a_fallback_of_many_processes_is_one_warning(caplog):
    caplog.set_level(logging.INFO, "adaptive_trainer")
    for rank in range(3):
        journal = Journal()
        journal.record(out_of_memory(rank=rank))
        journal.record(fallback(rank=rank))
    levels = [record.levelname for record in caplog.records]
    assert levels.count("WARNING") == 1
    assert levels.count("INFO") == 3  # each process's own out-of-memory is news


def test_a_fallback_does_not_speak_of_another_steps_failure():
    assert "out of memory in" not in describe(fallback(7), out_of_memory(3))
    assert "for this step alone" in describe(
        Fallback(step=3, rung="x", old=WHOLE, new=HALF, fidelity=Fidelity.BIT, scope="step")
    )


def test_a_step_costs_a_few_tens_of_microseconds(path):
    event, journal = step(1), Journal(path)
    best = math.inf
    for _ in range(20):  # the best of many: other work on the machine must not fail this
        began = time.perf_counter()
        for _ in range(100):
            journal.record(event)
        best = min(best, (time.perf_counter() - began) / 100)
    journal.close()
    assert best < 100e-6


def test_a_forked_process_writes_nothing_of_its_own(path):
    journal = Journal(path)
    journal.record(start())
    journal.record(step(1))
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            del journal
        os._exit(0)
    os.waitpid(child, 0)
    journal.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["start", "step"]


def test_a_failure_in_an_evaluation_is_placed_after_the_steps_that_are_done():
    plan = Plan()
    failure = OutOfMemory(step=200, phase=Phase.EVALUATE, message="", plan=plan)
    answer = Fallback(step=200, rung="empty_cache", old=plan, new=plan, fidelity=Fidelity.BIT, scope="evaluation")
    assert describe(failure).startswith("after step 200: ")
    assert describe(answer).startswith("after step 200: ")
    assert describe(replace(failure, phase=Phase.FORWARD)).startswith("step 201: ")
