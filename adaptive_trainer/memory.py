"""What devices have, hold and give back: the only reader of torch's device modules.

Every function takes the device that it is about and asks only that device's own module, by its index: on a machine
without CUDA nothing of CUDA is touched, and with several cards a process opens no context on another's.
"""

# ruff: noqa: TID251  this is the room that the ban on device modules points to

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from adaptive_trainer import host
from adaptive_trainer.budget import Budget
from adaptive_trainer.errors import RecipeError
from adaptive_trainer.oom import Verdict, recognise
from adaptive_trainer.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import Tensor

Outcome = TypeVar("Outcome")

#: Device types whose modules have the names of torch.cuda: statistics, limits and generators by device.
_WITH_STATISTICS = frozenset({"cuda", "xpu"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One reading of a device, in bytes; None where the device does not tell.

    Attributes:
        allocated_bytes: Held by this process's tensors.
        reserved_bytes: Held by this process's allocator, tensors and cache.
        free_bytes: What this process could still get.
        total_bytes: What the device has, or the limit that was set.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


def default_device() -> torch.device:
    """The accelerator there is, else the CPU; of several cards the launcher's for this process, else the current."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type not in _WITH_STATISTICS:
        return torch.device(accelerator.type)
    local_rank = os.environ.get("LOCAL_RANK", "")
    # A launcher may also show each process one card only; then its rank is no index.
    if local_rank.isdecimal() and int(local_rank) < torch.accelerator.device_count():
        return torch.device(accelerator.type, int(local_rank))
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_of(name: str | torch.device) -> torch.device:
    """The device that a user has named.

    Raises:
        RecipeError: It is not there.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return device
    here = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if here is None or here.type != device.type else torch.accelerator.device_count()
    if device.type != "meta" and (device.index or 0) >= count:
        there = "no accelerator" if here is None else f"{torch.accelerator.device_count()} x {here.type}"
        raise RecipeError(
            f"device: {name!s} is not there, this machine has {there}; leave it out, or type device='cpu'"
        )
    return device


def read(device: torch.device, budget: Budget | None = None) -> Memory:
    """What the device holds now; with a ``budget``, what that counts."""
    if budget is not None:
        live_bytes, limit_bytes = budget.live_bytes, budget.limit_bytes
        return Memory(
            allocated_bytes=live_bytes,
            reserved_bytes=live_bytes,
            free_bytes=max(0, limit_bytes - live_bytes),
            total_bytes=limit_bytes,
        )
    if device.type in _WITH_STATISTICS:
        return _read_statistics(device)
    if device.type == "mps":
        reserved_bytes, total_bytes = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
        return Memory(
            allocated_bytes=torch.mps.current_allocated_memory(),
            reserved_bytes=reserved_bytes,
            free_bytes=max(0, total_bytes - reserved_bytes),
            total_bytes=total_bytes,
        )
    if device.type == "cpu":
        used_bytes, total_bytes = host.used_and_total_bytes()
        return Memory(free_bytes=total_bytes - used_bytes, total_bytes=total_bytes)
    return Memory()


def _read_statistics(device: torch.device) -> Memory:
    module = torch.get_device_module(device)
    reserved_bytes = module.memory_reserved(device)
    limit_bytes = int(_total_bytes(device) * module.get_per_process_memory_fraction(device))
    free_bytes = max(0, limit_bytes - reserved_bytes)
    with suppress(RuntimeError):  # some drivers of XPU do not tell what is free
        free_bytes = min(free_bytes, module.mem_get_info(device)[0])
    return Memory(
        allocated_bytes=module.memory_allocated(device),
        reserved_bytes=reserved_bytes,
        free_bytes=free_bytes,
        total_bytes=limit_bytes,
    )


def allocated_bytes(device: torch.device, budget: Budget | None = None) -> int | None:
    """What tensors hold now, asked once a step; None where nobody counts (a CPU without a limit)."""
    if budget is not None:
        return budget.live_bytes
    if device.type in _WITH_STATISTICS:
        held: int = torch.get_device_module(device).memory_allocated(device)
        return held
    return torch.mps.current_allocated_memory() if device.type == "mps" else None


def peak_bytes(device: torch.device, budget: Budget | None = None) -> int | None:
    """The most that tensors held since `reset_peak`; None where nobody counts (MPS, a CPU without a limit)."""
    if budget is not None:
        return budget.peak_bytes
    if device.type in _WITH_STATISTICS:
        peak: int = torch.get_device_module(device).max_memory_allocated(device)
        return peak
    return None


def reset_peak(device: torch.device, budget: Budget | None = None) -> None:
    """Let the peak begin anew at what is held now."""
    if budget is not None:
        budget.reset_peak()
    elif device.type in _WITH_STATISTICS:
        torch.get_device_module(device).reset_peak_memory_stats(device)


class _Forgiven:
    """Swallows an out-of-memory, in any spelling; everything else passes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        return isinstance(error, Exception) and recognise(error).verdict in {Verdict.OOM, Verdict.SUSPECTED}


def forgiving(action: Callable[[], Outcome]) -> Outcome:
    """Do a part of the clean-up after an out-of-memory; it must be one that can be done again.

    A device may report an out-of-memory a second time, at whatever call comes next, which is this one. So the first
    one that the clean-up itself meets is taken for the old one, and the action is done again.

    Raises:
        Exception: Whatever else the action meets, and a second out-of-memory.
    """
    with _Forgiven():
        return action()
    return action()


def release(device: torch.device) -> None:
    """Free what nobody uses any more: unreachable objects, and blocks that the device's allocator keeps for later.

    Raises:
        Exception: What the clean-up meets, but for an out-of-memory that the device reports a second time.
    """
    forgiving(partial(_clean_up, device))


def _clean_up(device: torch.device) -> None:
    gc.collect()
    if device.type in _WITH_STATISTICS:
        module = torch.get_device_module(device)
        if module.is_initialized():
            with module.device(device):  # emptying the cache opens a context on the current device
                module.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif device.type == "cpu":
        _trim_heap()


def _trim_heap() -> None:
    """Give the C library's free blocks back to the system, where it has a call for that (glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


_FORMS = (
    "write an amount such as '20GiB', a whole number of bytes, or a fraction of the device such as 0.9 (without quotes)"
)


def resolve_limit(memory_limit: str | float | None, device: torch.device) -> int | None:
    """A ``memory_limit`` in bytes: an amount, a number of bytes, or a float fraction of the device above 0, up to 1.

    On a CPU the device is the host memory that this process may use, limits of containers included.

    Raises:
        RecipeError: It is nothing of that kind, or more than there is.
    """
    if memory_limit is None:
        return None
    total_bytes = _total_bytes(device)
    if isinstance(memory_limit, float) and 0 < memory_limit <= 1:
        limit_bytes = int(memory_limit * total_bytes)
    elif isinstance(memory_limit, str):
        limit_bytes = _amount(memory_limit)
    elif isinstance(memory_limit, int) and not isinstance(memory_limit, bool):
        limit_bytes = memory_limit
    else:
        raise RecipeError(f"memory_limit: {memory_limit!r} is no amount of memory; {_FORMS}")
    if limit_bytes <= 0:
        raise RecipeError(f"memory_limit: {memory_limit!r} leaves no memory at all; {_FORMS}")
    if limit_bytes > total_bytes:
        raise RecipeError(
            f"memory_limit: {memory_limit!r} is more than the {format_bytes(total_bytes)} that {device} has; "
            f"write at most {total_bytes}, or a fraction such as 0.9"
        )
    return limit_bytes


def _amount(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise RecipeError(f"memory_limit: {text!r} is no amount of memory; {_FORMS}") from error


def _total_bytes(device: torch.device) -> int:
    if device.type in _WITH_STATISTICS:
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    if device.type == "cpu":
        return host.total_bytes()
    raise RecipeError(
        f"memory_limit: there is no limit for {device.type}; it works on cuda, xpu, mps and cpu, so drop it"
    )


def set_limit(device: torch.device, limit_bytes: int) -> Budget | None:
    """Let nothing beyond ``limit_bytes`` be allocated on the device by this process.

    Returns:
        On a CPU the budget that counts, to be used as a guard of the run's phases; else None: the allocator obeys.

    Raises:
        RecipeError: The device has no way of limiting.
    """
    if device.type == "cpu":
        return Budget(limit_bytes)
    fraction = min(1.0, limit_bytes / _total_bytes(device))
    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(fraction)
    else:
        torch.get_device_module(device).set_per_process_memory_fraction(fraction, device)
    return None


def rng_state(device: torch.device) -> Tensor | None:
    """The state of the device's own generator, on the host; None for a CPU, whose stream is torch's own."""
    if device.type in _WITH_STATISTICS:
        state: Tensor = torch.get_device_module(device).get_rng_state(device)
        return state
    return torch.mps.get_rng_state() if device.type == "mps" else None


def set_rng_state(device: torch.device, state: Tensor | None) -> None:
    """Put back what `rng_state` gave."""
    if state is None:
        return
    if device.type in _WITH_STATISTICS:
        torch.get_device_module(device).set_rng_state(state, device)
    elif device.type == "mps":
        torch.mps.set_rng_state(state)


def bf16_supported(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself, not by emulation."""
    if device.type in _WITH_STATISTICS:
        module = torch.get_device_module(device)
        with module.device(device):  # it asks about the current device
            return bool(module.is_bf16_supported(including_emulation=False))
    if device.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    return device.type == "cpu"


def enable_expandable_segments(device: torch.device) -> bool:
    """Let the CUDA allocator grow its segments from now on, against fragmentation; True if that has been switched on.

    Nothing is done where the setting stands already, whichever way: that was somebody's choice.
    """
    if device.type != "cuda" or sys.platform != "linux" or torch.version.hip is not None:
        return False
    settings, switch_on = (
        getattr(torch._C, f"_accelerator_{name}AllocatorSettings", None)  # noqa: SLF001  there is no public name
        for name in ("get", "set")
    )
    if settings is None or switch_on is None or torch.cuda.get_allocator_backend() != "native":
        return False
    standing = settings()
    if "expandable_segments" in standing:
        return False
    # A new text replaces the old one as a whole, so what the user has set is said again.
    with suppress(RuntimeError, ValueError):
        switch_on(",".join(entry for entry in (standing, "expandable_segments:True") if entry))
        return True
    return False


def processes_on(device: torch.device) -> dict[int, int] | None:
    """Bytes on the device by process id, without this process; None where the driver does not tell."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        found = [
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ]
    except nvml.NVMLError:
        return None
    held = {entry.pid: entry.usedGpuMemory for entry in found}
    # In a container the driver may list the host's process ids, so that this process looks like another.
    if os.getpid() not in held or None in held.values():
        return None
    return {pid: num_bytes for pid, num_bytes in held.items() if pid != os.getpid()}
