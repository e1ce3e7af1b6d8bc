"""Compiled products with matrices in the blocks of GGUF files, which stay as they are in the file.

Values are made with the arithmetic of the ``gguf`` package, one row at a time, so products with few rows have the bits
that :mod:`shotcast.kernels.cpu.gemv` gives with a matrix of those values.

    Q4_0, Q8_0   value = scale * code             32 values: the scale, float16, and the codes
    Q4_1         value = scale * code + least     32 values: both, float16, and the codes
    Q4_K         value = scale * code - least     256 values, of which each 32 have a scale and a least value of 6 bits
    Q6_K         value = scale * code             256 values, of which each 16 have a scale of 8 bits

Format: github.com/ggml-org/ggml, src/ggml-common.h.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from shotcast.device.cpu.compilation import keep_on_disk
from shotcast.device.cpu.floats import F32, FORMATS, form_of, splat
from shotcast.device.cpu.threads import in_parallel
from shotcast.device.cpu.vectors import broadcast_lanes, load_at, store_at
from shotcast.kernels.cpu import gemv

MAX_ROWS = 32
"""The number of rows of x, float32 or bfloat16, up to which values are made anew for each product."""
_THREADS_FROM = 1 << 19
"""The number of values from which a second thread saves more time than waking it costs."""
_AT_ONCE = 1 << 20
"""The number of values that are held at once for many rows of x."""

_scratch = threading.local()
"""Memory for these values, kept between products: new memory would cost a page fault for each 4 KiB."""

_STORED = types.Array(types.uint8, 2, "C")
_ROWS = types.Array(types.float32, 2, "C")

_I8 = ir.IntType(8)
_LANES = 16

_inlined = njit(error_model="numpy")


@intrinsic
def _half(_context: Any, address: Any) -> Any:
    """Return the float16 at an address as float32."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        half = FORMATS[form_of("float16")]
        return half.widen(builder, load_at(builder, half.stored, arguments[0]), 1)

    return types.float32(types.int64), generate


# Values are made in vectors of 16: a compiler would have to prove that they do not overlap the codes.


def _bits(builder: Any, address: Any, shift: Any, mask: int) -> Any:
    """Return ``byte >> shift & mask`` of 16 bytes."""
    codes = load_at(builder, ir.VectorType(_I8, _LANES), address)
    shifted = builder.lshr(codes, broadcast_lanes(builder, builder.trunc(shift, _I8), _LANES))
    return builder.and_(shifted, splat(_I8, _LANES, mask))


def _store(builder: Any, codes: Any, scale: Any, least: Any, address: Any) -> None:
    """Store ``scale * code + least`` of 16 signed bytes."""
    values = builder.sitofp(codes, ir.VectorType(F32, _LANES))
    scaled = builder.fmul(values, broadcast_lanes(builder, scale, _LANES))
    store_at(builder, builder.fadd(scaled, broadcast_lanes(builder, least, _LANES)), address)


