"""GEMM of two large matrices, whose thread blocks take a configurable share of an SM.

    out[m, n] = a[m, k] @ b[k, n], summed in float32 and rounded once

A program computes tiles of the output, one after another. There may be fewer programs than tiles, so a matmul can stay
on a chosen number of SMs. Tiles, stages and warps determine how much of an SM a block takes; padding adds unused shared
memory. Blocks of other kernels run in the remainder (``research/occupancy.py``).

On compute capability 9 and later, the copy engine of the SM (TMA) loads and stores tiles, and tensor cores read them
from shared memory (wgmma). TMA requires rows that are multiples of 16 bytes. Other matrices are loaded by threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from tma_launch import TmaLaunch, descriptor

from shotcast.device.triton.intrinsics import INTERPRETED, add_dot, kernel, shared_memory_per_sm
from shotcast.device.triton.words import round_float
from shotcast.errors import ConfigError, UnsupportedError

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_ITEM_BYTES = 2
_RESERVED_BYTES = 1024
"""Shared memory per block that the driver reserves on GPUs with a copy engine."""
UNIT = 8
"""Elements in 16 bytes, the unit that a thread or the copy engine moves at a time."""


@triton.jit
def place_of(tile, tile_rows, tile_columns, GROUP: tl.constexpr):
    """Compute the row and the column of a tile, in tiles.

    Every GROUP rows of tiles are traversed column by column, so that tiles computed at the same time share rows and
    columns of the operands in the cache.
    """
    group = tile // (GROUP * tile_columns)
    first = group * GROUP
    height = tl.minimum(tile_rows - first, GROUP)
    inside = tile - group * (GROUP * tile_columns)
    return first + inside % height, inside // height


@triton.jit
def _cells(row, column, rows, columns, stride, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the offsets of a tile's elements, and a mask of those that exist."""
    i = row + tl.arange(0, ROWS)
    j = column + tl.arange(0, COLUMNS)
    offsets = i.to(tl.int64)[:, None] * (stride // UNIT * UNIT) + j[None, :]
    return offsets, (i < rows)[:, None] & (j < columns // UNIT * UNIT)[None, :]


@triton.jit
def _load(
    matrix,
    row,
    column,
    rows,
    columns,
    stride,
    TMA: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Load a tile of a matrix in its memory layout; elements past its ends are zeros."""
    if TMA:
        tile = matrix.load([row, column])
    else:
        offsets, inside = _cells(row, column, rows, columns, stride, UNIT, ROWS, COLUMNS)
        tile = tl.load(matrix + offsets, mask=inside, other=0.0)
    return tile


@triton.jit
def _store(matrix, tile, row, column, rows, columns, stride, TMA: tl.constexpr, UNIT: tl.constexpr):
    """Store the part of a tile that is within a matrix."""
    if TMA:
        matrix.store([row, column], tile)
    else:
        offsets, inside = _cells(row, column, rows, columns, stride, UNIT, tile.shape[0], tile.shape[1])
        tl.store(matrix + offsets, tile, mask=inside)


@triton.jit
def matrix_at(address, DTYPE: tl.constexpr, UNIT: tl.constexpr):
    """Convert an address to a pointer to a matrix whose rows begin at multiples of UNIT elements."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(DTYPE)), 2 * UNIT)


class Sizes(NamedTuple):
    """The sizes of a matmul, and the row strides of its operands in memory, in elements."""

    m: tl.tensor
    n: tl.tensor
    k: tl.tensor
    a_stride: tl.tensor
    b_stride: tl.tensor


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The SHAPE argument of matmul kernels, for a form and a configuration; see :func:`constants_of`.

    A_ROWS_ARE_K: ``a`` is stored as [k, m]. B_ROWS_ARE_N: ``b`` is stored as [n, k]. UNIT: rows begin and end at
    multiples of this many elements.
    """

    DTYPE: tl.dtype
    A_ROWS_ARE_K: bool
    B_ROWS_ARE_N: bool
    TMA: bool
    UNIT: int
    TILE_M: int
    TILE_N: int
    TILE_K: int
    GROUP: int
    STAGES: int


@triton.jit
def sums_of_tile(a, b, row, column, sizes, SHAPE: tl.constexpr):
    """Compute, in float32, the tile of ``a @ b`` that begins at a row and a column."""
    TMA: tl.constexpr = SHAPE.TMA
    UNIT: tl.constexpr = SHAPE.UNIT
    TILE_M: tl.constexpr = SHAPE.TILE_M
    TILE_N: tl.constexpr = SHAPE.TILE_N
    TILE_K: tl.constexpr = SHAPE.TILE_K
    m, n, k, a_stride, b_stride = sizes
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    for step in tl.range(tl.cdiv(k, TILE_K), num_stages=SHAPE.STAGES):
        depth = step * TILE_K
        if SHAPE.A_ROWS_ARE_K:
            left = tl.trans(_load(a, depth, row, k, m, a_stride, TMA, UNIT, TILE_K, TILE_M))
        else:
            left = _load(a, row, depth, m, k, a_stride, TMA, UNIT, TILE_M, TILE_K)
        if SHAPE.B_ROWS_ARE_N:
            right = tl.trans(_load(b, column, depth, n, k, b_stride, TMA, UNIT, TILE_N, TILE_K))
        else:
            right = _load(b, depth, column, k, n, b_stride, TMA, UNIT, TILE_K, TILE_N)
        sums = add_dot(sums, left, right)
    return sums


@triton.jit
def store_tile(out, sums, row, column, m, n, out_stride, DTYPE: tl.constexpr, TMA: tl.constexpr, UNIT: tl.constexpr):
    """Round a tile of sums and store the part of it that is within ``out``; with TMA, one half at a time."""
    if TMA:
        HALF: tl.constexpr = sums.shape[1] // 2
        first, second = tl.split(tl.permute(tl.reshape(sums, (sums.shape[0], 2, HALF)), (0, 2, 1)))
        _store(out, round_float(first, DTYPE), row, column, m, n, out_stride, TMA, UNIT)
        _store(out, round_float(second, DTYPE), row, column + HALF, m, n, out_stride, TMA, UNIT)
    else:
        _store(out, round_float(sums, DTYPE), row, column, m, n, out_stride, TMA, UNIT)


@dataclass(frozen=True, slots=True)
class GemmShape(ProductShape):
    """The SHAPE argument of :func:`gemm_kernel`; ``PERSISTENT`` programs have several tiles."""

    PERSISTENT: bool


@kernel(shape=GemmShape)
def gemm_kernel(a, b, out, sizes: Sizes, out_stride, SHAPE: tl.constexpr):
    """Program p: compute tiles p, p + programs, p + 2 programs, ...

    With TMA, ``a``, ``b`` and ``out`` are descriptors, and the two halves of a tile's columns are stored one after the
    other, through half the shared memory. Without TMA, they are addresses of rows ``stride`` elements apart.
    PERSISTENT: a program has several tiles, and loads the first steps of the next tile before it stores the current
    one.
    """
    if not SHAPE.TMA:
        a = matrix_at(a, SHAPE.DTYPE, SHAPE.UNIT)
        b = matrix_at(b, SHAPE.DTYPE, SHAPE.UNIT)
        out = matrix_at(out, SHAPE.DTYPE, SHAPE.UNIT)
    tile_rows = tl.cdiv(sizes.m, SHAPE.TILE_M)
    tile_columns = tl.cdiv(sizes.n, SHAPE.TILE_N)
    for tile in tl.range(tl.program_id(0), tile_rows * tile_columns, tl.num_programs(0), flatten=SHAPE.PERSISTENT):
        tile_row, tile_column = place_of(tile, tile_rows, tile_columns, SHAPE.GROUP)
        row = tile_row * SHAPE.TILE_M
        column = tile_column * SHAPE.TILE_N
        sums = sums_of_tile(a, b, row, column, sizes, SHAPE)
        store_tile(out, sums, row, column, sizes.m, sizes.n, out_stride, SHAPE.DTYPE, SHAPE.TMA, SHAPE.UNIT)


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The shape of a matmul's blocks."""

    tile_m: int = 128  # rows of the output that a program computes at a time
    tile_n: int = 256  # columns, likewise
    tile_k: int = 64  # the depth of a step
    stages: int = 3  # the number of steps in shared memory
    warps: int = 8  # warps per block
    padding_bytes: int = 0  # shared memory that a block takes without using it
    group: int = 16  # rows of tiles traversed together
    persistent: bool = False  # one program per SM, which computes tile after tile; otherwise one program per tile

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "tile_k"):
            size = getattr(self, name)
            if size < 16 or size > 256 or size & (size - 1):
                raise ConfigError(f"{name} is {size}; it takes a power of two from 16 to 256")
        if self.warps not in (4, 8):
            raise ConfigError(f"warps is {self.warps}; it takes 4 or 8, whole groups that share a tensor core product")
        for name, least in (("stages", 2), ("padding_bytes", 0), ("group", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it takes a number from {least} up")

    def __str__(self) -> str:
        padding = f", {self.padding_bytes} bytes of padding" if self.padding_bytes else ""
        programs = ", persistent" if self.persistent else ""
        return f"{self.tile_m}x{self.tile_n}x{self.tile_k}, {self.stages} stages, {self.warps} warps{programs}{padding}"


@dataclass(frozen=True, slots=True)
class GemmForm:
    """The properties shared by matmuls that are launched alike: shapes, layouts, dtype, alignment and device."""

    m: int
    n: int
    k: int
    strides: tuple[int, int, int]  # row strides in memory of ``a``, ``b`` and ``out``, in elements
    a_rows_are_k: bool  # ``a`` is stored as [k, m]
    b_rows_are_n: bool  # ``b`` is stored as [n, k]
    dtype: torch.dtype
    unit: int  # rows in memory begin and end at multiples of this power of two, the largest up to UNIT
    rows_are_units: bool  # rows begin at multiples of 16 bytes, regardless of where they end
    device: torch.device

    @property
    def uses_tma(self) -> bool:
        """True if the copy engine of SMs loads and stores tiles."""
        return self.rows_are_units and min(self.m, self.n, self.k) > 0 and has_tma(self.device)


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Check whether SMs have a copy engine for tiles; true for the interpreter."""
    return INTERPRETED or torch.cuda.get_device_capability(device) >= (9, 0)


def form_of(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> GemmForm:
    """Determine the form of ``out = a @ b``.

    Raises UnsupportedError if the dtype is not bfloat16 or float16, or if neither rows nor columns are contiguous.
    Raises ConfigError if the shapes, dtypes or devices do not match.
    """
    if a.dtype not in DTYPES or a.device.type != ("cpu" if INTERPRETED else "cuda"):
        raise UnsupportedError(f"products take bfloat16 or float16 on a GPU, not {a.dtype} on {a.device}")
    tensors = {"a": a, "b": b, "out": out}
    if any(tensor.dim() != 2 for tensor in tensors.values()):
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ConfigError(f"products take matrices of two dimensions, not {shapes}")
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or out.shape != (m, n):
        raise ConfigError(f"{list(a.shape)} @ {list(b.shape)} does not fit into {list(out.shape)}")
    if any(tensor.dtype != a.dtype or tensor.device != a.device for tensor in (b, out)):
        raise ConfigError(f"a has {a.dtype} on {a.device}, but b and out have other dtypes or devices")
    by_columns = [_is_by_columns(name, tensor) for name, tensor in tensors.items()]
    if by_columns[2]:
        raise UnsupportedError(f"rows of out must be contiguous; its strides are {out.stride()}")
    stored = [tensor.t() if swap else tensor for tensor, swap in zip(tensors.values(), by_columns, strict=True)]
    begins = [start for tensor in stored for start in (tensor.data_ptr() // a.itemsize, tensor.stride(0))]
    unit = math.gcd(UNIT, *begins, *(tensor.shape[1] for tensor in stored))
    strides = (stored[0].stride(0), stored[1].stride(0), stored[2].stride(0))
    rows_are_units = math.gcd(UNIT, *begins) == UNIT
    return GemmForm(m, n, k, strides, by_columns[0], by_columns[1], a.dtype, unit, rows_are_units, a.device)


def _is_by_columns(name: str, matrix: torch.Tensor) -> bool:
    """Check whether the columns of a matrix, rather than its rows, are contiguous."""
    rows, columns = matrix.shape
    if matrix.stride(1) == 1 or columns == 1:
        return False
    if matrix.stride(0) == 1 or rows == 1:
        return True
    raise UnsupportedError(f"rows or columns of {name} must be contiguous; its strides are {matrix.stride()}")


def most_shared_bytes(device: torch.device) -> int:
    """Look up the maximum shared memory per block."""
    return shared_memory_per_sm(device) - _RESERVED_BYTES


def shared_bytes(config: GemmConfig) -> int:
    """Compute the minimum shared memory of a block with TMA: the stages, half an output tile in flight, and padding."""
    stage = (config.tile_m + config.tile_n) * config.tile_k * _ITEM_BYTES
    half_of_output = config.tile_m * config.tile_n * _ITEM_BYTES // 2
    return config.stages * stage + half_of_output + config.padding_bytes


FAST = GemmConfig()
"""The fastest configuration measured on H200 (benchmarks/data/h200/shaped_products.json)."""
FAST_ON_FEW = (
    GemmConfig(128, 256, 64, 4, 8, group=8, persistent=True),
    GemmConfig(128, 128, 64, 6, 4, group=8, persistent=True),
)
"""The fastest on a chosen number of SMs: if programs have equally many tiles, and if that takes smaller tiles."""
_SMALL_TILE_RATE = 0.952
"""The speed of the smaller tiles relative to the larger ones, both divided evenly among SMs (ibid.: 0.93 to 1)."""
WITHOUT_TMA = GemmConfig(128, 128, 32, 3, 8)
"""The configuration for matrices that threads load: larger tiles would take more registers than a thread has."""


def choose_config(form: GemmForm, sms: int | None = None) -> GemmConfig:
    """Choose a configuration that is known to be fast on all SMs, or on ``sms`` of them."""
    if not form.uses_tma:
        return WITHOUT_TMA if sms is None else dataclasses.replace(WITHOUT_TMA, persistent=True)
    if sms is None:
        return FAST
    large, small = FAST_ON_FEW
    return small if _SMALL_TILE_RATE * _evenness(form, small, sms) > _evenness(form, large, sms) else large


def _tiles(form: GemmForm, config: GemmConfig) -> int:
    return triton.cdiv(form.m, config.tile_m) * triton.cdiv(form.n, config.tile_n)


def _evenness(form: GemmForm, config: GemmConfig, sms: int) -> float:
    """Compute the mean number of tiles of ``sms`` programs over the largest; partial tiles count as fractions."""
    most = triton.cdiv(_tiles(form, config), sms)
    return form.m * form.n / (config.tile_m * config.tile_n) / (sms * most)


def constants_of(form: GemmForm, config: GemmConfig) -> dict[str, Any]:
    """Build the fields of :class:`ProductShape`."""
    return {
        "DTYPE": DTYPES[form.dtype],
        "A_ROWS_ARE_K": form.a_rows_are_k,
        "B_ROWS_ARE_N": form.b_rows_are_n,
        "TMA": form.uses_tma,
        "UNIT": UNIT if form.uses_tma else form.unit,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "GROUP": config.group,
        "STAGES": config.stages,
    }


def arguments_of(form: GemmForm, config: GemmConfig) -> dict[str, Any]:
    """Build the arguments of :func:`gemm_kernel` except SHAPE, with ``a``, ``b`` and ``out`` as placeholders."""
    a_stride, b_stride, out_stride = form.strides
    sizes = {"sizes": Sizes(form.m, form.n, form.k, a_stride, b_stride), "out_stride": out_stride}
    operands: dict[str, Any] = dict.fromkeys(("a", "b", "out"), 1 << 40)
    if form.uses_tma:
        a_shape, a_tile = (form.m, form.k), (config.tile_m, config.tile_k)
        b_shape, b_tile = (form.k, form.n), (config.tile_k, config.tile_n)
        if form.a_rows_are_k:
            a_shape, a_tile = a_shape[::-1], a_tile[::-1]
        if form.b_rows_are_n:
            b_shape, b_tile = b_shape[::-1], b_tile[::-1]
        shapes = {
            "a": (a_shape, a_tile),
            "b": (b_shape, b_tile),
            "out": ((form.m, form.n), (config.tile_m, config.tile_n // 2)),
        }
        for (name, (shape, tile)), stride in zip(shapes.items(), form.strides, strict=True):
            operands[name] = descriptor(form.dtype, shape, (stride, 1), tile)
    return operands | sizes


class Gemm:
    """Matmuls of one form in blocks of one shape, on a chosen number of SMs.

    A persistent matmul has ``sms`` programs, and an idle GPU starts each on a separate SM. Raises ConfigError if a
    block would take more shared memory than it may.
    """

    def __init__(self, form: GemmForm, config: GemmConfig, sms: int):
        self.form, self.config = form, config
        self.tiles = _tiles(form, config)
        self.programs = min(self.tiles, sms) if config.persistent else self.tiles
        if form.uses_tma and (needed := shared_bytes(config)) > (most := most_shared_bytes(form.device)):
            raise ConfigError(f"blocks of {config} take {needed} bytes of shared memory; a block may have {most}")
        self._run = self._launch(max(1, self.programs))
        self._lock = threading.Lock()

    def _launch(self, programs: int) -> TmaLaunch:
        options = {"num_warps": self.config.warps}
        shape = GemmShape(**constants_of(self.form, self.config), PERSISTENT=self.config.persistent)
        arguments = arguments_of(self.form, self.config) | {"SHAPE": shape}
        return TmaLaunch(gemm_kernel, programs, arguments, ("a", "b", "out"), options, self.config.padding_bytes)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """Compute ``out = a @ b`` on the current stream, for tensors of this form."""
        if self.tiles:
            self._enqueue(self._operands(a, b, out))

    def _operands(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[Any, ...]:
        return (a, b, out) if self.form.uses_tma else (a.data_ptr(), b.data_ptr(), out.data_ptr())

    def _enqueue(self, call_values: tuple[Any, ...]) -> None:
        with self._lock, self._on_device():  # a launch holds the operands of one call at a time
            stream = 0 if INTERPRETED else torch.cuda.current_stream(self.form.device).cuda_stream
            self._run(stream, call_values)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if INTERPRETED else torch.cuda.device(self.form.device)
