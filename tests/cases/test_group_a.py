"""Recognising an out-of-memory, end to end: rows 1 to 22.

Rows 17 and 20 (native code that ends the process) are a matter of the documentation. The table of texts by itself is
tested in tests/test_oom.py.
"""

import builtins
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from adaptive_trainer import LadderExhausted, Plan, loop, memory, state
from adaptive_trainer.testing import inject_oom
from tests.cases.hooks import OOM, At, at_backward, at_forward, cap, regression, rows_of, rungs
from tests.cases.runs import copied, data, trainer_of
from tests.zoo import same, state_of

DATA = Path(__file__).parent.parent / "data/oom_messages.jsonl"
VECTORS = [json.loads(line) for line in DATA.read_text().splitlines()]
BATCH = 8


def vectors(*expected):
    return pytest.mark.parametrize("vector", [entry for entry in VECTORS if entry["expect"] in expected], ids=name_of)


def name_of(vector):
    return f"{vector['flavour']}-{vector['text'][:30]}".replace("\n", " ")


def error_of(vector):
    """An exception of that type and text: torch's or Python's own class where there is one."""
    name = vector["type"].rpartition(".")[2]
    places = (torch, torch.distributed, torch.utils.checkpoint, builtins)
    kind = next((getattr(place, name) for place in places if hasattr(place, name)), None)
    base = MemoryError if name == "_ArrayMemoryError" else RuntimeError
    return (kind or type(name, (base,), {}))(vector["text"])


@pytest.fixture(scope="module", autouse=True)
def _quick_collection():
    """What a first run imports need not be looked through at every failure."""
    run(regression()).fit()
    gc.collect()
    gc.freeze()


class Raises(nn.Module):
    """Raises exactly this at pieces of more than ``largest`` rows, ``times`` at most; keeps what it has raised."""

    def __init__(self, vector, *, largest=4, times=float("inf")):
        super().__init__()
        self.inner = regression()
        self._make = lambda: error_of(vector)
        self._largest, self._times = largest, times
        self.raised = _Kept()

    def forward(self, x):
        if len(x) > self._largest and len(self.raised) < self._times:
            self.raised.append(self._make())
            raise self.raised[-1]
        return self.inner(x)


class _Kept(list):
    """A list that is not rewound, because only plain lists are."""


def run(model, **rest):
    return trainer_of(model, data(2 * BATCH), batch_size=BATCH, **rest)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(loop.time, "sleep", lambda _seconds: None)


@vectors("oom")
def test_case_001_every_out_of_memory_walks_the_ladder_with_its_numbers(vector):
    result = run(Raises(vector, times=1)).fit()
    (failure,) = rows_of(result, "out_of_memory")
    assert failure.message == vector["text"]
    for name, value in vector.get("numbers", {}).items():
        if (name, value) != ("total_bytes", None):
            assert getattr(failure, name) == value, name
    beyond = (failure.requested_bytes or 0) > failure.total_bytes
    assert rungs(result) == ["halve_batch" if beyond else "empty_cache"]
    assert result.plan == Plan(micro_batch=4 if beyond else None)
    assert result.steps == 2


@vectors("oom")
def test_case_001_an_out_of_memory_for_ever_ends_with_its_type_and_text(vector):
    model = Raises(vector, largest=0)
    before = copied(model)
    with pytest.raises(LadderExhausted) as caught:
        run(model).fit()
    cause = caught.value.__cause__
    assert type(cause).__name__ == vector["type"].rpartition(".")[2]
    assert str(cause) == vector["text"]
    assert cause not in model.raised
    assert same(copied(model), before) is None


@vectors("suspected")
def test_case_001_a_suspicion_gets_one_smaller_try_and_the_run_goes_on(vector):
    model = Raises(vector)
    result = run(model).fit()
    (failure,) = rows_of(result, "out_of_memory")
    assert (failure.cause, failure.message) == ("unknown", vector["text"])
    assert rungs(result) == ["halve_batch"]
    assert result.plan == Plan(micro_batch=4)
    assert result.steps == 2
    assert len(model.raised) == 1


@vectors("suspected")
def test_case_001_a_suspicion_that_is_none_surfaces_at_the_second_time(vector):
    model, seen = Raises(vector, largest=0), []
    before = copied(model)
    with pytest.raises(Exception) as caught:
        run(model, callbacks=[seen.append]).fit()
    assert len(model.raised) == 2
    assert caught.value is model.raised[1]
    assert [event.event for event in seen] == ["start", "out_of_memory", "fallback"]
    assert same(copied(model), before) is None