@intrinsic
def _store_4_bits(_context: Any, codes: Any, shift: Any, less: Any, scale: Any, least: Any, address: Any) -> Any:
    """Store ``scale * ((byte >> shift & 15) - less) + least`` of 16 bytes."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, shift, less, scale, least, address = arguments
        less = broadcast_lanes(builder, builder.trunc(less, _I8), _LANES)
        _store(builder, builder.sub(_bits(builder, codes, shift, 15), less), scale, least, address)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32, types.float32, types.int64), generate


@intrinsic
def _store_6_bits(_context: Any, low: Any, low_shift: Any, high: Any, high_shift: Any, scale: Any, address: Any) -> Any:
    """Store ``scale * (code - 32)`` of 16 codes, whose high 2 bits are apart from the others."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        low, low_shift, high, high_shift, scale, address = arguments
        upper = builder.shl(_bits(builder, high, high_shift, 3), splat(_I8, _LANES, 4))
        codes = builder.or_(_bits(builder, low, low_shift, 15), upper)
        none = ir.Constant(F32, -0.0)
        _store(builder, builder.sub(codes, splat(_I8, _LANES, 32)), scale, none, address)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def _store_8_bits(_context: Any, codes: Any, scale: Any, address: Any) -> Any:
    """Store ``scale * byte`` of 16 signed bytes."""

    def generate(target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, scale, address = arguments
        _store(builder, load_at(builder, ir.VectorType(_I8, _LANES), codes), scale, ir.Constant(F32, -0.0), address)
        return target.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


@_inlined
def _q4_0(stored: Any, values: Any) -> None:
    codes, out, none = stored.ctypes.data + 2, values.ctypes.data, np.float32(-0.0)
    for block in range(values.shape[0] // 32):
        scale = _half(codes + 18 * block - 2)
        for half in range(2):
            _store_4_bits(codes + 18 * block, 4 * half, 8, scale, none, out + 128 * block + 64 * half)


@_inlined
def _q4_1(stored: Any, values: Any) -> None:
    codes, out = stored.ctypes.data + 4, values.ctypes.data
    for block in range(values.shape[0] // 32):
        scale, least = _half(codes + 20 * block - 4), _half(codes + 20 * block - 2)
        for half in range(2):
            _store_4_bits(codes + 20 * block, 4 * half, 0, scale, least, out + 128 * block + 64 * half)


@_inlined
def _q8_0(stored: Any, values: Any) -> None:
    codes, out = stored.ctypes.data + 2, values.ctypes.data
    for block in range(values.shape[0] // 32):
        scale = _half(codes + 34 * block - 2)
        for half in range(2):
            _store_8_bits(codes + 34 * block + 16 * half, scale, out + 128 * block + 64 * half)


@_inlined
def _q4_k(stored: Any, values: Any) -> None:
    address, out = stored.ctypes.data, values.ctypes.data
    for block in range(values.shape[0] // 256):
        at = 144 * block
        of_scales, of_leasts = _half(address + at), _half(address + at + 2)
        for part in range(8):
            scales = at + 4 + part
            if part < 4:
                factor, offset = stored[scales] & 63, stored[scales + 4] & 63
            else:
                factor = (stored[scales + 4] & 15) | (stored[scales - 4] >> 6) << 4
                offset = (stored[scales + 4] >> 4) | (stored[scales] >> 6) << 4
            scale, least = of_scales * np.float32(factor), -(of_leasts * np.float32(offset))
            codes, target = address + at + 16 + 32 * (part // 2), out + 1024 * block + 128 * part
            for half in range(2):
                _store_4_bits(codes + 16 * half, 4 * (part % 2), 0, scale, least, target + 64 * half)


@_inlined
def _q6_k(stored: Any, values: Any) -> None:
    address, out = stored.ctypes.data, values.ctypes.data
    for block in range(values.shape[0] // 256):
        at = 210 * block
        whole = _half(address + at + 208)
        for part in range(16):  # of 16 values: of two halves, of which each has four quarters of two parts
            half, quarter, place = part // 8, part // 2 % 4, part % 2
            low = address + at + 64 * half + 32 * (quarter % 2) + 16 * place
            high = address + at + 128 + 32 * half + 16 * place
            scale = whole * np.float32(np.int8(stored[at + 192 + part]))
            _store_6_bits(low, 4 * (quarter // 2), high, 2 * quarter, scale, out + 1024 * block + 64 * part)


@_inlined
def _round_to_bfloat16(values: Any) -> None:
    bits = values.view(np.uint32)
    for i in range(bits.shape[0]):
        odd = bits[i] >> np.uint32(16) & np.uint32(1)
        bits[i] = (bits[i] + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)


_KINDS = "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"


@_inlined
def _read(kind: int, stored: Any, values: Any) -> None:
    """Write the values of a row, whose format is the place in ``_KINDS``."""
    if kind == 0:
        _q4_0(stored, values)
    elif kind == 1:
        _q4_1(stored, values)
    elif kind == 2:
        _q8_0(stored, values)
    elif kind == 3:
        _q4_k(stored, values)
    else:
        _q6_k(stored, values)


_dot = njit(error_model="numpy", fastmath=gemv.FASTMATH)(gemv.dot)


def _dequantize(kind: int, stored: Any, out: Any, first: int, stop: int) -> None:
    for row in range(first, stop):
        _read(kind, stored[row], out[row])


def _multiply(kind: int, rounded: bool, x: Any, stored: Any, out: Any, first: int, stop: int) -> None:
    values = np.empty(x.shape[1], np.float32)
    for output in range(first, stop):
        _read(kind, stored[output], values)
        if rounded:
            _round_to_bfloat16(values)
        for row in range(x.shape[0]):
            out[row, output] = _dot(x[row], values)


_PART = types.int64, types.int64
_SIGNATURES: dict[Callable[..., None], Any] = {
    _dequantize: types.void(types.int64, _STORED, _ROWS, *_PART),
    _multiply: types.void(types.int64, types.boolean, _ROWS, _STORED, _ROWS, *_PART),
}


@functools.cache
def _compiled(function: Callable[..., None]) -> Any:
    dispatcher = njit(nogil=True, error_model="numpy")(function)
    keep_on_disk(dispatcher)
    dispatcher.compile(_SIGNATURES[function])
    dispatcher.disable_compile()
    return dispatcher


def dequantize(stored: torch.Tensor, kind: str, columns: int) -> torch.Tensor:
    """Return the values of rows as float32.

    Args:
        stored: uint8 [rows, bytes of the blocks of a row].
    """
    return _into(torch.empty(stored.shape[0], columns, device="cpu"), stored, kind)


def _into(out: torch.Tensor, stored: torch.Tensor, kind: str) -> torch.Tensor:
    run, arrays = _compiled(_dequantize), (_KINDS.index(kind), stored.numpy(), out.numpy())
    parts = None if out.numel() >= _THREADS_FROM else 1
    in_parallel(lambda first, stop: run(*arrays, first, stop), out.shape[0], parts)
    return out


def _multiply_many(x: torch.Tensor, stored: torch.Tensor, kind: str, bias: torch.Tensor | None) -> torch.Tensor:
    (rows, inputs), outputs = x.shape, stored.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device="cpu")
    step = max(1, _AT_ONCE // inputs)
    if getattr(_scratch, "values", torch.empty(0, device="cpu")).numel() < step * inputs:
        _scratch.values = torch.empty(step * inputs, device="cpu")
    for first in range(0, outputs, step):
        part = stored[first : first + step]
        values = _into(_scratch.values[: len(part) * inputs].view(-1, inputs), part, kind)
        weight, part_out = values.to(x.dtype).t(), out[:, first : first + step]
        if bias is None:
            torch.mm(x, weight, out=part_out)
        else:
            torch.addmm(bias[first : first + step], x, weight, out=part_out)
    return out


def linear(x: torch.Tensor, stored: torch.Tensor, kind: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias``, where the weights are values in blocks, rounded to the dtype of x. Returns [rows,
    outputs], of the dtype of x.

    Args:
        x: [rows, inputs].
        stored: contiguous uint8 [outputs, bytes of the blocks of a row].
        bias: [outputs].
    """
    rows, inputs, outputs = *x.shape, stored.shape[0]
    if rows > MAX_ROWS or x.dtype == torch.float16:
        return _multiply_many(x, stored, kind, bias)
    run, out = _compiled(_multiply), torch.empty(rows, outputs, device="cpu")
    arrays = _KINDS.index(kind), x.dtype == torch.bfloat16, x.float().contiguous().numpy(), stored.numpy(), out.numpy()
    in_parallel(
        lambda first, stop: run(*arrays, first, stop), outputs, None if inputs * outputs >= _THREADS_FROM else 1
    )
    return (out if bias is None else out + bias).to(x.dtype)
