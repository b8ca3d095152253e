"""What this machine offers for training, and what a rung that is not possible here lacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from adaptive_trainer import host, memory
from adaptive_trainer.events import OutOfMemory
from adaptive_trainer.phases import Phase
from adaptive_trainer.plan import Plan, Precision
from adaptive_trainer.rungs import RUNGS, Rung, Situation, Skip, Traits
from adaptive_trainer.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

_PURPOSES = {
    "deepspeed": "for the ZeRO and offload rungs",
    "nvidia-ml-py": "to tell what other processes hold on an NVIDIA GPU",
    "transformers": "to train its models",
    "scikit-learn": "for the images of recipes/digits.yaml",
}
_UNINSTALLED = "run from its source: pip install -e . says which libraries it needs"
_COMPILERS = {"g++": "to compile kernels", "ninja": "to compile kernels"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Attributes:
        section: What it belongs to.
        name: What was looked at.
        words: What was found.
    """

    section: str
    name: str
    words: str


def examine() -> list[Finding]:
    """Everything that was found, section by section. Nothing is installed or changed."""
    return [*_machine(), *_libraries(), *_rungs()]


def _machine() -> Iterator[Finding]:
    device = memory.default_device()
    reading = memory.read(device)
    yield Finding("machine", "processors", str(os.cpu_count() or "unknown"))
    used_bytes, total_bytes = host.used_and_total_bytes()
    held = f"{format_bytes(total_bytes - used_bytes)} free of {format_bytes(total_bytes)} for this process"
    yield Finding("machine", "host memory", held)
    yield Finding("machine", "device", str(device))
    if device.type != "cpu":
        yield Finding(
            "machine",
            "device memory",
            f"{format_bytes(reading.free_bytes)} free of {format_bytes(reading.total_bytes)}",
        )
    else:
        yield Finding("machine", "accelerator", "none: training runs on the CPU; memory_limit works there too")
    precision = "yes" if memory.bf16_supported(device) else "no: amp uses fp16 with a gradient scaler"
    yield Finding("machine", "bf16", precision)
    for name, purpose in _COMPILERS.items():
        yield Finding("machine", name, shutil.which(name) or f"not there ({purpose})")


def _libraries() -> Iterator[Finding]:
    yield Finding("libraries", "python", platform.python_version())
    yield Finding("libraries", "adaptive-trainer", _version("adaptive-trainer") or _UNINSTALLED)
    for requirement in _requirements():
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"""extra == ["']([\w-]+)""", requirement)
        assert name is not None, requirement  # noqa: S101  metadata that pip has accepted
        yield Finding("libraries", name[0], _version(name[0]) or _missing(name[0], extra[1] if extra else None))


def _requirements() -> list[str]:
    """What the trainer's own package asks for, as pip knows it: what is needed first, then the extras."""
    try:
        return metadata.requires("adaptive-trainer") or []
    except metadata.PackageNotFoundError:
        return []


def _missing(name: str, extra: str | None) -> str:
    if extra is None:
        return f'not installed (needed: pip install "{name}")'
    purpose = f"{_PURPOSES[name]}: " if name in _PURPOSES else ""
    return f'not installed ({purpose}pip install "adaptive-trainer[{extra}]")'


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _rungs() -> Iterator[Finding]:
    half: Precision = "bf16" if memory.bf16_supported(memory.default_device()) else "fp16"
    for rung in RUNGS:
        yield Finding("rungs", rung.name, _possibility(rung, half))


def _possibility(rung: Rung, half: Precision) -> str:
    """What the rung itself says, asked about a step of eight samples in several processes and in one."""
    together, alone = (_ask(rung, Traits(amp_precision=half, num_processes=count)) for count in (2, 1))
    if isinstance(together, Skip):
        return f"no: {together.reason}"
    if isinstance(alone, Skip):
        return f"in several processes only (accelerate launch): {alone.reason}"
    return f"yes: {rung.gives}"


def _ask(rung: Rung, traits: Traits) -> Plan | Skip:
    plan = Plan()
    event = OutOfMemory(step=0, phase=Phase.FORWARD, message="", plan=plan)
    return rung.step(plan, Situation(plan=plan, event=event, traits=traits, num_rows=8))
