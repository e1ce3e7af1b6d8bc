"""Quantized types of GGUF files, against decoders that follow the definition of ggml value by value, in float64."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
from test_gguf_file import NAMES, write

from shotcast.models.gguf_file import TYPES, GgufFile

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
Decoder = Callable[[bytes], Iterator[float]]


def halves(block: bytes, first: int, count: int = 1) -> tuple[float, ...]:
    return struct.unpack_from(f"<{count}e", block, first)


def q4_0(block: bytes) -> Iterator[float]:
    (d,) = halves(block, 0)
    for shift in (0, 4):
        yield from (d * ((byte >> shift & 15) - 8) for byte in block[2:])


def q4_1(block: bytes) -> Iterator[float]:
    d, least = halves(block, 0, 2)
    for shift in (0, 4):
        yield from (d * (byte >> shift & 15) + least for byte in block[4:])


def fives(high: bytes, low: bytes) -> Iterator[int]:
    """Yield codes of 5 bits: the fifth ones are the bits of a word, in their order."""
    (bits,) = struct.unpack("<I", high)
    for part in range(2):
        for i, byte in enumerate(low):
            yield (byte >> 4 * part & 15) | (bits >> (16 * part + i) & 1) << 4


def q5_0(block: bytes) -> Iterator[float]:
    (d,) = halves(block, 0)
    yield from (d * (code - 16) for code in fives(block[2:6], block[6:]))


def q5_1(block: bytes) -> Iterator[float]:
    d, least = halves(block, 0, 2)
    yield from (d * code + least for code in fives(block[4:8], block[8:]))


def q8_0(block: bytes) -> Iterator[float]:
    (d,) = halves(block, 0)
    yield from (d * code for code in struct.unpack("<32b", block[2:]))


def q2_k(block: bytes) -> Iterator[float]:
    scales, codes = block[:16], block[16:80]
    d, least = halves(block, 80, 2)
    for i in range(256):
        byte = codes[i // 128 * 32 + i % 32]
        scale = scales[i // 16]
        yield d * (scale & 15) * (byte >> (i % 128 // 32 * 2) & 3) - least * (scale >> 4)


def q3_k(block: bytes) -> Iterator[float]:
    high, codes, packed = block[:32], block[32:96], block[96:108]
    (d,) = halves(block, 108)
    for i in range(256):
        group = i // 16
        low = packed[group % 8] >> (4 * (group // 8)) & 15
        scale = low | (packed[8 + group % 4] >> (2 * (group // 4)) & 3) << 4
        code = codes[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
        yield d * (scale - 32) * (code - (0 if high[i % 32] >> (i // 32) & 1 else 4))


def sixes(packed: bytes, group: int) -> tuple[int, int]:
    """Return the 6-bit scale and least value of a group of 32."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    return (
        packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
        packed[group + 4] >> 4 | packed[group] >> 6 << 4,
    )


def q4_k(block: bytes) -> Iterator[float]:
    d, least = halves(block, 0, 2)
    for i in range(256):
        scale, offset = sixes(block[4:16], i // 32)
        code = block[16 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        yield d * scale * code - least * offset


def q5_k(block: bytes) -> Iterator[float]:
    d, least = halves(block, 0, 2)
    for i in range(256):
        scale, offset = sixes(block[4:16], i // 32)
        code = block[48 + i // 64 * 32 + i % 32] >> (4 * (i // 32 % 2)) & 15
        code |= (block[16 + i % 32] >> (i // 32) & 1) << 4
        yield d * scale * code - least * offset


def q6_k(block: bytes) -> Iterator[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (d,) = halves(block, 208)
    for i in range(256):
        half, place = divmod(i, 128)
        code = low[64 * half + place % 64] >> (4 * (place // 64)) & 15
        code |= (high[32 * half + place % 32] >> (2 * (place // 32)) & 3) << 4
        yield d * scales[i // 16] * (code - 32)


def iq4_nl(block: bytes) -> Iterator[float]:
    (d,) = halves(block, 0)
    for shift in (0, 4):
        yield from (d * IQ4[byte >> shift & 15] for byte in block[2:])


def iq4_xs(block: bytes) -> Iterator[float]:
    (d,), (high,) = halves(block, 0), struct.unpack_from("<H", block, 2)
    for i in range(256):
        group, place = divmod(i, 32)
        scale = block[4 + group // 2] >> (4 * (group % 2)) & 15 | (high >> (2 * group) & 3) << 4
        yield d * (scale - 32) * IQ4[block[8 + 16 * group + place % 16] >> (4 * (place // 16)) & 15]


DECODERS: dict[str, Decoder] = {
    function.__name__.upper(): function
    for function in (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs)
}


def test_every_quantized_type_has_a_decoder() -> None:
    assert set(DECODERS) == set(TYPES) - {"F32", "F16", "BF16"}


@pytest.mark.parametrize("kind", DECODERS)
def test_values_are_those_of_the_definition(tmp_path: Path, kind: str) -> None:
    written = write(tmp_path / "model.gguf", kind)
    checkpoint = GgufFile(tmp_path / "model.gguf")
    block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    for name in ("blk.0.ffn_down.weight", "token_embd.weight"):
        rows = written[name][0][:8]
        exact = [
            [value for first in range(0, len(row), nbytes) for value in DECODERS[kind](row[first : first + nbytes])]
            for row in (row.tobytes() for row in rows)
        ]
        columns = slice(block // 2, len(exact[0]) - 1)  # which divides blocks
        found = checkpoint.read(NAMES[name], slice(0, 8), columns).double()
        wanted = torch.tensor(exact, dtype=torch.float64)[:, columns]
        assert wanted.std() > 0.05
        # differences of two float32 products
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-6 * wanted.abs().max().item())
    checkpoint.close()
