"""The layout of a rank's private network record, as byte offsets from its start; all words are int64.

A *transfer* is a set of frames that are sent and received at once. Each frame has an entry; sent frames come first,
then received frames. A frame is a 32-byte header followed by its data.
"""

from __future__ import annotations

from shotcast.wire import MAX_NODES

NODES = 0
NODE = 8
ACCUMULATOR = 16  # the address of this rank's slice in float32; the slots of arriving slices follow it
SENDS = 48  # sent frames of the transfer
RECEIVES = 56  # received frames of the transfer
LOST = 64  # one more than the node whose connection has ended; 0 for none
LOST_ERROR = 72  # the errno with which it ended; 0 if it was closed
LOOKED = 80  # the time of the last check for Ctrl-C
OPERANDS = 96  # the addresses of two slices to add
IOVECS = 128  # two struct iovec
MESSAGE = 192  # a struct msghdr
DESCRIPTORS = 256  # of the connections, by node
POINTERS = DESCRIPTORS + 8 * MAX_NODES  # the addresses of the slices to add
RANGES = POINTERS + 8 * MAX_NODES  # the ranges that halving has divided, two words a step
POLLED = RANGES + 128  # an array of struct pollfd
ENTRIES = POLLED + 16 * MAX_NODES
ENTRY_BYTES = 128
NETWORK_WORDS = (ENTRIES + 2 * MAX_NODES * ENTRY_BYTES) // 8

# Words of an entry.
DESCRIPTOR = 0
PEER = 8  # its node
DATA = 16  # the address of the data
BYTES = 24  # of the data
MOVED = 32  # bytes of the frame that have been sent or received
FRAME_HEADER = 40  # four words
EXPECTED = 72  # the header that a frame must have, four words

READY = 104  # whether it may be possible to move more now

FRAME_HEADER_BYTES = 32
"""The header of a frame: the epoch, the two words of the call's header, and the step above the bytes of the data."""
STEP_AT = 48
"""The lowest bit of the step in the last word of a frame's header."""
