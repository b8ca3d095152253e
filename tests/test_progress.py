"""Progress: a bar on a terminal, lines on request, silence otherwise, and next to no time in a step."""

import io
import logging
import math
import sys
import time

import pytest
from rich.console import Console  # noqa: TID251  a terminal to draw on

from adaptive_trainer import progress as room
from adaptive_trainer.events import Climb, Fallback, Fidelity, OutOfMemory, Start, Step
from adaptive_trainer.journal import Journal
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan
from adaptive_trainer.progress import Progress, log_on_terminal

WHOLE, HALF = Plan(micro_batch=8), Plan(micro_batch=4)
START = Start(step=0, plan=WHOLE, effective_batch=8, num_processes=1)
FAILURE = OutOfMemory(step=1, phase=Phase.BACKWARD, message="no", plan=WHOLE)
FALLBACK = Fallback(step=1, rung="halve_batch", old=WHOLE, new=HALF, fidelity=Fidelity.ROUNDING)


def step(number, *, num_samples=8, peak_bytes=None):
    return Step(step=number, loss=0.5, seconds=0.5, num_samples=num_samples, lr=0.1, peak_bytes=peak_bytes)


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(room.time, "monotonic", lambda: Clock.now)
    return Clock


def test_the_bar_says_step_loss_speed_memory_and_plan(screen):
    with Progress(40, 2**30, screen) as progress:
        progress(START)
        progress(step(1, peak_bytes=2**29))
    text = screen.file.getvalue()
    for part in ("1/40", "loss 0.5", "16 samples/s", "512.0 MiB of 1.0 GiB", "micro-batch 8, fp32"):
        assert part in text


def test_the_bar_is_redrawn_at_most_ten_times_a_second(screen, clock, monkeypatch):
    progress = Progress(None, None, screen)
    progress(START)
    drawn = []
    monkeypatch.setattr(progress._bar, "draw", lambda number, text: drawn.append(number))
    for number in range(1, 1001):
        clock.now += 0.001
        progress(step(number))
    assert 1 <= len(drawn) <= 10
    progress.close()
    assert drawn[-1] == 1000


def test_the_bar_follows_the_plan_but_not_that_of_a_single_step(screen, clock):
    progress = Progress(None, None, screen)
    alone = Fallback(step=1, rung="x", old=WHOLE, new=HALF, fidelity=Fidelity.BIT, scope="step")
    for event, expected in (
        (START, WHOLE),
        (alone, WHOLE),
        (FALLBACK, HALF),
        (Climb(step=2, old=HALF, new=WHOLE), WHOLE),
    ):
        progress(event)
        assert progress._plan == expected
    progress.close()


def test_unknown_numbers_are_left_out(screen):
    with Progress(None, None, screen) as progress:
        progress(START)
        progress(step(1, num_samples=None))
    assert "samples/s" not in screen.file.getvalue()
    assert "unknown" not in screen.file.getvalue()


@pytest.fixture
def propagates_nowhere():
    """The log as it is where a program keeps it in a place of its own."""
    log, handler = logging.getLogger("adaptive_trainer"), logging.NullHandler()
    log.addHandler(handler)
    log.propagate = False
    yield
    log.removeHandler(handler)
    log.propagate = True


def test_a_fallback_is_one_line_above_the_bar(screen, propagates_nowhere):
    with Progress(None, None, screen) as progress:
        for event in (START, FAILURE, FALLBACK, step(2)):
            progress(event)
    lines = [line for line in screen.file.getvalue().splitlines() if "halve_batch" in line]
    assert len(lines) == 1
    for part in ("step 2", "backward", "micro-batch 8, fp32 -> micro-batch 4, fp32"):
        assert part in lines[0]


def test_a_fallback_that_the_log_shows_is_not_drawn_again(screen, monkeypatch):
    monkeypatch.setattr(room, "terminal", lambda: screen)
    with log_on_terminal(), Progress(None, None, screen) as progress, Journal(None, [progress]) as journal:
        for event in (START, FAILURE, FALLBACK):
            journal.record(event)
    assert screen.file.getvalue().count("halve_batch") == 1


def test_the_log_on_a_terminal_keeps_warnings_that_are_no_fallbacks(capsys):
    with log_on_terminal() as handler:
        Journal().record(FALLBACK)
        for _ in range(2):
            logging.getLogger("adaptive_trainer").warning("a checkpoint [bold] was not written")
    assert handler.warnings == ["a checkpoint [bold] was not written"]
    assert capsys.readouterr().err.count("warning: a checkpoint [bold] was not written") == 2
    logging.getLogger("adaptive_trainer").info("after it")
    assert "after it" not in capsys.readouterr().err


@pytest.mark.parametrize(("progress", "is_terminal", "there"), [(None, False, False), (None, True, True), (False, True, False), (True, False, True)])  # fmt: skip
def test_what_the_argument_asks_for(progress, is_terminal, there, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    assert (Progress.for_run(progress, 10, None) is not None) == there


def test_without_a_terminal_there_are_plain_lines_now_and_then(capsys, clock):
    progress = Progress.for_run(True, 100, None)
    progress(START)
    for number in range(1, 51):
        clock.now += 0.5
        progress(step(number))
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4  # at the first step, after each ten seconds, and at the end
    assert lines[0] == "step 1 of 100: loss 0.5, 16 samples/s | micro-batch 8, fp32"
    assert lines[-1].startswith("step 50 of 100:")


def test_a_step_costs_less_than_twenty_microseconds_when_nothing_is_drawn(screen):
    progress, event = Progress(None, None, screen), step(1)
    progress(START)
    progress(event)
    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            progress(event)
        best = min(best, (time.perf_counter() - began) / 100)
    progress.close()
    assert best < 20e-6
