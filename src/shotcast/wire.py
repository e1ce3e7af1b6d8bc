"""Facts that all ranks of a communicator must agree on, bit for bit.

These are codes, the header that every call exchanges, the abort word that ends calls, and the partition of a message
into slices. All of it is plain integers, so that kernels, compiled host code and tests share one definition.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shotcast.errors import ConfigError
from shotcast.units import align_up, format_size

MAX_WORLD_SIZE = 8
"""The maximum number of ranks per node for native kernels: the GPUs joined by NVLink."""

MAX_SMS = 256
"""The largest SM limit that a call may have."""

MAX_NODES = 64
"""The maximum number of nodes for native kernels."""

SENTINEL = 0xFFFFFFFF
"""A 32-bit word that means "not arrived yet". Data that contains it is sent with :data:`SENTINEL_STAND_IN`."""
SENTINEL_STAND_IN = 0x7FFFFFFF
SLICE_ALIGN = 16
"""The alignment of a message's slices in bytes."""


class NodeShape(NamedTuple):
    """A division of ranks into equal nodes, in numbers; ranks of one node share memory."""

    nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.ranks_per_node}"


class Op(enum.IntEnum):
    """Operations, with their header codes."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    SEND = 6
    RECV = 7
    BARRIER = 8
    ALL_REDUCE_RMS_NORM = 9
    REDUCE = 12
    GATHER = 13
    SCATTER = 14
    ALL_TO_ALL_UNEVEN = 15
    ALL_REDUCE_LAYER_NORM = 16

    __hash__ = int.__hash__  # an enum hashes its name, which takes longer, and every call is looked up

    @property
    def label(self) -> str:
        return self.name.lower()


ALL_REDUCE_NORMS = (Op.ALL_REDUCE_RMS_NORM, Op.ALL_REDUCE_LAYER_NORM)
"""Operations that normalize the rows of a sum."""

_LABELS = {int(op): op.label for op in Op}
"""Operations by header code."""


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
"""Item size by dtype name; the header carries the position. A barrier sends the position after the last."""

REDUCIBLE = ("float32", "float16", "bfloat16")
"""Dtypes whose sums are in float32, as used by norms, rings, sums of nodes and lossy transports.

Their words pass through sentinel slots. Everything in DTYPES can be copied, and :data:`REDUCED` can be reduced.
"""

REDUCTIONS = ("sum", "max", "min", "prod", "avg", "band", "bor", "bxor")
"""Reductions, indexed by header code."""

_OF_FLOATS, _OF_INTEGERS = ("sum", "max", "min", "prod", "avg"), tuple(name for name in REDUCTIONS if name != "avg")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
REDUCED = (
    dict.fromkeys((*REDUCIBLE, "float64"), _OF_FLOATS)
    | dict.fromkeys((*INTEGERS, "bool"), _OF_INTEGERS)
    | dict.fromkeys(("complex64", "complex128"), ("sum", "avg"))
)
"""The reductions of native kernels, by dtype. The only other ones defined are for complex numbers and FP8."""
OF_BOOL = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}
"""Reductions of bool that equal others under another name."""

SIXTEEN_BITS = ("float16", "bfloat16")
"""Dtypes to which sums of nodes may be rounded between nodes."""

FP8_BLOCK = 128
"""Elements that share a scale in FP8 transport; ``docs/reference/numerics.md`` has the details."""
FP8_LARGEST = 448.0
FP8_FLOOR = 0x0D800000
"""The smallest "largest absolute value" of a block, 2^-100, as the bits of a float32."""

_DTYPE_NAMES = (*DTYPES, "-")
_NO_DTYPE = len(DTYPES)

MAX_ALGORITHMS = 256
"""The number of algorithms that headers can distinguish."""
MAX_NBYTES = 1 << 44
"""Upper limit (exclusive) of sizes in headers."""

# The lowest bits of the fields of the two words of a header; see HeaderWords.
_WRITTEN = 1 << 47
_REDUCTION_AT, _REDUCTION_BITS = 44, 3
_PIECE_BITS, _LAUNCH_AT, _LAUNCH_BITS = 5, 5, 14
_ROOT_AT, _ROOT_BITS, _DTYPE_AT, _DTYPE_BITS, _ALGORITHM_AT = 19, 10, 29, 5, 34
OP_AT = 42
_PAYLOAD = (1 << 48) - 1


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The launch of an algorithm, the same on all ranks.

    GPU kernels use ``programs`` (thread blocks that carry data), ``block_words`` (32-bit words per tile) and
    ``num_warps``; compiled host code uses ``chunk_bytes`` (bytes per pipeline step).
    """

    programs: int = 1
    block_words: int = 128
    num_warps: int = 1
    chunk_bytes: int = 0

    @property
    def digest(self) -> int:
        """The 14-bit digest of the launch in a header."""
        return _launch_digest(f"{self.programs},{self.block_words},{self.num_warps},{self.chunk_bytes}")