@vectors("hopeless", "not_oom")
def test_case_001_anything_else_passes_through_at_the_first_time(vector):
    model, seen = Raises(vector, largest=0), []
    before = copied(model)
    with pytest.raises(Exception) as caught:
        run(model, callbacks=[seen.append]).fit()
    assert len(model.raised) == 1
    assert caught.value is model.raised[0]
    assert not hasattr(caught.value, "__notes__")
    assert [event.event for event in seen] == ["start"]
    assert same(copied(model), before) is None


# Row 2: the same error once more, at whatever call comes next.

ASYNC = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
STALE = {
    "release": (memory, "_clean_up"),
    "attributes_and_buffers": (state.Rewind, "restore"),
}


@pytest.mark.parametrize("place", STALE)
@pytest.mark.parametrize("plan", [Plan(), Plan(precision="fp16")], ids=str)
@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_002_a_stale_error_of_the_clean_up_is_swallowed_once(monkeypatch, place, plan, attach):
    ends = []
    for disturbed in (False, True):
        model = regression()
        if disturbed:
            owner, name = STALE[place]
            original, at = getattr(owner, name), At(1, message=ASYNC, error=torch.AcceleratorError)

            def clean_up(*args, at=at, original=original):
                at()
                return original(*args)

            monkeypatch.setattr(owner, name, clean_up)
            attach(model, 2, message=ASYNC, error=torch.AcceleratorError)
        trainer = run(model, plan=plan)
        result = trainer.fit()
        assert rungs(result) == (["empty_cache"] if disturbed else [])
        ends.append((state_of(trainer), trainer._loop.workshop.state.scaler))
    assert at.passed == 2
    assert same(ends[1], ends[0]) is None


def test_case_002_a_stale_error_of_the_next_forward_is_another_failure():
    model = regression()
    at_forward(model, 1, 2, message=ASYNC, error=torch.AcceleratorError)
    result = run(model).fit()
    assert rungs(result) == ["empty_cache", "halve_batch"]
    assert result.steps == 2


def test_case_002_a_clean_up_that_goes_on_failing_ends_the_run(monkeypatch):
    raised = []

    def clean_up(_device):
        raised.append(torch.AcceleratorError(ASYNC))
        raise raised[-1]

    monkeypatch.setattr(memory, "_clean_up", clean_up)
    with pytest.raises(torch.AcceleratorError) as caught, inject_oom():
        run(regression()).fit()
    assert caught.value is raised[1]
    assert "before this, step 1 had met: OutOfMemoryError" in caught.value.__notes__[0]


# Row 3: another torch.

_OLDER_TORCH = """
import torch
assert torch.OutOfMemoryError is torch.cuda.OutOfMemoryError
del torch.OutOfMemoryError, torch.cuda.OutOfMemoryError
from adaptive_trainer import AdaptiveTrainer
from adaptive_trainer.testing import inject_oom

data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
trainer = AdaptiveTrainer(torch.nn.Linear(2, 1), data, loss=torch.nn.MSELoss(), batch_size=8, progress=False)
text = "CUDA out of memory. Tried to allocate 2.00 GiB."
with inject_oom(message=f"RuntimeError: {text}"), inject_oom(phase="backward", message=f"RuntimeError: {text}"):
    result = trainer.fit()
print([event.rung for event in result.fallbacks], result.steps)
"""


