"""The header of a GGUF file: metadata and tensor locations.

The gguf package has a reader too, but it creates an object for every vocabulary entry, which takes seconds in every
process that opens the file. This reader skips lists of strings unless they are requested.

Format: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.units import about_size, align_up

VERSIONS = (2, 3)
"""Accepted format versions. Version 1 had 32-bit counts."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
"""Metadata types: the struct codes of numbers, and two others."""


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor's location in the file."""

    shape: tuple[int, ...]  # the shape of its values, rows first
    type_number: int  # ggml's number of the type of its elements
    offset: int  # the offset in the file, in bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by name, usually without lists of strings (vocabularies), and tensors by name, in file order."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorLocation]

    @classmethod
    def read(cls, path: Path, with_strings: bool = False) -> GgufHeader:
        """Read a file's header, with or without its lists of strings. Raises ConfigError if the file cannot be read, is
        truncated or malformed. Raises UnsupportedError for another version or byte order.
        """
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _read(path, _Cursor(content, with_strings))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        # struct.error, OverflowError: the file ends early. ValueError: invalid text, or an empty file (not mappable)
        except (struct.error, OverflowError, ValueError) as error:
            raise ConfigError(
                f"{path} ({about_size(path.stat().st_size)}) is truncated or no GGUF file: {error}"
            ) from error


class _Cursor:
    """A file offset that advances as values are read."""

    def __init__(self, content: mmap.mmap, with_strings: bool):
        self._content, self._with_strings = content, with_strings
        self.offset = 0

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{count}{code}", self._content, self.offset)
        self.offset += struct.calcsize(f"<{count}{code}")
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        length = self.number("Q")
        return str(self.numbers("s", length)[0], "utf-8")

    def value(self) -> Any:
        """Read a type and a value; None for a skipped list of strings."""
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_code(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind != _STRING:
            return list(self.numbers(_code(kind), count))
        return self._strings(count)

    def _strings(self, count: int) -> list[str] | None:
        content, offset, size, unpack = self._content, self.offset, len(self._content), struct.Struct("<Q").unpack_from
        texts: list[str] = []
        for _ in range(count):  # a hundred thousand in a vocabulary and its merges
            start = offset + 8
            offset = start + unpack(content, offset)[0]
            if offset > size:
                raise ValueError("it ends within a string")
            if self._with_strings:
                texts.append(str(content[start:offset], "utf-8"))
        self.offset = offset
        return texts if self._with_strings else None


def _code(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"metadata is of type {kind}, which does not exist")
    return _NUMBERS[kind]


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    if (magic := cursor.numbers("s", 4)[0]) != b"GGUF":
        raise ValueError(f"it begins with {magic!r}")
    if (version := cursor.number("I")) not in VERSIONS:
        if version & 0xFFFF == 0:
            raise UnsupportedError(f"{path} has the other byte order than this machine")
        accepted = " and ".join(map(str, VERSIONS))
        raise UnsupportedError(f"{path} is of version {version} of GGUF; accepted: {accepted}")
    tensor_count, metadata_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        name = cursor.text()
        if name in metadata:
            raise ValueError(f"it says {name} twice")
        metadata[name] = cursor.value()
    locations: dict[str, TensorLocation] = {}
    for _ in range(tensor_count):
        name = cursor.text()
        if name in locations:
            raise ValueError(f"it has tensor {name!r} twice")
        shape = cursor.numbers("Q", cursor.number("I"))[::-1]
        locations[name] = TensorLocation(shape, cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, which is not a power of two")
    start = align_up(cursor.offset, alignment)
    return GgufHeader(
        {name: value for name, value in metadata.items() if value is not None},
        {
            name: TensorLocation(found.shape, found.type_number, start + found.offset)
            for name, found in locations.items()
        },
    )