RMS, LAYER, LAYER_WITH_BIAS = "rms", "layer", "layer with bias"
NORM_KINDS = (RMS, LAYER, LAYER_WITH_BIAS)
"""RMSNorm, LayerNorm, and LayerNorm with a bias."""

QUANTIZATIONS = ("", "static", "dynamic")
"""FP8 forms of a normalized row: none; one scale per tensor, given by the caller; one scale per row, computed."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The norm that follows the sum in a fused call, row by row.

    Attributes:
        hidden: elements of a row.
        quantize: one of :data:`QUANTIZATIONS`.
        keeps_normed: the norm is (also) returned in the dtype of the call.
        weight: the dtype of weight and bias, from :data:`REDUCIBLE`, if it differs from the call's; otherwise empty.
        kind: one of :data:`NORM_KINDS`.
    """

    hidden: int
    quantize: str = ""
    keeps_normed: bool = True
    weight: str = ""
    kind: str = RMS

    @property
    def code(self) -> int:
        """The norm's code in the header's root field."""
        weight = ("", *REDUCIBLE).index(self.weight)
        code = QUANTIZATIONS.index(self.quantize) | (not self.keeps_normed) << 2 | weight << 3
        return code | NORM_KINDS.index(self.kind) << 5

    @classmethod
    def of_code(cls, code: int) -> Norm | None:
        """Return a norm with this code and any rows; None if there is none."""
        quantize, weight, kind = code & 3, code >> 3 & 3, code >> 5
        if quantize >= len(QUANTIZATIONS) or weight > len(REDUCIBLE) or kind >= len(NORM_KINDS):
            return None
        return cls(0, QUANTIZATIONS[quantize], not code & 4, ("", *REDUCIBLE)[weight], NORM_KINDS[kind])

    def __str__(self) -> str:
        words = f"{self.quantize} FP8{' and the norm' if self.keeps_normed else ''}" if self.quantize else ""
        weight = f"weight of {self.weight}" if self.weight else ""
        return ", ".join(filter(None, (words, weight, "bias" if self.kind == LAYER_WITH_BIAS else "")))


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call as an executor runs it.

    ``nbytes`` counts the tensor that defines the call: the input of all_reduce, reduce, reduce_scatter (whole), scatter
    (whole), all_to_all, broadcast and send, the output of all_gather (whole), gather (whole) and recv; it is 0 in an
    uneven all_to_all, whose parts only their two ranks know. ``root`` is the root of a call that has one, or the peer
    of send and recv. ``sizes`` are the elements of each rank in an uneven all_gather; in an uneven all_to_all, the
    elements that this rank sends to each rank, then the ones that it receives; otherwise empty. ``norm`` belongs to the
    fused operations; their ``nbytes`` counts ``x``. A call that multiplies has no algorithm, and ``nbytes`` counts the
    product or the gathered tensor. A call may be split into pieces, each with a separate plan: then ``whole_nbytes`` is
    the ``nbytes`` of the whole call, and ``piece`` is the number of the piece. ``capacity`` is the message size, in
    bytes, that the workspace of GPU kernels must at least be laid out for. ``reduction``, of all_reduce, reduce and
    reduce_scatter, is one of :data:`REDUCTIONS`.
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
    capacity: int = 0
    reduction: str = REDUCTIONS[0]


def _fnv(text: str) -> int:
    """Hash a text to 32 bits (FNV-1a)."""
    digest = 0x811C9DC5
    for byte in text.encode():
        digest = ((digest ^ byte) * 0x01000193) & 0xFFFFFFFF
    return digest


def _launch_digest(text: str) -> int:
    """Hash a text to the width of the launch field."""
    digest = _fnv(text)
    return (digest ^ digest >> _LAUNCH_BITS ^ digest >> 2 * _LAUNCH_BITS) & (1 << _LAUNCH_BITS) - 1


_ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Operations whose root is a rank."""
ANSWER = 1
"""The piece number in the header of a receiver's answer to a sender, before the vendor library sends the message."""