def test_case_003_without_a_class_of_that_name_the_text_is_enough():
    found = subprocess.run([sys.executable, "-c", _OLDER_TORCH], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["['empty_cache', 'halve_batch'] 1"]


# Rows 5, 7, 8, 18, 21: other spellings, by hand and where the row says.


def test_case_005_the_drivers_own_words_walk_the_ladder():
    model = regression()
    at_forward(model, 1, 2, 3, message="CUDA driver error: out of memory", error=RuntimeError)
    assert rungs(run(model).fit()) == ["empty_cache", "halve_batch", "halve_batch"]


CUSOLVER = "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"


@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_005_a_status_of_a_library_is_tried_once_at_the_smaller_size(attach):
    model = regression()
    attach(model, 1, message=CUSOLVER, error=RuntimeError)
    result = run(model).fit()
    assert rungs(result) == ["halve_batch"]
    assert result.steps == 2
    model = regression()
    at = attach(model, *range(1, 100), message=CUSOLVER, error=RuntimeError)
    with pytest.raises(RuntimeError, match="CUSOLVER_STATUS_INTERNAL_ERROR"):
        run(model).fit()
    assert at.passed == 2


def test_case_005_each_step_may_be_suspected_once():
    model = regression()
    at_forward(model, 1, 4, message=CUSOLVER, error=RuntimeError)  # the first try of each of two steps
    result = run(model).fit()
    assert rungs(result) == ["halve_batch", "halve_batch"]
    assert result.plan == Plan(micro_batch=2)


@pytest.mark.parametrize("passage", [1, 2])
@pytest.mark.parametrize("call", ["cublasCreate(handle)", "cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda)"])
def test_case_007_a_workspace_of_cublas_in_backward_is_a_plain_out_of_memory(passage, call):
    plain = run(regression())
    plain.fit()
    model = regression()
    at_backward(model, passage, message=f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `{call}`", error=RuntimeError)  # fmt: skip
    trainer = run(model)
    result = trainer.fit()
    assert rungs(result) == ["empty_cache"]
    assert rows_of(result, "out_of_memory")[0].phase == "backward"
    assert same(state_of(trainer), state_of(plain)) is None


CUDNN = [
    "Unable to find a valid cuDNN algorithm to run convolution",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "GET was unable to find an engine to execute this computation",
]


@pytest.mark.parametrize("text", CUDNN)
def test_case_008_cudnn_without_memory_recovers_at_four_rows(text):
    model = regression()
    model.register_forward_pre_hook(lambda _module, args: _fail_above(4, args, text))
    result = run(model).fit()
    assert rungs(result) == ["halve_batch"]
    assert result.plan == Plan(micro_batch=4)


@pytest.mark.parametrize("text", CUDNN)
@pytest.mark.parametrize("rest", [{}, {"separable": False}, {"ladder": ["empty_cache", "amp"]}], ids=str)
def test_case_008_cudnn_with_another_fault_is_not_driven_down(text, rest):
    """Where no smaller piece is to be had, the first one surfaces."""
    model, seen = regression(), []
    at = at_forward(model, *range(1, 100), message=text, error=RuntimeError)
    with pytest.raises(RuntimeError) as caught:
        run(model, callbacks=[seen.append], **rest).fit()
    assert str(caught.value) == text
    assert at.passed == (1 if rest else 2)
    assert [event.event for event in seen][1:] == ([] if rest else ["out_of_memory", "fallback"])


def _fail_above(largest, args, text, error=RuntimeError):
    if len(args[0]) > largest:
        raise error(text)


class OutOfResources(Exception):
    """As Triton has it."""


@pytest.mark.parametrize("error", [OutOfResources, torch.OutOfMemoryError, RuntimeError])
def test_case_009_a_kernels_shared_memory_is_never_laddered(error):
    """The compiler raises it again as an ``OutOfMemoryError``, which is believed no more."""
    text = "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help."
    model = regression()
    at = at_forward(model, 1, message=text, error=error)
    with pytest.raises(error, match="Hardware limit"):
        run(model).fit()
    assert at.passed == 1


# Rows 10 and 11: what the user's loader meets.

LOADER = {
    "bus_error": "DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
    "killed": "DataLoader worker (pid 123) is killed by signal: Killed. ",
    "pinned": "CUDA error: out of memory",
    "plain": OOM,
}  # fmt: skip


class Failing(Dataset):
    """Fails at one sample."""

    def __init__(self, at, error):
        self._at, self._error = at, error

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == self._at:
            raise self._error
        return torch.randn(8), torch.randn(1)


@pytest.mark.parametrize("text", LOADER.values(), ids=LOADER)
@pytest.mark.parametrize("place", ["data_set", "loader", "iterable"])
def test_case_010_case_011_what_a_loader_raises_is_the_same_object(text, place):
    error = RuntimeError(text)

    def batches():
        yield torch.randn(8, 8), torch.randn(8, 1)
        raise error

    samples = {
        "data_set": lambda: {"samples": Failing(20, error), "batch_size": 8, "shuffle": False},
        "loader": lambda: {"samples": DataLoader(Failing(20, error), batch_size=8), "batch_size": None},
        "iterable": lambda: {"samples": batches(), "batch_size": None},
    }[place]()
    seen = []
    trainer = trainer_of(callbacks=[seen.append], **samples)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit()
    assert caught.value is error
    assert {event.event for event in seen} == {"start", "step"}


KILLED = """
import os, signal
import torch
from adaptive_trainer import AdaptiveTrainer

class Killed(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(8), torch.zeros(1)

seen = []
try:
    AdaptiveTrainer(torch.nn.Linear(8, 1), Killed(), loss=torch.nn.functional.mse_loss, batch_size=8, shuffle=False,
                    num_workers=1, callbacks=[seen.append], progress=False).fit()
except RuntimeError as error:
    print(error)
print("out_of_memory" in {event.event for event in seen})
"""


def test_case_011_a_worker_that_the_kernel_kills_ends_the_run_and_says_so():
    """In a process of its own: torch's signal handler may raise later, in whatever runs then."""
    ran = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=100, check=False)
    assert re.search(r"killed by signal|exited unexpectedly", ran.stdout), ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "False"


def test_case_011_host_memory_in_the_loader_is_not_laddered_either():
    error = MemoryError()
    with pytest.raises(MemoryError) as caught:
        trainer_of(samples=Failing(3, error), batch_size=8, shuffle=False).fit()
    assert caught.value is error


# Rows 13 to 15: sizes.


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "build", "evaluate"])
@pytest.mark.parametrize("size", ["more than 1EB memory", "17179869184.00 GiB", "16.00 EiB"])
def test_case_013_an_absurd_request_is_a_fault_and_no_shortage(phase, size):
    text, seen = f"CUDA out of memory. Tried to allocate {size}.", []
    trainer = run(regression(), callbacks=[seen.append], eval_data=data(8))
    with inject_oom(phase=phase, message=text) as injected, pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit()
    assert str(caught.value) == text
    assert injected.fired == 1
    assert {event.event for event in seen} <= {"start", "step"}


