"""The layout of a rank's shared region, its private context and plan records.

The shared region of a rank, mapped by all ranks:

    control     progress, two headers and the places of two calls' tensors on one cache line, written only by the owner
                and polled by the peers; the abort word, written by whoever finds a fault; counters of messages for
                each peer
    generations two staging areas, used by even and odd steps
    outboxes    for each receiver: ``OUTBOX_SLOTS`` slots of a chunk, each with its header before it
    heap        user tensors

The context and plan records are private arrays of int64; offsets into them are in bytes.
"""

from __future__ import annotations

LINE = 128
"""Bytes between words of different writers; cores prefetch pairs of 64-byte lines."""

# Control words, by byte offset in the region.
PROGRESS = 0
HEADERS = 8
PLACES = 40  # of x and out: the bytes from the start of the region; 0 for a tensor that is not in it
ABORT = LINE
HEARTBEAT = 2 * LINE  # the time at which this rank was last seen waiting
WAITS_FOR = HEARTBEAT + 8  # the target of that wait: 0 for a collective call, 1 + the peer for a message
SENT = 1024
RECEIVED = 2048
CONTROL_BYTES = 4096

OUTBOX_SLOTS = 4
OUTBOX_HEADER_BYTES = 64

YIELD_NS = 1_000_000
"""Time that a wait spends yielding its core before it sleeps."""
INTERRUPT_NS = 20_000_000
"""Time between checks for Ctrl-C; each check takes the interpreter lock."""

# Context words.
RANK, WORLD, EPOCH, STEP, DEADLINE, TIMEOUT, SPINS, GENERATION, OUTBOX_CHUNK = range(0, 72, 8)
HEADER_WORD = 72  # the first word of the header of the current call, with its epoch
GONE = 80  # a bit for each rank whose process has ended; another thread sets it
NETWORK = 88  # the address of the record of the network between nodes; 0 on one node
PARTS_PEER = 96  # of a failed uneven all_to_all: the rank that sends a part of an unexpected size,
PARTS_SENT = 104  # and its bytes
REGIONS = 128
SOURCES = 256
ROW = 320
HEAP = 576  # the bytes from the start of a region to its heap, and to the end of that; both 0 if there is none
HEAP_END = 584
CONTEXT_WORDS = 80

# Words of ROW, the state of a fused call: addresses of the next element (0 if not wanted), advanced during the call;
# eps and the start of sums, as float32 bits; the number of columns of the row summed so far; and, as float32, the
# partial sums of the squares (for a LayerNorm, of the values), in which column c goes to number c % 32.
RESIDUAL, NEW_RESIDUAL, WEIGHT, NORMED, QUANTIZED, SCALE, DYNAMIC, EPS, START, COLUMN, BIAS = range(0, 88, 8)
SQUARES = 128
SQUARES_LANES = 32

# Plan words. EXTENTS and OFFSETS are by rank: sizes and offsets, in bytes, of the parts of an all_gather. ADD, NORM and
# HIDDEN are for fused calls. PARTIAL, ADD_PARTIAL and ROUND are the arithmetic of sums over nodes: of ranks to float32,
# of float32, and of float32 to the dtype; other reductions are in the dtype itself, and PARTIAL_BYTES is the size of an
# element between nodes. SLOT is the bytes from one slice that has arrived from another node to the next, and TOTAL
# those to the sum that is normed. MESSAGE_NUMBER counts the messages between two ranks on different nodes, whose ROOT
# is the descriptor of their connection.
HEADER = 0  # of two words
CHUNK, ROOT, ITEMSIZE, ARITHMETIC = range(16, 48, 8)
EXTENTS = 64
OFFSETS = 128
ADD, NORM, HIDDEN, NBYTES, PARTIAL, ADD_PARTIAL, ROUND = range(192, 248, 8)
SLOT, MESSAGE_NUMBER, TOTAL, ROOT_NODE, PARTIAL_BYTES = range(248, 288, 8)
PARTS = 288  # offset and size of the part of each rank, node by node; behind the words of all plans. In an uneven
# all_to_all they describe the parts that this rank sends to each rank
PLAN_WORDS = 36
