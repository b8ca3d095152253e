"""Checkpoints on disk: written aside, read back, renamed; and the newest one that is whole.

A process can end at any instruction and a disk can fill up at any byte. So whatever carries a checkpoint's public name
is complete: it was written under a hidden name, forced to the disk, read from there again and compared before it was
renamed, and it gets a hidden name again before the first of its files is removed. What carries a hidden name with
``part`` is rubbish; what carries one with ``old`` was moved out of the way for a new one of the same step, and is put
back if that one never came.

Nothing in a checkpoint is trusted when it is read: the manifest has a checksum of each file, links are not followed,
and what does not read as it should is passed over with a warning.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptive_trainer import manifest, packing, storages, tensor_files
from adaptive_trainer.errors import CheckpointError
from adaptive_trainer.tensor_files import TensorFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime
    from pathlib import Path

    from torch import Tensor

WEIGHTS_NAME, STRUCTURE_NAME, TENSORS_NAME = "model.safetensors", "state.json", "state.safetensors"
_NAMES = (WEIGHTS_NAME, STRUCTURE_NAME, TENSORS_NAME)

_CHECKPOINT = re.compile(r"step-([0-9]{8,})")
_HIDDEN = re.compile(r"\.(step-[0-9]{8,})\.([0-9]+)\.(part|old)")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        path: Its folder.
        step: Optimizer steps completed.
        num_bytes: What its files take on the disk.
    """

    path: Path
    step: int
    num_bytes: int


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is whole.

    Attributes:
        path: Its folder.
        step: Optimizer steps completed.
        rest: What was saved beside the weights, with its tensors on the host.
    """

    path: Path
    step: int
    rest: Any
    _weights: TensorFile = field(repr=False)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by name, each read into host memory when it is asked for."""
        return self._weights


# Writing.


def write(root: Path, step: int, weights: Mapping[str, Tensor], rest: Any, *, keep: int) -> Saved:
    """Write ``root/step-<step>``, then remove older good ones until ``keep`` are left, this one among them.

    Whatever is raised, what was there before is there still, and nothing half written.

    Args:
        root: The folder of all checkpoints; made if need be.
        step: Optimizer steps completed. A checkpoint of the same step is replaced.
        weights: By the names of the user's own model. They pass through host memory in small pieces.
        rest: A nested value as `adaptive_trainer.packing.pack` takes it.
        keep: At least 1.

    Raises:
        Unpackable: The rest or the weights hold what no checkpoint can.
        OSError: The disk is full, say, or read back something else than was written.
    """
    structure, tensors = packing.pack(rest)
    for name, tensor in weights.items():
        if (oddity := storages.oddity(tensor)) is not None:
            raise packing.Unpackable(f"{name}: {oddity} cannot be kept in a checkpoint")
    contents: dict[str, Iterable[bytes | memoryview]] = {
        WEIGHTS_NAME: tensor_files.chunks(weights),
        STRUCTURE_NAME: [json.dumps(structure, allow_nan=False, separators=(",", ":")).encode()],
        TENSORS_NAME: tensor_files.chunks(tensors),
    }
    if not root.is_dir():
        root.mkdir(parents=True)
        manifest.sync_folder(root.parent)
    final = root / f"step-{step:08d}"
    part = _hidden(final, "part")
    try:
        _remove(part)
        part.mkdir()
        num_bytes = manifest.fill(part, step, contents)
        _read_back(part, step)
        _put_in_place(part, final)
    finally:
        _remove(part)  # there only if something was raised
    _thin_out(root, step, keep)
    return Saved(final, step, num_bytes)


def _read_back(part: Path, step: int) -> None:
    try:
        manifest.verify(part, step, _NAMES)
    except manifest.Flaw as flaw:
        if isinstance(flaw.__cause__, OSError):
            raise flaw.__cause__ from None
        raise OSError(errno.EIO, f"what was written reads back differently ({flaw})", str(part)) from None