class HeaderWords(NamedTuple):
    """The two 48-bit words of a header. The sender puts the 16 low bits of the epoch above each.

    So each word shows by itself whether it has arrived, and the words need not be stored together.

    Attributes:
        size: from bit 0 up, bytes of the whole call, or the digest of the sizes of an uneven all_gather, 44; reduction
            3; and a bit that is always 1, so that no word is zero, which means "never written".
        call: from bit 0 up, piece 5 (modulo 32), digest of the launch (and of the rows of a norm) 14, root 10, dtype 5,
            algorithm 8, operation 6.
    """

    size: int
    call: int

    @classmethod
    def of_cells(cls, cells: Sequence[int], epoch: int | None = None) -> HeaderWords | None:
        """Return the header in two 64-bit cells; None if they hold none (of ``epoch``, if given)."""
        for cell in cells:
            if not cell or (epoch is not None and cell >> 48 & 0xFFFF != epoch & 0xFFFF):
                return None
        size, call = cells
        return cls(size & _PAYLOAD, call & _PAYLOAD)


def encode_header(plan: CallPlan, algorithm: int) -> HeaderWords:
    """Encode the header of a call.

    Send and recv of one message must have equal headers, so both use the operation SEND and the sender as root.

    Args:
        algorithm: the code of the plan's algorithm, below :data:`MAX_ALGORITHMS`.

    Raises:
        ConfigError: the size does not fit.
    """
    digested = plan.sizes and plan.op is not Op.ALL_TO_ALL_UNEVEN
    size = _fnv(",".join(map(str, plan.sizes))) if digested else plan.whole_nbytes or plan.nbytes
    if not 0 <= size < MAX_NBYTES:
        raise ConfigError(f"a message has from 0 to {MAX_NBYTES - 1} bytes, not {size}")
    dtype = _NO_DTYPE if plan.op is Op.BARRIER else _DTYPE_NAMES.index(plan.dtype)
    op = Op.SEND if plan.op is Op.RECV else plan.op
    call = int(op) << OP_AT | algorithm << _ALGORITHM_AT | dtype << _DTYPE_AT | plan.root << _ROOT_AT
    rows = 0 if plan.norm is None else _launch_digest(f"rows of {plan.norm.hidden}")
    call |= (plan.launch.digest ^ rows) << _LAUNCH_AT | plan.piece & (1 << _PIECE_BITS) - 1
    return HeaderWords(_WRITTEN | REDUCTIONS.index(plan.reduction) << _REDUCTION_AT | size, call)


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header.

    ``launch`` is the digest of the launch and the rows of a norm, ``piece`` the number of the piece modulo 32.
    """

    op: str
    dtype: str
    algorithm: str
    reduction: str
    root: int
    nbytes: int
    launch: int
    piece: int

    @classmethod
    def decode(cls, words: HeaderWords, algorithms: Sequence[str] = ()) -> Header:
        """Decode a header; ``algorithms`` are names in the order of their codes."""
        size, call = words
        op, algorithm, dtype = call >> OP_AT & 63, call >> _ALGORITHM_AT & 0xFF, call >> _DTYPE_AT & 31
        return cls(
            op=_LABELS.get(op, f"op {op}"),
            dtype=_DTYPE_NAMES[dtype] if dtype < len(_DTYPE_NAMES) else f"dtype {dtype}",
            algorithm=algorithms[algorithm] if algorithm < len(algorithms) else f"algorithm {algorithm}",
            reduction=REDUCTIONS[size >> _REDUCTION_AT & (1 << _REDUCTION_BITS) - 1],
            root=call >> _ROOT_AT & (1 << _ROOT_BITS) - 1,
            nbytes=size & MAX_NBYTES - 1,
            launch=call >> _LAUNCH_AT & (1 << _LAUNCH_BITS) - 1,
            piece=call & (1 << _PIECE_BITS) - 1,
        )

    def differs(self, fields: Collection[str], ranks: Sequence[int] = ()) -> str:
        """Describe the call in words, including its launch and piece if they are among the differing ``fields``.

        ``ranks`` maps ranks to the numbers shown to users; empty if these are the same.
        """
        if (self.op == "send" or self.op in _ROOTED) and self.root < len(ranks):
            return dataclasses.replace(self, root=ranks[self.root]).differs(fields)
        what = "rows or launch" if self.op.endswith("_norm") else "launch"
        end = f" in {what} #{self.launch:04x}" if "launch" in fields else ""
        return f"{self}{end}{f', piece {self.piece}' if 'piece' in fields else ''}"

    def __str__(self) -> str:
        size, end = format_size(self.nbytes), ""
        if self.op == "send":
            end = f", from rank {self.root}"
        elif self.op in _ROOTED:
            end = f", root {self.root}"
            if self.op == "reduce":
                end = f", {self.reduction}{end}"
        elif self.op == "all_to_all_uneven":
            size = "parts of any sizes"
        elif self.op == "all_gather" and self.root == UNEVEN:
            size = f"uneven sizes #{self.nbytes:08x}"
        elif self.op.endswith("_norm"):
            words = str(Norm.of_code(self.root) or f"norm {self.root}")
            end = f", {words}" if words else ""
        elif self.reduction != "sum":
            end = f", {self.reduction}"
        what = "the answer to a send" if self.op == "send" and self.piece == ANSWER else self.op
        return f"{what}({self.dtype}, {size}, {self.algorithm}{end})"


TIMEOUT, MISMATCH, DEAD, INTERRUPTED, UNREACHABLE, PARTS_DIFFER, LEFT = 1, 2, 3, 4, 5, 6, 7
"""Kinds of faults: a rank is late, calls differ, a rank's process has ended, a signal ended a rank's call, the
connection to a rank was lost or its node does not answer, a rank sends a part of unexpected size, a rank has left. A
rank that finds another gone may not know that it has left, and then reports that it has ended."""
UNEVEN = 1
"""The root field of an uneven all_gather, whose size field holds a digest of all ranks' sizes."""

