"""The vocabulary of kernels for traffic between nodes: tiles that are put to another rank, and waits for them.

A kernel looks up where to put tiles with :func:`destination`, opens the slots of its call with :func:`enter_network`,
sends with :func:`put_tiles` and waits with :func:`await_tiles`; ``docs/reference/protocols.md`` ("Sums of nodes")
explains why that is correct. A put has two forms. If the ranks of all nodes have their memory mapped (logical nodes of
one host), it consists of stores. Otherwise the words are *staged* in this rank's region, and NVSHMEM puts them from
there, without waiting for completion. The constexpr argument PUTS of a kernel selects the form; ``puts`` is the address
of a table with the PE and the address that puts take for each rank.

A tile travels whole: its words are contiguous, so that a put may be one network message. The words of its low halves
come first, then the words of its high halves (:func:`shotcast.device.triton.words.unpack`); there are as many of each
as the tile has words.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from shotcast.device.triton.intrinsics import yield_core
from shotcast.device.triton.nvshmem import put_nbi_block
from shotcast.transport.triton import layout, sync
from shotcast.transport.triton.sync import POLLS_PER_CHECK, SENTINEL, TIMEOUT

GRACE = tl.constexpr(layout.GRACE)


class GpuNetwork(NamedTuple):
    """The network as a program sees it in one call.

    ``quads`` is the offset, in quads, of the slots of this call in the region of every rank, and ``staging`` the offset
    of what this rank stages. ``clears`` says that slots are cleared after they are read.
    """

    quads: tl.tensor
    staging: tl.tensor
    puts: tl.constexpr
    clears: tl.constexpr


class Destination(NamedTuple):
    """A rank in the form that :func:`put_tiles` takes.

    ``address`` is the address of its region, or with PUTS what puts take in its place; ``pe`` is its number in NVSHMEM.
    Access both by position: in Triton 3.6, an element taken from a tuple of these has lost the names.
    """

    address: tl.tensor
    pe: tl.tensor


@triton.jit
def destination(peers, puts, rank, PUTS: tl.constexpr):
    """Return the destination of what goes to a rank. It never changes, so look it up as early as you like."""
    if PUTS:
        address = sync.region_address(puts, 2 * rank)
        pe = sync.region_address(puts, 2 * rank + 1).to(tl.int32)
    else:
        address = sync.region_address(peers, rank)
        pe = rank
    return Destination(address, pe)


@triton.jit
def enter_network(call, quads, staging_at, staging_quads, PUTS: tl.constexpr, CLEARS: tl.constexpr):
    """Open the slots of the call, which begin at ``quads``. Staged data has two generations."""
    return GpuNetwork(quads, sync.cells_offset(call.epoch, staging_at, staging_quads), PUTS, CLEARS)


@triton.jit
def put_tiles(call, network, target, word, lanes, parts, count, PARTS: tl.constexpr):
    """Put the first ``count`` words of each of PARTS tiles to a rank, beginning at its word ``word`` between nodes.

    ``word`` and ``count`` are multiples of 4, the same in the :func:`await_tiles` that waits for them; ``lanes`` are
    the numbers of a tile's words. No word may be the sentinel. Nothing is put if the call is stopped. A word is staged
    at its own number, and has the same content for all ranks that it goes to in a call.
    """
    mask = lanes < count
    if network.puts:
        address = call.own.to(tl.int64)
        staged = network.staging + word // 4
        for part in tl.static_range(PARTS):
            sync.store_to(call, address, staged + part * (count // 4), lanes, parts[part], mask, False)
        if (count > 0) & (call.live != 0):
            arrival = (network.quads + word // 4).to(tl.int64) * 16
            nbytes = count.to(tl.int64) * (4 * PARTS)
            put_nbi_block(target[0] + arrival, address + staged.to(tl.int64) * 16, nbytes, target[1])
    else:
        for part in tl.static_range(PARTS):
            quads = network.quads + (word + part * count) // 4
            sync.store_to(call, target[0], quads, lanes, parts[part], mask, False)


@triton.jit
def load_tiles(call, network, words, lanes, counts, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """Load what has arrived of COUNT puts of PARTS tiles. All loads are issued before any is used.

    Words beyond the counts read as arrived.
    """
    tiles = ()
    for i in tl.static_range(COUNT):
        for part in tl.static_range(PARTS):
            quads = network.quads + (words[i] + part * counts[i]) // 4
            slot = sync.words_at(call.own.to(tl.int64), quads) + lanes
            tiles = tiles + (tl.load(slot, mask=lanes < counts[i], other=0, volatile=True),)
    return tiles


@triton.jit
def clear_tiles(call, network, words, lanes, counts, PARTS: tl.constexpr, COUNT: tl.constexpr):
    """Restore the sentinels in place of the words that :func:`load_tiles`, called with the same arguments, found."""
    clean = tl.full([lanes.shape[0]], SENTINEL, tl.int32)
    for i in tl.static_range(COUNT):
        for part in tl.static_range(PARTS):
            quads = network.quads + (words[i] + part * counts[i]) // 4
            tl.store(sync.words_at(call.own.to(tl.int64), quads) + lanes, clean, mask=lanes < counts[i])


@triton.jit
def await_tiles(
    call,
    network,
    words,
    lanes,
    counts,
    first,
    step,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Wait for COUNT puts of this call, of PARTS tiles each. Returns (tiles, call).

    Put i has ``counts[i]`` words per tile, beginning at ``words[i]``, and comes from rank ``first + i * step``; its
    tiles are those from ``i * PARTS`` on. Wait for each put only once, as its slots may be cleared here. Use the
    returned ``call`` from here on: if the call was stopped, ``live`` is 0 and the tiles are not valid.

    DEPTH is the number of ranks that the data pass through on their way here, beyond the sender. Each makes the
    deadline a GRACE-th of the timeout later, so that ranks nearer to one that stopped give up first, and name it.
    """
    tiles = load_tiles(call, network, words, lanes, counts, PARTS, COUNT)
    waiting = sync.any_missing(tiles, call.epoch, False, PARTS * COUNT) & call.live
    started = call.started
    live = call.live
    polls = 0
    while waiting != 0:
        yield_core()
        tiles = load_tiles(call, network, words, lanes, counts, PARTS, COUNT)
        waiting = sync.any_missing(tiles, call.epoch, False, PARTS * COUNT)
        polls += 1
        if polls % POLLS_PER_CHECK == 0:
            late_ranks = call.rank * 0
            for i in tl.static_range(COUNT):
                for part in tl.static_range(PARTS):
                    missing = sync.missing_words(tiles[i * PARTS + part], call.epoch, False)
                    late_ranks = late_ranks | (tl.max(missing.to(tl.int32), axis=0) << (first + i * step))
            grace = tl.atomic_add(call.own + TIMEOUT, 0, sem="relaxed", scope="sys") // GRACE * DEPTH
            later = tl.where(started == 0, started, started + grace)
            checked, live = sync.check_deadline(call, later, late_ranks, True, WORLD)
            started = tl.where(started == 0, checked, started)
            waiting = waiting & live
    if network.clears:
        clear_tiles(call, network, words, lanes, counts, PARTS, COUNT)
    return tiles, sync.with_status(call, live, started)
