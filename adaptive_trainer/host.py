"""How much host memory this process may use: the machine's, its containers', and its own limits.

The only reader of the operating system.
"""

# ruff: noqa: TID251  this is the room that the ban on psutil points to

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


def used_and_total_bytes() -> tuple[int, int]:
    """Bytes used and in all of the host memory that this process may use: of the limit that is nearest."""
    return min(_ceilings(), key=lambda ceiling: ceiling.limit_bytes - ceiling.used_bytes)


def total_bytes() -> int:
    """Bytes of host memory that this process may use in all: the lowest of all limits."""
    return min(ceiling.limit_bytes for ceiling in _ceilings())


class _Ceiling(NamedTuple):
    used_bytes: int
    limit_bytes: int


def _ceilings() -> Iterator[_Ceiling]:
    """Everything that bounds this process's host memory: the machine, its containers, its own resource limits."""
    import psutil  # noqa: PLC0415  imported where it is used, so that importing the package stays quick

    machine = psutil.virtual_memory()
    yield _Ceiling(machine.total - machine.available, machine.total)
    yield from _cgroup_ceilings(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    if sys.platform != "win32":
        import resource  # noqa: PLC0415  not there on Windows

        own = psutil.Process().memory_info()
        for kind, used_bytes in ((resource.RLIMIT_AS, own.vms), (resource.RLIMIT_DATA, getattr(own, "data", own.rss))):
            limit_bytes = resource.getrlimit(kind)[0]
            if limit_bytes != resource.RLIM_INFINITY:
                yield _Ceiling(min(used_bytes, limit_bytes), limit_bytes)


def _cgroup_ceilings(membership: Path, mount: Path) -> Iterator[_Ceiling]:
    """The limits of the process's control group and of all above it, for both versions of control groups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, current, reclaimable = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, current = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit_bytes = _number(folder / limit)
            if limit_bytes is not None:
                used_bytes = (_number(folder / current) or 0) - _statistic(folder / "memory.stat", reclaimable)
                yield _Ceiling(min(max(0, used_bytes), limit_bytes), limit_bytes)
            if folder == root:
                break


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or the word "max"
        return None


def _statistic(file: Path, name: str) -> int:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
