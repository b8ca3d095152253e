"""Devices and the host: each asked through its own module alone, limits resolved, clean-up that survives stale errors."""

# ruff: noqa: TID251  the devices that the tested room alone may read are played here

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from adaptive_trainer import host, memory
from adaptive_trainer.budget import Budget
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.phases import Phase, Track

CPU = torch.device("cpu")
MPS = torch.device("mps")
GIB = 2**30


class Recorder:
    """Stands in for the functions of a device module: known ones are recorded with their arguments, others refused."""

    def __init__(self, monkeypatch, module, answers):
        self.calls = []
        for name, found in vars(module).copy().items():
            if isinstance(found, types.FunctionType) and not name.startswith("_"):
                monkeypatch.setattr(module, name, self._refuse(f"{module.__name__}.{name}"))
        for name, answer in answers.items():
            monkeypatch.setattr(module, name, self._record(name, answer))

    def _refuse(self, name):
        def refuse(*args, **kwargs):
            pytest.fail(f"{name} was called")

        return refuse

    def _record(self, name, answer):
        def record(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.values()))
            return answer(*args) if callable(answer) else answer

        return record


class CurrentDevice:
    """``torch.cuda.device`` with a memory of which device was current."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        CurrentDevice.now = self.device

    def __exit__(self, *_exception):
        CurrentDevice.now = None


def cuda(monkeypatch, *, fraction=1.0, **answers):
    properties = types.SimpleNamespace(total_memory=16 * GIB, uuid="c0ffee")
    known = {
        "is_initialized": True,
        "memory_allocated": 3 * GIB,
        "memory_reserved": 5 * GIB,
        "max_memory_allocated": 4 * GIB,
        "reset_peak_memory_stats": None,
        "mem_get_info": (9 * GIB, 16 * GIB),
        "get_device_properties": properties,
        "get_per_process_memory_fraction": fraction,
        "set_per_process_memory_fraction": None,
        "get_rng_state": torch.arange(3, dtype=torch.uint8),
        "set_rng_state": None,
        "empty_cache": None,
        "is_bf16_supported": True,
        "get_allocator_backend": "native",
    }
    recorder = Recorder(monkeypatch, torch.cuda, known | answers)
    monkeypatch.setattr(torch.cuda, "device", CurrentDevice)
    return recorder


@pytest.fixture
def no_cuda(monkeypatch):
    return Recorder(monkeypatch, torch.cuda, {})


# Devices.


def test_without_an_accelerator_the_default_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert memory.default_device() == CPU


@pytest.mark.parametrize(
    ("kind", "local_rank", "num_devices", "expected"),
    [
        ("cuda", "1", 4, torch.device("cuda", 1)),
        ("cuda", None, 4, torch.device("cuda", 2)),
        ("cuda", "3", 1, torch.device("cuda", 2)),  # one visible card for each process
        ("xpu", "0", 2, torch.device("xpu", 0)),
        ("mps", "0", 1, MPS),
    ],
)
def test_default_device_is_the_launchers_choice_else_the_current_one(
    monkeypatch, kind, local_rank, num_devices, expected
):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert memory.default_device() == expected


def test_case_102_only_the_own_device_is_touched(monkeypatch):
    device = torch.device("cuda", 1)
    current_at = []
    recorder = cuda(
        monkeypatch,
        empty_cache=lambda: current_at.append(CurrentDevice.now),
        is_bf16_supported=lambda *_: current_at.append(CurrentDevice.now),
    )
    memory.read(device)
    memory.peak_bytes(device)
    memory.reset_peak(device)
    memory.release(device)
    memory.set_rng_state(device, memory.rng_state(device))
    memory.set_limit(device, memory.resolve_limit(0.5, device))
    memory.bf16_supported(device)
    called = {name for name, *_ in recorder.calls}
    assert called >= {
        "mem_get_info",
        "get_rng_state",
        "set_rng_state",
        "set_per_process_memory_fraction",
        "empty_cache",
    }
    asked = [call for call in recorder.calls if call[0] not in {"empty_cache", "is_bf16_supported", "is_initialized"}]
    assert all(device in call for call in asked), recorder.calls
    assert current_at == [device, device]


def test_a_process_that_never_used_cuda_opens_no_context_to_clean_up(monkeypatch):
    recorder = cuda(monkeypatch, is_initialized=False)
    memory.release(torch.device("cuda", 0))
    assert [name for name, *_ in recorder.calls] == ["is_initialized"]


def test_cuda_is_read_in_bytes_under_the_limit_that_was_set(monkeypatch):
    device = torch.device("cuda", 0)
    cuda(monkeypatch)
    assert memory.read(device) == memory.Memory(
        allocated_bytes=3 * GIB, reserved_bytes=5 * GIB, free_bytes=9 * GIB, total_bytes=16 * GIB
    )
    assert memory.peak_bytes(device) == 4 * GIB
    cuda(monkeypatch, fraction=0.5)
    limited = memory.read(device)
    assert (limited.free_bytes, limited.total_bytes) == (3 * GIB, 8 * GIB)


def test_a_driver_that_does_not_tell_what_is_free_is_no_failure(monkeypatch):
    def silent(_device):
        raise RuntimeError("The device doesn't support querying the available free memory")

    cuda(monkeypatch, mem_get_info=silent)
    assert memory.read(torch.device("cuda", 0)).free_bytes == 11 * GIB


def test_mps_is_read_through_its_own_module(monkeypatch, no_cuda):
    Recorder(
        monkeypatch,
        torch.mps,
        {"current_allocated_memory": 10, "driver_allocated_memory": 30, "recommended_max_memory": 100},
    )
    assert memory.read(MPS) == memory.Memory(allocated_bytes=10, reserved_bytes=30, free_bytes=70, total_bytes=100)
    assert memory.peak_bytes(MPS) is None


def test_a_budget_answers_for_a_cpu():
    budget = Budget(1000)
    kept = torch.zeros(100)
    with Track(guards=(budget,)).enter(Phase.FORWARD):
        torch.zeros(50)
    budget.adopt([kept])
    assert memory.read(CPU, budget) == memory.Memory(
        allocated_bytes=400, reserved_bytes=400, free_bytes=600, total_bytes=1000
    )
    del kept
    assert memory.peak_bytes(CPU, budget) == 400
    memory.reset_peak(CPU, budget)
    assert memory.peak_bytes(CPU, budget) == 0


def test_a_cpu_without_a_limit_knows_the_host_and_no_peak():
    reading = memory.read(CPU)
    assert reading.allocated_bytes is None
    assert 0 < reading.free_bytes < reading.total_bytes
    memory.reset_peak(CPU)
    assert memory.peak_bytes(CPU) is None


def test_an_unknown_device_is_all_unknown():
    device = torch.device("hpu")
    assert memory.read(device) == memory.Memory()
    assert memory.peak_bytes(device) is None
    assert memory.rng_state(device) is None
    assert memory.bf16_supported(device) is False
    memory.release(device)


# Clean-up.


def test_case_018_release_on_mps_empties_its_own_cache_once_and_calls_nothing_of_cuda(monkeypatch, no_cuda):
    recorder = Recorder(monkeypatch, torch.mps, {"empty_cache": None})
    memory.release(MPS)
    assert recorder.calls == [("empty_cache",)]


def test_release_on_a_cpu_collects_cycles_and_calls_nothing_of_cuda(no_cuda):
    budget = Budget(GIB)
    with Track(guards=(budget,)).enter(Phase.FORWARD):
        cycle = [torch.zeros(1000)]
    cycle.append(cycle)
    del cycle
    memory.release(CPU)
    assert budget.live_bytes == 0


STALE = [
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError('!handles_.at(i) INTERNAL ASSERT FAILED at "/c10/cuda/CUDACachingAllocator.cpp":430, please report'),
]


def failing(*errors):
    """A function that raises these one after the other, and then nothing more."""
    left = list(errors)

    def fail():
        if left:
            raise left.pop(0)

    return fail


@pytest.mark.parametrize("error", STALE, ids=lambda error: type(error).__name__)
def test_case_002_an_out_of_memory_of_the_cleanup_itself_is_swallowed_once(monkeypatch, error):
    recorder = cuda(monkeypatch, empty_cache=failing(error))
    memory.release(torch.device("cuda", 0))
    assert [name for name, *_ in recorder.calls].count("empty_cache") == 2
    assert sys.exc_info() == (None, None, None)


def test_case_002_a_second_out_of_memory_of_the_cleanup_surfaces(monkeypatch):
    first, second = RuntimeError("CUDA error: out of memory"), RuntimeError("CUDA error: out of memory")
    recorder = cuda(monkeypatch, empty_cache=failing(first, second))
    with pytest.raises(RuntimeError) as raised:
        memory.release(torch.device("cuda", 0))
    assert raised.value is second
    assert raised.value.__context__ is None  # the first one is dead, with whatever its frames held
    assert [name for name, *_ in recorder.calls].count("empty_cache") == 2


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory."),
        KeyboardInterrupt(),
    ],
    ids=["sticky", "hopeless", "interrupt"],
)
def test_anything_else_of_the_cleanup_passes_through_the_first_time(monkeypatch, error):
    recorder = cuda(monkeypatch, empty_cache=failing(error))
    with pytest.raises(type(error)) as raised:
        memory.release(torch.device("cuda", 0))
    assert raised.value is error
    assert [name for name, *_ in recorder.calls].count("empty_cache") == 1


# Limits.


def test_no_limit_is_no_limit():
    assert memory.resolve_limit(None, CPU) is None


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("2GiB", 2 * GIB),
        ("1.5 GB", 1_500_000_000),
        (4096, 4096),
        (0.25, 4 * GIB),
        (1.0, 16 * GIB),
        (16 * GIB, 16 * GIB),
    ],
)
def test_limits_are_amounts_bytes_or_fractions_of_the_device(monkeypatch, typed, expected):
    cuda(monkeypatch)
    assert memory.resolve_limit(typed, torch.device("cuda", 0)) == expected


@pytest.mark.parametrize(
    "typed", [True, False, 0, -1, 0.0, -0.5, 1.5, float("nan"), float("inf"), "0", "-1GiB", "lots", [1]]
)
def test_what_is_no_limit_is_refused_with_what_to_type(typed):
    with pytest.raises(RecipeError) as raised:
        memory.resolve_limit(typed, CPU)
    message = str(raised.value)
    assert message.startswith(f"memory_limit: {typed!r} ")
    assert "'20GiB'" in message
    assert "0.9" in message


def test_more_than_the_device_has_is_refused_with_both_numbers(monkeypatch):
    cuda(monkeypatch)
    with pytest.raises(
        RecipeError, match=r"memory_limit: '17GiB' is more than the 16\.0 GiB that cuda:0 has"
    ) as raised:
        memory.resolve_limit("17GiB", torch.device("cuda", 0))
    assert str(16 * GIB) in str(raised.value)


def test_a_device_without_limits_says_where_there_are_some():
    with pytest.raises(RecipeError, match=r"memory_limit.*hpu.*cuda, xpu, mps and cpu"):
        memory.resolve_limit("1GiB", torch.device("hpu"))
    with pytest.raises(RecipeError, match=r"memory_limit.*hpu"):
        memory.set_limit(torch.device("hpu"), GIB)


def test_set_limit_is_a_budget_on_a_cpu_and_a_fraction_on_devices(monkeypatch):
    budget = memory.set_limit(CPU, 1000)
    assert isinstance(budget, Budget)
    assert budget.limit_bytes == 1000
    device = torch.device("cuda", 1)
    recorder = cuda(monkeypatch)
    assert memory.set_limit(device, 4 * GIB) is None
    assert ("set_per_process_memory_fraction", 0.25, device) in recorder.calls
    recorder = Recorder(
        monkeypatch, torch.mps, {"recommended_max_memory": 100, "set_per_process_memory_fraction": None}
    )
    assert memory.set_limit(MPS, 30) is None
    assert recorder.calls[-1] == ("set_per_process_memory_fraction", 0.3)


def write_group(folder, values, *, version):
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    folder.mkdir(parents=True, exist_ok=True)
    limit, used, reclaimable = values
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {reclaimable}\n")


def test_container_limits_of_the_second_version_count_with_those_above_them(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/step\n")
    write_group(tmp_path, (1, 1, 0), version=2)  # not in the file system of the control groups
    write_group(tmp_path / "fs" / "job", (1000, 700, 100), version=2)
    write_group(tmp_path / "fs" / "job" / "step", ("max", 600, 100), version=2)
    assert list(host._cgroup_ceilings(membership, tmp_path / "fs")) == [(600, 1000)]


def test_container_limits_of_the_first_version_count_also_where_the_path_is_not_shown(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("5:devices:/docker/x\n4:cpu,memory:/docker/x\n0::/docker/x\n")
    write_group(tmp_path / "fs" / "memory", (2000, 500, 50), version=1)
    assert list(host._cgroup_ceilings(membership, tmp_path / "fs")) == [(450, 2000)]


def test_no_control_groups_are_no_limits(tmp_path):
    assert list(host._cgroup_ceilings(tmp_path / "none", tmp_path)) == []


def test_the_nearest_ceiling_is_the_hosts_and_the_lowest_the_cpus_total(monkeypatch):
    ceilings = [host._Ceiling(50, 100), host._Ceiling(10, 80), host._Ceiling(0, 70)]
    monkeypatch.setattr(host, "_ceilings", lambda: iter(ceilings))
    assert host.used_and_total_bytes() == (50, 100)
    assert memory.resolve_limit(1.0, CPU) == 70
    with pytest.raises(RecipeError, match="71 is more than the 70 B that cpu has"):
        memory.resolve_limit(71, CPU)


UNDER_A_REAL_LIMIT = """
import resource, psutil, torch
from adaptive_trainer import host, memory
from adaptive_trainer.oom import recognise
torch.set_num_threads(1)
cpu = torch.device("cpu")
limit_bytes = psutil.Process().memory_info().data + 256 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
assert memory.resolve_limit(1.0, cpu) == limit_bytes
used, total = host.used_and_total_bytes()
assert total == limit_bytes and total - used <= 257 * 2**20, (used, total)
caught = None
try:
    torch.empty(2**30, dtype=torch.uint8)
