"""The table of spellings and look-alikes: every known message, the chain, the figures, and that nothing makes it raise."""

from __future__ import annotations

import ast
import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.checkpoint import CheckpointError

from adaptive_trainer import oom
from adaptive_trainer.oom import RULES, Numbers, Recognition, Verdict, parse_numbers, recognise, recognise_text

GIB, MIB = 2**30, 2**20
VECTORS = [json.loads(line) for line in (Path(__file__).parent / "data/oom_messages.jsonl").read_text().splitlines()]
OOM_TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 MiB is free."
)


def vector_name(vector):
    return f"{vector['expect']}-{vector['flavour']}-{vector['text'][:40]}".replace("\n", " ")


def out_of_memory(text=OOM_TEXT):
    return torch.OutOfMemoryError(text)


def raised(action):
    """The exception object as a handler gets it, with its chain."""
    with pytest.raises(BaseException) as caught:
        action()
    return caught.value


# --- every message ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=vector_name)
def test_case_001_every_known_message_is_what_it_is_known_to_be(vector):
    found = recognise_text(vector["text"], vector["type"])
    assert (found.verdict, found.flavour, found.host) == (
        vector["expect"],
        vector["flavour"],
        vector.get("host", False),
    )
    figures = vector.get("numbers", {})
    assert {name: getattr(found.numbers, name) for name in figures} == figures
    assert found.message == vector["text"]


@pytest.mark.parametrize("vector", VECTORS, ids=vector_name)
def test_an_exception_object_is_recognised_as_its_text_is(vector):
    name = vector["type"].rpartition(".")[2]
    base = MemoryError if name == "_ArrayMemoryError" else RuntimeError
    error = type(name, (base,), {})(vector["text"])
    found = recognise(error)
    assert (found.verdict, found.type_name, found.message) == (vector["expect"], name, vector["text"])


def test_every_row_of_the_table_is_the_first_to_fit_some_known_message():
    """A row that no vector reaches is either untested or hidden behind another."""
    reached = set()
    for vector in VECTORS:
        names = frozenset({vector["type"].rpartition(".")[2]})
        reached |= {next((i for i, rule in enumerate(RULES) if rule.fits(vector["text"], names)), None)}
    missing = [RULES[i].flavour for i in range(len(RULES)) if i not in reached]
    # Triton's class speaks through its text first; the class alone is tested below.
    assert missing == ["triton"]


def test_the_table_is_in_the_order_that_its_essay_gives():
    """Hopeless, look-alikes, out of memory, suspected, look-alikes of the families; classes after texts."""
    verdicts = [rule.verdict for rule in RULES]
    blocks = [verdict for i, verdict in enumerate(verdicts) if i == 0 or verdicts[i - 1] is not verdict]
    assert blocks == [Verdict.HOPELESS, Verdict.NOT_OOM, Verdict.OOM, Verdict.SUSPECTED, Verdict.NOT_OOM]
    by_class = [rule.class_name is not None for rule in RULES if rule.verdict is Verdict.OOM]
    assert by_class == sorted(by_class)


# --- real classes ----------------------------------------------------------------------------------------------------


