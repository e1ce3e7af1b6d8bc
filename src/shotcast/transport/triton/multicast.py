"""Multicast memory: one address that stands for the same offset in the regions of all ranks.

The switch repeats a store to such an address for all ranks, and answers a load from it with the sum of all ranks'
words. Only the operations here may touch it. They move quads, 16 aligned bytes each, as four separate words, so that
the content of one access does not depend on how the compiler distributes a tile over threads.

Compiled, these are ``multimem`` instructions of sm_90 and later, inspected, not run on hardware. Triton's interpreter
emulates them on addresses given to ``emulate``; any other address is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.device.triton.words import sum_words

if INTERPRETED:

    @dataclass(slots=True)
    class Emulated:
        """A range of emulated multicast addresses, with counts of the quads stored and summed through it.

        Addresses from ``start`` to ``start + nbytes`` stand for the memory at each of ``bases``.
        """

        start: int
        nbytes: int
        bases: tuple[int, ...]
        stored_quads: int = 0
        summed_quads: int = 0

    _emulated: list[Emulated] = []

    def emulate(start: int, nbytes: int, bases: tuple[int, ...]) -> Emulated:
        """Make ``start`` the multicast address of the memory at ``bases`` in this process, one base for each rank.

        No memory may lie at ``start``, so that only the operations here can use the address. Reusing a range replaces
        its previous meaning.
        """
        _emulated[:] = [old for old in _emulated if start + nbytes <= old.start or old.start + old.nbytes <= start]
        _emulated.append(Emulated(start, nbytes, bases))
        return _emulated[-1]

    def _find(address: Any, quads: Any, mask: Any) -> Emulated:
        first = int(address.handle.data.item())
        reached = quads.handle.data[mask.handle.data.astype(bool)]
        end = first + 16 * (int(reached.max()) + 1 if reached.size else 0)
        for area in _emulated:
            if area.start <= first and end <= area.start + area.nbytes:
                return area
        raise RuntimeError(f"no multicast memory is emulated at {first:#x} to {end:#x}")

    def _pointers(address: Any, area: Emulated, base: int, quads: Any) -> Any:
        return (address + (base - area.start)).to(tl.pointer_type(tl.int32)) + quads * 4

    def multicast_quads(address: Any, quads: Any, words: Any, mask: Any) -> None:
        """Store four words at each of ``quads`` quads past ``address``, on every rank."""
        area = _find(address, quads, mask)
        area.stored_quads += int(mask.handle.data.sum())
        for base in area.bases:
            pointers = _pointers(address, area, base, quads)
            for place, word in enumerate(words):
                tl.store(pointers + place, word, mask=mask)

    def multicast_sum(address: Any, quads: Any, mask: Any, DTYPE: Any) -> Any:
        """Load four words at each of ``quads`` quads past ``address``: sums over all ranks, added in rank order."""
        area = _find(address, quads, mask)
        area.summed_quads += int(mask.handle.data.sum())
        words = ()
        for place in range(4):
            parts = tuple(
                tl.load(_pointers(address, area, base, quads) + place, mask=mask, other=0) for base in area.bases
            )
            words += (sum_words(parts, len(parts), DTYPE),)
        return words

else:

    @triton.jit
    def multicast_quads(address, quads, words, mask):
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $6, 0;
            @p multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r,r,r",
            [address + quads.to(tl.int64) * 16, words[0], words[1], words[2], words[3], mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.constexpr_function
    def _sum_text(dtype):
        """Return the assembly of the load. 16-bit floats are added in float32 and rounded once."""
        kind = {tl.bfloat16: "add.acc::f32.v4.bf16x2", tl.float16: "add.acc::f32.v4.f16x2"}.get(dtype, "add.v4.f32")
        return f"""{{
            .reg .pred p;
            setp.ne.b32 p, $5, 0;
            mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
            @p multimem.ld_reduce.relaxed.sys.global.{kind} {{$0, $1, $2, $3}}, [$4];
            }}"""

    @triton.jit
    def multicast_sum(address, quads, mask, DTYPE: tl.constexpr):
        return tl.inline_asm_elementwise(
            _sum_text(DTYPE),
            "=&r,=&r,=&r,=&r,l,r",
            [address + quads.to(tl.int64) * 16, mask.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def quads_of(words, QUADS: tl.constexpr):
    """Split a tile into four tiles of QUADS: the first words of its quads, the second, the third and the fourth."""
    even, odd = tl.split(tl.reshape(words, [QUADS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def multicast_words(address, offs, words, mask):
    """Store words ``offs`` past ``address``, on every rank.

    ``offs`` ascend by one from a multiple of 4, and ``mask`` selects whole quads.
    """
    QUADS: tl.constexpr = words.shape[0] // 4
    starts, _s1, _s2, _s3 = quads_of(offs, QUADS)
    inside, _i1, _i2, _i3 = quads_of(mask.to(tl.int32), QUADS)
    multicast_quads(address, starts // 4, quads_of(words, QUADS), inside != 0)