except RuntimeError as error:
    caught = recognise(error)
assert caught is not None and caught.verdict == "oom" and caught.host, caught
assert caught.numbers.requested_bytes == 2**30
memory.release(cpu)
assert torch.zeros(2**24).sum() == 0
print("held")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA holds for mapped memory on Linux only")
def test_a_real_limit_of_the_system_is_resolved_met_recognised_and_survived():
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_REAL_LIMIT],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "held\n"


# Generators, precision, the allocator's settings, other processes.


def test_random_state_is_the_devices_own_and_none_on_a_cpu(monkeypatch, no_cuda):
    assert memory.rng_state(CPU) is None
    before = torch.get_rng_state()
    memory.set_rng_state(CPU, None)
    assert torch.equal(torch.get_rng_state(), before)
    state = torch.arange(4, dtype=torch.uint8)
    recorder = Recorder(monkeypatch, torch.mps, {"get_rng_state": state, "set_rng_state": None})
    assert memory.rng_state(MPS) is state
    memory.set_rng_state(MPS, state)
    memory.set_rng_state(MPS, None)
    assert [name for name, *_ in recorder.calls] == ["get_rng_state", "set_rng_state"]


def test_bf16_is_asked_without_emulation(monkeypatch):
    assert memory.bf16_supported(CPU) is True
    recorder = cuda(monkeypatch, is_bf16_supported=False)
    assert memory.bf16_supported(torch.device("cuda", 0)) is False
    assert recorder.calls == [("is_bf16_supported", False)]


