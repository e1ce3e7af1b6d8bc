"""Runs call plans with the Triton kernels: on a GPU, or on CPU ranks under Triton's interpreter."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any, NamedTuple

import torch
import triton.language as tl

from shotcast import wire
from shotcast.device.triton import tiles
from shotcast.device.triton.intrinsics import INTERPRETED, has_float8_conversions, supports_pdl
from shotcast.device.triton.launch import Launch
from shotcast.errors import ConfigError
from shotcast.kernels.triton.norm import DTYPES, NORM_ADDRESSES, norm_addresses, norm_arguments
from shotcast.memory.operands import NormTensors
from shotcast.memory.streams import current_device, raw_stream
from shotcast.memory.symmetric import HostGroup, SymmetricBuffer
from shotcast.transport.triton import layout
from shotcast.transport.triton.barrier import barrier
from shotcast.transport.triton.copies import BROADCAST, EXCHANGE, GATHER, copy
from shotcast.transport.triton.fused_one_shot import one_shot_rms_norm
from shotcast.transport.triton.fused_reduce_scatter import scatter_rms_norm
from shotcast.transport.triton.fused_two_shot import two_shot_rms_norm
from shotcast.transport.triton.layout import Layout
from shotcast.transport.triton.multimem import multimem_all_reduce
from shotcast.transport.triton.one_shot import one_shot_reduce
from shotcast.transport.triton.ring import ring
from shotcast.transport.triton.send_recv import send_recv
from shotcast.transport.triton.two_shot import two_shot_all_reduce
from shotcast.transport.triton.two_shot_fp8 import two_shot_fp8_all_reduce
from shotcast.wire import CallPlan, Fault, Op

_COPIES = {Op.ALL_GATHER: GATHER, Op.ALL_TO_ALL: EXCHANGE, Op.BROADCAST: BROADCAST}

_IN_PIECES = ("two_shot", "multimem")
"""Algorithms that pass an all-reduce beyond the workspace in pieces."""
ROW_OPTIONS = {"maxnreg": 128}
"""For the kernel whose programs hold rows; ``candidates._fused_launch_shape`` counts on 16 warps a multiprocessor."""


def fp8_options(world_size: int, native: bool) -> dict[str, Any]:
    """Of compiling ``two_shot_fp8``: as few registers a thread as hold its tiles (more if they are converted by integer
    arithmetic). Left alone, the assembler takes twice as many to reorder loads, and a GPU holds half the warps."""
    if world_size <= 4:
        return {"maxnreg": 128}
    return {"maxnreg": 168} if native else {}


Bound = tuple[Any, int, int, dict[str, Any]]
"""Kernel, grid, warps, arguments."""
_KEPT_PLANS = 4096


class _Entry(NamedTuple):
    """A plan made ready: ``launches`` are its pieces, each with its first byte; they take what ``tensors`` says."""

    plan: CallPlan
    launches: tuple[tuple[Launch, int], ...]
    tensors: str


class TritonExecutor:
    """This rank's side of a communicator whose calls are Triton kernels.

    Args:
        buffer: symmetric memory of ``Layout.for_messages(max_bytes).nbytes``, zero.
        group: for the barrier after the memory is set up.
        max_bytes: the largest message.
        timeout_s: deadline of a call, from its first unsuccessful look.
        device: where the kernels run; ``cpu`` needs Triton's interpreter (TRITON_INTERPRET=1 at import).
    """

    def __init__(
        self, buffer: SymmetricBuffer, group: HostGroup, max_bytes: int, timeout_s: float, device: torch.device
    ):
        on_gpu = device.type == "cuda"
        if on_gpu == INTERPRETED:
            where = "the interpreter (TRITON_INTERPRET=1)" if INTERPRETED else "a GPU"
            raise ConfigError(f"Triton was imported to run kernels on {where}; it cannot serve {device.type} ranks now")
        self._buffer = buffer
        self._rank, self._world = group.rank, group.world_size
        self._layout = Layout.for_messages(max_bytes)
        self._device = device
        self._pdl, self._converts_fp8 = supports_pdl(device), has_float8_conversions(device)
        self._control = buffer.view(self._rank, 0, (layout.CONTROL_WORDS,), torch.int64)
        self._status = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        self._status_word = ctypes.c_int64.from_address(self._status.data_ptr())
        table = list(buffer.addresses) + [0] * (wire.MAX_WORLD_SIZE - self._world) + [buffer.multicast_address]
        self._peers = torch.tensor(table, dtype=torch.int64, device=device)
        self._own_address, self._peers_address = buffer.addresses[self._rank], self._peers.data_ptr()
        self.clear_after_read_bytes = layout.CLEAR_AFTER_READ_BYTES
        self._multicast = bool(buffer.multicast_address)
        self._cells = torch.zeros(2 * layout.row_cell_count(max_bytes), dtype=torch.int64, device=device)
        self._prepared: set[str] = set()
        self._entries: dict[tuple[int, bool], _Entry] = {}
        self._timeout_s = timeout_s
        self.clear(0)
        group.barrier()

    # -- calls ------------------------------------------------------------------------------------------------------

    def run(
        self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None, norm: NormTensors | None = None
    ) -> None:
        """Launch the call's kernel on the current stream. ``x`` and ``out`` are contiguous and of the plan's sizes.

        Those of a fused call (``norm``), and its ``x``, begin at multiples of 16 bytes.
        """
        # an address that no kernel uses must still be one
        source = (x.data_ptr() if x is not None else 0) or self._own_address
        target = (out.data_ptr() if out is not None else 0) or self._own_address
        aligned = not (source | target) & 15
        entry = self._entries.get((id(plan), aligned))
        if entry is None:
            entry = self._ready(plan, aligned)
        stream = 0
        if not INTERPRETED:
            if current_device() != self._device.index:
                with torch.cuda.device(self._device):
                    self.run(plan, x, out, norm)
                return
            stream = raw_stream(self._device.index)
        for launch, start in entry.launches:
            if entry.tensors == "x and out":
                launch(stream, (source + start, target + start))
            elif entry.tensors == "x and norm":
                assert norm is not None
                launch(stream, (source, *norm_addresses(norm, self._own_address)))
            else:
                launch(stream, {"x": (source,), "out": (target,), "none": ()}[entry.tensors])

    def whole(self, plan: CallPlan, aligned: bool) -> Launch | None:
        """The kernel of a call with ``x`` and ``out`` that was run, if it is all there is to the call: to be given the
        stream and both addresses. ``aligned``: these are multiples of 16."""
        entry = self._entries.get((id(plan), aligned))
        if INTERPRETED or entry is None or entry.tensors != "x and out" or len(entry.launches) > 1:
            return None
        return entry.launches[0][0]

    def prepare(self, plan: CallPlan) -> bool:
        """Compile every form of the kernel that ``plan`` may need on any rank; True if that had not been done."""
        form = self.form(plan)
        if INTERPRETED or form in self._prepared:
            return False
        with torch.cuda.device(self._device):
            for aligned in (True, False):
                for launch, _ in self._ready(plan, aligned).launches:
                    launch.load()
        self._prepared.add(form)
        return True

    def form(self, plan: CallPlan) -> str:
        """Names what ``plan`` needs compiled."""
        shape = plan.launch
        clears = {self._clears(piece) for piece, _ in self._pieces(plan)}
        return (
            f"{plan.op.label}/{plan.algorithm}/{plan.dtype}/{shape.block_words}/{shape.num_warps}/{sorted(clears)}"
            f"/{plan.norm.hidden if plan.norm else 0}/{plan.norm.code if plan.norm else 0}"
        )

    def _ready(self, plan: CallPlan, aligned: bool) -> _Entry:
        tensors, names = "x and out", ("x", "out")
        if plan.op is Op.BARRIER or plan.algorithm == "vendor":
            tensors, names = "none", ()
        elif plan.norm is not None:
            tensors, names = "x and norm", ("x", *NORM_ADDRESSES)
        elif plan.op in (Op.SEND, Op.RECV):
            tensors, names = "x" if plan.op is Op.SEND else "out", ("data",)
        launches = []
        for piece, start in self._pieces(plan):
            kernel, programs, warps, arguments = self._bind(piece, self._unit(piece, aligned))
            options = self._options(warps)
            if kernel is scatter_rms_norm:
                options |= ROW_OPTIONS
            if kernel is two_shot_fp8_all_reduce:
                options |= fp8_options(self._world, self._converts_fp8)
            launches.append((Launch(kernel, programs, arguments, names, options), start))
        if len(self._entries) >= _KEPT_PLANS:
            self._entries.clear()
        # the entry keeps its plan alive, so an identity is never another plan's
        entry = self._entries[id(plan), aligned] = _Entry(plan, tuple(launches), tensors)
        return entry

    def _pieces(self, plan: CallPlan) -> list[tuple[CallPlan, int]]:
        """The calls that make up ``plan``, with the byte each begins at: several, where it is beyond the workspace."""
        most = self._layout.max_bytes // 16 * 16
        if plan.op is not Op.ALL_REDUCE or plan.algorithm not in _IN_PIECES or plan.nbytes <= most:
            return [(plan, 0)]
        pieces = []
        for start in range(0, plan.nbytes, most):
            nbytes = min(most, plan.nbytes - start)
            programs = max(1, math.ceil(plan.launch.programs * nbytes / plan.nbytes))
            launch = dataclasses.replace(plan.launch, programs=programs)
            pieces.append((dataclasses.replace(plan, nbytes=nbytes, launch=launch), start))
        return pieces

    def _clears(self, plan: CallPlan) -> bool:
        """Whether the call clears its slots itself: see :data:`layout.CLEAR_AFTER_READ_BYTES`."""
        parts = plan.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL)
        slot = max(plan.sizes) * wire.DTYPES[plan.dtype] if plan.sizes else plan.nbytes // (self._world if parts else 1)
        return plan.dtype in DTYPES and slot > self.clear_after_read_bytes

    def _options(self, warps: int) -> dict[str, Any]:
        return {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": self._pdl}

    def _unit(self, plan: CallPlan, aligned: bool) -> int:
        """16 when every address and size of the call is a multiple of 16 bytes, else the item size up to 4."""
        item = wire.DTYPES[plan.dtype]
        bits = plan.nbytes
        for size in plan.sizes:
            bits |= size * item
        if plan.op in (Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL) and not plan.sizes:
            bits |= plan.nbytes // self._world
        return 16 if aligned and bits % 16 == 0 else min(item, 4)

    def _bind(self, plan: CallPlan, unit: int) -> Bound:
        """The kernel of a plan with all its arguments; those that are tensors' addresses stand for any."""
        shape, where = plan.launch, self._layout
        block, warps = shape.block_words, shape.num_warps
        common = {
            "own": self._own_address,
            "peers": self._peers_address,
            "rank": self._rank,
            # both sides of a message name the sender
            "header": (dataclasses.replace(plan, root=self._rank) if plan.op is Op.SEND else plan).header,
            "WORLD": self._world,
            "WARPS": 1 if INTERPRETED else warps,
            "PDL": self._pdl,
        }
        if plan.op is Op.BARRIER or plan.algorithm == "vendor":
            return barrier, 1, 1, {**common, "WARPS": 1}
        common |= {"DTYPE": DTYPES.get(plan.dtype, tl.int32), "UNIT": unit}
        if plan.op in (Op.SEND, Op.RECV):
            chunks = math.ceil(plan.nbytes / (4 * layout.CHUNK_WORDS))
            message = {
                "data": self._own_address,
                "peer": plan.root,
                "nbytes": plan.nbytes,
                "mailboxes_at": where.mailboxes_at,
                "SENDING": plan.op is Op.SEND,
                "WARPS": 1 if INTERPRETED else 4,
            }
            return send_recv, 1 + min(max(chunks, 1), layout.CHANNELS), 4, common | message
        common |= {"x": self._own_address, "slots_at": where.slots_at, "slots_quads": where.slots_quads, "BLOCK": block}
        programs = 1 + shape.programs
        if plan.norm is not None:
            kernel, warps, more = self._fused(plan)
            del common["UNIT"]
            return kernel, programs, warps, common | more
        common["out"] = self._own_address
        part = plan.nbytes // self._world
        if plan.op in _COPIES:
            return copy, programs, warps, common | self._copy_arguments(plan, part)
        if plan.algorithm == "ring":
            gathers = plan.op is Op.ALL_REDUCE or plan.op is Op.ALL_GATHER
            slice_nbytes = wire.slice_bytes(plan.nbytes, self._world) if plan.op is Op.ALL_REDUCE else part
            sizes = {"nbytes": plan.nbytes, "slice_nbytes": slice_nbytes}
            return ring, programs, warps, common | sizes | {"REDUCE": plan.op is not Op.ALL_GATHER, "GATHER": gathers}
        if plan.algorithm == "multimem":
            # a quad that two threads of a program summed could come out in two ways, so each quad has one thread
            block = max(block, 128 * warps) if not INTERPRETED else block
            flags = {"nbytes": plan.nbytes, "flags_at": where.flags_at, "BLOCK": block}
            return multimem_all_reduce, 1 + min(shape.programs, layout.FLAG_ROWS), warps, common | flags
        common["CLEAR_AFTER_READ"] = self._clears(plan)
        if plan.algorithm == "two_shot":
            return two_shot_all_reduce, programs, warps, common | {"nbytes": plan.nbytes, "MULTICAST": self._multicast}
        if plan.algorithm == "two_shot_fp8":
            arguments = {"nbytes": plan.nbytes, "NATIVE": self._converts_fp8}
            return two_shot_fp8_all_reduce, programs, warps, common | arguments
        scatter = plan.op is Op.REDUCE_SCATTER
        return (
            one_shot_reduce,
            programs,
            warps,
            common | {"nbytes": part if scatter else plan.nbytes, "SCATTER": scatter},
        )

    def _fused(self, plan: CallPlan) -> tuple[Any, int, dict[str, Any]]:
        """Kernel, warps and arguments of a fused call beside those that all kernels have."""
        assert plan.norm is not None
        row_words = plan.norm.hidden * wire.DTYPES[plan.dtype] // 4
        if plan.op is Op.ALL_REDUCE_RMS_NORM:
            one_shot, parts = plan.algorithm == "one_shot", -(-row_words // plan.launch.block_words)
            cells = self._cells.data_ptr()
            arguments = norm_arguments(plan.norm, self._own_address) | {
                "nbytes": plan.nbytes,
                "sum_cells": cells,
                "amax_cells": cells + self._cells.nbytes // 2,
                # two-shot, with four rows a program, gains nothing by it
                "cell_stride": layout.row_cell_stride(plan.nbytes // (4 * row_words), parts) if one_shot else 1,
                "ROW_TILES": parts,
            }
            if one_shot:
                return one_shot_rms_norm, plan.launch.num_warps, arguments
            more = {"MULTICAST": self._multicast, "CLEAR_AFTER_READ": self._clears(plan)}
            return two_shot_rms_norm, plan.launch.num_warps, arguments | more
        nbytes = plan.nbytes // self._world
        row_block, warps = tiles.row_tile(row_words)
        arguments = norm_arguments(plan.norm, self._own_address) | {
            "nbytes": nbytes,
            "row_programs": max(1, min(nbytes // (4 * row_words), plan.launch.programs // 2)),
            "MULTICAST": self._multicast,
            # rows decide the warps, and a thread that polls has words of its own
            "BLOCK": plan.launch.block_words if INTERPRETED else max(plan.launch.block_words, 128 * warps),
            "ROW_BLOCK": row_block,
            "WARPS": 1 if INTERPRETED else warps,
        }
        gather = plan.op is Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER
        at_once = min(self._world, tiles.slots_at_once(row_block, warps))
        return scatter_rms_norm, warps, arguments | {"GATHER": gather, "GROUP": at_once}

    def _copy_arguments(self, plan: CallPlan, part: int) -> dict[str, Any]:
        item = wire.DTYPES[plan.dtype]
        if plan.sizes:
            part = max(plan.sizes) * item
            starts = [sum(plan.sizes[:r]) * item for r in range(self._world + 1)]
        elif plan.op is Op.BROADCAST:
            part = plan.nbytes
            starts = [0] + [plan.nbytes] * self._world
        else:
            starts = [r * part for r in range(self._world + 1)]
        starts += [starts[-1]] * (wire.MAX_WORLD_SIZE - self._world)
        return {
            "root": plan.root,
            "part_nbytes": part,
            **{f"start{i}": start for i, start in enumerate(starts)},
            "cells_at": self._layout.cells_at,
            "cells_quads": self._layout.cells_quads,
            "KIND": _COPIES[plan.op],
            "CELLS": plan.dtype not in DTYPES,
            "CLEAR_AFTER_READ": self._clears(plan),
            "MULTICAST": self._multicast and plan.dtype in DTYPES,
        }

    # -- state ------------------------------------------------------------------------------------------------------

    def waiting(self, nbytes: int) -> int:
        """How many messages of ``nbytes`` may lie in a mailbox while their sender goes on."""
        return min(
            layout.MESSAGE_SLOTS, layout.CHUNKS_IN_FLIGHT // max(1, math.ceil(nbytes / (4 * layout.CHUNK_WORDS)))
        )

    def fault(self) -> Fault | None:
        """What stopped the communicator, as far as a finished kernel of this rank has seen. Never synchronises."""
        word = self._status_word.value
        return Fault.decode(word & 0xFFFFFFFFFFFFFFFF) if word else None

    def headers(self, epoch: int) -> list[int | None]:
        """What each rank called in ``epoch`` (48 bits of a header), None where no such header came. Synchronises.

        After a message that was not as this rank expected it: the headers of its two ranks.
        """
        came, expected = self._control[layout.MESSAGE_MISMATCH : layout.MESSAGE_MISMATCH + 2].tolist()
        if expected:
            told: list[int | None] = [None] * self._world
            own = told[self._rank] = expected & (1 << 48) - 1
            told[wire.Header.decode(own).root] = came & (1 << 48) - 1
            return told
        row = layout.HEADERS + epoch % 2 * wire.MAX_WORLD_SIZE
        words = self._control[row : row + self._world].tolist()
        return [word & (1 << 48) - 1 if word and word >> 48 & 0xFFFF == epoch & 0xFFFF else None for word in words]

    @property
    def epoch(self) -> int:
        """Collective calls begun so far. Synchronises."""
        return int(self._control[layout.EPOCH].item()) - 1

    def set_epoch(self, epoch: int) -> None:
        """Make the next collective call number ``epoch`` + 1; all ranks alike, with no call under way."""
        self._control[layout.EPOCH] = epoch + 1
        self._flag_cells(epoch)

    def _flag_cells(self, epoch: int) -> None:
        """Give all flag cells the flag of call ``epoch``, over: zeros would be the flag of call 2^32."""
        where = self._layout
        shape = (4 * where.cells_quads,)
        cells = self._buffer.view(self._rank, where.cells_at * layout.QUAD, shape, torch.int64)
        flag = epoch & 0xFFFFFFFF
        cells.fill_((flag - (1 << 32) if flag >> 31 else flag) << 32)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls and graph replays."""
        self._timeout_s = timeout_s
        self._control[layout.TIMEOUT] = int(timeout_s * 1e9)

    def drain(self) -> None:
        """Wait for this rank's kernels."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def clear(self, epoch: int) -> None:
        """Put all memory as new, the last call being number ``epoch``. On every rank, between two host barriers."""
        where = self._layout
        self._control.zero_()
        self._cells.zero_()
        words = self._buffer.view(self._rank, 0, (where.nbytes // 4,), torch.int32)
        words[where.mailboxes_at * 4 : where.cells_at * 4].zero_()
        words[where.slots_at * 4 :].fill_(-1)
        self._control[layout.STATUS] = self._status.data_ptr()
        self.set_epoch(epoch)
        self.set_timeout(self._timeout_s)
        self._status_word.value = 0
        self.drain()

    def close(self) -> None:
        """Let go of the memory; every rank must have drained."""
        self._control = self._peers = torch.empty(0, dtype=torch.int64)
        self._buffer.close()
