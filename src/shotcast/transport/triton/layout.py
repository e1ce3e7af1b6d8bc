"""The layout of a rank's region of symmetric memory: plain numbers for the host and the kernels.

A region consists of the parts of :class:`WorkspaceLayout` in their order, behind the control block: two generations of
flag cells and of staged data, and three of sentinel slots. Offsets never depend on a call, so calls of different sizes
cannot overlap; only the window is divided anew by each call that passes through it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shotcast.hardware.nodes import folded
from shotcast.units import align_up
from shotcast.wire import DTYPES, FP8_BLOCK, MAX_SMS, MAX_WORLD_SIZE, REDUCIBLE, Op, slice_bytes

# Control block, in 64-bit words. Peers write only ABORT, HEADERS, CREDITS, MESSAGE_HEADERS and RECEIVES_BEGUN.
TIMEOUT = 6  # deadline of a call, in ns
STATUS = 7  # address of the host's words (pinned), listed below
CLOCK = 8  # latest time that any waiting program has read
GONE = 9  # a bit for each rank whose process has ended, as programs have found it in the host's word
HEADERS = 32  # [2 parities of the epoch][8 ranks][HEADER_WORDS]
SENT = 64  # [8 peers][CHANNELS] chunks sent to each peer
RECEIVED = SENT + 8 * 32  # [8 peers][CHANNELS] chunks received from each peer
CREDITS = RECEIVED + 8 * 32  # [8 peers][CHANNELS] chunks from this rank that each peer has received
MESSAGE_HEADERS = CREDITS + 8 * 32  # [8 peers][MESSAGE_SLOTS][HEADER_WORDS] headers of messages from each peer
RECEIVES_BEGUN = MESSAGE_HEADERS + 8 * 16 * 2  # [8 peers] messages from this rank that each peer has begun to receive
# [8 peers][2 sides][2] messages begun, and their chunks, as the sender (side 0) and as the receiver (side 1)
MESSAGE_COUNTS = RECEIVES_BEGUN + 16
MESSAGE_READERS = MESSAGE_COUNTS + 32  # programs of the current send or recv that have read MESSAGE_COUNTS
MESSAGE_MISMATCH = MESSAGE_READERS + 1  # [2][HEADER_WORDS] the header received, and the one that this rank expected
WIDE_HEADERS = 1152  # [2 parities of the epoch][16 ranks][HEADER_WORDS], in place of HEADERS, for more than 8 ranks
PARTS_CAME = 1216  # the epoch of an all_to_all with a part that differs, then [8 ranks] bytes that came, and expected
# What every program of a call reads first, in COPIES places: program p reads copy p % COPIES. (One place serves about
# one load in a nanosecond, so a thousand programs would wait for each other there.) Addresses are those of copy 0.
COPIES = 32
COPY_WORDS = 16  # from copy to copy: 128 bytes, a line; peers write its abort word, which is rare
EPOCH = 1280  # number of the next call
GENERATION = EPOCH + 1  # that of the next call with slots (0, 1 or 2); above 2 bits, the extent of the latest such call
ABORT = EPOCH + 2  # 0, or the fault that stopped the communicator (wire.Fault)
READERS = EPOCH + 3  # programs of the current call that have read this copy, but for program 0
CONTROL_WORDS = 2048

# Words of the host's memory, in 64-bit words from the address in STATUS; each has a separate cache line.
HOST_FAULT = 0  # the abort word, once a call of this rank has seen it
HOST_GONE = 8  # a bit for each rank whose process has ended; the host sets it, past all streams
HOST_WAIT = 16  # the fault to expect of a call that has waited for WAIT_NOTICE_NS; stored again at every check
HOST_WORDS = 24

HOST_LOOK_NS = 2_000_000
"""The wait, in ns, after which a program looks for the host's marks; a look takes several microseconds."""

WAIT_NOTICE_NS = 5_000_000_000
"""The wait, in ns, after which a call tells the host which ranks it waits for."""

MOST_RANKS = 16
"""The most ranks served by kernels that put to other hosts: as many as a fault can name at once."""

HEADER_WORDS = 2
"""The number of 64-bit words in a header; each has the epoch in its 16 highest bits."""

CHANNELS = 32
"""The number of programs that carry the chunks of a message; each channel has its own chunks and credits."""
MESSAGE_SLOTS = 16
"""The number of messages that may be in flight between two ranks, if there is room for their chunks."""
CHUNK_WORDS = 512
"""The number of 32-bit words in a chunk of a message. Two chunks per channel may be in flight."""
CHUNKS_IN_FLIGHT = 2 * CHANNELS
"""The number of chunks that may be in flight between two ranks. Each uses the channel after the previous one's."""

FLAG_ROWS = 1024
"""The number of programs in a grid that can raise flags; each has a row with one 64-bit word for each rank."""
FLAG_ROW_QUADS = MAX_WORLD_SIZE // 2