@pytest.mark.parametrize("newer", [True, False])
def test_bf16_on_mps_is_a_matter_of_the_system(monkeypatch, newer):
    monkeypatch.setattr(
        torch.backends.mps, "is_macos_or_newer", lambda major, minor: newer and (major, minor) == (14, 0)
    )
    assert memory.bf16_supported(MPS) is newer


@pytest.fixture
def settings(monkeypatch):
    """The allocator's settings as a list of texts, the last one standing."""
    texts = [""]
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: texts[-1])
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", texts.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "hip", None)
    return texts


def test_expandable_segments_are_switched_on_beside_the_users_own_settings(monkeypatch, settings):
    cuda(monkeypatch)
    device = torch.device("cuda", 0)
    assert memory.enable_expandable_segments(device) is True
    assert settings == ["", "expandable_segments:True"]
    assert memory.enable_expandable_segments(device) is False
    settings[:] = ["max_split_size_mb:128"]
    assert memory.enable_expandable_segments(device) is True
    assert settings[-1] == "max_split_size_mb:128,expandable_segments:True"


def test_expandable_segments_stay_where_the_user_or_the_machine_refuses(monkeypatch, settings):
    device = torch.device("cuda", 0)
    cuda(monkeypatch)
    settings[:] = ["expandable_segments:False"]
    assert memory.enable_expandable_segments(device) is False
    settings[:] = [""]
    assert memory.enable_expandable_segments(CPU) is False
    cuda(monkeypatch, get_allocator_backend="cudaMallocAsync")
    assert memory.enable_expandable_segments(device) is False
    cuda(monkeypatch)
    monkeypatch.setattr(sys, "platform", "win32")
    assert memory.enable_expandable_segments(device) is False
    monkeypatch.setattr(sys, "platform", "linux")
    assert settings == [""]
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: failing(RuntimeError("refused"))())
    assert memory.enable_expandable_segments(device) is False


