"""Functions that a rank of tests/device/test_words.py runs: words.py interpreted, compared with torch.

They have their own module, since Triton decides at import whether it interprets.
"""

# ruff: noqa: N803, RUF005 (Triton: compile-time arguments are upper case, and tuples are joined by +)
from __future__ import annotations

import ctypes
import mmap
import time

import numpy as np
import torch
import triton
import triton.language as tl

from shotcast.collectives import reference
from shotcast.device.triton.float8 import from_words, to_words
from shotcast.device.triton.words import load_words, nan_unless, pack, store_words, sum_words, unpack
from shotcast.transport.triton import layout
from shotcast.transport.triton.sync import Call, Entry, check_deadline, enter, escape_sentinel
from shotcast.wire import Fault

DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
GUARD = 0xA5


@triton.jit
def unpack_kernel(words, low, high, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    first, second = unpack(tl.load(words + offs), DTYPE)
    tl.store(low + offs, first)
    tl.store(high + offs, second)


@triton.jit
def pack_kernel(low, high, words, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(words + offs, pack(tl.load(low + offs), tl.load(high + offs), DTYPE))


@triton.jit
def sum_kernel(parts, out, COUNT: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    words = ()
    for r in tl.static_range(COUNT):
        words = words + (tl.load(parts + r * SIZE + offs),)
    tl.store(out + offs, sum_words(words, COUNT, DTYPE))


@triton.jit
def move_kernel(source, target, start, there, nbytes, UNIT: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    words = load_words(source.to(tl.int64), start, offs, nbytes, UNIT)
    store_words(target.to(tl.int64), there, offs, words, nbytes, UNIT)


@triton.jit
def load_kernel(source, out, start, nbytes, UNIT: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    tl.store(out + offs, load_words(source.to(tl.int64), start, offs, nbytes, UNIT))


@triton.jit
def to_fp8_kernel(values, words, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    parts = ()
    for i in tl.static_range(4):
        parts = parts + (tl.load(values + 4 * offs + i),)
    tl.store(words + offs, to_words(parts[0], parts[1], parts[2], parts[3], False))


@triton.jit
def from_fp8_kernel(words, values, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    parts = from_words(tl.load(words + offs), False)
    for i in tl.static_range(4):
        tl.store(values + 4 * offs + i, parts[i])


@triton.jit
def guard_kernel(words, sent, stopped, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    value = escape_sentinel(tl.load(words + offs))
    live = tl.load(words) * 0
    tl.store(sent + offs, nan_unless(live + 1, value, DTYPE))
    tl.store(stopped + offs, nan_unless(live, value, DTYPE))


@triton.jit
def look_kernel(control, table, started, live, EXTENDED_DEADLINE: tl.constexpr):
    own = control.to(tl.int64).to(tl.pointer_type(tl.int64))
    peers = table.to(tl.int64).to(tl.pointer_type(tl.int64))
    zero = tl.program_id(0) * 0
    none = tl.load(started) * 0
    call = Call(own, peers, zero, none, none, none + 5, zero, zero, zero + 1, tl.load(started))
    _, still = check_deadline(call, tl.load(started), zero + 1, False, 1, EXTENDED_DEADLINE, True)
    tl.store(live, still)


def random_words(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << 32, count, np.uint32).view(np.int32))


def floats_of(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return words.view(dtype)


def expect(got: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    """Assert that every bit is equal; all NaNs count as one value."""
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype)
    kind = {2: torch.int16, 4: torch.int32}[got.element_size()]
    wrong = got.view(kind) != wanted.view(kind)
    if got.is_floating_point():
        wrong &= ~(got.isnan() & wanted.isnan())
    where = wrong.nonzero()[:4].flatten()
    assert not wrong.any(), f"{what}: {int(wrong.sum())} differ, {got[where].tolist()} for {wanted[where].tolist()}"


def unpacks_every_pattern(name: str) -> None:
    """Unpack all 65536 halves, each once as the low and once as the high half."""
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    words = patterns | (patterns.flip(0) << 16)
    low, high = torch.empty(2, 1 << 16).unbind()
    unpack_kernel[(1,)](words, low, high, DTYPES[name], 1 << 16)
    halves = floats_of(words, getattr(torch, name)).float()
    expect(low, halves[0::2].contiguous(), "low")
    expect(high, halves[1::2].contiguous(), "high")


def unpacks_float32() -> None:
    words = random_words(1 << 16, 1)  # includes NaNs of all kinds
    low, high = torch.empty(2, 1 << 16).unbind()
    unpack_kernel[(1,)](words, low, high, DTYPES["float32"], 1 << 16)
    for got in (low, high):
        assert torch.equal(got.view(torch.int32), words)


def values_to_round(name: str) -> torch.Tensor:
    """Return float32 values around every value of a 16-bit dtype.

    These are the value itself, the ties between neighbours, and one ulp to either side.
    """
    exact = floats_of(torch.arange(1 << 15, dtype=torch.int32).to(torch.int16), getattr(torch, name)).float()
    ties = (exact[:-1].double() + exact[1:].double()).div(2).float()
    last = exact[exact.isfinite()].max()
    # halfway from the largest finite value to where the next would be; from there on, all values are infinite
    previous = exact[exact.isfinite()].sort().values[-2]
    edge = (last.double() + (last.double() - previous.double()) / 2).float().reshape(1)
    middles = torch.cat([exact, ties, edge])
    beside = [middles.view(torch.int32) + step for step in (-1, 0, 1)]
    values = torch.cat(beside).view(torch.float32)
    return torch.cat([values, -values, random_words(1 << 16, 2).view(torch.float32)])


def packs(name: str) -> None:
    values = values_to_round(name)
    size = triton.next_power_of_2(values.numel())
    values = torch.cat([values, torch.zeros(size - values.numel())])
    words = torch.empty(size, dtype=torch.int32)
    pack_kernel[(1,)](values, values.flip(0), words, DTYPES[name], size)
    dtype = getattr(torch, name)
    halves = floats_of(words, dtype)
    expect(halves[0::2].contiguous(), values.to(dtype), "low")
    expect(halves[1::2].contiguous(), values.flip(0).to(dtype), "high")
    rounded = (values.to(dtype).float() - values).abs() > 0
    assert rounded.sum() > 60_000
    assert values.isnan().any()
    assert values.isinf().any()


def fp8_of_every_byte() -> None:
    """Convert every byte, at every position of a word."""
    every = torch.arange(256, dtype=torch.uint8)
    for place in range(4):
        patterns = every.roll(place)
        values = torch.empty(256)
        from_fp8_kernel[(1,)](patterns.view(torch.int32), values, 64)
        expect(values, patterns.view(torch.float8_e4m3fn).float(), place)


def fp8_rounds() -> None:
    """Round values around every e4m3 value, ties, values beyond 448 or below the smallest, and random bits."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat([exact, (exact[:-1] + exact[1:]) / 2, torch.tensor([2.0**-10, 448.0, 464.0, 1e9, torch.inf])])
    values = torch.cat([middles.view(torch.int32) + step for step in (0, 1)] + [middles[1:].view(torch.int32) - 1])
    values = torch.cat([values, values | -(2**31), random_words(1 << 15, 5)]).view(torch.float32)
    size = triton.next_power_of_2(-(-values.numel() // 4))
    values = torch.cat([values, torch.zeros(4 * size - values.numel())])
    words = torch.empty(size, dtype=torch.int32)
    to_fp8_kernel[(1,)](values, words, size)
    wanted = values.clamp(-448, 448).to(torch.float8_e4m3fn)  # beyond, torch's conversion gives NaN
    got = words.view(torch.uint8)
    wrong = (got != wanted.view(torch.uint8)) & ~(values.isnan() & ((got & 0x7F) == 0x7F))
    assert not wrong.any(), (values[wrong][:4], got[wrong][:4], wanted[wrong][:4])
    assert len(set(got.tolist())) >= 254


def packs_float32() -> None:
    values = random_words(1 << 16, 3)
    words = torch.empty_like(values)
    pack_kernel[(1,)](values.view(torch.float32), values.view(torch.float32), words, DTYPES["float32"], 1 << 16)
    assert torch.equal(words, values)


def sums(name: str) -> None:
    """Sum arbitrary bits, and values of one magnitude, whose sums round; one to eight parts."""
    dtype = getattr(torch, name)
    size = 1 << 13
    for count in range(1, 9):
        near = torch.randn(count, size * 4 // dtype.itemsize, generator=torch.Generator().manual_seed(count)).to(dtype)
        near[:, :8] = -0.0
        near[:, 8:16] = torch.tensor([1e-45, 6e-8, -1e-40, 9.2e-41, 1e-38, -6e-8, 3e-5, 1e-45]).to(dtype)
        any_bits = random_words(count * size, count).view(dtype).reshape(count, -1)
        for parts in (near, any_bits):
            out = torch.empty(size, dtype=torch.int32)
            sum_kernel[(1,)](parts.view(torch.int32), out, count, DTYPES[name], size)
            expect(floats_of(out, dtype), reference.ordered_sum(list(parts)), (name, count))


def minus_zero(name: str) -> list[bool]:
    """Return the signs of -0.0 + ... + -0.0 for one and two parts: the sum starts at +0.0."""
    dtype = getattr(torch, name)
    signs = []
    for count in (1, 2):
        parts = torch.full([count, 16 * 4 // dtype.itemsize], -0.0, dtype=dtype)
        out = torch.empty(16, dtype=torch.int32)
        sum_kernel[(1,)](parts.view(torch.int32), out, count, DTYPES[name], 16)
        signs.append(bool(floats_of(out, dtype).signbit().any()))
    return signs


def moves(unit: int) -> int:
    """Move every length from 0 to 40 bytes that the unit divides, between all such offsets. Returns the moves made."""
    done = 0
    size = 16
    for nbytes in range(0, 41, unit):
        for start, there in ((0, 0), (unit, 0), (0, unit), (3 * unit, 2 * unit)):
            source = torch.randint(0, 256, (160,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
            room, area = aligned(source), aligned(torch.full([160], GUARD, dtype=torch.uint8))
            move_kernel[(1,)](room, area, start, there, nbytes, unit, size)
            wanted = torch.full([160], GUARD, dtype=torch.uint8)
            wanted[there : there + nbytes] = source[start : start + nbytes]
            assert torch.equal(area, wanted), (unit, nbytes, start, there)
            words = torch.empty(size, dtype=torch.int32)
            load_kernel[(1,)](room, words, start, nbytes, unit, size)
            padded = torch.zeros(4 * size, dtype=torch.uint8)
            padded[:nbytes] = source[start : start + nbytes]
            assert torch.equal(words.view(torch.uint8), padded), (unit, nbytes, start, "zero beyond the end")
            done += 1
    return done


def aligned(data: torch.Tensor) -> torch.Tensor:
    """Return a copy at an address that is a multiple of 16."""
    room = torch.empty(data.numel() + 16, dtype=torch.uint8)
    skip = -room.data_ptr() % 16
    room[skip : skip + data.numel()].copy_(data)
    return room[skip : skip + data.numel()]


def guards(name: str) -> None:
    """The sentinel is sent as a NaN, and every other word as itself; a stopped call returns nothing but NaN."""
    dtype = getattr(torch, name)
    words = random_words(1 << 12, 5)
    words[::7] = -1
    words[1::7] = 0x7FFFFFFF
    words[2::7] = -65536  # half of the sentinel: a NaN beside a zero
    sent, stopped = torch.empty_like(words), torch.empty_like(words)
    guard_kernel[(1,)](words, sent, stopped, DTYPES[name], 1 << 12)
    was = words == -1
    assert torch.equal(sent[~was], words[~was])
    assert not (sent == -1).any()
    assert floats_of(sent[was], dtype).isnan().all()
    assert floats_of(stopped, dtype).isnan().all()
    assert not (stopped == -1).any()


class Waiting:
    """A program that has waited ``waited_s`` of 1000 seconds for rank 0."""

    def __init__(self, waited_s: float, patient: bool = False):
        self.control = torch.zeros(layout.CONTROL_WORDS, dtype=torch.int64)
        self.host = torch.zeros(layout.HOST_WORDS, dtype=torch.int64)
        self.control[layout.TIMEOUT], self.control[layout.STATUS] = 10**12, self.host.data_ptr()
        self._table = torch.tensor([self.control.data_ptr()] * 9)
        self._started = torch.tensor([time.monotonic_ns() - int(waited_s * 1e9)])
        self._patient = patient

    def goes_on(self) -> bool:
        """Check the deadline; return whether the program goes on. If it does not, the abort word is set."""
        live = torch.zeros(1, dtype=torch.int32)
        look_kernel[(1,)](self.control, self._table, self._started, live, self._patient)
        copies = self.control[layout.ABORT :: layout.COPY_WORDS][: layout.COPIES]
        assert bool((copies == 0).all()) == bool(live[0])
        assert (copies == copies[0]).all()
        assert self.control[layout.ABORT] == self.host[layout.HOST_FAULT]
        return bool(live[0])


def patience(waited_s: float, patient: bool) -> bool:
    return Waiting(waited_s, patient).goes_on()


def marked(ranks: int) -> tuple[list[bool], Fault | None]:
    """Have the host mark ``ranks`` as ended between two checks. Return whether the checks let it go on; the fault."""
    program, checks = Waiting(1.0), []
    for check in range(3):
        if check == 1:
            program.host[layout.HOST_GONE] = ranks
        checks.append(program.goes_on())
        assert program.host[layout.HOST_GONE] == (ranks if check else 0), "the host's word is the host's"
        if not checks[-1]:
            return checks, Fault.decode(int(program.host[layout.HOST_FAULT]))
    return checks, None


def goes_on_though_marked(waited_s: float) -> bool:
    """Return whether a program goes on for whose rank the host has a mark."""
    program = Waiting(waited_s)
    program.host[layout.HOST_GONE] = 1
    return program.goes_on()


def notices(waited_s: float) -> Fault | None:
    """Return what the host is told of a program that goes on."""
    program = Waiting(waited_s)
    assert program.goes_on()
    word = int(program.host[layout.HOST_WAIT])
    return Fault.decode(word) if word else None


@triton.jit
def enter_kernel(own, peers, x, out, SIZE: tl.constexpr):
    """Use addresses that are numbers, as a collective does: of its own memory, of its peers', and of a tensor."""
    call = enter(Entry(own, peers, 0, 0, 0), 1, False)
    tl.store(call.peers + 1, call.epoch)
    store_words(out, 0, tl.arange(0, SIZE), load_words(x, 0, tl.arange(0, SIZE), SIZE * 4, 4), SIZE * 4, 4)


def small_addresses() -> tuple[int, list[int], list[int]]:
    """Run a kernel on memory below 2^31, where a program that is not position-independent has its heap.

    Returns the address, what the kernel wrote about its epoch (7), and what it copied (1 to 8).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    private, anonymous, low = 0x02, 0x20, 0x40
    address = libc.mmap(None, 1 << 16, mmap.PROT_READ | mmap.PROT_WRITE, private | anonymous | low, -1, 0)
    assert address not in (None, 2**64 - 1)
    words = np.ctypeslib.as_array((ctypes.c_int64 * (1 << 13)).from_address(address))
    words[layout.EPOCH] = 7
    peers, x, out = address + (1 << 15), address + (3 << 14), address + (3 << 14) + 1024
    data = words[(3 << 14) // 8 :].view(np.int32)
    data[:8] = np.arange(1, 9)
    enter_kernel[(1,)](address, peers, x, out, 8)
    return address, words[(1 << 15) // 8 :][:2].tolist(), data[256:264].tolist()
