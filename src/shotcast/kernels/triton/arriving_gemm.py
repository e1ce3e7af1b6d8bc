"""Products of a matrix whose rows are arriving while they are multiplied.

    out[m, n] = a[m, k] @ b[k, n]    as :mod:`.gemm`, with the same bits

``a`` consists of a shard of each rank, and a call that runs beside the product brings all shards at once, from their
first rows to their last. It announces how much of each is there (:func:`shotcast.transport.triton.sync.announce`). A
tile begins when its rows are there. Tiles go in the order in which rows come: the first rows of every shard, this
rank's first, and then the next ones.

The kernel is launched behind the call, in its stream, as a programmatic dependent launch. So it begins when every
program of the call has let it in, and not before: the call needs no SM any more that this kernel could take. It ends
after the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import (
    await_prior_kernel,
    fence_async_proxy,
    kernel,
    load_acquire,
    supports_pdl,
    yield_core,
)
from shotcast.device.triton.launch import Launch
from shotcast.kernels.triton.gemm import (
    Gemm,
    GemmConfig,
    GemmForm,
    ProductShape,
    Sizes,
    arguments_of,
    constants_of,
    matrix_at,
    place_of,
    store_tile,
    sums_of_tile,
)

MOST_WORDS = 256
"""The most programs that a call announces by. A reduction over as many words passes through all warps."""
WORDS = tl.constexpr(MOST_WORDS)
WORDS_NBYTES = 8 * (MOST_WORDS + 1)
"""Bytes of these words, and of one that counts programs of the product."""
FEWEST_REGISTERS = 160
"""Registers per thread that suffice for tiles of up to 128 sums a thread. 256 threads with as many leave room for 512
with 48 (``BESIDE_REGISTERS`` of :mod:`shotcast.transport.triton.few_sms`)."""


@triton.jit
def await_chunks(arrivals, chunks, workers, TMA: tl.constexpr):
    """Wait until the first ``chunks`` chunks of every shard are there (an acquire).

    Worker w brings chunks w, w + workers, ... and counts them in word w of ``arrivals``. With TMA, copies by the copy
    engine of the SM see them too.
    """
    lanes = tl.arange(0, WORDS)
    present = lanes < workers
    wanted = (chunks - lanes + workers - 1) // workers
    found = load_acquire(arrivals + lanes, present)
    waiting = tl.max((present & (found < wanted)).to(tl.int32), axis=0)
    while waiting != 0:
        yield_core()
        found = load_acquire(arrivals + lanes, present)
        waiting = tl.max((present & (found < wanted)).to(tl.int32), axis=0)
    tl.debug_barrier()
    if TMA:
        fence_async_proxy()


@triton.jit
def finish(arrivals):
    """Set all words to zero for the next call; the last program of the grid does."""
    tl.debug_barrier()
    done = tl.atomic_add(arrivals + WORDS, 1, sem="relaxed", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(arrivals + tl.arange(0, WORDS), tl.zeros([WORDS], tl.int64))
        tl.store(arrivals + WORDS, done * 0)


class Arriving(NamedTuple):
    """The order and the announcements of rows that are arriving.

    ``shards`` is the number of shards whose first rows go before the second rows of any, beginning with
    ``first_shard``; 1 where tiles do not divide a shard.
    """

    shard_rows: tl.tensor
    shards: tl.tensor
    first_shard: tl.tensor
    row_nbytes: tl.tensor
    chunk_nbytes: tl.tensor
    workers: tl.tensor


@dataclass(frozen=True, slots=True)
class ArrivingShape(ProductShape):
    """A product of rows that are arriving."""

    PDL: bool


@kernel(shape=ArrivingShape)
def arriving_gemm_kernel(a, b, out, arrivals, sizes: Sizes, out_stride, arriving: Arriving, SHAPE: tl.constexpr):
    """Do what :func:`shotcast.kernels.triton.gemm.gemm_kernel` does, each tile when its rows of ``a`` are there."""
    if not SHAPE.TMA:
        a = matrix_at(a, SHAPE.DTYPE, SHAPE.UNIT)
        b = matrix_at(b, SHAPE.DTYPE, SHAPE.UNIT)
        out = matrix_at(out, SHAPE.DTYPE, SHAPE.UNIT)
    shard_rows, shards, first_shard, row_nbytes, chunk_nbytes, workers = arriving
    arrivals = arrivals.to(tl.int64).to(tl.pointer_type(tl.int64))
    tile_rows = tl.cdiv(sizes.m, SHAPE.TILE_M)
    tile_columns = tl.cdiv(sizes.n, SHAPE.TILE_N)
    for tile in tl.range(tl.program_id(0), tile_rows * tile_columns, tl.num_programs(0)):
        turn, tile_column = place_of(tile, tile_rows, tile_columns, SHAPE.GROUP)
        tile_row = (first_shard + turn % shards) % shards * (tile_rows // shards) + turn // shards
        row = tile_row * SHAPE.TILE_M
        column = tile_column * SHAPE.TILE_N
        end = tl.minimum(row + SHAPE.TILE_M, sizes.m)
        shard = row // shard_rows
        rows = tl.minimum(end - shard * shard_rows, shard_rows)  # a tile that goes on into the next shard needs all
        chunks = (rows.to(tl.int64) * row_nbytes + chunk_nbytes - 1) // chunk_nbytes
        await_chunks(arrivals, chunks, workers, SHAPE.TMA)
        sums = sums_of_tile(a, b, row, column, sizes, SHAPE)
        store_tile(out, sums, row, column, sizes.m, sizes.n, out_stride, SHAPE.DTYPE, SHAPE.TMA, SHAPE.UNIT)
    await_prior_kernel(SHAPE.PDL)  # so the end of this kernel says that the call has ended, too
    finish(arrivals)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The way in which rows come."""

    rank: int  # the shard that is this rank's own
    world_size: int  # the number of shards, all of equal size
    workers: int  # programs of the call that brings them
    chunk_nbytes: int  # bytes of a chunk, of which each worker brings one of every shard at a time


