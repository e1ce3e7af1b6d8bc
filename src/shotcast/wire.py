"""Facts that all ranks of a communicator must agree on, bit for bit.

These are codes, the header that every call exchanges, the abort word that ends calls, and the partition of a
message into slices. All of it is plain integers, so that kernels, compiled host code and tests share one statement.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shotcast.errors import ConfigError
from shotcast.units import align_up, format_size

MAX_WORLD_SIZE = 8
"""The most ranks that own kernels serve on one node: the GPUs that NVLink joins."""

MAX_SMS = 256
"""The most SMs that a call may be given to keep to."""

MAX_NODES = 64
"""The most nodes that own kernels serve."""

SENTINEL = 0xFFFFFFFF
"""A 32-bit word that means "not arrived yet". Data that contains it is sent with :data:`SENTINEL_STAND_IN`."""
SENTINEL_STAND_IN = 0x7FFFFFFF
SLICE_ALIGN = 16
"""Slices of a message begin at multiples of this many bytes."""


class NodeShape(NamedTuple):
    """The numbers in a division of ranks into equally large nodes; ranks of one node share memory."""

    nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


class Op(enum.IntEnum):
    """Operations, with their code in the header."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    SEND = 6
    RECV = 7
    BARRIER = 8
    ALL_REDUCE_RMS_NORM = 9
    REDUCE_SCATTER_RMS_NORM = 10
    REDUCE_SCATTER_RMS_NORM_ALL_GATHER = 11

    __hash__ = int.__hash__  # an enum hashes its name, which takes longer, and every call is looked up

    @property
    def label(self) -> str:
        return self.name.lower()


DTYPES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
"""Item size by dtype name; the header carries the position. A barrier sends the position behind the last."""

REDUCIBLE = ("float32", "float16", "bfloat16")
"""Dtypes the own kernels add up. Everything in DTYPES can be copied."""

SIXTEEN_BITS = ("float16", "bfloat16")
"""Dtypes in which sums of nodes may pass between nodes, rounded."""

FP8_BLOCK = 128
"""Elements that share a scale in FP8 transport; ``docs/reference/numerics.md`` has all of it."""
FP8_LARGEST = 448.0
FP8_FLOOR = 0x0D800000
"""The least "largest absolute value" of a block, 2^-100, as bits of a float32."""

_DTYPE_NAMES = (*DTYPES, "-")
_NO_DTYPE = len(DTYPES)

MAX_ALGORITHMS = 256
"""Algorithms that a header tells apart."""
MAX_NBYTES = 1 << 47
"""Headers hold sizes below this."""

# The lowest bits of the fields of the two words of a header; see HeaderWords.
_WRITTEN = 1 << 47
_PIECE_BITS, _LAUNCH_AT, _LAUNCH_BITS = 5, 5, 14
_ROOT_AT, _ROOT_BITS, _DTYPE_AT, _DTYPE_BITS, _ALGORITHM_AT = 19, 10, 29, 5, 34
OP_AT = 42
_PAYLOAD = (1 << 48) - 1


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The launch of an algorithm, the same on all ranks.

    GPU kernels use ``programs`` (thread blocks that carry data), ``block_words`` (32-bit words a tile) and
    ``num_warps``; compiled host code uses ``chunk_bytes`` (bytes of one pipeline step).
    """

    programs: int = 1
    block_words: int = 128
    num_warps: int = 1
    chunk_bytes: int = 0

    @property
    def digest(self) -> int:
        """The 14 bits that stand for the launch in a header."""
        digest = _fnv(f"{self.programs},{self.block_words},{self.num_warps},{self.chunk_bytes}")
        return (digest ^ digest >> _LAUNCH_BITS ^ digest >> 2 * _LAUNCH_BITS) & (1 << _LAUNCH_BITS) - 1


QUANTIZATIONS = ("", "static", "dynamic")
"""FP8 forms of a normed row: none; one scale a tensor, given by the caller; one scale a row, computed."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm that follows the sum in a fused call, row by row.

    Attributes:
        hidden: elements of a row.
        quantize: one of :data:`QUANTIZATIONS`.
        keeps_normed: the norm is (also) given in the dtype of the call.
    """

    hidden: int
    quantize: str = ""
    keeps_normed: bool = True

    @property
    def code(self) -> int:
        """The number that stands for the norm in the header's root field."""
        return QUANTIZATIONS.index(self.quantize) + (0 if self.keeps_normed else 4)


