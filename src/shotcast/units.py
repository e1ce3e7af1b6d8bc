"""Formatting and parsing of byte counts and other numbers."""

from __future__ import annotations

import re

from shotcast.errors import ConfigError

_FACTOR = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str | int) -> int:
    """Parse ``"8"``, ``"64K"``, ``"1.5MB"`` or ``"16MiB"`` to bytes (binary multiples, as in nccl-tests)."""
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"a size cannot be negative: {text}")
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?\s*", text.upper())
    if not match:
        raise ConfigError(f"not a size: {text!r}; write bytes, or a number with K, M or G, such as 64K")
    nbytes = float(match[1]) * _FACTOR[match[2]]
    if nbytes != int(nbytes):
        raise ConfigError(f"not a whole number of bytes: {text!r}")
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """Format ``65536`` as ``"64 KiB"``. The text is exact: a size that is not a whole multiple keeps a smaller unit."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def about_size(nbytes: int) -> str:
    """Format a size with three digits for reading: ``10011474841`` as ``"9.32 GiB"``, ``65536`` as ``"64 KiB"``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            value = nbytes / factor
            digits = 2 if value < 10 else 1 if value < 100 else 0
            text = f"{value:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}"
    return f"{nbytes} B"


def about(number: float) -> str:
    """Format a number with four digits for reading: ``54384.2`` as ``"54,380"``, ``2.01449`` as ``"2.014"``."""
    return f"{float(f'{number:.4g}'):,.10g}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: ``"1 core"``, ``"2 cores"``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def align_up(value: int, multiple: int) -> int:
    """Round up to the next multiple of ``multiple``."""
    return -(-value // multiple) * multiple