def test_case_001_case_002_real_classes_of_torch_are_recognised():
    found = recognise(out_of_memory())
    assert (found.verdict, found.type_name, found.host) == (Verdict.OOM, "OutOfMemoryError", False)
    assert found.numbers.requested_bytes == 20 * MIB
    found = recognise(torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"))
    assert (found.verdict, found.flavour, found.type_name) == (Verdict.OOM, "cuda runtime", "AcceleratorError")
    found = recognise(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    assert (found.verdict, found.flavour) == (Verdict.NOT_OOM, "sticky error")


def test_case_003_a_class_of_that_name_is_enough_and_so_is_a_subclass_of_it():
    class Mine(type("OutOfMemoryError", (Exception,), {})):
        pass

    assert recognise(Mine("words that nobody knows")).flavour == "out-of-memory class"
    assert recognise(torch.OutOfMemoryError()).verdict is Verdict.OOM
    assert recognise(type("NotOutOfMemoryError", (Exception,), {})("the same words")).verdict is Verdict.NOT_OOM


def test_case_009_the_class_is_not_believed_against_the_text_of_a_look_alike():
    assert recognise(out_of_memory("out of resource: shared memory, Required: 131072")).verdict is Verdict.NOT_OOM
    assert recognise(type("OutOfResources", (Exception,), {})("Required: 131072")).flavour == "triton"


def test_case_013_an_absurd_request_is_hopeless_but_an_absurd_limit_is_not():
    assert recognise(out_of_memory("CUDA out of memory. Tried to allocate more than 1EB memory.")).verdict == "hopeless"
    limit = "would exceed allowed memory. (out of memory)\nRequested : 1.00 MiB\nPyTorch limit : 17179869184.00 GiB"
    assert recognise(out_of_memory("Allocation on device 5 " + limit)).verdict is Verdict.OOM


def test_what_this_machine_raises_when_its_memory_runs_out():
    # 512 TiB: more than any address space of today, so that overcommitting does not help, and less than absurd.
    found = recognise(raised(lambda: torch.empty(2**49, dtype=torch.uint8)))
    assert (found.verdict, found.flavour, found.host) == (Verdict.OOM, "cpu", True)
    assert found.numbers.requested_bytes == 2**49
    found = recognise(raised(lambda: torch.empty(2**62, dtype=torch.uint8)))
    assert (found.verdict, found.host) == (Verdict.HOPELESS, True)
    found = recognise(raised(lambda: np.empty(2**49, dtype=np.uint8)))
    assert (found.verdict, found.flavour, found.host) == (Verdict.OOM, "numpy", True)
    assert found.numbers.requested_bytes == 2**49
    found = recognise(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert (found.verdict, found.flavour, found.host) == (Verdict.OOM, "operating system", True)
    found = recognise(MemoryError())
    assert (found.verdict, found.flavour, found.host, found.message) == (Verdict.OOM, "python", True, "")


# --- the chain -------------------------------------------------------------------------------------------------------


def raise_from(cause, error):
    raise error from cause


def raise_while_handling(first, second):
    try:
        raise_from(None, first)
    except BaseException:  # noqa: BLE001  whatever was given is what is being handled
        raise second  # noqa: B904  the implicit context is what is tested


def test_an_unknown_wrapper_is_looked_through_by_cause():
    found = recognise(raised(lambda: raise_from(out_of_memory(), ValueError("step failed"))))
    assert (found.verdict, found.message, found.type_name) == (Verdict.OOM, OOM_TEXT, "OutOfMemoryError")
    assert found.numbers.total_bytes == 8 * GIB


def test_an_unknown_error_raised_while_handling_is_looked_through_by_context():
    found = recognise(raised(lambda: raise_while_handling(out_of_memory(), KeyError("loss"))))
    assert (found.verdict, found.type_name) == (Verdict.OOM, "OutOfMemoryError")


def test_a_suppressed_context_is_not_looked_at():
    def hide():
        try:
            raise out_of_memory()
        except RuntimeError:
            raise ValueError("bad batch") from None

    found = recognise(raised(hide))
    assert (found.verdict, found.flavour, found.message) == (Verdict.NOT_OOM, "unknown", "bad batch")


def test_a_cause_is_preferred_to_the_context_and_the_context_is_then_not_looked_at():
    def both():
        try:
            raise out_of_memory()
        except RuntimeError:
            raise ValueError("outer") from TypeError("the cause")

    assert recognise(raised(both)).verdict is Verdict.NOT_OOM


@pytest.mark.parametrize(
    "outer",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: no kernel image is available"),
        RuntimeError("NCCL error: unhandled system error"),
        RuntimeError("Ray actor died: ran out of memory"),
        CheckpointError("recomputed values have other shapes"),
        IndexError("index out of range in self"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_known_look_alike_outside_decides_against_the_out_of_memory_inside(outer):
    found = recognise(raised(lambda: raise_while_handling(out_of_memory(), outer)))
    assert (found.verdict, found.message) == (Verdict.NOT_OOM, str(outer))


def test_an_out_of_memory_outside_decides_against_the_look_alike_inside():
    found = recognise(raised(lambda: raise_while_handling(IndexError("index out of range in self"), out_of_memory())))
    assert found.verdict is Verdict.OOM


def test_the_outermost_known_one_decides_between_suspected_and_certain():
    suspected = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")
    assert recognise(raised(lambda: raise_from(suspected, out_of_memory()))).verdict is Verdict.OOM
    suspected = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.")
    assert recognise(raised(lambda: raise_from(out_of_memory(), suspected))).verdict is Verdict.SUSPECTED


def test_a_cycle_ends():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert recognise(first).verdict is Verdict.NOT_OOM
    second.__cause__ = out_of_memory()
    second.__cause__.__cause__ = first
    assert recognise(first).verdict is Verdict.OOM


def test_a_falsy_exception_in_the_chain_is_still_looked_at():
    class Falsy(RuntimeError):
        def __bool__(self):
            return False

    error = ValueError("step failed")
    error.__cause__ = Falsy(OOM_TEXT)
    assert recognise(error).verdict is Verdict.OOM


def test_a_very_long_chain_is_walked_to_its_end():
    error = out_of_memory()
    for depth in range(5000):
        outer = ValueError(f"attempt {depth}")
        outer.__context__ = error
        error = outer
    assert recognise(error).verdict is Verdict.OOM


def group(*members):
    return ExceptionGroup("several", list(members))


def test_a_group_is_out_of_memory_only_if_every_member_is():
    wrapped = ValueError("step failed")
    wrapped.__cause__ = out_of_memory()
    assert recognise(group(out_of_memory(), wrapped)).verdict is Verdict.OOM
    mixed = recognise(group(out_of_memory(), ValueError("bad")))
    assert (mixed.verdict, mixed.flavour) == (Verdict.NOT_OOM, "mixed group")
    assert recognise(group(out_of_memory(), IndexError("index out of range in self"))).flavour == "index"
    assert recognise(group(out_of_memory(), RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"))).verdict is Verdict.SUSPECTED
    assert recognise(group(group(out_of_memory()), group(MemoryError()))).verdict is Verdict.OOM
    assert recognise(group(group(out_of_memory()), group(ValueError("bad")))).verdict is Verdict.NOT_OOM


def test_members_that_share_a_cause_are_each_judged_by_it():
    shared = out_of_memory()
    members = [ValueError("first"), ValueError("second")]
    for member in members:
        member.__cause__ = shared
    assert recognise(group(*members)).verdict is Verdict.OOM


def test_a_group_of_unknown_members_lets_the_next_be_looked_at():
    error = group(ValueError("bad"))
    error.__cause__ = out_of_memory()
    assert recognise(error).verdict is Verdict.OOM


def test_groups_nested_beyond_reason_do_not_raise():
    error = out_of_memory()
    for _ in range(3000):
        error = group(error)
    assert recognise(error).verdict is Verdict.NOT_OOM


# --- texts that are hard to get --------------------------------------------------------------------------------------


class Unprintable(RuntimeError):
    def __str__(self):
        raise ZeroDivisionError("no text today")


def test_an_exception_that_cannot_be_printed_is_judged_by_what_it_was_made_from():
    assert recognise(Unprintable()).message == ""
    assert recognise(Unprintable(OOM_TEXT)).verdict is Verdict.OOM
    error = ValueError("outer")
    error.__cause__ = Unprintable(3, OOM_TEXT)
    assert recognise(error).numbers.requested_bytes == 20 * MIB


def test_what_an_exception_prints_does_not_hide_what_it_was_made_from():
    class Polite(Exception):
        def __str__(self):
            return "training failed, sorry"

    found = recognise(Polite(OOM_TEXT))
    assert found.verdict is Verdict.OOM
    assert found.message == f"training failed, sorry\n{OOM_TEXT}"
    assert recognise(RuntimeError("step failed", out_of_memory())).verdict is Verdict.OOM


def test_an_args_attribute_of_the_users_own_does_not_disturb():
    class Own(Exception):
        args = 7

    assert recognise(Own(OOM_TEXT)).verdict is Verdict.OOM


# --- figures ---------------------------------------------------------------------------------------------------------


def test_fractions_are_added_before_they_are_cut():
    text = "30.80 GiB is allocated by PyTorch, and 2.80 MiB is reserved by PyTorch but unallocated"
    numbers = parse_numbers("Of the allocated memory " + text)
    assert (numbers.allocated_bytes, numbers.reserved_bytes) == (33071248179, 33074184192)


def test_case_124_what_neither_is_free_nor_ours_is_held_by_others_from_one_gib_upwards():
    def others(free):
        text = f"(GPU 0; 8.00 GiB total capacity; 4.00 GiB already allocated; {free}; 5.00 GiB reserved in total by PyTorch)"
        return parse_numbers(text).other_processes_bytes

    assert others("2048.00 MiB free") == GIB
    assert others("2049.00 MiB free") is None
    assert others("9.00 GiB free") is None
    assert others("nothing known") is None


def test_named_processes_are_added_up_and_nothing_is_derived_beside_them():
    text = (
        "GPU 3 has a total capacity of 80.00 GiB of which 8.00 MiB is free. Process 1 has 1.50 GiB memory in use. "
        "Process 22 has 512.00 KiB memory in use. Including non-PyTorch memory, this process has 3.00 GiB memory in use."
    )
    assert parse_numbers(text).other_processes_bytes == 3 * GIB // 2 + 512 * 1024


def test_a_text_without_figures_has_none():
    assert parse_numbers("CUDA error: out of memory") == Numbers()
    assert parse_numbers("9.5 GiB of cake, 3 free rooms, 4.00 GiB") == Numbers()


@given(st.integers(0, 10**8), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_a_printed_size_comes_back_to_the_byte(hundredths, unit):
    text = f"CUDA out of memory. Tried to allocate {hundredths // 100}.{hundredths % 100:02} {unit}."
    factor = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert parse_numbers(text).requested_bytes == hundredths * factor // 100


# --- properties ------------------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [vector["text"] for vector in VECTORS] + ["\n", ",", "1" * 50, " GiB free;", "²³ GiB", "\x00"]
)
ANY_TEXT = st.one_of(st.text(), st.lists(st.one_of(FRAGMENTS, st.text(max_size=5)), max_size=4).map("".join))


@given(ANY_TEXT, st.text(max_size=20))
@example("Tried to allocate " + "9" * 500 + " GiB", "RuntimeError")
@example("Tried to allocate 1,,,2.5 GiB (allocated so far: , bytes)", "OutOfMemoryError")
def test_recognition_never_raises(text, type_name):
    for found in (recognise_text(text, type_name), recognise(RuntimeError(text)), recognise(Unprintable(text, text))):
        assert isinstance(found, Recognition)
        amounts = [getattr(found.numbers, name) for name in Numbers.__slots__]
        assert all(amount is None or (type(amount) is int and amount >= 0) for amount in amounts)


WORDS = "the a robot went out of memory lane GPU batch size 3.50 GiB error failed while we allocate more . , : ( RuntimeError"


@given(st.lists(st.sampled_from(WORDS.split(" ")), max_size=12).map(" ".join))
def test_sentences_of_everyday_words_are_not_out_of_memory(sentence):
    assert recognise(RuntimeError(sentence)).verdict is Verdict.NOT_OOM


# Without lower-case vowels, because Hypothesis also tries the words that it finds in the code under test.
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="aeiou_")))
def test_random_text_is_not_out_of_memory(text):
    assert recognise_text(text).flavour == "unknown"


@pytest.mark.timeout(20)
def test_a_huge_text_takes_no_more_than_linear_time():
    for piece in ("1", "1.5 GiB ", "Cuda failure ", "cudaHostAlloc ", "in pin memory thread\n", "worker ", "Tried to "):
        assert recognise_text(piece * (200_000 // len(piece))).verdict is Verdict.NOT_OOM


# --- the floor -------------------------------------------------------------------------------------------------------


def test_the_room_imports_only_the_standard_library():
    """F1 rooms are read on machines and in commands without torch; this one needs no other room either."""
    tree = ast.parse(Path(oom.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "re", "dataclasses", "enum", "fractions"}