_NORM_CODES = {
    Norm(0, quantize, keeps).code: f", {quantize} FP8{' and the norm' if keeps else ''}"
    for quantize in QUANTIZATIONS[1:]
    for keeps in (True, False)
}
"""The root field of a fused call's header, in words."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call as an executor runs it.

    ``nbytes`` counts the tensor that defines the call: the input of all_reduce, reduce_scatter (whole), all_to_all,
    broadcast and send, the output of all_gather (whole) and recv. ``root`` is the root of a broadcast, or the peer of
    send and recv. ``sizes`` are the elements of each rank in an uneven all_gather, otherwise empty. ``norm`` belongs to
    the fused operations; their ``nbytes`` counts ``x``. A call may be made in pieces, each a plan of its own: then
    ``whole_nbytes`` counts what ``nbytes`` would count of the call, and ``piece`` is the number of the piece. ``room``
    is the longest message, in bytes, that the workspace of GPU kernels must at least be laid out for.
    """

    op: Op
    algorithm: str
    dtype: str
    nbytes: int
    root: int = 0
    sizes: tuple[int, ...] = ()
    launch: LaunchShape = LaunchShape()
    norm: Norm | None = None
    whole_nbytes: int = 0
    piece: int = 0
    room: int = 0


def _fnv(text: str) -> int:
    """Return 32 bits that stand for a text (FNV-1a)."""
    digest = 0x811C9DC5
    for byte in text.encode():
        digest = ((digest ^ byte) * 0x01000193) & 0xFFFFFFFF
    return digest


def sizes_digest(sizes: Sequence[int]) -> int:
    """Return 32 bits that stand for the sizes of all ranks in a header."""
    return _fnv(",".join(map(str, sizes)))


ANSWER = 1
"""The piece in the header by which the receiver of a message answers its sender, before the vendor library sends it."""


class HeaderWords(NamedTuple):
    """The two words of a header, 48 bits each. The sender puts the 16 low bits of the epoch above each of them.

    So each word says for itself whether it has come, and no two of them need to be stored at once.

    Attributes:
        size: bytes of the whole call, or the digest of the sizes of an uneven all_gather; bit 47 is always 1, so that
            no word is zero, which means "never written".
        call: from bit 0 up, piece 5 (modulo 32), digest of the launch 14, root 10, dtype 5, algorithm 8, operation 6.
    """

    size: int
    call: int

    @classmethod
    def of_cells(cls, cells: Sequence[int], epoch: int | None = None) -> HeaderWords | None:
        """Return the header in two 64-bit cells, or None if they hold none (of ``epoch``, where it is given)."""
        for cell in cells:
            if not cell or (epoch is not None and cell >> 48 & 0xFFFF != epoch & 0xFFFF):
                return None
        size, call = cells
        return cls(size & _PAYLOAD, call & _PAYLOAD)


def encode_header(plan: CallPlan, algorithm: int) -> HeaderWords:
    """Return the header of a call.

    Send and recv of one message have equal headers, so the operation of both is SEND and the root is the sender.

    Args:
        algorithm: the code of the plan's algorithm, below :data:`MAX_ALGORITHMS`.

    Raises:
        ConfigError: the size has no room.
    """
    size = sizes_digest(plan.sizes) if plan.sizes else plan.whole_nbytes or plan.nbytes
    if not 0 <= size < MAX_NBYTES:
        raise ConfigError(f"a message has from 0 to {MAX_NBYTES - 1} bytes, not {size}")
    dtype = _NO_DTYPE if plan.op is Op.BARRIER else _DTYPE_NAMES.index(plan.dtype)
    op = Op.SEND if plan.op is Op.RECV else plan.op
    call = int(op) << OP_AT | algorithm << _ALGORITHM_AT | dtype << _DTYPE_AT | plan.root << _ROOT_AT
    call |= plan.launch.digest << _LAUNCH_AT | plan.piece & (1 << _PIECE_BITS) - 1
    return HeaderWords(_WRITTEN | size, call)


