"""The report: what the journal says, and nothing else."""

import io
import json

import pytest
from rich.console import Console  # noqa: TID251  something to draw on

from adaptive_trainer.cli import main
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.events import (
    Cause,
    Checkpoint,
    Climb,
    Evaluate,
    Fallback,
    Fidelity,
    Finish,
    OutOfMemory,
    Start,
    Step,
)
from adaptive_trainer.journal import Journal
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan
from adaptive_trainer.report import plan_words, read_history, transitions
from adaptive_trainer.report.terminal import render

WHOLE, HALF, QUARTER = Plan(micro_batch=8), Plan(micro_batch=4), Plan(micro_batch=2)


def out_of_memory(step, plan=WHOLE):
    return OutOfMemory(
        step=step, phase=Phase.BACKWARD, cause=Cause.ACTIVATIONS, message="no", plan=plan,
        requested_bytes=3 * 2**20, allocated_bytes=5 * 2**20, free_bytes=2**20, total_bytes=8 * 2**20,
    )  # fmt: skip


def fallback(step, old, new, scope="run"):
    return Fallback(
        step=step, rung="halve_batch", old=old, new=new, fidelity=Fidelity.ROUNDING, scope=scope, num_rows=8
    )


def step(number, loss, peak_bytes=None):
    return Step(step=number, loss=loss, seconds=0.5, num_samples=8, lr=0.1, peak_bytes=peak_bytes)


EVENTS = (
    Start(step=0, plan=WHOLE, effective_batch=8, num_processes=1),
    step(1, 4.0),
    out_of_memory(1),
    fallback(1, WHOLE, HALF),
    step(2, 3.0, 6 * 2**20),
    Evaluate(step=2, metrics={"loss": 2.5, "accuracy [top]": 0.75}),
    step(3, 1.5),
    Finish(step=3, plan=HALF, loss=1.5, seconds=2.0, peak_bytes=7 * 2**20, num_fallbacks=1),
)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "runs" / "demo"


def write(run_dir, events):
    with Journal(run_dir / "journal.jsonl") as journal:
        for event in events:
            journal.record(event)


def drawn(run_dir, width=200):
    screen = Console(file=io.StringIO(), width=width)
    screen.print(render(read_history(run_dir), width))
    return screen.file.getvalue()


def headline(text, name):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return " ".join(line.removeprefix(name).split())


def row_with(text, word):
    (line,) = [line for line in text.splitlines() if word in line]
    return " ".join(line.replace("│", "|").split())


def test_the_header_sums_the_run_up(run_dir):
    write(run_dir, EVENTS)
    (run_dir / "recipe.yaml").write_text("")
    text = drawn(run_dir)
    assert headline(text, "recipe").endswith("recipe.yaml")
    assert headline(text, "steps") == "3"
    assert headline(text, "time in steps") == "1.5 s"
    assert headline(text, "final plan") == "micro-batch 4, fp32"
    assert headline(text, "loss") == "4 -> 1.5"
    assert headline(text, "peak") == "7.0 MiB"


def test_the_trail_has_one_row_a_fallback_with_its_numbers(run_dir):
    write(run_dir, EVENTS)
    row = row_with(drawn(run_dir), "halve_batch")
    assert row == (
        "| 2 | backward | activations | 3.0 MiB | 5.0 MiB | 1.0 MiB / 8.0 MiB | halve_batch | "
        "micro-batch 8, fp32 -> micro-batch 4 x 2, fp32 | rounding |"
    )


def test_a_narrow_terminal_cuts_nothing_off(run_dir):
    write(run_dir, EVENTS)
    text = drawn(run_dir, width=80)
    assert "\u2026" not in text
    words = " ".join(text.replace("│", " ").split())
    for part in (
        "step 2",
        "backward",
        "activations",
        "asked 3.0 MiB",
        "free 1.0 MiB / 8.0 MiB",
        "halve_batch",
        "rounding",
    ):
        assert part in words


def test_a_rung_of_the_users_own_is_named_as_it_is(run_dir):
    own = Fallback(step=1, rung="[bold]mine", old=WHOLE, new=HALF, fidelity=Fidelity.CHANGED)
    write(run_dir, [out_of_memory(1), own])
    assert "[bold]mine" in drawn(run_dir)


def test_evaluations_are_a_table_with_names_as_they_were_given(run_dir):
    write(run_dir, EVENTS)
    assert "accuracy [top]" in drawn(run_dir)
    assert row_with(drawn(run_dir), "0.75") == "| 2 | 2.5 | 0.75 |"


def test_a_calm_run_has_no_trail(run_dir):
    write(run_dir, [event for event in EVENTS if event.event in ("start", "step", "finish")])
    assert "out of memory" not in drawn(run_dir)


