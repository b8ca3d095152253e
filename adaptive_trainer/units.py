"""Bytes and durations as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

_FACTORS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50, "EIB": 2**60,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGTPE]?I?B)?\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """The number of bytes that a text such as ``"40GiB"``, ``"1.5 GB"`` or ``"1048576"`` means.

    Units with an *i* are powers of 1024, those without it are powers of 1000.

    Raises:
        ValueError: The text is no such quantity; the message says which forms are.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or (match["unit"] or "B").upper() not in _FACTORS:
        raise ValueError(f"{text!r} is not an amount of memory; write for example '20GiB', '512MiB' or 1073741824")
    return int(Decimal(match["number"]) * _FACTORS[(match["unit"] or "B").upper()])


def format_bytes(num_bytes: int | None) -> str:
    """``42467328`` as ``"40.5 MiB"``; ``"unknown"`` for None."""
    if num_bytes is None:
        return "unknown"
    amount, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """``0.0123`` as ``"12 ms"``, ``75`` as ``"1 min 15 s"``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
