"""What a kernel needs of the machine under it, in two forms with one meaning.

Compiled, these are single instructions. Under Triton's interpreter, which has neither inline assembly nor a clock,
they are plain Python, so that algorithms do not branch on where they run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

INTERPRETED = bool(triton.knobs.runtime.interpret)

_NOT_SPECIALIZED = [
    "x",
    "out",
    "data",
    "own",
    "peers",
    "rank",
    "header",
    "root",
    "peer",
    "part",
    "nbytes",
    "slice_nbytes",
    "s0",
    "s1",
    "s2",
    "s3",
    "s4",
    "s5",
    "s6",
    "s7",
    "s8",
    "mail_at",
    "flags_at",
    "cells_at",
    "cells_quads",
    "slots_at",
    "slots_quads",
    "residual",
    "weight",
    "new_residual",
    "normed",
    "quantized",
    "scale",
    "eps",
    "row_programs",
    "cells",
    "more_cells",
]


def kernel(fn: Callable[..., None]) -> Any:
    """A Triton kernel whose compiled form depends on its constexpr arguments only, never on a rank's addresses."""
    return triton.jit(do_not_specialize=_NOT_SPECIALIZED)(fn)


if INTERPRETED:

    def now_ns() -> int:
        """Nanoseconds of a clock that only moves forward."""
        return time.monotonic_ns()

    def relax() -> None:
        """Let the rank that is waited for run."""
        os.sched_yield()

    def await_prior_kernel(PDL: Any) -> None:
        """Return once the preceding kernel of the stream is complete and its stores are visible."""

    def release_next_kernel(PDL: Any) -> None:
        """Allow the next kernel of the stream to be scheduled (it still awaits this one's end)."""

    def store_release(pointers: Any, values: Any, mask: Any) -> None:
        """Store after all that the program stored, in the order in which any rank sees it."""
        tl.store(pointers, values, mask=mask)

    def acquire() -> None:
        """Let this thread's loads from here on, by any address, see what came before the stores it has read."""

    def round_to(value: Any, DTYPE: Any) -> Any:
        """float32 to bits of a 16-bit float in an int32, to nearest even; NaN stays NaN."""
        if DTYPE == tl.bfloat16:
            bits = value.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(value != value, 0x7FFF, rounded.to(tl.int32))
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF

else:

    @triton.jit
    def now_ns():
        return globaltimer()

    @triton.jit
    def relax():
        pass

    @triton.jit
    def await_prior_kernel(PDL: tl.constexpr):
        if PDL:
            gdc_wait()

    @triton.jit
    def release_next_kernel(PDL: tl.constexpr):
        if PDL:
            gdc_launch_dependents()

    @triton.jit
    def store_release(pointers, values, mask):
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $3, 0;
            @p st.release.sys.global.b64 [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,l,r",
            [pointers.to(tl.int64), values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def acquire():
        tl.inline_asm_elementwise(
            """
            fence.acq_rel.sys;
            fence.proxy.alias;
            mov.b32 $0, 0;
            """,
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def round_to(value, DTYPE: tl.constexpr):
        return value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