@dataclass(frozen=True, slots=True)
class Header:
    """A header, read back. ``launch`` is the digest of the launch, ``piece`` the number of the piece modulo 32."""

    op: str
    dtype: str
    algorithm: str
    root: int
    nbytes: int
    launch: int
    piece: int

    @classmethod
    def decode(cls, words: HeaderWords, algorithms: Sequence[str] = ()) -> Header:
        """Read a header; ``algorithms`` are their names, in the order of their codes."""
        size, call = words
        op, algorithm, dtype = call >> OP_AT & 63, call >> _ALGORITHM_AT & 0xFF, call >> _DTYPE_AT & 31
        return cls(
            op=Op(op).label if op in Op._value2member_map_ else f"op {op}",
            dtype=_DTYPE_NAMES[dtype] if dtype < len(_DTYPE_NAMES) else f"dtype {dtype}",
            algorithm=algorithms[algorithm] if algorithm < len(algorithms) else f"algorithm {algorithm}",
            root=call >> _ROOT_AT & (1 << _ROOT_BITS) - 1,
            nbytes=size & ~_WRITTEN,
            launch=call >> _LAUNCH_AT & (1 << _LAUNCH_BITS) - 1,
            piece=call & (1 << _PIECE_BITS) - 1,
        )

    def differs(self, fields: Collection[str]) -> str:
        """Return the call in words, with those of its launch and piece that are among ``fields``, which differ."""
        end = f" in launch #{self.launch:04x}" if "launch" in fields else ""
        return f"{self}{end}{f', piece {self.piece}' if 'piece' in fields else ''}"

    def __str__(self) -> str:
        size, end = format_size(self.nbytes), ""
        if self.op in ("broadcast", "send"):
            end = f", {'root' if self.op == 'broadcast' else 'from rank'} {self.root}"
        elif self.op == "all_gather" and self.root == UNEVEN:
            size = f"uneven sizes #{self.nbytes:08x}"
        elif self.op.endswith(("_rms_norm", "_rms_norm_all_gather")):
            end = _NORM_CODES.get(self.root, "")
        elif self.root:
            end = f", reduction {self.root}"
        what = "the answer to a send" if self.op == "send" and self.piece == ANSWER else self.op
        return f"{what}({self.dtype}, {size}, {self.algorithm}{end})"


TIMEOUT, MISMATCH, DEAD, INTERRUPTED, UNREACHABLE = 1, 2, 3, 4, 5
"""Kinds of faults: a rank is late, calls differ, a rank's process has ended, a signal ended a rank's call, the
connection to a rank was lost or its node does not answer."""
UNEVEN = 1
"""The root field of an uneven all_gather, whose size field holds the digest of the sizes of all ranks."""

MAX_NAMED_RANKS = 1024
"""Ranks that an abort word can name: numbers below this."""
_BLOCK = 16
FAULT_MASK_AT, FAULT_BLOCK_AT, FAULT_OP_AT, FAULT_KIND_AT = 32, 48, 54, 60
"""The lowest bits of the fields above the epoch in an abort word."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An abort word, read back: kind, the ranks it names, operation and 32 bits of the epoch.

    Bits from 0 up: epoch 32, rank mask 16, block 6, op 6, kind 4. The mask is of the 16 ranks from 16 * block on. Zero
    means no fault.
    """

    kind: int
    op: str
    ranks: tuple[int, ...]
    epoch32: int

    @classmethod
    def decode(cls, word: int) -> Fault:
        mask, op = word >> FAULT_MASK_AT & 0xFFFF, word >> FAULT_OP_AT & 63
        first = (word >> FAULT_BLOCK_AT & 63) * _BLOCK
        return cls(
            kind=word >> FAULT_KIND_AT & 15,
            op=Op(op).label if op in Op._value2member_map_ else f"op {op}",
            ranks=tuple(first + r for r in range(_BLOCK) if mask >> r & 1),
            epoch32=word & 0xFFFFFFFF,
        )


def encode_fault(kind: int, op: int, ranks: Collection[int], epoch: int) -> int:
    """Return the abort word of a fault; see :class:`Fault`.

    A word names the ranks of one block of 16: of the ranks given, those in the block of the lowest.

    Args:
        kind: TIMEOUT, MISMATCH, DEAD, INTERRUPTED or UNREACHABLE.
        ranks: the ranks at fault, below :data:`MAX_NAMED_RANKS`.
        epoch: of the call; for a message, its number.
    """
    block = min(ranks, default=0) // _BLOCK
    mask = sum(1 << rank % _BLOCK for rank in set(ranks) if rank // _BLOCK == block)
    fields = kind << FAULT_KIND_AT | op << FAULT_OP_AT | block << FAULT_BLOCK_AT | mask << FAULT_MASK_AT
    return fields | epoch & 0xFFFFFFFF


def slice_bytes(nbytes: int, world_size: int) -> int:
    """Return the bytes of each rank's slice of a message; the last slices may be shorter or empty."""
    return align_up(-(-nbytes // world_size), SLICE_ALIGN)


_MOST_MORE_BYTES = 64 << 10
"""Bytes that a rank may send more to save a step over the network: about what passes in the time of a step."""


def in_one_step(nodes: int, slice_bytes: int) -> bool:
    """Return whether each node sends its rounded sums to all others, rather than parts in two steps.

    Of a slice of R bytes, that sends (H - 1) R bytes rather than 2 (H - 1) R / H, and has the same result.
    """
    return (nodes - 1) * (nodes - 2) * slice_bytes <= nodes * _MOST_MORE_BYTES
