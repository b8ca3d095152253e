"""Deciding is pure, and the walk ends: tried over every reachable plan and every order of causes."""

import itertools
from dataclasses import replace

import pytest
import torch

from adaptive_trainer import AdaptiveTrainer
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.events import Cause, Fidelity, OutOfMemory
from adaptive_trainer.ladder import Descend, GiveUp, Ladder, Situation, Skip, Traits, decide
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan, sizes
from adaptive_trainer.rungs import RUNG_NAMES, RUNGS, Rung

PHASES = list(Phase)
TRAITS = [
    Traits(),
    Traits(batch_norm=True),
    Traits(random=True),
    Traits(recompute_refusal="no repeated blocks", amp_refusal="half already"),
    Traits(cut_refusal="separable=False"),
    Traits(amp_precision="fp16", num_processes=2),
]


def situation(plan=None, phase=Phase.FORWARD, *, cause=Cause.ACTIVATIONS, rows=16, numbers=None, **rest):
    plan = plan or Plan()
    event = OutOfMemory(step=0, phase=phase, cause=cause, message="", plan=plan, **(numbers or {}))
    return Situation(plan=plan, event=event, num_rows=rows, **rest)


def after(seen, decision):
    """The situation of the next attempt, if it fails in the same way."""
    used = seen.used | {decision.rung.name} if decision.plan == seen.plan else seen.used
    return replace(seen, plan=decision.plan, event=replace(seen.event, plan=decision.plan), used=used)


def walk(ladder, seen):
    """All decisions until the ladder gives up."""
    decisions = []
    while isinstance(decision := decide(ladder, seen), Descend):
        decisions.append(decision)
        seen = after(seen, decision)
        assert len(decisions) < 50
    return decisions, decision


def test_the_default_walk():
    decisions, end = walk(Ladder(), situation(rows=16))
    assert [decision.rung.name for decision in decisions] == [
        "empty_cache", *["halve_batch"] * 4, "gradient_checkpointing", "amp",
    ]  # fmt: skip
    assert [decision.plan.micro_batch for decision in decisions] == [None, 8, 4, 2, 1, 1, 1]
    assert set(end.skipped) == set(RUNG_NAMES)
    assert all(end.skipped.values())


@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, None])
def test_every_order_of_causes_ends_and_goes_strictly_down(traits, rows):
    """Row 33. All plans that any sequence of failures can reach, each seen with each cause and phase."""
    start = situation(rows=rows, traits=traits)
    open_, seen_ = [start], set()
    while open_:
        here = open_.pop()
        for phase, cause in itertools.product(PHASES, (Cause.ACTIVATIONS, Cause.LONG_BATCH, Cause.OTHER_PROCESS)):
            now = replace(here, event=replace(here.event, phase=phase, cause=cause))
            decision = decide(Ladder(), now)
            assert decide(Ladder(), now) == decision
            if isinstance(decision, GiveUp):
                assert set(decision.skipped) == set(RUNG_NAMES)
                continue
            again = decision.plan == here.plan
            assert again or decision.plan.descends_from(here.plan)
            assert not (again and decision.rung.name in here.used)
            if rows is not None:
                pieces = sizes(rows, decision.plan.micro_batch, traits.smallest_piece)
                assert sum(pieces) == rows
                assert min(pieces) >= min(rows, traits.smallest_piece)
            key = (decision.plan, after(now, decision).used)
            if key not in seen_:
                seen_.add(key)
                open_.append(after(now, decision))
    assert len(seen_) < 200


@pytest.mark.parametrize("order", list(itertools.permutations(RUNG_NAMES[:4])))
def test_the_walk_follows_the_users_order(order):
    decisions, _ = walk(Ladder.of(order), situation(rows=4))
    taken = [name for name, _ in itertools.groupby(decision.rung.name for decision in decisions)]
    assert taken == list(order)


def test_an_empty_ladder_gives_up_at_once():
    assert decide(Ladder.of([]), situation()) == GiveUp(skipped={})


