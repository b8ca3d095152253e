"""Plans are values: their numbers follow from one another, and going down is an order."""

import itertools

import pytest
import torch

from adaptive_trainer.plan import Plan, sizes

SOME_PLANS = [
    Plan(micro_batch=rows, gradient_checkpointing=recompute, precision=precision, zero_stage=stage, offload=offload)
    for rows in (None, 8, 4, 1)
    for recompute in (False, True)
    for precision in ("fp32", "bf16", "fp16")
    for stage in (0, 3)
    for offload in ("none", "parameters")
]


@pytest.mark.parametrize("num_samples", range(1, 40))
def test_sizes_are_those_of_tensor_split(num_samples):
    for micro_batch in range(1, num_samples + 2):
        found = sizes(num_samples, micro_batch)
        pieces = torch.arange(num_samples).tensor_split(len(found))
        assert found == tuple(len(piece) for piece in pieces)
        assert len(found) == -(-num_samples // micro_batch)
        assert max(found) <= micro_batch


def test_sizes_of_the_settled_examples():
    assert sizes(10, 4) == (4, 3, 3)
    assert sizes(5, 3) == (3, 2)
    assert sizes(7, None) == (7,)
    assert sizes(0, 4) == (0,)


def test_no_piece_is_shorter_than_the_smallest_unless_the_batch_is():
    for num_samples, micro_batch, smallest in itertools.product(range(1, 30), range(1, 31), (1, 2, 3)):
        found = sizes(num_samples, micro_batch, smallest)
        assert sum(found) == num_samples
        assert min(found) >= min(smallest, num_samples)


def test_accumulation_is_the_number_of_pieces():
    assert Plan(micro_batch=4).accumulation(10) == 3
    assert Plan().accumulation(10) == 1
    assert Plan().accumulation(None) == 1
    assert Plan(micro_batch=4).accumulation(None) is None
    assert Plan(micro_batch=2).accumulation(5, smallest=2) == 2
    assert Plan(micro_batch=1).as_dict(8, smallest=2)["accumulation"] == 4
    assert Plan(micro_batch=4).accumulation(0) == 1


def test_descending_is_a_strict_order():
    for a in SOME_PLANS:
        assert not a.descends_from(a)
    for a, b in itertools.product(SOME_PLANS, repeat=2):
        assert not (a.descends_from(b) and b.descends_from(a))
    below = {a: [b for b in SOME_PLANS if b.descends_from(a)] for a in SOME_PLANS}
    for a in SOME_PLANS:
        for b in below[a]:
            assert set(below[b]) <= set(below[a])


@pytest.mark.parametrize(
    "wrong", [{"micro_batch": 0}, {"micro_batch": True}, {"precision": "fp8"}, {"zero_stage": 4}, {"offload": "disk"}]
)
def test_a_value_outside_its_range_is_refused_with_what_was_typed(wrong):
    (key, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=f"{key}={value!r}"):
        Plan(**wrong)


def test_a_plan_in_the_journal_has_the_keys_of_the_contract():
    assert Plan(micro_batch=16).as_dict(64) == {
        "micro_batch": 16, "accumulation": 4, "gradient_checkpointing": False,
        "precision": "fp32", "zero_stage": 0, "offload": "none",
    }  # fmt: skip
