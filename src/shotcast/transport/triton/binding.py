"""Binding of a call to the kernel that serves it, with all its arguments.

Each kernel file has a function ``bind(plan, context)`` next to its kernel. It says which kernel runs a
:class:`~shotcast.wire.CallPlan` on this rank, on which grid, and with which arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import triton.language as tl

from shotcast import wire
from shotcast.device.triton.intrinsics import INTERPRETED
from shotcast.device.triton.launch import Launch
from shotcast.errors import UnsupportedError
from shotcast.kernels.triton.norm import DTYPES
from shotcast.memory import nvshmem_library
from shotcast.memory.streams import SideLane
from shotcast.transport.triton.layout import WorkspaceLayout
from shotcast.transport.triton.sync import Entry, EntryWithPuts
from shotcast.wire import CallPlan, HeaderWords, Op

TENSORS: dict[str, tuple[str, ...]] = {
    "x and out": ("x", "out"),
    "x and out in place": ("x", "out", "places"),
    "x, out and sizes": ("x", "out", "spans"),
    "x and norm": ("x", "norm"),
    "x": ("data",),
    "out": ("data",),
    "none": (),
}
"""The tensors of a call, with the kernel arguments that each call supplies: mostly their addresses."""

COMPILE_OPTIONS = {"enable_fp_fusion": False}
"""Compiler options of all kernels; without them, float32 sums could skip a rounding."""

_PLACES = tuple(one.name for one in dataclasses.fields(WorkspaceLayout))
_PARTS = (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL)
_OF_PARTS = {"complex64": "float32", "complex128": "float64", "bool": "int1"}


@dataclass(frozen=True, slots=True)
class CallShape:
    """The argument SHAPE of a kernel: the constants that it is compiled for (see :meth:`KernelContext.launch`)."""

    DTYPE: tl.dtype
    UNIT: int
    WORLD: int
    WARPS: int
    PDL: bool


@dataclass(frozen=True, slots=True)
class TileShape(CallShape):
    """The argument SHAPE of a kernel that works in tiles of BLOCK words."""

    BLOCK: int


class KernelLaunch(NamedTuple):
    """A kernel on a grid."""

    kernel: Any  # made by `shotcast.device.triton.intrinsics.kernel`
    programs: int  # in the grid; program 0 exchanges headers
    num_warps: int  # in a program
    arguments: dict[str, Any]  # every argument by name; the addresses of the call's tensors are placeholders
    tensors: str  # a key of `TENSORS`
    options: dict[str, Any]  # compiler options, such as `maxnreg`
    # returns the elements of `spans` for a call whose parts have these sizes; None if parts have no sizes
    of_sizes: Callable[[tuple[int, ...]], Sequence[int]] | None = None


class Enqueue(Protocol):
    """A call that the host enqueues, as a :class:`~shotcast.device.triton.launch.Launch` enqueues a kernel."""

    @property
    def launches(self) -> Sequence[Launch]: ...
    def __call__(self, stream: int, call_values: Sequence[Any]) -> None: ...


class EnqueuedCall(NamedTuple):
    """A call of more than one kernel. It meets the other ranks before it writes to them, so it needs no gate."""

    enqueue: Enqueue
    tensors: str  # a key of `TENSORS`


@dataclass(frozen=True, slots=True)
class KernelContext:
    """The facts about a rank that its kernels are bound with."""

    rank: int
    world_size: int
    layout: WorkspaceLayout  # of a rank's region of symmetric memory; offsets count quads of 16 bytes
    own_address: int  # the address of this rank's region
    addresses: tuple[int, ...]  # the addresses of all regions, by rank; 0 for regions that are not mapped
    peers_address: int  # the address of the table of all regions' addresses, in device memory
    cells_address: int  # the address of this GPU's cells, through which programs of fused kernels add up rows
    cells_nbytes: int  # bytes of these cells
    blocks_address: int  # the address of the table of all ranks' blocks of tensors, in device memory
    multicast: bool  # the table ends with a multicast address that kernels may use
    pdl: bool  # kernels begin before the previous one has ended (programmatic dependent launch)
    native_fp8: bool  # the GPU has instructions that convert FP8
    clear_after_read_bytes: int  # calls whose slots are larger clear them as they read
    header_of: Callable[[CallPlan], HeaderWords]  # `header_of(plan)` returns the header words of a plan
    aligned: bool = field(default=True)  # all addresses of the call are multiples of 16
    nodes: int = field(default=1)  # the number of nodes, which all have equally many consecutive ranks
    # the address of the table of what puts to each rank take, in device memory; 0 if all regions are mapped
    puts_address: int = field(default=0)
    lane: SideLane | None = field(default=None)  # for calls that run on two streams

    def launch(
        self,
        kernel: Any,
        plan: CallPlan,
        *,
        programs: int | None = None,
        num_warps: int | None = None,
        tensors: str = "x and out",
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> KernelLaunch:
        """Return ``kernel`` with the given arguments, and with those below that it takes by name.

        Addresses and offsets: ``x``, ``out``, ``data``, ``slots_at``, ``slots_quads``, ``cells_at``, ``cells_quads``,
        ``staging_at``, ``staging_quads``, ``window_at``, ``progress_at``, ``flags_at``, ``mailboxes_at``. Plan values:
        ``root`` and ``nbytes``. Argument of :func:`.sync.enter`: ``entry``, an EntryWithPuts if PUTS is true.

        Fields of SHAPE: ``DTYPE`` (int32 for a dtype that is only moved), ``UNIT`` (16 if every address and size is a
        multiple of 16 bytes, else the item size up to 4), ``WORLD``, ``NODES``, ``PUTS``, ``BLOCK`` (words of a tile),
        ``WARPS``, ``PDL``, ``CLEAR_AFTER_READ``, ``MULTICAST``, ``NATIVE``.

        The grid has ``programs`` programs (by default the plan's and one for the headers) of ``num_warps`` warps (by
        default the plan's). ``tensors`` is a key of :data:`TENSORS`. ``options`` are compiler options, in addition to
        those that all kernels take.
        """
        # (a kernel without tensors exchanges the header of a call that the library makes)
        fields = [one.name for one in dataclasses.fields(kernel.shape)]
        if plan.reduction != "sum" and tensors != "none" and "REDUCTION" not in fields:
            raise UnsupportedError(f"there is no {plan.algorithm} {plan.op.label} for {plan.reduction}")
        warps = plan.launch.num_warps if num_warps is None else num_warps
        # both sides of a message name the sender
        named = dataclasses.replace(plan, root=self.rank) if plan.op is Op.SEND else plan
        header = self.header_of(named)
        regions, who = (self.own_address, self.peers_address), (self.rank, header.size, header.call)
        given = {
            "x": self.own_address,
            "out": self.own_address,
            "data": self.own_address,
            "entry": EntryWithPuts(*regions, self.puts_address or self.own_address, *who)
            if "PUTS" in fields
            else Entry(*regions, *who),
            "root": plan.root,
            "nbytes": plan.nbytes,
            "DTYPE": DTYPES.get(plan.dtype, tl.int32),
            "UNIT": self.unit(plan),
            "WORLD": self.world_size,
            "NODES": self.nodes,
            "PUTS": bool(self.puts_address),
            "BLOCK": plan.launch.block_words,
            "WARPS": 1 if INTERPRETED else warps,
            "PDL": self.pdl,
            "CLEAR_AFTER_READ": self.clears(plan),
            "MULTICAST": self.multicast,
            "NATIVE": self.native_fp8,
        }
        places = {name: getattr(self.layout, name) for name in kernel.arg_names if name in _PLACES}
        taken = places | {name: value for name, value in given.items() if name in kernel.arg_names}
        taken |= {name: value for name, value in arguments.items() if name not in fields}
        given |= arguments
        taken["SHAPE"] = kernel.shape(**{name: given[name] for name in fields})
        grid = 1 + plan.launch.programs if programs is None else programs
        compiled = {"num_warps": warps, "launch_pdl": self.pdl} | COMPILE_OPTIONS | (options or {})
        if "PUTS" in fields and given["PUTS"] and not INTERPRETED:
            compiled["extern_libs"] = nvshmem_library.extern_libs()
        return KernelLaunch(kernel, grid, warps, taken, tensors, compiled)

    def clears(self, plan: CallPlan) -> bool:
        """Return whether the call clears its slots itself; see :data:`.layout.CLEAR_AFTER_READ_BYTES`."""
        if plan.dtype not in DTYPES:
            return False
        if plan.sizes:
            return max(plan.sizes) * wire.DTYPES[plan.dtype] > self.clear_after_read_bytes
        return plan.nbytes // (self.world_size if plan.op in _PARTS else 1) > self.clear_after_read_bytes

    def in_one_step(self, plan: CallPlan) -> bool:
        """Return whether the rounded sums of nodes pass in one step (see :func:`shotcast.wire.in_one_step`)."""
        return wire.in_one_step(self.nodes, wire.slice_bytes(plan.nbytes, self.world_size // self.nodes))

    def unit(self, plan: CallPlan) -> int:
        """Return 16 if every address and size of the call is a multiple of 16 bytes, else the item size up to 4."""
        item = wire.DTYPES.get(plan.dtype, 1)
        bits = plan.nbytes
        for size in plan.sizes:
            bits |= size * item
        if plan.op in _PARTS and not plan.sizes:
            bits |= plan.nbytes // self.world_size
        return 16 if self.aligned and bits % 16 == 0 else min(item, 4)


def dtype_of(dtype: str) -> tl.dtype:
    """Return the dtype of the numbers that kernels reduce in tensors of ``dtype``."""
    number: tl.dtype = getattr(tl, _OF_PARTS.get(dtype, dtype))
    return number


def reduction_of(dtype: str, reduction: str) -> int:
    """Return the code of the reduction that kernels apply to these numbers."""
    return wire.REDUCTIONS.index(wire.OF_BOOL.get(reduction, reduction) if dtype == "bool" else reduction)


def reduction_arguments(plan: CallPlan, context: KernelContext) -> dict[str, Any]:
    """Return the arguments DTYPE, REDUCTION and CELLS of a kernel, and its slots, which are flag cells with CELLS.

    Floats of up to 32 bits go through sentinel slots. The words of other data can have any bits, so they go as flag
    cells. Raises UnsupportedError for a reduction that native kernels do not have.
    """
    if plan.reduction not in wire.REDUCED.get(plan.dtype, ()):
        raise UnsupportedError(f"kernels have no {plan.reduction} of {plan.dtype}")
    cells = plan.dtype not in wire.REDUCIBLE
    arguments = {"DTYPE": dtype_of(plan.dtype), "REDUCTION": reduction_of(plan.dtype, plan.reduction), "CELLS": cells}
    if cells:
        arguments |= {"slots_at": context.layout.cells_at, "slots_quads": context.layout.cells_quads}
    return arguments