def test_batch_norm_puts_gradient_checkpointing_before_halving():
    """Row 59."""
    decisions, _ = walk(Ladder(), situation(rows=8, traits=Traits(batch_norm=True)))
    assert [decision.rung.name for decision in decisions] == [
        "empty_cache", "gradient_checkpointing", "halve_batch", "halve_batch", "amp",
    ]  # fmt: skip
    assert decisions[3].plan.micro_batch == 2
    assert decisions[2].fidelity is Fidelity.CHANGED


def test_the_users_own_order_is_kept_for_batch_norm_too():
    decisions, _ = walk(Ladder.of(["halve_batch", "gradient_checkpointing"]), situation(traits=Traits(batch_norm=True)))
    assert decisions[0].rung.name == "halve_batch"


def test_fidelity_is_the_worst_that_applies():
    halve = RUNGS[1]
    assert halve.fidelity(Traits()) is Fidelity.ROUNDING
    assert halve.fidelity(Traits(random=True)) is Fidelity.STATISTICAL
    assert halve.fidelity(Traits(random=True, batch_norm=True)) is Fidelity.CHANGED
    assert [rung.fidelity(Traits()) for rung in RUNGS] == [
        Fidelity.BIT, Fidelity.ROUNDING, Fidelity.BIT, Fidelity.CHANGED, *[Fidelity.ROUNDING] * 5,
    ]  # fmt: skip


@pytest.mark.parametrize("phase", [Phase.OPTIMIZER, Phase.LOAD, Phase.BUILD, Phase.CHECKPOINT])
def test_what_smaller_pieces_cannot_help_is_not_halved(phase):
    decisions, end = walk(Ladder(), situation(phase=phase))
    assert [decision.rung.name for decision in decisions] == ["empty_cache"]
    assert phase in end.skipped["halve_batch"]


def test_one_process_skips_sharding_with_its_reason():
    end = walk(Ladder.of(["zero_1", "offload_optimizer"]), situation())[1]
    assert "one process" in end.skipped["zero_1"]
    assert end.skipped["offload_optimizer"]


def test_case_014_a_request_beyond_the_device_skips_the_cache_and_is_halved():
    numbers = {"requested_bytes": 94 * 2**30, "total_bytes": 79 * 2**30}
    decision = decide(Ladder(), situation(numbers=numbers))
    assert decision.rung.name == "halve_batch"
    assert "94.0 GiB" in decision.skipped["empty_cache"]


def test_a_long_batch_is_cut_at_once_to_what_fits_and_for_its_step_alone():
    decision = decide(Ladder(), situation(rows=8, cause=Cause.LONG_BATCH, fitting_rows=2))
    assert (decision.rung.name, decision.plan.micro_batch, decision.this_step_only) == ("halve_batch", 2, True)


def test_case_124_other_processes_are_not_answered_by_smaller_plans():
    numbers = {"total_bytes": 32 * 2**30, "other_processes_bytes": 31 * 2**30}
    decisions, end = walk(Ladder(), situation(cause=Cause.OTHER_PROCESS, numbers=numbers))
    assert [decision.rung.name for decision in decisions] == ["empty_cache"]
    assert "31.0 GiB" in end.skipped["halve_batch"]


def test_a_suspicion_tries_a_smaller_piece_and_nothing_else():
    decision = decide(Ladder(), situation(suspected=True))
    assert decision.rung.name == "halve_batch"
    assert isinstance(decide(Ladder(), situation(rows=1, suspected=True)), GiveUp)


def test_a_rung_taken_back_is_not_tried_again():
    decision = decide(
        Ladder(), situation(rows=1, used=frozenset({"empty_cache"}), undone=frozenset({"gradient_checkpointing"}))
    )
    assert decision.rung.name == "amp"


def test_a_users_rung_is_one_function():
    def one_row(plan):
        """Straight down to one row."""
        return replace(plan, micro_batch=1)

    decision = decide(Ladder.of([one_row, "amp"]), situation())
    assert (decision.rung.name, decision.plan.micro_batch) == ("one_row", 1)
    assert decision.rung.gives == "Straight down to one row."


def test_a_users_rung_may_look_at_the_situation_and_skip():
    def careful(plan, seen):
        return Skip("no rows") if seen.num_rows is None else None

    end = decide(Ladder.of([careful]), situation(rows=None))
    assert end.skipped == {"careful": "no rows"}
    assert "cannot help" in decide(Ladder.of([careful]), situation()).skipped["careful"]