PROGRESS_ROWS = MAX_SMS
"""The number of programs in a grid that can publish their progress; each has a row with a 64-bit word for each rank."""
PROGRESS_STEP_BITS = 20
"""Bits of a progress word that count the steps of a call; the epoch is above them."""

BLOCKS = 64
"""The most blocks of memory in which a rank makes tensors that all ranks map (:mod:`shotcast.memory.block_heap`)."""
PLACE_AT = 48
"""The lowest bit of the block number, plus one, in a tensor's place; its first byte in the block is below."""
PLACE_ROWS = 2 * PROGRESS_ROWS
"""Rows for the places of all ranks' tensors: each program that publishes its progress has two, for alternate calls."""
PLACE_ROW_QUADS = MAX_WORLD_SIZE
"""Quads of such a row, which has two 64-bit words for each rank: the places of ``x`` and of ``out``."""

WINDOW_BYTES = 16 << 20
"""The most bytes of a window, which should stay in a GPU's cache while a message of any size passes."""
ENGINE_ROOM = 32 << 20
"""The longest message of the smallest region that supports calls by copy engines."""
_ENGINE_BYTES = {False: 256 << 20, True: 64 << 20}
"""Bytes of such a region for data that copy engines bring: enough for an all_reduce of 128 MiB at once, or of 32 MiB if
the communicator is exclusive, whose calls use copy engines only by name."""
CHUNKS_IN_WINDOW = 3
"""Places in the window for uneven parts: one is sent while the previous one is read, possibly before the reader of the
one before that has said that it is done."""
STEPS_IN_FLIGHT = 2
"""Steps from sending a chunk through the window to taking it; a place is reused after twice as many."""


CELLS_TAKE = 4
"""The room that a divided message takes in flag cells, relative to slots: twice its bytes, out of half the room."""

QUAD = 16
"""Bytes of a quad: four 32-bit words, the unit of extents and offsets, and the widest access of a GPU thread."""

MAX_SPREAD_CELLS = 1024
"""A fused call with at most this many cells spaces them 128 bytes apart."""

CLEAR_AFTER_READ_BYTES = 4 << 20
"""Calls with larger slots clear them after reading them. Smaller slots are cleared by the next call while it waits."""

NETWORK_BYTES = 8 << 20
"""The most bytes in a generation of the slots between nodes; a longer message passes in pieces."""
_NETWORK_SLACK = 64
"""Words of such a slot beyond those of a slice, of which the last is rounded up."""
GRACE = 32
"""The divisor of the timeout that gives the extra wait for each rank that the data pass through."""

_MAILBOX_BYTES = MAX_WORLD_SIZE * CHANNELS * 2 * CHUNK_WORDS * 8
_FLAG_BYTES = FLAG_ROWS * FLAG_ROW_QUADS * QUAD
_PROGRESS_BYTES = PROGRESS_ROWS * FLAG_ROW_QUADS * QUAD
_PLACE_BYTES = align_up(PLACE_ROWS * PLACE_ROW_QUADS * QUAD, 4096)

FIRST_CAPACITY = 8 << 20
"""The longest message of a communicator's first region, which takes about 82 MiB."""
_GROWTH = 4