def _put_in_place(part: Path, final: Path) -> None:
    aside = _hidden(final, "old")
    is_replaced = os.path.lexists(final)
    _remove(aside)
    try:
        if is_replaced:
            final.rename(aside)
        part.rename(final)
    except BaseException:
        if is_replaced and not os.path.lexists(final):
            aside.rename(final)
        raise
    manifest.sync_folder(final.parent)
    if is_replaced:
        _discard(aside, final)


def _thin_out(root: Path, step: int, keep: int) -> None:
    # Those of later steps are of a run that went on from further back since: neither counted nor removed.
    older = [path for path in checkpoints(root) if _step_of(path.name) <= step and _looks_good(path)]
    for path in older[max(keep, 1) :]:
        _discard(path, path)


def _looks_good(path: Path) -> bool:
    """Whether its files have the sizes that they should: reading all of each at every save would take too long."""
    try:
        manifest.check(path, _step_of(path.name), _NAMES)
    except manifest.Flaw:
        return False
    return True


def _discard(path: Path, final: Path) -> None:
    """Remove a checkpoint so that it is never seen without some of its files. One that stays is no failure."""
    doomed = _hidden(final, "part")
    with contextlib.suppress(OSError):
        path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _hidden(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{os.getpid()}.{kind}")


# Reading.


def checkpoints(root: Path) -> list[Path]:
    """Whatever carries the name of a checkpoint, good or not, the newest first."""
    try:
        names = [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []
    return [root / name for name in sorted(filter(_is_checkpoint, names), key=_step_of, reverse=True)]


def open_newest(root: Path, warn: Callable[[str], None]) -> Opened | None:
    """The newest checkpoint that is good; None if there is none at all.

    Args:
        root: The folder of all checkpoints.
        warn: Given one line for each that is passed over, with what is wrong with it.

    Raises:
        CheckpointError: There are some, and none is good.
    """
    flaws: list[str] = []
    for path in checkpoints(root):
        try:
            return _opened(path)
        except manifest.Flaw as flaw:
            flaws.append(f"{path.name}: {flaw}")
            warn(f"checkpoint {path} is passed over: {flaw}")
    if not flaws:
        return None
    raise CheckpointError(
        f"none of the checkpoints in {root} can be resumed from ({'; '.join(flaws)}); "
        "to start anew type resume=never, which moves them aside and deletes nothing"
    )


def _opened(path: Path) -> Opened:
    step = _step_of(path.name)
    manifest.verify(path, step, _NAMES)
    try:
        structure = json.loads(manifest.read(path / STRUCTURE_NAME))
        rest = packing.unpack(structure, TensorFile(path / TENSORS_NAME))
        return Opened(path, step, rest, TensorFile(path / WEIGHTS_NAME))
    except (ValueError, RecursionError, OSError) as error:
        said = " ".join(str(error).split())
        raise manifest.Flaw(f"its files are whole, but not what this version writes ({said})") from None


def _is_checkpoint(name: str) -> bool:
    match = _CHECKPOINT.fullmatch(name)
    return match is not None and name == f"step-{int(match[1]):08d}"


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


# What is left, and what is in the way.


def clear_unfinished(root: Path) -> None:
    """Remove what writers that are no longer alive have left half done, and put back what they had moved aside.

    What this process itself has left counts as well, so it may not be writing at the same time.
    """
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        match = _HIDDEN.fullmatch(path.name)
        if match is None or _is_alive_elsewhere(int(match[2])):
            continue
        final = root / match[1]
        if match[3] == "old" and not os.path.lexists(final):
            path.rename(final)
        else:
            _remove(path)


def _is_alive_elsewhere(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def set_aside(root: Path, now: datetime) -> Path | None:
    """Move the folder of all checkpoints out of the way, to a name beside it that tells the time; None if it is empty.

    Raises:
        OSError: It cannot be moved.
    """
    if not root.is_dir() or not any(root.iterdir()):
        return None
    stem = f"{root.name}.old-{now:%Y%m%d-%H%M%S}"
    target, number = root.with_name(stem), 1
    while os.path.lexists(target):
        number += 1
        target = root.with_name(f"{stem}-{number}")
    root.rename(target)
    manifest.sync_folder(root.parent)
    return target
