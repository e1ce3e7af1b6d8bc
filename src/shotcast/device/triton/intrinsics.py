"""Machine primitives for kernels, in two forms with one meaning.

Compiled, they are single instructions. Under Triton's interpreter, which has neither inline assembly nor a clock, they
are plain Python, so algorithms need not branch on where they run.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

INTERPRETED = bool(triton.knobs.runtime.interpret)
ROWS_FIRST = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 7))
"""True if the last, not the first, of a tile's outer dimensions goes to the threads of a warp. Triton's choice between
dimensions of equal contiguity (in the coalescing pass) changed with 3.7."""


def kernel(fn: Callable[..., None] | None = None, *, shape: type | None = None) -> Any:
    """Make a Triton kernel whose compiled form depends only on its constexpr arguments, never on a rank's addresses.

    ``shape`` is the frozen dataclass of its argument ``SHAPE: tl.constexpr``. A decorator without parentheses has none.
    """
    if fn is None:
        return functools.partial(kernel, shape=shape)
    annotations = inspect.signature(fn).parameters.values()
    made = triton.jit(do_not_specialize=[p.name for p in annotations if "constexpr" not in str(p.annotation)])(fn)
    made.shape = shape
    if not INTERPRETED:
        made._call_hook = functools.partial(_call_hook, made._call_hook)
    return made


def _call_hook(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a compilation hook of Triton, such as vLLM's. Triton writes all constants as JSON, which has no shapes."""
    return call(*({k: _written(v) for k, v in one.items()} if type(one) is dict else one for one in arguments))


def _written(value: Any) -> Any:
    return repr(value) if dataclasses.is_dataclass(value) else value


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether kernels may be scheduled before the previous one has ended (programmatic dependent launch)."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def has_float8_conversions(device: torch.device) -> bool:
    """Return whether the GPU has FP8 conversion instructions."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def num_sms(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for the interpreter, whose programs run one after the other."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory_per_sm(device: torch.device) -> int:
    """Return the bytes of shared memory of an SM; the interpreter has no limit, and counts as 256 KiB."""
    if INTERPRETED:
        return 1 << 18
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the GPU has compute capability 9 (some launches were measured there); true for the interpreter."""
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] == 9


def launch_options(device: torch.device, warps: int) -> dict[str, Any]:
    """Return the launch options of a kernel that calls ``await_prior_kernel`` in every program."""
    return {"num_warps": warps, "launch_pdl": supports_pdl(device)}


if INTERPRETED:

    def now_ns() -> int:
        """Return the time of a monotonic clock, in nanoseconds."""
        return time.monotonic_ns()

    def yield_core() -> None:
        """Yield the core to the rank that this one waits for."""
        os.sched_yield()

    def await_prior_kernel(PDL: Any) -> None:
        """Wait until the previous kernel of the stream is complete and its stores are visible."""

    def release_next_kernel(PDL: Any) -> None:
        """Allow the next kernel of the stream to be scheduled (it still waits for this one to end)."""

    def store_release(pointers: Any, values: Any, mask: Any) -> None:
        """Store with release semantics: every rank sees the program's earlier stores first."""
        tl.store(pointers, values, mask=mask)

    def load_acquire(pointers: Any, mask: Any) -> Any:
        """Load 64-bit words (an acquire): a thread then sees what preceded the store-release that it has read."""
        return tl.load(pointers, mask=mask, other=0, volatile=True)

    def load_pair(pointer: Any) -> Any:
        """Load two consecutive 64-bit words, anew each time and by a single load."""
        return tl.load(pointer, volatile=True), tl.load(pointer + 1, volatile=True)

    def fence_acquire() -> None:
        """Let this thread's later loads, through any address, see what preceded the stores that it has read."""

    def sync_warp() -> None:
        """Synchronize the threads of a warp, so that each sees what the others see."""

    def opaque(value: Any) -> Any:
        """Hide a scalar's value from the compiler, so that what follows from it is not hoisted out of a loop."""
        return value

    def load_words_of_quad(pointer: Any, mask: Any, like: Any, COUNT: Any) -> Any:
        """Load COUNT consecutive words from each pointer, as that many tiles, anew each time and by a single load.

        (A plain load of few words may be compiled into several loads; the kernel would then test one and use another.)
        ``like`` is a tile of the same shape that provides the layout; its values are not used.
        """
        return tuple(tl.load(pointer + i, mask=mask, other=0, volatile=True) for i in range(COUNT))

    def store_words_of_quad(pointer: Any, words: Any, mask: Any, COUNT: Any) -> None:
        """Store COUNT consecutive words at each pointer, one from each tile, by a single store."""
        for i in range(COUNT):
            tl.store(pointer + i, words[i], mask=mask)

    def dot(left: Any, right: Any) -> Any:
        """Multiply two matrix tiles of the same dtype in float32; each product is exact or rounded to float32."""
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")

    def add_dot(sums: Any, left: Any, right: Any) -> Any:
        """Return ``sums`` plus :func:`dot`; the tiles may also be float8."""
        return sums + dot(left, right)

    def round_to(value: Any, DTYPE: Any) -> Any:
        """Convert float32 to the bits of a 16-bit float in an int32, rounding to nearest even; NaN stays NaN."""
        if DTYPE == tl.bfloat16:
            bits = value.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(value != value, 0x7FFF, rounded.to(tl.int32))
        return value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF

    def round_pair(low: Any, high: Any, DTYPE: Any) -> Any:
        """Convert two float32 values to one word of two 16-bit floats, each as :func:`round_to` does."""
        return round_to(low, DTYPE) | (round_to(high, DTYPE) << 16)