def capacities(max_bytes: int) -> tuple[int, ...]:
    """Return, ascending, the longest messages of the regions that a communicator for ``max_bytes`` may have."""
    between = [capacity for power in range(1, 8) if 2 * (capacity := FIRST_CAPACITY * _GROWTH**power) <= max_bytes]
    return (*([FIRST_CAPACITY] if FIRST_CAPACITY < max_bytes else []), *between, max_bytes)


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """The parts of a region for messages up to ``max_bytes``: offsets and sizes in quads, ``nbytes`` in bytes.

    ``piece_bytes`` is the longest message, or piece of one, that the slots between nodes hold.
    """

    max_bytes: int
    mailboxes_at: int
    flags_at: int
    progress_at: int
    places_at: int
    cells_at: int
    cells_quads: int
    slots_at: int
    slots_quads: int
    staging_at: int
    staging_quads: int
    window_at: int
    window_quads: int
    copies_at: int
    copies_quads: int
    piece_bytes: int
    nbytes: int

    @classmethod
    def for_messages(
        cls,
        max_bytes: int,
        mailboxes: bool = True,
        nodes: int = 1,
        ranks_per_node: int = MAX_WORLD_SIZE,
        staged: bool = False,
        engine_bytes: int = 0,
    ) -> WorkspaceLayout:
        """Lay out a region for messages up to ``max_bytes``.

        Two-shot needs room for a message twice (once for each shot), and flag cells carry half as much data in as many
        bytes. Between nodes, a rank exchanges a slice of a message, and a word of two 16-bit floats takes two words of
        float32; the slots for that lie behind the others of a generation. If they are ``staged`` to be put, they take
        the same room again, twice, and there is no window, which needs all ranks mapped. Copy engines bring up to
        ``engine_bytes`` at once. Only one region of a communicator needs ``mailboxes``.
        """
        slack = 2 * MAX_WORLD_SIZE * QUAD
        slot_bytes = 8 * network_slots(nodes)
        longest = slot_bytes * (slice_bytes(max_bytes, ranks_per_node) // 4 + _NETWORK_SLACK)
        network = align_up(min(longest, NETWORK_BYTES), 4096) if nodes > 1 else 0
        piece = (network // slot_bytes - _NETWORK_SLACK) * 4 * ranks_per_node if nodes > 1 else max_bytes
        slots = align_up(2 * (max_bytes + slack), 4096) + network
        cells = align_up(max_bytes + 2 * slack, 4096)
        staging = network if staged else 0
        window = 0 if staged else window_bytes(max_bytes)
        copies = engine_bytes if not staged and max_bytes >= ENGINE_ROOM else 0
        parts = {
            "mailboxes_at": _MAILBOX_BYTES if mailboxes else 0,
            "flags_at": _FLAG_BYTES,
            "progress_at": _PROGRESS_BYTES,
            "places_at": _PLACE_BYTES,
            "cells_at": 2 * cells,
            "slots_at": 3 * slots,
            "staging_at": 2 * staging,
            "window_at": window,
            "copies_at": copies,
        }
        *starts, nbytes = itertools.accumulate(parts.values(), initial=CONTROL_WORDS * 8)
        return cls(
            max_bytes=max_bytes,
            cells_quads=cells // QUAD,
            slots_quads=slots // QUAD,
            staging_quads=staging // QUAD,
            window_quads=window // QUAD,
            copies_quads=copies // QUAD,
            piece_bytes=min(piece, max_bytes) // QUAD * QUAD,
            nbytes=nbytes,
            **{name: start // QUAD for name, start in zip(parts, starts, strict=True)},
        )


def piece(dtype: str, max_bytes: int) -> int:
    """Return the longest piece of a divided message in a region for messages up to ``max_bytes``.

    A piece takes up its bytes twice, once for each shot: in slots, or in half as many flag cells.
    """
    return max_bytes // (1 if dtype in REDUCIBLE else CELLS_TAKE) // QUAD * QUAD


def places_in_window(op: Op) -> int:
    """Return the number of window places for a program's chunks from each rank; an all_reduce has as many for sums."""
    return (4 if op is Op.ALL_REDUCE else 2) * STEPS_IN_FLIGHT


def places_of_copies(op: Op, chunks: int) -> int:
    """Return the number of places for each rank's chunks from copy engines: two in turn, and as many for sums."""
    return min(chunks, 2) * (2 if op is Op.ALL_REDUCE else 1)


def bytes_of_copies(exclusive: bool) -> int:
    """Return the bytes that a communicator's large regions set aside for the data of copy engines."""
    return _ENGINE_BYTES[exclusive]


def window_bytes(max_bytes: int) -> int:
    """Return the bytes of the window in a region for messages up to ``max_bytes``, or the least in a larger one."""
    return min(align_up(2 * max_bytes, 4096), WINDOW_BYTES)


def network_slots(nodes: int) -> int:
    """Return the most slots, each for the partial sums of a slice, that an exchange between nodes takes at a rank: one
    for each other node, or for each step, for folding and for words.
    """
    return max(nodes - 1, nodes.bit_length() + (folded(nodes) > 0))


def row_cell_count(max_bytes: int) -> int:
    """Return how many 64-bit cells programs need to add up the sum of squares of a row whose tiles they hold.

    There is one cell for each tile of 128 words, rounded up to a power of two for each row.
    """
    return max(2 * (max_bytes // 512 + MAX_WORLD_SIZE), MAX_SPREAD_CELLS * row_cell_stride(1, MAX_SPREAD_CELLS))


def row_cell_stride(rows: int, parts: int) -> int:
    """Return the distance, in cells, between the cells of neighboring tiles: 128 bytes in a call of few cells."""
    return 16 if rows << (parts - 1).bit_length() <= MAX_SPREAD_CELLS else 1


def fp8_slot_quads(nbytes: int, world_size: int, dtype: str) -> int:
    """Return the size of a ``two_shot_fp8`` slot, in quads: the words of a slice, then its scales.

    Each shot has one slot for each rank.
    """
    slice_quads, block = slice_bytes(nbytes, world_size) // QUAD, FP8_BLOCK * DTYPES[dtype] // QUAD
    group_blocks = DTYPES[dtype]  # four of float32, two of 16-bit floats
    groups, rest = divmod(slice_quads, block * group_blocks)
    return groups * block + min(rest, block) + -(-(groups + (rest > 0)) * group_blocks // 4)