def test_a_run_that_has_not_finished_says_so_and_knows_its_plan(run_dir):
    write(run_dir, [*EVENTS[:-1], fallback(3, HALF, QUARTER, "step"), Climb(step=3, old=HALF, new=WHOLE)])
    text = drawn(run_dir)
    assert headline(text, "steps") == "3 (the run has not finished)"
    assert headline(text, "final plan") == "micro-batch 8, fp32"


def test_a_plan_for_one_step_is_not_the_final_plan(run_dir):
    write(run_dir, [*EVENTS[:-1], fallback(3, HALF, QUARTER, "step")])
    assert headline(drawn(run_dir), "final plan") == "micro-batch 4 x 2, fp32"


def test_of_a_step_done_again_after_a_crash_the_last_row_counts(run_dir):
    write(run_dir, [step(1, 4.0), step(2, 9.0)])
    write(run_dir, [step(2, 3.0), step(3, 2.0)])
    history = read_history(run_dir)
    assert history.losses == [4.0, 3.0, 2.0]
    assert history.seconds == 1.5


def test_a_failure_without_an_answer_ends_the_trail():
    rows = [event.as_dict() for event in (out_of_memory(1), fallback(1, WHOLE, HALF), out_of_memory(1, HALF))]
    found = transitions(rows)
    assert [(entry.out_of_memory is not None, entry.fallback is not None) for entry in found] == [
        (True, True),
        (True, False),
    ]


def test_a_rung_that_was_taken_back_has_a_row_of_its_own():
    rows = [event.as_dict() for event in (out_of_memory(1), fallback(1, WHOLE, HALF), fallback(1, HALF, WHOLE))]
    assert [entry.out_of_memory is None for entry in transitions(rows)] == [False, True]


def test_a_plan_of_another_version_is_still_shown():
    assert plan_words({"micro_batch": 4, "accumulation": 2, "precision": "fp32", "colour": "red"}) == (
        "micro-batch 4 x 2, fp32"
    )
    assert "int4" in plan_words({"micro_batch": 4, "precision": "int4"})
    assert plan_words(None) == "unknown"


def test_reporting_exits_with_0_and_prints_the_tables(run_dir, capsys):
    write(run_dir, EVENTS)
    assert main(["report", str(run_dir)]) == 0
    assert "halve_batch" in capsys.readouterr().out


def test_a_folder_that_is_not_there_has_a_nearest_name(run_dir, capsys):
    write(run_dir, EVENTS)
    assert main(["report", str(run_dir.parent / "dmeo")]) == 2
    assert f"did you mean {run_dir}?" in capsys.readouterr().err


def test_a_folder_of_runs_names_the_runs_in_it(run_dir, capsys):
    write(run_dir, EVENTS)
    assert main(["report", str(run_dir.parent)]) == 2
    assert f"did you mean {run_dir}?" in capsys.readouterr().err


def test_a_folder_without_a_journal_is_wrong_input(tmp_path):
    with pytest.raises(RecipeError, match=r"there is no journal\.jsonl in it"):
        read_history(tmp_path)


@pytest.mark.parametrize("content", ["", "nonsense\n", json.dumps({"event": "unheard of"}) + "\n"])
def test_a_journal_with_nothing_recognisable_exits_with_3(run_dir, capsys, content):
    run_dir.mkdir(parents=True)
    (run_dir / "journal.jsonl").write_text(content)
    assert main(["report", str(run_dir)]) == 3
    assert "nothing in its journal was recognised" in capsys.readouterr().err


LARGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "damage",
    [
        '{"event": "evaluate", "metrics": {"loss": 1}}',
        '{"event": "evaluate", "step": 1, "metrics": null}',
        '{"event": "evaluate", "step": 1, "metrics": {"loss": "low"}}',
        f'{{"event": "evaluate", "step": 1, "metrics": {{"loss": {LARGE}}}}}',
        '{"event": "out_of_memory", "step": 1, "requested_bytes": "2 GiB"}',
        '{"event": "out_of_memory", "step": 1, "free_bytes": Infinity}',
        f'{{"event": "out_of_memory", "step": 1, "total_bytes": {LARGE}}}',
        '{"event": "out_of_memory", "step": "x"}',
        '{"event": "out_of_memory", "step": 1.5}',
        '{"event": "out_of_memory", "step": 1, "phase": ["forward"]}',
        '{"event": "out_of_memory", "step": 1, "plan": "micro-batch 4"}',
        '{"event": "fallback", "step": 0, "old": 3}',
        '{"event": "fallback", "step": 0, "scope": []}',
        '{"event": "step", "step": true, "loss": 1}',
        '{"event": "step", "step": 1, "loss": "1"}',
        '{"event": "step", "step": 1, "seconds": NaN}',
        '{"event": "step", "step": 1, "seconds": 1e300}',
        '{"event": "finish", "step": 1, "peak_bytes": {}}',
        '{"event": ["step"], "step": 1}',
        '{"step": 1}',
        "[1]",
    ],
)
def test_a_row_that_is_not_as_rows_are_counts_for_nothing(run_dir, capsys, damage):
    run_dir.mkdir(parents=True)
    (run_dir / "journal.jsonl").write_text(f"{damage}\n")
    assert main(["report", str(run_dir)]) == 3
    write(run_dir, EVENTS)
    whole = drawn(run_dir)
    (run_dir / "journal.jsonl").unlink()
    write(run_dir, EVENTS)
    assert whole == drawn(run_dir)
    assert main(["report", str(run_dir)]) == 0