def register_limit(form: GemmForm, config: GemmConfig) -> dict[str, int]:
    """Return the compiler's limit of registers, by which a block that brings rows fits beside one of the product.

    Blocks of four warps leave enough without one.
    """
    limited = form.uses_tma and config.warps == 8 and config.tile_m * config.tile_n <= 128 * 256
    return {"maxnreg": FEWEST_REGISTERS} if limited else {}


class ArrivingGemm(Gemm):
    """Products of one form whose ``a`` is arriving, in rows that lie one after the other.

    Tiles are not pipelined across each other, so ``config.persistent`` only limits the SMs.
    """

    def __init__(self, form: GemmForm, config: GemmConfig, sms: int, arrival: Arrival):
        self._arrival = arrival
        super().__init__(form, config, sms)

    def _launch(self, programs: int) -> Launch:
        form, arrival = self.form, self._arrival
        shard_rows = form.m // arrival.world_size
        divided = shard_rows % self.config.tile_m == 0
        pdl = supports_pdl(form.device)
        shards, first = (arrival.world_size, arrival.rank) if divided else (1, 0)
        row_nbytes = form.k * form.dtype.itemsize
        arguments = arguments_of(self.form, self.config) | {
            "arrivals": 1 << 40,
            "arriving": Arriving(shard_rows, shards, first, row_nbytes, arrival.chunk_nbytes, arrival.workers),
            "SHAPE": ArrivingShape(**constants_of(form, self.config), PDL=pdl),
        }
        options = {"num_warps": self.config.warps, "launch_pdl": pdl} | register_limit(form, self.config)
        opened = ("a", "b", "out", "arrivals")
        return Launch(arriving_gemm_kernel, programs, arguments, opened, options, self.config.padding_bytes)

    def load(self) -> None:
        """Compile the kernel and load it, unless that has been done."""
        with self._lock, self._on_device():
            self._run.load()

    def multiply(self, stream: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, arrivals: int) -> None:
        """Compute ``out = a @ b`` on the stream with this handle, right behind the call that brings ``a``.

        ``arrivals`` is the address of the words by which the call announces. They are zero again when this ends.
        """
        with self._lock:
            self._run(stream, (*self._operands(a, b, out), arrivals))
