"""The vocabulary of kernels for what passes between nodes: cells that are put to another rank, and waits for them.

A kernel looks up where to put cells with :func:`destination`, opens the cells of its call with :func:`enter_network`,
sends with :func:`put_cells` and waits with :func:`await_cells`; ``docs/reference/protocols.md`` explains why that is
correct. A put has two forms. Where the ranks of all nodes have their memory mapped (logical nodes of one host), it is
stores. Else the cells are *staged* in this rank's own region, and NVSHMEM puts them from there, without a wait for the
end. A kernel has the constexpr argument PUTS for that, and ``puts``, the address of a table with the PE and the address
that puts take for each rank.

A *cell* is 64 bits that arrive at once: 32 of data, and the low 32 bits of the epoch. It says for itself that it has
come, so cells need no order, no fence and no signal. The data are the bits of a float32 (a partial sum is not rounded),
or a word of the result. Each step of an exchange has a *slot* of cells of its own at the receiver. The slots of a call
lie one after the other in one of two *generations*, by the parity of the epoch; nothing is cleared.

A tile travels whole: its cells lie side by side, so that a put may be one message of the network. Those of its low
halves come first, then those of its high halves (:func:`shotcast.device.triton.words.unpack`), as many of each as the
tile has words.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import yield_core
from shotcast.device.triton.nvshmem import put_nbi_block
from shotcast.transport.triton import layout
from shotcast.transport.triton.sync import (
    POLLS_PER_CHECK,
    TIMEOUT,
    any_missing,
    cells_offset,
    check_deadline,
    missing_words,
    region_address,
    store_to,
    with_status,
)

GRACE = tl.constexpr(layout.GRACE)


class Network(NamedTuple):
    """The network as a program sees it in one call.

    ``quads`` is the offset, in quads, of the cells of this call in the region of every rank; ``staging`` is what the
    cells that are staged lie behind them. ``puts`` is PUTS, known at compile time.
    """

    quads: tl.tensor
    staging: tl.tensor
    puts: tl.constexpr


class Destination(NamedTuple):
    """A rank, as :func:`put_cells` needs to know it.

    ``address`` is that of its region, or with PUTS what puts take in its place, and ``pe`` its number in NVSHMEM. Use
    their positions: in Triton 3.6 what is taken from a tuple of these has lost the names.
    """

    address: tl.tensor
    pe: tl.tensor


@triton.jit
def destination(peers, puts, rank, PUTS: tl.constexpr):
    """Return the destination of what goes to a rank. It never changes: look it up as early as you like."""
    if PUTS:
        address = region_address(puts, 2 * rank)
        pe = region_address(puts, 2 * rank + 1).to(tl.int32)
    else:
        address = region_address(peers, rank)
        pe = rank
    return Destination(address, pe)


@triton.jit
def enter_network(call, network_at, network_quads, PUTS: tl.constexpr):
    """Open the cells of the call. The two generations that are staged lie behind the two that arrive."""
    return Network(cells_offset(call.epoch, network_at, network_quads), 2 * network_quads, PUTS)


@triton.jit
def cells_at(network, cell):
    """Return the offset, in quads, of a cell of the call; its number is even."""
    return network.quads + cell // 2


@triton.jit
def put_cells(call, network, target, cell, lanes, parts, count, PARTS: tl.constexpr):
    """Put the first ``count`` words of each of PARTS tiles of 32 bits to a rank, from its cell ``cell`` on.

    ``cell`` and ``count`` are multiples of 4, the same in the :func:`await_cells` that waits for them; ``lanes`` are
    the numbers of a tile's words. Nothing is put if the call is stopped.

    A cell is staged at its own number, and has the same content for all ranks that it goes to in a call. So what a put
    still reads does not change before the call after the next, which no rank begins before all have what they were sent
    in this one.
    """
    mask = lanes < count
    if network.puts:
        address = call.own.to(tl.int64)
        for part in tl.static_range(PARTS):
            at = cells_at(network, cell + part * count) + network.staging
            store_to(call, address, at, lanes, parts[part], mask, True)
        if (count > 0) & (call.live != 0):
            offset = cells_at(network, cell).to(tl.int64) * 16
            nbytes = count.to(tl.int64) * (8 * PARTS)
            put_nbi_block(target[0] + offset, address + offset + network.staging.to(tl.int64) * 16, nbytes, target[1])
    else:
        for part in tl.static_range(PARTS):
            store_to(call, target[0], cells_at(network, cell + part * count), lanes, parts[part], mask, True)


@triton.jit
def load_cells(call, network, cells, lanes, counts, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """Load what has come of COUNT puts of PARTS tiles. All loads are issued before one is used.

    Cells beyond the counts read as arrived.
    """
    tiles = ()
    for i in tl.static_range(COUNT):
        for part in tl.static_range(PARTS):
            mask = lanes < counts[i]
            base = tl.multiple_of(call.own, 16) + cells_at(network, cells[i] + part * counts[i]) * 2
            tile = tl.load(base + lanes, mask=mask, other=0, volatile=True)
            tiles = tiles + (tl.where(mask, tile, call.epoch << 32),)
    return tiles


@triton.jit
def await_cells(
    call,
    network,
    cells,
    lanes,
    counts,
    first,
    step,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Wait for COUNT puts of this call, of PARTS tiles each. Returns (tiles of 32 bits, call).

    Put i has ``counts[i]`` words a tile from ``cells[i]`` on, and comes from rank ``first + i * step``; its tiles are
    those from ``i * PARTS`` on. Use the returned ``call`` from here on: if the call was stopped, ``live`` is 0 and the
    tiles are not valid.

    DEPTH is the number of ranks that the data pass through on their way here, beyond the sender. The deadline is so
    many times a little later (``layout.GRACE`` of them make the timeout twice as long): a rank that waits for one that
    stopped names it before those that wait for the first name that.
    """
    tiles = load_cells(call, network, cells, lanes, counts, PARTS, COUNT)
    waiting = any_missing(tiles, call.epoch, True, PARTS * COUNT) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        tiles = load_cells(call, network, cells, lanes, counts, PARTS, COUNT)
        waiting = any_missing(tiles, call.epoch, True, PARTS * COUNT)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            late_ranks = call.rank * 0
            for i in tl.static_range(COUNT):
                for part in tl.static_range(PARTS):
                    missing = missing_words(tiles[i * PARTS + part], call.epoch, True)
                    late_ranks = late_ranks | (tl.max(missing.to(tl.int32), axis=0) << (first + i * step))
            grace = tl.atomic_add(call.own + TIMEOUT, 0, sem="relaxed", scope="sys") // GRACE * DEPTH
            later = tl.where(started == 0, started, started + grace)
            checked, live = check_deadline(call, later, late_ranks, True, WORLD)
            started = tl.where(started == 0, checked, started)
            waiting = waiting & live
    words = ()
    for i in tl.static_range(PARTS * COUNT):
        words = words + (tiles[i].to(tl.int32),)
    return words, with_status(call, live, started)
