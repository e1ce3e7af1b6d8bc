"""A workspace: one region of symmetric memory on every rank, with the state of the protocols that use it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shotcast import wire
from shotcast.device.triton.intrinsics import has_float8_conversions, supports_pdl
from shotcast.errors import ClosedError
from shotcast.memory import driver
from shotcast.memory.arena import Lease
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.streams import SideLane
from shotcast.transport.triton import layout
from shotcast.transport.triton.binding import KernelContext
from shotcast.transport.triton.layout import WorkspaceLayout
from shotcast.wire import CallPlan, HeaderWords

if TYPE_CHECKING:
    from shotcast.memory.nvshmem import HeapLease


class GpuWorkspace:
    """This rank's side of a workspace. The memory has a multicast address on all ranks or on none.

    Args:
        host_address: the address of the host's words (:data:`.layout.HOST_FAULT` and others).
        nodes: the number of nodes, which all have equally many consecutive ranks.
        blocks_address: the address of the table of all ranks' blocks of tensors.
    """

    def __init__(
        self,
        memory: Lease | HeapLease,
        where: WorkspaceLayout,
        group: StoreGroup,
        host_address: int,
        device: torch.device,
        header_of: Callable[[CallPlan], HeaderWords],
        nodes: int,
        blocks_address: int,
    ):
        self.memory, self.where = memory, where
        rank, world_size = self._rank, self._world = group.rank, group.world_size
        self._host_address, self._device = host_address, device
        self._control = memory.view(rank, 0, (layout.CONTROL_WORDS,), torch.int64)
        table = list(memory.addresses) + [0] * (wire.MAX_WORLD_SIZE - world_size) + [memory.multicast_address]
        self._headers_at, self._header_ranks = layout.HEADERS, wire.MAX_WORLD_SIZE
        if world_size > wire.MAX_WORLD_SIZE:
            self._headers_at, self._header_ranks = layout.WIDE_HEADERS, layout.MOST_RANKS
        self._peers = torch.tensor(table, dtype=torch.int64, device=device)
        puts = [word for target in memory.targets for word in (target.address, target.pe)]
        self._puts = torch.tensor(puts, dtype=torch.int64, device=device)
        self._cells = torch.zeros(3 * layout.row_cell_count(where.max_bytes), dtype=torch.int64, device=device)
        self.context = KernelContext(
            rank=rank,
            world_size=world_size,
            layout=where,
            own_address=memory.addresses[rank],
            addresses=tuple(memory.addresses),
            peers_address=self._peers.data_ptr(),
            cells_address=self._cells.data_ptr(),
            cells_nbytes=self._cells.nbytes,
            blocks_address=blocks_address,
            multicast=bool(memory.multicast_address),
            pdl=supports_pdl(device),
            native_fp8=has_float8_conversions(device),
            clear_after_read_bytes=layout.CLEAR_AFTER_READ_BYTES,
            header_of=header_of,
            nodes=nodes,
            puts_address=self._puts.data_ptr() if puts else 0,
            lane=SideLane(device) if device.type == "cuda" else None,
        )

    @property
    def stopped(self) -> bool:
        words = self._read(layout.ABORT, layout.COPIES * layout.COPY_WORDS)
        return any(words[:: layout.COPY_WORDS])

    @property
    def epoch(self) -> int:
        """The number of collective calls begun so far."""
        return self._read(layout.EPOCH)[0] - 1

    def _read(self, first: int, count: int = 1) -> list[int]:
        """Return words of this rank's control memory as they are now, no matter what its streams wait for."""
        if not self._control.numel():
            raise ClosedError("this workspace was given back")
        address = self.context.own_address + 8 * first
        if self._device.type == "cuda":
            return driver.side_stream(self._device.index).read_words(address, count)
        return list((ctypes.c_int64 * count).from_address(address))

    def set_epoch(self, epoch: int) -> None:
        """Make the next collective call number ``epoch`` + 1, on all ranks alike and with no call under way."""
        end = layout.EPOCH + layout.COPIES * layout.COPY_WORDS
        self._control[layout.EPOCH : end : layout.COPY_WORDS].fill_(epoch + 1)
        # the flag of a finished call, because zero would be the flag of call 2^32
        where, flag = self.where, epoch & 0xFFFFFFFF
        cells = self.memory.view(self._rank, where.cells_at * layout.QUAD, (4 * where.cells_quads,), torch.int64)
        cells.fill_((flag - (1 << 32) if flag >> 31 else flag) << 32)

    def headers(self, epoch: int) -> list[HeaderWords | None]:
        """Return the header of each rank's call in ``epoch``, or None if no such header came; after a mismatch between
        a send and a recv, those of the two ranks.
        """
        width = layout.HEADER_WORDS
        record = self._read(layout.MESSAGE_MISMATCH, 2 * width)
        came, expected = (HeaderWords.of_cells(record[at : at + width]) for at in (0, width))
        if expected:
            headers: list[HeaderWords | None] = [None] * self._world
            headers[self._rank] = expected
            headers[wire.Header.decode(expected).root] = came
            return headers
        row = self._headers_at + epoch % 2 * self._header_ranks * width
        words = self._read(row, self._world * width)
        return [HeaderWords.of_cells(words[at : at + width], epoch) for at in range(0, len(words), width)]

    def parts(self, epoch: int) -> dict[int, str]:
        """Return, by rank, the sizes that made this rank stop the uneven all_to_all ``epoch``; empty if it did not."""
        found, *sizes = self._read(layout.PARTS_CAME, 1 + 2 * self._world)
        own = self.headers(epoch)[self._rank]
        if found != epoch or own is None:
            return {}
        dtype = wire.Header.decode(own).dtype
        item = wire.DTYPES[dtype]
        texts = {}
        for sender, (came, expected) in enumerate(zip(sizes[::2], sizes[1::2], strict=True)):
            if came != expected:
                texts[sender] = f"sends {came // item} of {dtype} to rank {self._rank}"
                texts.setdefault(self._rank, f"expects {expected // item} from rank {sender}")
        return texts

    def stop(self, fault: int) -> None:
        """Stop the calls of this workspace because of a fault; one that is already known here stays, as the cause of
        others.
        """
        if self.stopped:
            return
        for copy in range(layout.COPIES):
            address = self.context.own_address + 8 * (layout.ABORT + copy * layout.COPY_WORDS)
            if self._device.type == "cuda":
                driver.side_stream(self._device.index).write_word(address, fault)
            else:
                ctypes.c_int64.from_address(address).value = fault

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls and graph replays."""
        self._control[layout.TIMEOUT] = int(timeout_s * 1e9)

    def clear(self, epoch: int, timeout_s: float) -> None:
        """Reset all memory to its initial state after call ``epoch``. Call it between two host barriers."""
        where = self.where
        self._control.zero_()
        self._cells.zero_()
        words = self.memory.view(self._rank, 0, (where.nbytes // 4,), torch.int32)
        words[where.mailboxes_at * 4 : where.cells_at * 4].zero_()
        words[where.slots_at * 4 : where.staging_at * 4].fill_(-1)
        self._control[layout.STATUS] = self._host_address
        self.set_epoch(epoch)
        self.set_timeout(timeout_s)

    def close(self) -> None:
        """Give the memory back. This rank's calls must have ended; other ranks' calls may not have."""
        self._control = self._peers = self._puts = self._cells = torch.empty(0, dtype=torch.int64, device="cpu")
        self.memory.close()