else:

    @triton.jit
    def now_ns():
        return globaltimer()

    @triton.jit
    def yield_core():
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
    def load_acquire(pointers, mask):
        return tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.b32 p, $2, 0;
            mov.b64 $0, 0;
            @p ld.acquire.sys.global.b64 $0, [$1];
            }""",
            "=&l,l,r",
            [pointers.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def load_pair(pointer):
        return tl.inline_asm_elementwise(
            "ld.volatile.global.v2.b64 {$0, $1}, [$2];",
            "=l,=l,l",
            [pointer.to(tl.int64)],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def fence_acquire():
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
    def sync_warp():
        tl.inline_asm_elementwise(
            """
            bar.warp.sync 0xffffffff;
            mov.b32 $0, 0;
            """,
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def opaque(value):
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)

    @triton.jit
    def load_words_of_quad(pointer, mask, like, COUNT: tl.constexpr):
        if COUNT == 2:
            words = tl.inline_asm_elementwise(
                """{
                .reg .pred p;
                setp.ne.b32 p, $3, 0;
                mov.b32 $0, 0; mov.b32 $1, 0;
                @p ld.volatile.global.v2.b32 {$0, $1}, [$2];
                }""",
                "=&r,=&r,l,r,r",
                [pointer.to(tl.int64), mask.to(tl.int32), like],
                dtype=(tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )
        else:
            tl.static_assert(COUNT == 4)
            words = tl.inline_asm_elementwise(
                """{
                .reg .pred p;
                setp.ne.b32 p, $5, 0;
                mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
                @p ld.volatile.global.v4.b32 {$0, $1, $2, $3}, [$4];
                }""",
                "=&r,=&r,=&r,=&r,l,r,r",
                [pointer.to(tl.int64), mask.to(tl.int32), like],
                dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
                is_pure=False,
                pack=1,
            )
        return words

    @triton.jit
    def store_words_of_quad(pointer, words, mask, COUNT: tl.constexpr):
        if COUNT == 2:
            tl.inline_asm_elementwise(
                """{
                .reg .pred p;
                setp.ne.b32 p, $4, 0;
                @p st.global.v2.b32 [$1], {$2, $3};
                mov.b32 $0, 0;
                }""",
                "=r,l,r,r,r",
                [pointer.to(tl.int64), words[0], words[1], mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.static_assert(COUNT == 4)
            tl.inline_asm_elementwise(
                """{
                .reg .pred p;
                setp.ne.b32 p, $6, 0;
                @p st.global.v4.b32 [$1], {$2, $3, $4, $5};
                mov.b32 $0, 0;
                }""",
                "=r,l,r,r,r,r,r",
                [pointer.to(tl.int64), words[0], words[1], words[2], words[3], mask.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def dot(left, right):
        return tl.dot(left, right, input_precision="ieee")

    @triton.jit
    def add_dot(sums, left, right):
        # Compute capability 9 sums float8 products in few bits: here only within a step, as steps are added in float32.
        if left.dtype == tl.float8e4nv:
            sums = tl.dot(left, right, sums, max_num_imprecise_acc=left.shape[1])
        else:
            sums = tl.dot(left, right, sums, input_precision="ieee")
        return sums

    @triton.jit
    def round_to(value, DTYPE: tl.constexpr):
        return value.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF

    @triton.jit
    def round_pair(low, high, DTYPE: tl.constexpr):
        if DTYPE == tl.bfloat16:
            word = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            word = tl.inline_asm_elementwise(
                "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
            )
        return word
