"""Where things lie in a rank's region of symmetric memory; plain numbers for host and kernels.

A region is, in this order: the control block, mailboxes of send and recv, flags of programs, two generations of flag
cells, three generations of sentinel slots. Offsets never depend on a call, so calls of different sizes cannot overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from shotcast.units import align_up
from shotcast.wire import DTYPES, FP8_BLOCK, MAX_WORLD_SIZE, Norm, slice_bytes

# Control block, in 64-bit words. Peers write only ABORT, HEADERS, CREDITS, MESSAGE_HEADERS and RECEIVES_BEGUN, which
# have cache lines of their own.
EPOCH = 0  # number of the next call
READERS = 1  # programs of the running call that have read EPOCH
GENERATION = 2  # 0, 1 or 2: the slots that the next call with slots uses
EXTENT = 3  # 3 words: quads that each generation holds
TIMEOUT = 6  # ns that a call may wait
STATUS = 7  # address of the host's copy of the abort word (pinned)
CLOCK = 8  # latest time any waiting program has seen
ABORT = 16  # set once, see wire.Fault
HEADERS = 32  # [2 parities][8 ranks]
SENT = 64  # [8 peers][CHANNELS] chunks sent to each peer
RECEIVED = SENT + 8 * 32  # [8 peers][CHANNELS] chunks received from each peer
CREDITS = RECEIVED + 8 * 32  # [8 peers][CHANNELS] chunks that each peer has taken from the mailbox here
MESSAGE_HEADERS = CREDITS + 8 * 32  # [8 peers][MESSAGE_SLOTS] of messages from each peer
RECEIVES_BEGUN = MESSAGE_HEADERS + 8 * 16  # [8 peers] messages of mine that each peer has begun to receive
MESSAGE_COUNTS = (
    RECEIVES_BEGUN + 16
)  # [8 peers][2 sides][2] messages begun, and their chunks, as sender (0) and as receiver (1)
MESSAGE_READERS = MESSAGE_COUNTS + 32  # programs of the running send or recv that have read MESSAGE_COUNTS
MESSAGE_MISMATCH = MESSAGE_READERS + 1  # [2] the header that came, of 64 bits, and the one that this rank expected
CONTROL_WORDS = 1024

CHANNELS = 32
"""Programs of a send or recv; each has its own chunks and credits."""
MESSAGE_SLOTS = 16
"""Messages that may be under way between two ranks, as far as their chunks have room."""
CHUNK_WORDS = 512
"""32-bit words of a chunk of a message; two chunks a channel are in flight."""
CHUNKS_IN_FLIGHT = 2 * CHANNELS
"""Chunks that may be under way between two ranks: each has the lane after the one before."""

FLAG_ROWS = 1024
"""Programs of a grid that can raise flags; each has a row of one 64-bit word a rank."""
FLAG_ROW_QUADS = MAX_WORLD_SIZE // 2

QUAD = 16
"""Bytes of a quad: four 32-bit words, the unit of extents and offsets, and the widest access of a GPU thread."""

MAX_SPREAD_CELLS = 1024
"""Cells of the largest fused call that has them 128 bytes apart."""

CLEAR_AFTER_READ_BYTES = 4 << 20
"""Calls with larger slots clear them as they read; of smaller ones the next call clears them, hidden under its wait."""

_MAILBOX_BYTES = MAX_WORLD_SIZE * CHANNELS * 2 * CHUNK_WORDS * 8
_FLAG_BYTES = FLAG_ROWS * FLAG_ROW_QUADS * QUAD


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in quads, and sizes, of a region for messages up to ``max_bytes``."""

    max_bytes: int
    mailboxes_at: int
    flags_at: int
    cells_at: int
    cells_quads: int
    slots_at: int
    slots_quads: int
    nbytes: int

    @classmethod
    def for_messages(cls, max_bytes: int) -> Layout:
        """Two-shot needs a message twice (both shots); flag cells carry half as much in as many bytes."""
        slack = 2 * MAX_WORLD_SIZE * QUAD
        slots = align_up(2 * (max_bytes + slack), 4096)
        cells = align_up(max_bytes + 2 * slack, 4096)
        mailboxes_at = CONTROL_WORDS * 8
        flags_at = mailboxes_at + _MAILBOX_BYTES
        cells_at = flags_at + _FLAG_BYTES
        slots_at = cells_at + 2 * cells
        return cls(
            max_bytes=max_bytes,
            mailboxes_at=mailboxes_at // QUAD,
            flags_at=flags_at // QUAD,
            cells_at=cells_at // QUAD,
            cells_quads=cells // QUAD,
            slots_at=slots_at // QUAD,
            slots_quads=slots // QUAD,
            nbytes=slots_at + 3 * slots,
        )


def row_cell_count(max_bytes: int) -> int:
    """Cells of 8 bytes by which programs with tiles of a row add up: one a tile of 128 words, up to twice as many.

    Rows of one tile need none.
    """
    return max(2 * (max_bytes // 512 + MAX_WORLD_SIZE), MAX_SPREAD_CELLS * row_cell_stride(1, MAX_SPREAD_CELLS))


def row_cell_stride(rows: int, parts: int) -> int:
    """Cells from one part's to the next: 128 bytes in a call of few. Each row has a power of two of them."""
    return 16 if rows << (parts - 1).bit_length() <= MAX_SPREAD_CELLS else 1


def fp8_slot_quads(nbytes: int, world_size: int, dtype: str) -> int:
    """Quads of a slot of ``two_shot_fp8``: a slice's words, then its scales. Each shot has one slot for each rank."""
    slice_quads, block = slice_bytes(nbytes, world_size) // QUAD, FP8_BLOCK * DTYPES[dtype] // QUAD
    blocks = DTYPES[dtype]  # of a group: four of float32, two of 16-bit floats
    whole, rest = divmod(slice_quads, block * blocks)
    return whole * block + min(rest, block) + -(-(whole + (rest > 0)) * blocks // 4)


def gathered_row_quads(norm: Norm, dtype: str) -> int:
    """Quads that a normed row takes on its way to all ranks: what of it was asked for, and a scale of its own."""
    quads = norm.hidden * DTYPES[dtype] // QUAD if norm.keeps_normed else 0
    if norm.quantize:
        quads += -(-norm.hidden // QUAD) + (norm.quantize == "dynamic")
    return quads
