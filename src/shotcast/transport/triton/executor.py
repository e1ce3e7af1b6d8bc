"""Runs call plans with the Triton kernels: on a GPU, or on CPU ranks under Triton's interpreter."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from typing import Any, NamedTuple, Protocol

import torch

from shotcast import wire
from shotcast.device.triton.intrinsics import INTERPRETED, has_float8_conversions, supports_pdl
from shotcast.device.triton.launch import Launch
from shotcast.errors import ConfigError
from shotcast.kernels.triton.norm import norm_addresses
from shotcast.memory import driver
from shotcast.memory.operands import NormTensors
from shotcast.memory.streams import current_device, raw_stream
from shotcast.memory.symmetric import HostGroup, SymmetricBuffer
from shotcast.transport.triton import layout
from shotcast.transport.triton.binding import TENSORS, KernelContext, KernelLaunch
from shotcast.transport.triton.layout import Layout
from shotcast.wire import CallPlan, Fault, HeaderWords

_SETTLE_S = 0.3
"""Time from the end of a process to the mark that ends waits for it. A program that has looked for a word before the
rank sent it, and ended, looks again by then."""


class Form(Protocol):
    """A form of an algorithm, as far as the executor needs it."""

    @property
    def divides(self) -> bool: ...


class Algorithms(Protocol):
    """The algorithms of a communicator, as far as the executor needs them."""

    def header(self, plan: CallPlan, /) -> HeaderWords: ...
    def form(self, plan: CallPlan, /) -> Form: ...
    def kernel(self, plan: CallPlan, kind: str, /) -> Any: ...


class _Piece(NamedTuple):
    """One kernel of a call, which takes the tensors from byte ``start`` on."""

    launch: Launch
    start: int


class BoundCall:
    """A call with its kernels: only the addresses of its tensors are open."""

    __slots__ = ("_executor", "_pieces", "_plan", "_tensors")

    def __init__(self, executor: TritonExecutor, plan: CallPlan):
        self._executor, self._plan = executor, plan
        self._pieces: dict[bool, tuple[_Piece, ...]] = {}
        self._tensors = ""

    def run(self, x: torch.Tensor | None, out: torch.Tensor | None, norm: NormTensors | None = None) -> None:
        """Launch the kernels on the current stream. ``x`` and ``out`` are contiguous and of the plan's sizes.

        Those of a fused call (``norm``), and its ``x``, begin at multiples of 16 bytes.
        """
        executor = self._executor
        own = executor.own_address
        # an address that no kernel uses must still be one
        source = (x.data_ptr() if x is not None else 0) or own
        target = (out.data_ptr() if out is not None else 0) or own
        stream = 0
        if not INTERPRETED:
            index = executor.device.index
            if current_device() != index:
                with torch.cuda.device(executor.device):
                    self.run(x, out, norm)
                return
            stream = raw_stream(index)
        aligned = not (source | target) & 15
        pieces = self._pieces.get(aligned) or self._bind(aligned)
        for launch, start in pieces:
            if self._tensors == "x and out":
                launch(stream, (source + start, target + start))
            elif self._tensors == "x and norm":
                assert norm is not None
                launch(stream, (source, *norm_addresses(norm, own)))
            else:
                launch(stream, {"x": (source,), "out": (target,), "none": ()}[self._tensors])

    def one_launch(self, aligned: bool) -> Launch | None:
        """Return the kernel of a call that has run, if the call is one kernel with ``x`` and ``out``.

        The kernel is to be given the stream and both addresses. ``aligned``: these are multiples of 16.
        """
        pieces = self._pieces.get(aligned, ())
        if INTERPRETED or len(pieces) != 1 or self._tensors != "x and out":
            return None
        return pieces[0].launch

    def load(self) -> None:
        """Compile every form of the kernels that the call may need on any rank, and load them."""
        if INTERPRETED:
            return
        with torch.cuda.device(self._executor.device):
            for aligned in (True, False):
                for piece in self._pieces.get(aligned) or self._bind(aligned):
                    piece.launch.load()

    def _bind(self, aligned: bool) -> tuple[_Piece, ...]:
        pieces = []
        for plan, start in self._executor.pieces(self._plan):
            bound = self._executor.kernel(plan, aligned)
            self._tensors = bound.tensors
            opened = TENSORS[bound.tensors]
            launch = Launch(bound.kernel, bound.programs, bound.arguments, opened, bound.options)
            pieces.append(_Piece(launch, start))
        self._pieces[aligned] = tuple(pieces)
        return self._pieces[aligned]


class TritonExecutor:
    """This rank's side of a communicator whose calls are Triton kernels.

    Args:
        buffer: symmetric memory of ``Layout.for_messages(max_bytes).nbytes``, zero.
        group: for the barrier after the memory is set up.
        max_bytes: the largest message of the workspace.
        timeout_s: deadline of a call, from its first unsuccessful look.
        device: where the kernels run; ``cpu`` needs Triton's interpreter (TRITON_INTERPRET=1 at import).
        algorithms: those that plans name.

    Attributes:
        own_address: of this rank's region of the buffer.
    """

    def __init__(
        self,
        buffer: SymmetricBuffer,
        group: HostGroup,
        max_bytes: int,
        timeout_s: float,
        device: torch.device,
        algorithms: Algorithms,
    ):
        on_gpu = device.type == "cuda"
        if on_gpu == INTERPRETED:
            where = "the interpreter (TRITON_INTERPRET=1)" if INTERPRETED else "a GPU"
            raise ConfigError(f"Triton was imported to run kernels on {where}; it cannot serve {device.type} ranks now")
        self._buffer = buffer
        self._rank, self._world = group.rank, group.world_size
        self._layout = Layout.for_messages(max_bytes)
        self.device = device
        self._algorithms = algorithms
        self._control = buffer.view(self._rank, 0, (layout.CONTROL_WORDS,), torch.int64)
        self._status = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        self._status_word = ctypes.c_int64.from_address(self._status.data_ptr())
        table = list(buffer.addresses) + [0] * (wire.MAX_WORLD_SIZE - self._world) + [buffer.multicast_address]
        self._peers = torch.tensor(table, dtype=torch.int64, device=device)
        self.own_address = buffer.addresses[self._rank]
        self._cells = torch.zeros(2 * layout.row_cell_count(max_bytes), dtype=torch.int64, device=device)
        self.context = KernelContext(
            rank=self._rank,
            world_size=self._world,
            layout=self._layout,
            own_address=self.own_address,
            peers_address=self._peers.data_ptr(),
            cells_address=self._cells.data_ptr(),
            cells_nbytes=self._cells.nbytes,
            multicast=bool(buffer.multicast_address),
            pdl=supports_pdl(device),
            native_fp8=has_float8_conversions(device),
            clear_after_read_bytes=layout.CLEAR_AFTER_READ_BYTES,
            header_of=algorithms.header,
        )
        if on_gpu:
            driver.side_stream(device.index)  # made here, as the thread of the mark has no context
        self._timeout_s = timeout_s
        self._marking, self._gone, self._closed = threading.Lock(), 0, False
        self.clear(0)
        group.barrier()

    # -- calls ------------------------------------------------------------------------------------------------------

    def bind(self, plan: CallPlan) -> BoundCall:
        """Return a call that can be run again and again."""
        return BoundCall(self, plan)

    def kernel(self, plan: CallPlan, aligned: bool) -> KernelLaunch:
        """Return the kernel of a plan that is no longer than the workspace, or of a piece."""
        context = dataclasses.replace(self.context, aligned=aligned)
        launch: KernelLaunch = self._algorithms.kernel(plan, "triton")(plan, context)
        return launch

    def form(self, plan: CallPlan) -> str:
        """Return a name for what ``plan`` needs compiled."""
        shape = plan.launch
        clears = {self.context.clears(piece) for piece, _ in self.pieces(plan)}
        return (
            f"{plan.op.label}/{plan.algorithm}/{plan.dtype}/{shape.block_words}/{shape.num_warps}/{sorted(clears)}"
            f"/{plan.norm.hidden if plan.norm else 0}/{plan.norm.code if plan.norm else 0}"
        )

    def pieces(self, plan: CallPlan) -> list[tuple[CallPlan, int]]:
        """Return the calls that make up ``plan``, with the byte at which each begins.

        There are several where a message is beyond the workspace and the algorithm divides it.
        """
        most = self._layout.max_bytes // 16 * 16
        if plan.nbytes <= most or not self._algorithms.form(plan).divides:
            return [(plan, 0)]
        pieces = []
        for number, start in enumerate(range(0, plan.nbytes, most)):
            nbytes = min(most, plan.nbytes - start)
            programs = max(1, math.ceil(plan.launch.programs * nbytes / plan.nbytes))
            launch = dataclasses.replace(plan.launch, programs=programs)
            piece = dataclasses.replace(plan, nbytes=nbytes, launch=launch, whole_nbytes=plan.nbytes, piece=number)
            pieces.append((piece, start))
        return pieces

    # -- state ------------------------------------------------------------------------------------------------------

    def waiting(self, nbytes: int) -> int:
        """Return how many messages of ``nbytes`` may lie in a mailbox while their sender goes on."""
        return min(
            layout.MESSAGE_SLOTS, layout.CHUNKS_IN_FLIGHT // max(1, math.ceil(nbytes / (4 * layout.CHUNK_WORDS)))
        )

    def fault(self) -> Fault | None:
        """Return the fault that a finished kernel of this rank has seen, or None. Never synchronises."""
        word = self._status_word.value
        return Fault.decode(word & 0xFFFFFFFFFFFFFFFF) if word else None

    def headers(self, epoch: int) -> list[HeaderWords | None]:
        """Return what each rank called in ``epoch``, None where no such header came.

        After a mismatch between a send and a recv, it gives the headers of the two ranks. Synchronises.
        """
        width = layout.HEADER_WORDS
        record = self._control[layout.MESSAGE_MISMATCH : layout.MESSAGE_MISMATCH + 2 * width].tolist()
        came, expected = (HeaderWords.of_cells(record[at : at + width]) for at in (0, width))
        if expected:
            headers: list[HeaderWords | None] = [None] * self._world
            headers[self._rank] = expected
            headers[wire.Header.decode(expected).root] = came
            return headers
        row = layout.HEADERS + epoch % 2 * wire.MAX_WORLD_SIZE * width
        words = self._control[row : row + self._world * width].tolist()
        return [HeaderWords.of_cells(words[at : at + width], epoch) for at in range(0, len(words), width)]

    @property
    def epoch(self) -> int:
        """The number of collective calls begun so far. Synchronises."""
        return int(self._control[layout.EPOCH].item()) - 1

    def set_epoch(self, epoch: int) -> None:
        """Make the next collective call number ``epoch`` + 1; all ranks alike, with no call under way."""
        self._control[layout.EPOCH] = epoch + 1
        self._flag_cells(epoch)

    def _flag_cells(self, epoch: int) -> None:
        """Give all flag cells the flag of call ``epoch``, which is over: zero would be the flag of call 2^32."""
        where = self._layout
        shape = (4 * where.cells_quads,)
        cells = self._buffer.view(self._rank, where.cells_at * layout.QUAD, shape, torch.int64)
        flag = epoch & 0xFFFFFFFF
        cells.fill_((flag - (1 << 32) if flag >> 31 else flag) << 32)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls and graph replays."""
        self._timeout_s = timeout_s
        self._control[layout.TIMEOUT] = int(timeout_s * 1e9)

    def mark_gone(self, rank: int) -> None:
        """End calls that wait for ``rank``, now and later: its process has ended. Any thread may call it.

        It takes effect a moment later: a program that has just found a word missing may look for the mark now, though
        the rank sent the word at its end.
        """
        timer = threading.Timer(_SETTLE_S, self._mark_gone, (rank,))
        timer.daemon = True
        timer.start()

    def _mark_gone(self, rank: int) -> None:
        with self._marking:
            self._gone |= 1 << rank
            if self._closed:
                return
            address = self.own_address + 8 * layout.GONE
            if self.device.type == "cuda":
                driver.side_stream(self.device.index).write_word(address, self._gone)
            else:
                ctypes.c_int64.from_address(address).value = self._gone

    def drain(self) -> None:
        """Wait for this rank's kernels."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self, epoch: int) -> None:
        """Reset all memory to its first state, the last call being number ``epoch``. Between two host barriers."""
        where = self._layout
        self._control.zero_()
        self._cells.zero_()
        words = self._buffer.view(self._rank, 0, (where.nbytes // 4,), torch.int32)
        words[where.mailboxes_at * 4 : where.cells_at * 4].zero_()
        words[where.slots_at * 4 :].fill_(-1)
        self._control[layout.STATUS] = self._status.data_ptr()
        self._control[layout.GONE] = self._gone
        self.set_epoch(epoch)
        self.set_timeout(self._timeout_s)
        self._status_word.value = 0
        self.drain()

    def close(self) -> None:
        """Let go of the memory; every rank must have drained."""
        with self._marking:
            self._closed = True
        self._control = self._peers = torch.empty(0, dtype=torch.int64)
        self._buffer.close()
