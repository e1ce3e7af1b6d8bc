"""The executor for CPU ranks on several nodes: shared memory inside a node, TCP between nodes."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import mmap
import os
import statistics
import threading
import time
from array import array
from contextlib import ExitStack

import torch

from shotcast import wire
from shotcast.cost.collective import NetworkCost
from shotcast.errors import ConfigError
from shotcast.memory.symmetric import raise_failures
from shotcast.transport.cpu import layout as local_layout
from shotcast.transport.cpu.executor import CpuBoundCall, CpuExecutor, parts_of
from shotcast.transport.cpu.host_call import HostCall
from shotcast.transport.cpu.waiting import ABORTED, DONE, INTERRUPTED, MISMATCHED, PEER_GONE, TIMED_OUT
from shotcast.transport.network import layout
from shotcast.transport.network.connect import connect
from shotcast.transport.network.control import ControlPlane, RankState
from shotcast.transport.network.copies import BARRIER, SWAP
from shotcast.transport.network.layout import FRAME_HEADER_BYTES
from shotcast.transport.network.messages import MessageConnections
from shotcast.transport.network.sums import ALL_PAIRS, partial_bytes
from shotcast.transport.transport import Built, Network, Ranks
from shotcast.units import align_up
from shotcast.wire import CallPlan, HeaderWords, LaunchShape, Op

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.4
"""Time limit for answers from other nodes after a call has failed."""
_SILENT_S = 0.25
"""A rank that waits in a call updates its heartbeat more often than this; a rank that does not is stopped."""
_CONNECT_S = 60.0
_KERNEL_BYTES = 64 << 10
"""Bytes that the two ends of a new connection buffer while nobody receives: at least this much with Linux defaults."""
_LEAST_PROBES, _MOST_PROBES, _PROBING_US = 2, 12, 5e5
"""The least and most calls that measure a property of the network, and the time that ends them earlier."""
_PROBE_BYTES, _MOST_PROBE_BYTES = 4 << 20, 12 << 20
"""Bytes of such a call: to a single peer (each of several peers gets half), and the most to all peers together."""


class Message(CpuBoundCall):
    """A send or recv between two nodes, with its compiled function and its record."""

    __slots__ = ("_numbers",)
    _executor: HostsExecutor

    def __init__(self, executor: HostsExecutor, plan: CallPlan, call: HostCall, numbers: dict[int, int]):
        super().__init__(executor, plan, call)
        self._numbers = numbers

    def load(self) -> None:
        super().load()
        transfer = self._function
        assert transfer is not None

        def connect_and_transfer(context: int, record: int, x: int, out: int) -> int:
            status = self._connect()
            if status == DONE:
                status = transfer(context, record, x, out)
            self._numbers[self.plan.root] += status == DONE
            return status

        self._function = connect_and_transfer

    def _connect(self) -> int:
        """Write the connection and the number of the message to the record. Returns a status."""
        executor, rank = self._executor, self.plan.root
        deadline = time.monotonic() + executor.timeout_s

        def goes_on() -> bool:
            return not executor.stopped and not executor.ended(rank)

        connection = executor.messages.to if self.plan.op is Op.SEND else executor.messages.of
        descriptor = connection(rank, deadline, goes_on)
        if descriptor is None:
            return ABORTED if executor.stopped else PEER_GONE if executor.ended(rank) else TIMED_OUT
        self._record[local_layout.ROOT // 8] = descriptor
        self._record[local_layout.MESSAGE_NUMBER // 8] = self._numbers[rank]
        return DONE


class HostsExecutor(CpuExecutor):
    """Runs the calls of a communicator whose ranks are processes on several nodes, with the same number on each.

    Construction is collective, and raises the errors of :class:`CpuExecutor` on all ranks.
    """

    kind = "hosts"
    heap_nbytes = 0

    def __init__(self, ranks: Ranks):
        host, nodes = ranks.host, ranks.layout
        self._hosts, self._nodes, self._told, self._tell_left = host, nodes, ranks.ended, ranks.left
        self._global_rank = host.rank
        self._node = nodes.node_of(host.rank)
        self._members = nodes.members[self._node]
        self._peers = nodes.peers(host.rank)
        self._gone: set[int] = set()
        self._links = ExitStack()  # connections, and the threads that serve them
        self.closed = True  # until there is shared memory
        try:
            failure = ""
            try:
                part = host.part(self._members, f"node {self._node}")
                super().__init__(part, ranks.max_bytes, ranks.timeout_s, ranks.algorithms)
            except ConfigError as error:
                failure = str(error)
            raise_failures(host, failure)
            self._sender = host.rank
            self._network = array("q", [0] * layout.NETWORK_WORDS)
            self._network_address = self._network.buffer_info()[0]
            self._set(local_layout.NETWORK, self._network_address)
            self._put(layout.NODES, nodes.nodes)
            self._put(layout.NODE, self._node)
            self._slices: mmap.mmap | None = None
            self._slices_bytes = 0
            self._telling = threading.Lock()
            self._numbers: tuple[dict[int, int], dict[int, int]] = ({}, {})  # of messages to and from each rank
            self._network_headers: tuple[int, list[HeaderWords | None]] | None = None
            self._connect()
            self.network = self._measure()
        except BaseException:
            self.close()
            raise

    # -- connections ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        made = connect(self._hosts, self._nodes, _CONNECT_S)
        self._links.callback(made.close)
        for node, one in made.data.items():
            self._put(layout.DESCRIPTORS + 8 * node, one.fileno())
        self.messages = MessageConnections(made.listener, made.hellos)
        self._links.callback(self.messages.close)
        hears = self._mark_fault, self._peer_ended, lambda node: self._tell_left(self._peers[node])
        self._control = ControlPlane(made.control, self._states_of_node, *hears)
        self._links.callback(self._control.close)

    def _measure(self) -> NetworkCost:
        """Measure the network with a few exchanges between all nodes. Collective; the result is the same on all ranks.

        Raises ConfigError on all ranks if the exchanges fail.
        """
        nodes, ranks = self._nodes.nodes, len(self._members)
        slice_bytes = align_up(min(_PROBE_BYTES // 2, _MOST_PROBE_BYTES // (nodes - 1)), 64)

        def probe(call: HostCall, nbytes: int) -> CpuBoundCall:
            op = Op.BARRIER if call.header_only else Op.ALL_REDUCE
            return CpuBoundCall(self, CallPlan(op, "vendor", "float32", nbytes, launch=LaunchShape(0, 0, 0)), call)

        probes = (probe(SWAP, 0), probe(SWAP, _PROBE_BYTES), probe(BARRIER, 0), probe(ALL_PAIRS, slice_bytes * ranks))
        deadline_s = self.timeout_s
        self.set_timeout(max(deadline_s, _CONNECT_S))  # ranks may arrive at a construction arbitrarily late
        x = torch.zeros(max(_PROBE_BYTES, slice_bytes * ranks) // 4, dtype=torch.float32, device="cpu")
        out = torch.empty_like(x)

        def tried_us(call: CpuBoundCall) -> float:
            began = time.perf_counter()
            call.run(x, out)
            return 1e6 * (time.perf_counter() - began)

        failure, times = "", []
        for call in probes:
            call.load()
            self._hosts.barrier()
            tried_us(call)  # ranks leave a barrier one by one, but begin the next call together
            slowest_us = max(self._hosts.all_gather(tried_us(call)))
            tried_us(call)
            count = max(_LEAST_PROBES, min(_MOST_PROBES, int(_PROBING_US / slowest_us)))
            tried = [tried_us(call) for _ in range(count)][count // 3 :]  # connections speed up during the first third
            # a rank that begins late waits less by the same amount, and the opposite holds the next time
            times.append(statistics.median(map(sum, itertools.pairwise(tried))) / 2)
        if (fault := self.fault()) is not None:
            failure = f"the network could not be measured: {fault}"
        raise_failures(self._hosts, failure)
        slowest = [max(each) for each in zip(*self._hosts.all_gather(tuple(times)), strict=True)]
        super().clear(0)
        self._slices, self._slices_bytes = None, 0
        self.set_timeout(deadline_s)
        self._hosts.barrier()

        def gbps(nbytes: int, step_us: float, whole_us: float) -> float:
            return nbytes / max(whole_us - step_us, whole_us / 10) / 1e3  # noise must not make it infinitely fast

        step_us, whole_us, spread_us, whole_spread_us = slowest
        rates = gbps(_PROBE_BYTES, step_us, whole_us), gbps((nodes - 1) * slice_bytes, spread_us, whole_spread_us)
        return NetworkCost(step_us, rates[0], spread_us, rates[1])

    def _peer_ended(self, node: int) -> None:
        self._gone.add(self._peers[node])
        self._told(self._peers[node])

    # -- calls ---------------------------------------------------------------------------------------------------

    def bind(self, plan: CallPlan) -> CpuBoundCall:
        message = plan.op in (Op.SEND, Op.RECV)
        within = message and plan.root in self._members
        call = self._call_of(plan, super().kind if within else self.kind, self._nodes.world_size)
        if not message or within:
            return CpuBoundCall(self, plan, call)
        numbers = self._numbers[0 if plan.op is Op.SEND else 1]
        numbers.setdefault(plan.root, 0)
        return Message(self, plan, call, numbers)

    def record(self, plan: CallPlan, call: HostCall) -> array[int]:
        """Build the record of a call, and allocate room for the slices that arrive during it."""
        record = super().record(plan, call)
        if plan.op in (Op.SEND, Op.RECV) and plan.root in self._members:
            record[local_layout.ROOT // 8] = self._members.index(plan.root)
        if plan.op in (Op.BROADCAST, Op.REDUCE) and not call.header_only:
            record[local_layout.ROOT // 8] = self._nodes.local_rank_of(plan.root)
            record[local_layout.ROOT_NODE // 8] = self._nodes.node_of(plan.root)
        slice_bytes = wire.slice_bytes(plan.nbytes, len(self._members))
        slots = call.slots(self._nodes.nodes, slice_bytes)
        if slots > 0:
            count = -(-slice_bytes // wire.DTYPES[plan.dtype])
            record[local_layout.PARTIAL_BYTES // 8] = partial_bytes(plan)
            slot = align_up(partial_bytes(plan) * count, 64) + 64 * self._nodes.nodes
            record[local_layout.SLOT // 8] = slot
            capacity = slot * (1 + slots)
            record[local_layout.TOTAL // 8] = capacity
            self._make_room(capacity + (plan.nbytes if call.norms else 0))
        return record

    def _put_parts(self, record: array[int], plan: CallPlan) -> None:
        sizes = parts_of(plan, self._nodes.world_size)
        ends = list(itertools.accumulate(sizes))
        for rank in itertools.chain(*self._nodes.members):
            record.extend((ends[rank] - sizes[rank], sizes[rank]))

    def _make_room(self, nbytes: int) -> None:
        """Ensure at least ``nbytes`` of private memory for slices in the form that nodes exchange."""
        if nbytes <= self._slices_bytes:
            return
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self._slices_bytes = align_up(nbytes, mmap.PAGESIZE)
        self._slices = mmap.mmap(-1, self._slices_bytes, flags=flags)
        self._put(layout.ACCUMULATOR, ctypes.addressof(ctypes.c_char.from_buffer(self._slices)))

    def _put(self, offset: int, value: int) -> None:
        self._network[offset // 8] = value

    # -- faults --------------------------------------------------------------------------------------------------

    def fail(self, status: int, plan: CallPlan, header: HeaderWords) -> None:
        if status == ABORTED:
            if (word := self.stopped_word.value) != 0:
                self._control.tell(word)  # the rank that found the fault may have lost its connections
            return
        if plan.op in (Op.SEND, Op.RECV):
            kind, guilty = self._blame_message(status, plan, header)
        else:
            kind, guilty = self._blame(status)
        self._stop(wire.encode_fault(kind, int(plan.op), guilty, self.epoch))

    def _mark_fault(self, word: int) -> None:
        with self._telling:
            super()._mark_fault(word)

    def _stop(self, word: int) -> None:
        super()._stop(word)
        self._control.tell(self.stopped_word.value)

    def _blame_message(self, status: int, plan: CallPlan, header: HeaderWords) -> tuple[int, list[int]]:
        """Determine the kind of fault of a message, and the rank at fault."""
        self._put(layout.LOST, 0)
        if status == INTERRUPTED:
            return wire.INTERRUPTED, [self._global_rank]
        if status == MISMATCHED:
            headers: list[HeaderWords | None] = [None] * self._nodes.world_size
            if plan.root in self._members:
                self._keep_message_headers(dataclasses.replace(plan, root=self._members.index(plan.root)), header)
                assert self._message_headers is not None
                for rank, words in zip(self._members, self._message_headers[1], strict=True):
                    headers[rank] = words
            else:
                first = (layout.ENTRIES + layout.FRAME_HEADER) // 8
                headers[plan.root] = HeaderWords(*self._network[first + 1 : first + 3])
                headers[self._global_rank] = header
            self._network_headers = (self.epoch, headers)
            return wire.MISMATCH, [plan.root]
        if status == PEER_GONE:
            return self._gone_kind([plan.root]), [plan.root]
        return wire.TIMEOUT, [plan.root]

    def ended(self, rank: int) -> bool:
        """Check whether the process of a rank on another node is known to have ended."""
        return rank in self._gone

    def _blame(self, status: int) -> tuple[int, list[int]]:
        """Determine the kind of fault, and the ranks at fault."""
        if status == INTERRUPTED:
            return wire.INTERRUPTED, [self._global_rank]
        if status == PEER_GONE:
            return self._blame_lost()
        states = self._states()
        if status == MISMATCHED:
            headers = {rank: state.header for rank, state in states.items() if state.header is not None}
            found = list(headers.values())
            usual = max(found, key=found.count)
            differing = [rank for rank, header in headers.items() if header != usual]
            unheard = [rank for rank in range(self._nodes.world_size) if rank not in headers]
            return wire.MISMATCH, differing or unheard
        assert status == TIMED_OUT
        absent = {rank: state.silent_s for rank, state in states.items() if state.header is None}
        late = [rank for rank, silent_s in absent.items() if silent_s > _SILENT_S]
        silent = [rank for rank in range(self._nodes.world_size) if rank not in states]
        if late:
            return wire.TIMEOUT, late
        if silent:
            self._await_better_news()
            return wire.UNREACHABLE, silent
        if absent:  # they wait in an earlier call, for ranks that are not known
            return wire.TIMEOUT, list(absent)
        stopped = [rank for rank, state in states.items() if state.silent_s > _SILENT_S and rank != self._global_rank]
        if stopped:
            return wire.TIMEOUT, stopped
        return wire.TIMEOUT, self._behind(states)

    def _await_better_news(self) -> None:
        """Give a rank of this node time to act whose peers may answer for a node that is silent here."""
        until = time.monotonic() + _SILENT_S
        while len(self._members) > 1 and not self.stopped_word.value and time.monotonic() < until:
            time.sleep(0.005)

    def _behind(self, states: dict[int, RankState]) -> list[int]:
        """List the ranks of this node that are behind in the call, or the peers on other nodes if none is."""
        own = states[self._global_rank].progress
        behind = [rank for rank in self._members if states[rank].progress < own]
        return behind or [rank for rank in self._peers if rank != self._global_rank]

    def _blame_lost(self) -> tuple[int, list[int]]:
        lost, error = self._network[layout.LOST // 8], self._network[layout.LOST_ERROR // 8]
        self._put(layout.LOST, 0)
        if not lost:
            gone = self.context[local_layout.GONE // 8]
            guilty = [rank for local, rank in enumerate(self._members) if gone >> local & 1]
            return self._gone_kind(guilty), guilty
        until = time.monotonic() + _SILENT_S
        node = lost - 1
        while node not in self._control.ended and node not in self._control.parted and time.monotonic() < until:
            time.sleep(0.002)
        dead = node in self._control.ended
        logger.info("the connection to node %s ended: %s", self._nodes.names[node], os.strerror(error) if error else "")
        guilty = [self._peers[node]]
        return wire.DEAD if dead else self._gone_kind(guilty, wire.UNREACHABLE), guilty

    def _gone_kind(self, ranks: list[int], otherwise: int = wire.DEAD) -> int:
        """Determine the kind of fault for ranks that will never arrive."""
        return wire.LEFT if set(ranks) <= set(self._hosts.left) else otherwise

    def _absent(self) -> list[int]:
        return self._blame(TIMED_OUT)[1]

    def _known(self, rank: int) -> int:
        return self._members[rank]

    def waiting(self, nbytes: int) -> int:
        """Compute how many messages of ``nbytes`` a sender may be ahead; between nodes, the kernel's buffer counts."""
        return min(super().waiting(nbytes), _KERNEL_BYTES // (nbytes + FRAME_HEADER_BYTES))

    def headers(self, epoch: int) -> list[HeaderWords | None]:
        if self._network_headers is not None and self._network_headers[0] == epoch:
            return list(self._network_headers[1])
        states = self._states(epoch)
        return [states[rank].header if rank in states else None for rank in range(self._nodes.world_size)]

    def _states(self, epoch: int | None = None) -> dict[int, RankState]:
        """Collect the states of all ranks, except on nodes that do not answer in time."""
        epoch = self.epoch if epoch is None else epoch
        by_node = {self._node: self._states_of_node(epoch)} | self._control.ask(epoch, _PATIENCE_S)
        found: dict[int, RankState] = {}
        for node, states in by_node.items():
            found |= zip(self._nodes.members[node], states, strict=True)
        return dict(sorted(found.items()))

    def _states_of_node(self, epoch: int) -> list[RankState]:
        now, gone = time.monotonic_ns(), self.context[local_layout.GONE // 8]
        found = []
        for local, header in enumerate(super().headers(epoch)):
            silent_s = (now - self._word(local, local_layout.HEARTBEAT)) / 1e9
            found.append(RankState(header, silent_s, self._progress(local), bool(gone >> local & 1)))
        return found

    def mark_gone(self, rank: int) -> None:
        """End calls that wait for ``rank`` of this node; connections report the ranks of other nodes."""
        self._gone.add(rank)
        if rank in self._members:
            super().mark_gone(self._members.index(rank))

    # -- state ---------------------------------------------------------------------------------------------------

    def clear(self, epoch: int) -> None:
        """Clear faults and calls, and reconnect. Call it on every rank, between two host barriers."""
        self._control.part()
        self._hosts.barrier(_CONNECT_S)  # from here on, no rank marks an old fault or hears the end of a connection
        self._links.close()
        super().clear(epoch)
        self._network_headers = None
        for numbers in self._numbers:
            numbers.update(dict.fromkeys(numbers, 0))
        self._connect()

    def close(self) -> None:
        self._links.close()
        super().close()


def build(ranks: Ranks) -> Built:
    """Build the executor for CPU ranks on several nodes."""
    executor = HostsExecutor(ranks)
    return Built(executor, network=Network("tcp", executor.network))