BEYOND = {
    "before": "CUDA out of memory. Tried to allocate 93.75 GiB (GPU 0; 79.15 GiB total capacity; 2.00 GiB already allocated; 75.00 GiB free; 2.10 GiB reserved in total by PyTorch)",
    "now": "CUDA out of memory. Tried to allocate 93.75 GiB. GPU 0 has a total capacity of 79.15 GiB of which 75.00 GiB is free. Including non-PyTorch memory, this process has 4.15 GiB memory in use. Of the allocated memory 2.00 GiB is allocated by PyTorch, and 102.40 MiB is reserved by PyTorch but unallocated.",
}  # fmt: skip


@pytest.mark.parametrize("text", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("rows", [16, 8])
def test_case_014_a_request_beyond_the_device_goes_straight_to_the_halving(text, rows):
    model = regression()
    model.register_forward_pre_hook(lambda _module, args: _fail_above(rows // 2, args, text, torch.OutOfMemoryError))
    result = trainer_of(model, batch_size=rows).fit()
    assert rungs(result) == ["halve_batch"]
    assert "93.8 GiB" in result.fallbacks[0].skipped["empty_cache"]
    (failure,) = rows_of(result, "out_of_memory")
    assert failure.requested_bytes == int(93.75 * 2**30)
    assert failure.total_bytes == int(79.15 * 2**30)
    assert failure.allocated_bytes == 2 * 2**30
    assert failure.free_bytes == 75 * 2**30


def test_case_014_the_capacity_may_be_the_limit_that_was_set():
    """One hidden layer of 16 rows does not fit into all that there is."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    result = trainer_of(model, memory_limit="12KiB", batch_size=64).fit()
    assert rungs(result)[0] == "halve_batch"
    assert "16.0 KiB" in result.fallbacks[0].skipped["empty_cache"]


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: invalid configuration argument\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: too many resources requested for launch",
        "integer out of range",
    ],
)
@pytest.mark.parametrize("error", [RuntimeError, torch.AcceleratorError])
def test_case_015_a_limit_of_kernels_is_not_memory_although_a_smaller_batch_would_do(text, error):
    model = regression()
    model.register_forward_pre_hook(lambda _module, args: _fail_above(8, args, text, error))
    seen = cap(model, 100)
    with pytest.raises(error) as caught:
        trainer_of(model).fit()
    assert str(caught.value).startswith(text)
    assert seen == []  # the first hook raised, and nothing was tried again


# Rows 18, 19, 21, 22: other devices and allocators.

MPS = [
    "MPS backend out of memory (MPS allocated: 7.43 GB, other allocations: 24.46 GB, max allowed: 32.00 GB). Tried to allocate 129.21 MB on private pool.",
    "Invalid buffer size: 19.45 GB",
]  # fmt: skip


@pytest.mark.parametrize("text", MPS)
@pytest.mark.parametrize("attach", [at_forward, at_backward])
def test_case_018_mps_is_answered_and_cuda_is_left_alone(monkeypatch, text, attach):
    """That release empties the cache of MPS itself, once: tests/test_memory.py."""
    touched = []
    for name in ("empty_cache", "synchronize", "memory_allocated", "mem_get_info", "set_rng_state", "init"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, name=name: touched.append(name))
    model = regression()
    attach(model, 1, message=text, error=RuntimeError)
    result = run(model).fit()
    assert rungs(result) == ["empty_cache"]
    assert touched == []


LOST = "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"
XPU = "XPU out of memory. Tried to allocate 512.00 MiB."


@pytest.mark.parametrize("place", ["next_forward", "restore", "release"])
def test_case_019_a_device_that_is_lost_after_an_out_of_memory_ends_the_run_and_names_both(monkeypatch, place):
    """From the out-of-memory on everything fails, the clean-up included."""
    lost, gone = RuntimeError(LOST), []
    model = regression()

    def forward(_module, _args):
        if gone:
            raise lost
        gone.append(True)
        raise torch.OutOfMemoryError(XPU)

    def touch(*_):
        raise lost

    model.register_forward_pre_hook(forward)
    if place == "restore":
        monkeypatch.setattr(state.Rewind, "restore", touch)
    if place == "release":
        monkeypatch.setattr(memory, "_clean_up", touch)
    with pytest.raises(RuntimeError) as caught:
        run(model).fit()
    assert caught.value is lost
    assert XPU in lost.__notes__[0]
    assert len(gone) == 1


def test_case_021_the_asynchronous_allocator_has_words_of_its_own():
    text = "Allocation on device 5 would exceed allowed memory. (out of memory)\nCurrently allocated     : 54.14 GiB\nRequested               : 686.41 MiB\nDevice limit            : 79.35 GiB\nFree (according to CUDA): 27.19 MiB"  # fmt: skip
    model = regression()
    at_backward(model, 1, 2, message=text)
    result = run(model).fit()
    assert rungs(result) == ["empty_cache", "halve_batch"]
    assert rows_of(result, "out_of_memory")[0].requested_bytes == int(686.41 * 2**20)


class Reduces(nn.Module):
    """Has a collective of its own in the forward."""

    def __init__(self):
        super().__init__()
        self.inner = regression()

    def forward(self, x):
        torch.distributed.all_reduce(x)
        return self.inner(x)


UNHANDLED = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed."  # fmt: skip


@pytest.mark.parametrize(
    "text", [f"{UNHANDLED}\nLast error:\nCuda failure {code}'out of memory'" for code in ("", "2 ")]
)
def test_case_022_a_collective_without_memory_gets_the_cache(monkeypatch, text):
    monkeypatch.setattr(torch.distributed, "all_reduce", At(1, message=text, error=torch.distributed.DistBackendError))
    result = run(Reduces()).fit()
    assert rungs(result) == ["empty_cache"]
    assert result.plan == Plan()


@pytest.mark.parametrize("text", [UNHANDLED, UNHANDLED.replace("unhandled cuda error", "internal error")])
def test_case_022_a_collective_that_fails_otherwise_is_not_memory(monkeypatch, text):
    at = At(1, message=text, error=torch.distributed.DistBackendError)
    monkeypatch.setattr(torch.distributed, "all_reduce", at)
    with pytest.raises(torch.distributed.DistBackendError):
        run(Reduces()).fit()
    assert at.passed == 1


def test_case_001_a_group_of_out_of_memories_is_one_and_ends_with_its_words():
    def step(model, batch):
        raise ExceptionGroup(
            "two workers", [torch.OutOfMemoryError(OOM), RuntimeError("CUDA driver error: out of memory")]
        )

    with pytest.raises(LadderExhausted) as caught:
        run(regression(), step=step).fit()
    assert OOM in str(caught.value.__cause__)
    assert "ExceptionGroup" in str(caught.value.__cause__)