def test_a_users_rung_that_goes_up_is_passed_over():
    def up(plan):
        return replace(plan, micro_batch=64)

    end = decide(Ladder.of([up]), situation(Plan(micro_batch=8)))
    assert "not lower" in end.skipped["up"]


def test_a_users_rung_that_frees_something_else_gets_one_more_try_a_step():
    freed = []

    def free_mine(plan):
        freed.append(1)
        return plan

    decisions, _ = walk(Ladder.of([free_mine]), situation())
    assert [decision.plan for decision in decisions] == [Plan()]


def test_names_and_rungs_mix_and_an_unknown_name_is_refused():
    own = Rung(name="own", step=lambda plan, _: Skip("never"), gives="nothing", costs="nothing")
    assert [rung.name for rung in Ladder.of(["amp", own])] == ["amp", "own"]
    with pytest.raises(KeyError, match="halve"):
        Ladder.of(["halve"])


def test_a_users_rung_that_gives_no_plan_is_named():
    def wrong(plan):
        return {"micro_batch": 1}

    with pytest.raises(RecipeError, match="the rung 'wrong' gave a dict"):
        decide(Ladder.of([wrong]), situation())


# Names tell rungs apart, in the journal and in what was taken back.

TWICE = {
    "two lambdas": [lambda plan: replace(plan, micro_batch=1), lambda plan: plan],
    "one name typed twice": ["amp", "halve_batch", "amp"],
    "a rung named as one of the table": ["amp", replace(RUNGS[3], costs="more")],
    "a function named as one of the table": ["amp", RUNGS[0], Rung(name="amp", step=RUNGS[0].step, gives="", costs="")],
}


@pytest.mark.parametrize("entries", TWICE.values(), ids=TWICE)
def test_two_rungs_of_one_name_are_refused_and_it_is_said_what_to_type(entries):
    for made in (lambda: Ladder.of(entries), lambda: AdaptiveTrainer(torch.nn.Linear(2, 2), [], ladder=entries)):
        with pytest.raises(
            RecipeError, match=r"(?s)^ladder: .*more than one rung is called '(amp|<lambda>)'.*def"
        ) as caught:
            made()
        assert "Rung(name=" in str(caught.value)


def test_a_ladder_made_by_hand_is_refused_for_two_rungs_of_one_name_too():
    with pytest.raises(RecipeError, match="called 'amp'"):
        Ladder((RUNGS[3], RUNGS[3]))


def test_functions_of_other_names_are_no_mistake():
    def one(plan):
        return plan

    assert [rung.name for rung in Ladder.of([one, lambda plan: plan, "amp"])] == ["one", "<lambda>", "amp"]


def test_batch_norm_moves_the_users_own_rung_and_does_not_exchange_it():
    own = replace(RUNGS[1], costs="mine")
    order = Ladder((own, *RUNGS[2:4])).order(Traits(batch_norm=True))
    assert [rung.name for rung in order] == ["gradient_checkpointing", "halve_batch", "amp"]
    assert order[1] is own


# A leak.


def test_case_035_a_leak_is_answered_by_the_cache_and_one_rung_more():
    fresh = situation(cause=Cause.LEAK)
    assert decide(Ladder(), replace(fresh, used=frozenset({"empty_cache"}))).rung.name == "halve_batch"
    decisions, end = walk(Ladder(), replace(fresh, leak_answered=True))
    assert [decision.rung.name for decision in decisions] == ["empty_cache"]
    assert "grows with every step" in end.skipped["halve_batch"]
    assert "grows with every step" in end.skipped["amp"]
    assert isinstance(decide(Ladder(), situation(leak_answered=True, used=frozenset({"empty_cache"}))), Descend)


def test_case_035_a_users_rung_that_frees_what_leaks_is_still_asked():
    def clear_my_list(plan):
        return plan

    decision = decide(Ladder.of([clear_my_list]), situation(cause=Cause.LEAK, leak_answered=True))
    assert decision.rung.name == "clear_my_list"
