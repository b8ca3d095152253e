"""Law 7, Honesty: each transition is one journal row and one log line, and nothing changes without one."""

import json
import logging

import pytest

from adaptive_trainer import AdaptiveTrainer, Fidelity, Plan
from adaptive_trainer.testing import inject_oom
from tests.zoo import ZOO, loss

ROWS = {
    "start": {"plan", "effective_batch", "num_processes", "resumed_from"},
    "step": {"loss", "seconds", "num_samples", "lr", "peak_bytes"},
    "out_of_memory": {
        "phase", "cause", "message", "requested_bytes", "allocated_bytes", "reserved_bytes", "free_bytes",
        "total_bytes", "plan", "input_shapes",
    },
    "fallback": {"rung", "old", "new", "fidelity", "skipped"},
    "evaluate": {"metrics"},
    "checkpoint": {"path", "num_bytes", "seconds"},
    "finish": {"plan", "loss", "seconds", "peak_bytes", "num_fallbacks"},
}  # fmt: skip


def run(tmp_path, kind="mlp", **rest):
    trainer = AdaptiveTrainer(
        ZOO[kind].make(), ZOO[kind].data(24), loss=loss, batch_size=8, run_dir=tmp_path, progress=False,
        eval_data=ZOO[kind].data(8), **rest,
    )  # fmt: skip
    with inject_oom(step=2, phase="backward", times=2):
        result = trainer.fit()
    rows = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    return result, rows


def test_the_journal_has_the_rows_and_keys_of_the_contract(tmp_path):
    result, rows = run(tmp_path)
    assert [row["event"] for row in rows] == [
        "start", "step", "out_of_memory", "fallback", "out_of_memory", "fallback", "step", "step", "evaluate", "checkpoint",
        "finish",
    ]  # fmt: skip
    for row in rows:
        assert {"event", "time", "step", "rank"} | ROWS[row["event"]] <= row.keys()
    assert [event.as_dict() for event in result.events] == rows
    assert [row["step"] for row in rows] == [0, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3]
    failure, fallback = rows[2], rows[5]
    assert failure["phase"] == "backward"
    assert failure["cause"] == "activations"
    assert failure["requested_bytes"] == 2 * 2**30
    assert failure["input_shapes"] == {"0": [8, 6], "1": [8]}
    assert (fallback["rung"], fallback["fidelity"]) == ("halve_batch", "rounding")
    assert fallback["old"]["micro_batch"] is None
    assert fallback["new"] == {
        "micro_batch": 4, "accumulation": 2, "gradient_checkpointing": False, "precision": "fp32", "zero_stage": 0,
        "offload": "none",
    }  # fmt: skip
    assert rows[0]["effective_batch"] == 8
    assert rows[-1]["num_fallbacks"] == 2


@pytest.mark.parametrize(
    ("kind", "fidelity"),
    [("mlp", Fidelity.ROUNDING), ("dropout_transformer", Fidelity.STATISTICAL), ("cnn_batch_norm", Fidelity.CHANGED)],
)
def test_the_fidelity_of_halving_is_the_models(tmp_path, kind, fidelity):
    result, _ = run(tmp_path, kind, ladder=["halve_batch"])
    assert {event.fidelity for event in result.fallbacks} == {fidelity}


def test_a_fallback_is_one_warning_and_a_calm_run_has_none(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="adaptive_trainer"):
        run(tmp_path)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage().count("\n") for record in warnings] == [0, 0]
    assert "halve_batch" in warnings[1].getMessage()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="adaptive_trainer"):
        AdaptiveTrainer(ZOO["mlp"].make(), ZOO["mlp"].data(8), loss=loss, batch_size=8, progress=False).fit()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_callbacks_see_each_step_once_as_frozen_records():
    """Row 29."""
    seen = []

    class Listener:
        def on_event(self, event):
            seen.append(event)

    trainer = AdaptiveTrainer(
        ZOO["mlp"].make(), ZOO["mlp"].data(24), loss=loss, batch_size=8, callbacks=[Listener(), seen.append], progress=False,
    )  # fmt: skip
    with inject_oom(step=2, times=3):
        result = trainer.fit()
    assert seen[::2] == seen[1::2] == list(result.events)
    assert [event.step for event in result.events if event.event == "step"] == [1, 2, 3]
    with pytest.raises(AttributeError):
        seen[0].step = 7


def test_what_a_callback_raises_passes_through():
    error = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def fail(event):
        raise error

    with pytest.raises(RuntimeError) as caught:
        AdaptiveTrainer(
            ZOO["mlp"].make(), ZOO["mlp"].data(8), loss=loss, batch_size=8, callbacks=[fail], progress=False
        ).fit()
    assert caught.value is error


def test_the_accumulation_that_is_written_is_the_number_of_pieces_that_are_run():
    """No piece of a model with BatchNorm is a single row."""
    model, pieces = ZOO["cnn_batch_norm"].make(), []

    def one_row(plan):
        return Plan(micro_batch=1)

    model.register_forward_pre_hook(lambda _module, args: pieces.append(len(args[0])))
    trainer = AdaptiveTrainer(
        model, ZOO["cnn_batch_norm"].data(10), loss=loss, batch_size=5, progress=False, ladder=[one_row, "empty_cache"]
    )
    with inject_oom(step=1, times=2):
        result = trainer.fit()
    rows = [event.as_dict() for event in result.events]
    assert pieces[-2:] == [3, 2]
    assert [row["new"]["accumulation"] for row in rows if row["event"] == "fallback"] == [2, 2]
    assert [row["plan"]["accumulation"] for row in rows if row["event"] == "out_of_memory"] == [1, 2]
