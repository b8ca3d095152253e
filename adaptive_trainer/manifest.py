"""A folder of files that can prove that it is whole: written durably, with the size and checksum of each file.

Nothing in such a folder is trusted when it is read. Links are not followed, so that a folder from elsewhere cannot show
at other files of this machine, and the files that count are those that the reader names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

#: Of the folder's layout, and of what its files are made of.
VERSION = 1
MANIFEST_NAME = "manifest.json"
_MAX_MANIFEST_BYTES = 2**16
_PIECE_BYTES = 2**20


class Flaw(Exception):  # noqa: N818  it is no error, but what is wrong with a folder
    """Why a folder cannot be used; its cause is what the operating system said, if that was it."""


def fill(folder: Path, step: int, contents: Mapping[str, Iterable[bytes | memoryview]]) -> int:
    """Write files and their manifest into an empty folder and force all of it to the disk. Gives the size in bytes.

    Raises:
        OSError: What the operating system says.
    """
    files = {name: _write(folder / name, pieces) for name, pieces in contents.items()}
    text = json.dumps({"version": VERSION, "step": step, "files": files}, separators=(",", ":")).encode()
    written = _write(folder / MANIFEST_NAME, [text])
    sync_folder(folder)
    return int(sum(file["size"] for file in [*files.values(), written]))


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(file, rest) :]
        os.fsync(file)
        if hasattr(os, "posix_fadvise"):  # then reading back asks the disk, and not the memory in front of it
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return {"size": size, "sha256": digest.hexdigest()}


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check(folder: Path, step: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the manifest says of each file, after a look at their sizes.

    Raises:
        Flaw: It is of another step or version or is damaged, or a file is missing or has another size.
    """
    if not stat.S_ISDIR(_stat(folder).st_mode):
        raise Flaw("it is not a folder, but a link or a file")
    manifest = _read_manifest(folder / MANIFEST_NAME)
    version, files = manifest.get("version"), manifest.get("files")
    if type(version) is int and version > VERSION:
        raise Flaw(f"written by a newer version (format {version}, this one reads {VERSION})")
    if type(version) is not int or version != VERSION or manifest.get("step") != step or not isinstance(files, dict):
        raise Flaw(f"{MANIFEST_NAME} is damaged or of another folder")
    for name in names:
        if not isinstance(files.get(name), dict):
            raise Flaw(f"{MANIFEST_NAME} is damaged (it says nothing of {name})")
        size = files[name].get("size")
        if (found := _stat(folder / name).st_size) != size:
            raise Flaw(f"{name} has {found} bytes instead of {size}")
    return files


def _read_manifest(path: Path) -> dict[str, Any]:
    if (size := _stat(path).st_size) > _MAX_MANIFEST_BYTES:
        raise Flaw(f"{path.name} has {size} bytes, more than any that is written")
    try:
        manifest = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise Flaw(f"{path.name} is damaged ({type(error).__name__})") from None
    if not isinstance(manifest, dict):
        raise Flaw(f"{path.name} is damaged (it holds a {type(manifest).__name__})")
    return manifest


def verify(folder: Path, step: int, names: Sequence[str]) -> None:
    """Read all of the named files and compare their checksums.

    Raises:
        Flaw: As `check`, or a file holds something else than was written.
    """
    files = check(folder, step, names)
    for name in names:
        digest = hashlib.sha256()
        for piece in _pieces(folder / name):
            digest.update(piece)
        if digest.hexdigest() != files[name].get("sha256"):
            raise Flaw(f"{name} is damaged: its checksum is not that of what was written")


def read(path: Path) -> bytes:
    """All of a file.

    Raises:
        Flaw: It cannot be read, or is a link or no file.
    """
    return b"".join(_pieces(path))


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        # A pipe that somebody has put there is not waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Flaw(f"{path.name} is not a file")
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except OSError as error:
        _refuse(path, error)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError as error:
        _refuse(path, error)


def _refuse(path: Path, error: OSError) -> NoReturn:
    said = "is a link, which is not followed" if error.errno == errno.ELOOP else f"cannot be read ({error.strerror})"
    raise Flaw(f"{path.name} {said}") from error