MAX_NAMED_RANKS = 1024
"""Upper limit (exclusive) of the ranks that an abort word can name."""
_BLOCK = 16
FAULT_MASK_AT, FAULT_BLOCK_AT, FAULT_OP_AT, FAULT_KIND_AT = 32, 48, 54, 60
"""The lowest bits of the fields above the epoch in an abort word."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A decoded abort word: kind, the ranks it names, operation and 32 bits of the epoch.

    Bits from 0 up: epoch 32, rank mask 16, block 6, op 6, kind 4. The mask covers the 16 ranks from 16 * block on. Zero
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
            op=_LABELS.get(op, f"op {op}"),
            ranks=tuple(first + r for r in range(_BLOCK) if mask >> r & 1),
            epoch32=word & 0xFFFFFFFF,
        )


class Wait(NamedTuple):
    """A call that is waiting for other ranks.

    Attributes:
        op, epoch: the call's operation and number; 0 for messages.
        since: when the call began to wait (``time.monotonic``).
        peers: the other ends of messages; empty for a collective call.
    """

    op: str
    epoch: int
    since: float
    peers: tuple[int, ...] = ()


def encode_fault(kind: int, op: int, ranks: Collection[int], epoch: int) -> int:
    """Encode a fault as an abort word; see :class:`Fault`.

    A word names ranks of one block of 16: only given ranks in the same block as the lowest.

    Args:
        kind: TIMEOUT, MISMATCH, DEAD, INTERRUPTED, UNREACHABLE, PARTS_DIFFER or LEFT.
        ranks: the ranks at fault, below :data:`MAX_NAMED_RANKS`.
        epoch: the number of the call or message.
    """
    block = min(ranks, default=0) // _BLOCK
    mask = sum(1 << rank % _BLOCK for rank in set(ranks) if rank // _BLOCK == block)
    fields = kind << FAULT_KIND_AT | op << FAULT_OP_AT | block << FAULT_BLOCK_AT | mask << FAULT_MASK_AT
    return fields | epoch & 0xFFFFFFFF


def slice_bytes(nbytes: int, world_size: int) -> int:
    """Return the size of each rank's slice of a message; the last slices may be shorter or empty."""
    return align_up(-(-nbytes // world_size), SLICE_ALIGN)


_MOST_MORE_BYTES = 64 << 10
"""Extra bytes that a rank may send to save a network step: about as many as are sent in the time of a step."""


def in_one_step(nodes: int, slice_bytes: int) -> bool:
    """Return whether each node sends its rounded sums to all others, rather than parts in two steps.

    For a slice of R bytes, this sends (H - 1) R bytes rather than 2 (H - 1) R / H, with the same result.
    """
    return (nodes - 1) * (nodes - 2) * slice_bytes <= nodes * _MOST_MORE_BYTES