@pytest.mark.parametrize(
    "plan", [{}, {"micro_batch": "4"}, {"precision": ["fp32"]}, {"zero_stage": {}}, {"micro_batch": 4, "offload": 1}]
)
def test_a_plan_that_makes_no_sense_is_shown_as_it_is(run_dir, plan):
    row = {"event": "fallback", "step": 1, "rung": "half \ud800", "old": plan, "new": plan}
    run_dir.mkdir(parents=True)
    (run_dir / "journal.jsonl").write_text(json.dumps(row))
    text = drawn(run_dir)
    text.encode()
    assert "again" in row_with(text, "half")


def test_a_row_of_another_version_with_fewer_keys_is_still_shown(run_dir):
    run_dir.mkdir(parents=True)
    rows = [{"event": event, "step": 1} for event in ("start", "step", "out_of_memory", "fallback", "evaluate")]
    (run_dir / "journal.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(read_history(run_dir).rows) == 5
    assert "unknown" in drawn(run_dir)


def test_every_row_that_the_journal_writes_is_recognised(run_dir):
    events = (
        *EVENTS,
        step(4, float("nan")),
        Climb(step=4, old=HALF, new=WHOLE),
        Evaluate(step=4, metrics={"loss": float("inf")}),
        Checkpoint(step=4, path="there", num_bytes=3, seconds=0.5),
        OutOfMemory(step=4, phase=Phase.FORWARD, message="no", plan=WHOLE),
    )
    write(run_dir, events)
    assert [row["event"] for row in read_history(run_dir).rows] == [event.event for event in events]
    assert "unknown" in drawn(run_dir)


def test_a_folder_that_cannot_be_looked_into_is_wrong_input(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        read_history(tmp_path / ("long" * 100))


def skipped(number):
    return Step(step=number, loss=float("inf"), seconds=0.5, num_samples=8, lr=0.1, skipped=True)


def test_a_skipped_step_does_not_stand_for_the_last_one_that_was_done(run_dir):
    """Its row has the number of the step before it, because a skipped step is none."""
    write(run_dir, [step(1, 4.0), step(2, 3.0), skipped(2), skipped(2)])
    history = read_history(run_dir)
    assert history.losses == [4.0, 3.0]
    assert history.seconds == 2.0
    write(run_dir, [skipped(2), step(3, 2.0)])
    assert read_history(run_dir).losses == [4.0, 3.0, 2.0]
    assert headline(drawn(run_dir), "steps").startswith("3 (")


def test_a_run_of_skipped_steps_alone_has_no_step(run_dir):
    write(run_dir, [EVENTS[0], skipped(0)])
    assert headline(drawn(run_dir), "steps").startswith("0")


def test_of_several_runs_in_one_journal_the_last_is_told_and_the_others_are_counted(run_dir):
    write(run_dir, EVENTS)
    assert "earlier" not in drawn(run_dir)
    write(run_dir, [EVENTS[0], step(1, 9.0)])
    write(
        run_dir,
        [Start(step=0, plan=QUARTER, effective_batch=8, num_processes=1, num_rows=8), step(1, 8.0), step(2, 7.0)],
    )
    history, text = read_history(run_dir), drawn(run_dir)
    assert history.num_earlier == 2
    assert history.losses == [8.0, 7.0]
    assert headline(text, "steps") == "2 (the run has not finished)"
    assert headline(text, "final plan") == "micro-batch 2 x 4, fp32"
    assert headline(text, "fallbacks") == "0"
    assert headline(text, "earlier runs").startswith("2 in the same journal")


def test_a_run_that_is_gone_on_with_is_one_run(run_dir):
    write(run_dir, EVENTS)
    write(run_dir, [Start(step=3, plan=HALF, effective_batch=8, num_processes=1), step(4, 1.0)])
    history = read_history(run_dir)
    assert (history.num_earlier, history.losses) == (0, [4.0, 3.0, 1.5, 1.0])