class FakeDriver(types.ModuleType):
    """The few functions of pynvml that are used."""

    class NVMLError(Exception):
        """What the driver raises."""

    def __init__(self, held, error=None):
        super().__init__("pynvml")
        self.held, self.error, self.asked = held, error, []

    def nvmlInit(self):
        if self.error is not None:
            raise self.NVMLError(self.error)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, _handle):
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in self.held.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _handle):
        return []


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (FakeDriver({os.getpid(): GIB, 7: 2 * GIB, 8: GIB}), {7: 2 * GIB, 8: GIB}),
        (FakeDriver({os.getpid(): GIB}), {}),
        (FakeDriver({7: 2 * GIB}), None),  # process ids of another namespace: this process cannot be told apart
        (FakeDriver({os.getpid(): GIB, 7: None}), None),
        (FakeDriver({}, error="no driver"), None),
        (None, None),
    ],
    ids=["others", "alone", "namespace", "unknown", "no driver", "no pynvml"],
)
def test_other_processes_are_told_by_the_driver_or_not_at_all(monkeypatch, driver, expected):
    cuda(monkeypatch)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert memory.processes_on(torch.device("cuda", 0)) == expected
    assert memory.processes_on(CPU) is None
    if expected is not None:
        assert driver.asked == ["GPU-c0ffee"]


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "xpu", "mps"])
def test_a_device_that_is_not_there_is_refused_with_what_is(name):
    if torch.accelerator.is_available():
        pytest.fail("this test is for machines without an accelerator")
    with pytest.raises(RecipeError, match=rf"device: {name} is not there, this machine has no accelerator"):
        memory.device_of(name)
    assert memory.device_of("cpu") == torch.device("cpu")
