"""The same calls as :mod:`rounds.ranks`, message by message from a queue of events.

It shares no arithmetic with the recurrence but the routes of messages and the bandwidths on them, and is what the
recurrence is held against: each rank is a process that sends, waits for its messages, and continues, and each network
adapter and link of a switch serves one message after the other. These can serve what is ready first, as real ones do,
or by rounds, as the recurrence has it. It takes some ten microseconds a message, so it is for algorithms of tens of
rounds on thousands of ranks, or of thousands of rounds on tens.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rounds.ranks import Array, CollectiveCall, Fabric, Jitter, beginnings, follow
from rounds.schedules import Reach, Round


class Service(enum.Enum):
    """The order in which adapters and links between switches serve messages."""

    READY = "as they are ready, of whatever round"
    ROUNDS = "by rounds, those of one round as they are ready"


def end_times(
    call: CollectiveCall,
    fabric: Fabric,
    begin_us: Sequence[float] | None = None,
    jitter: Jitter | None = None,
    service: Service = Service.READY,
) -> list[float]:
    """Return when each rank ends a call, in microseconds; the arguments but ``service`` are those of the recurrence."""
    return _Run(call, fabric, jitter, service).run(begin_us)


def exact_end_times(
    call: CollectiveCall, fabric: Fabric, begin_us: Sequence[float] | None = None, jitter: Jitter | None = None
) -> Array:
    """Return when each rank ends a call, in microseconds, where queues serve messages as they are ready.

    That is by the recurrence if nothing is overtaken in it, and message by message otherwise.
    """
    found = follow(call, fabric, begin_us, jitter)
    return np.array(end_times(call, fabric, begin_us, jitter)) if found.overtaken else found.end_us


@dataclass(slots=True)
class _Message:
    """A message between nodes, or one to all peers, on its way through its queues."""

    number: int
    source: int
    target: int
    nbytes: float
    latency_us: float
    queues: tuple[int, ...]  # the sender's adapter, two links of switches, the receiver's adapter; -1 for none
    stage: int = 0
    ready_us: float = 0.0
    ended_us: float = -math.inf


@dataclass(slots=True)
class _Queue:
    """A network adapter in one direction, or a link of a leaf.

    Attributes:
        free_us: when it has served all that it has begun.
        round: the round of what it served last, and when it was free before that: what interleaves waits for no other
            message of its round.
        pending: by round, the messages that are still to come.
        held: messages of a round that is not to be served yet.
    """

    free_us: float = -math.inf
    round: int = -1
    free_before_us: float = -math.inf
    pending: Counter[int] = field(default_factory=Counter)
    held: list[tuple[int, float, int, _Message]] = field(default_factory=list)

    def serves(self, number: int) -> bool:
        return not any(left for earlier, left in self.pending.items() if earlier < number)


class _Run:
    """One call: the events that are to come, and how far each rank has got."""

    def __init__(self, call: CollectiveCall, fabric: Fabric, jitter: Jitter | None, service: Service):
        self._call, self._fabric, self._jitter = call, fabric, jitter
        self._by_rounds = service is Service.ROUNDS
        self._ranks = call.shape.world_size
        self._local = call.shape.ranks_per_node
        self._late_in: dict[int, Array] = {}
        self._targets_in = [self._targets_of(each) for each in call.rounds]
        self._gbps = fabric.queue_gbps(self._local)
        self._queues: dict[int, _Queue] = {}
        self._plans = [self._plan(number, each) for number, each in enumerate(call.rounds)]
        self._round = [0] * self._ranks
        self._begun = [False] * self._ranks  # whether a rank is in its round, or its beginning is still to come
        self._ready_us = [0.0] * self._ranks  # the latest of what a rank has waited for in its round
        self._missing = [0] * self._ranks  # messages, and the end of its own sending
        self._early: list[dict[int, list[float]]] = [{} for _ in range(self._ranks)]
        self._ended_us = [0.0] * self._ranks
        # time, kind, round, rank, order: what happens at one time is taken by the way of a message, then by rounds
        self._events: list[tuple[float, int, int, int, int, _Message | None]] = []
        self._order = 0

    def run(self, begin_us: Sequence[float] | None) -> list[float]:
        for rank, begin in enumerate(beginnings(self._call, begin_us).tolist()):
            self._add(begin + self._fabric.link.fixed_us, _BEGIN, 0, rank)
        while self._events:
            time_us, kind, number, rank, _, message = heapq.heappop(self._events)
            if message is not None:
                self._reach(message, time_us)
            elif kind == _BEGIN:
                self._begin(rank, time_us)
            elif self._begun[rank] and self._round[rank] == number:
                self._arrive(rank, time_us)
            else:
                self._early[rank].setdefault(number, []).append(time_us)
        return self._ended_us

    def _add(self, time_us: float, kind: int, number: int, rank: int, message: _Message | None = None) -> None:
        heapq.heappush(self._events, (time_us, kind, number, rank, self._order, message))
        self._order += 1

    def _plan(self, number: int, each: Round) -> dict[int, _Message]:
        """Return by sender the messages between nodes of a round, and announce them to their queues."""
        if each.reach is Reach.NODE:
            return {}
        targets = np.arange(self._ranks)
        sources, stages = targets, 1  # to all peers: by the own adapter
        if each.reach is Reach.PAIR:
            sources, stages = np.array(each.sources), 4
            (targets,) = np.nonzero(sources // self._local != targets // self._local)
            sources = sources[targets]
        queues, latency_us = self._fabric.routes(sources, targets, self._local)
        found = {}
        for source, target, way, latency in zip(
            sources.tolist(), targets.tolist(), queues[:, :stages].tolist(), latency_us.tolist(), strict=True
        ):
            found[source] = _Message(number, source, target, each.nbytes, latency, tuple(way))
            for queue in (queue for queue in way if queue >= 0):
                self._queues.setdefault(queue, _Queue()).pending[number] += 1
        return found

    def _begin(self, rank: int, now_us: float) -> None:
        """Begin the next round of a rank: send, and wait for others."""
        number = self._round[rank]
        if number == len(self._call.rounds):
            self._ended_us[rank] = now_us + self._call.taken_us(self._fabric.link)
            return
        each = self._call.rounds[number]
        self._begun[rank], self._ready_us[rank] = True, now_us
        self._missing[rank] = 1 + len(self._sources(each, rank))
        early = self._early[rank].pop(number, [])
        message = self._plans[number].get(rank)
        if message is not None:
            self._add(now_us, _QUEUE, number, message.target, message)
        else:
            pairs = each.reach is Reach.PAIR
            targets = self._targets_in[number].get(rank, []) if pairs else self._sources(each, rank)
            sent_us = now_us + each.nbytes / (self._fabric.link.bw_gbps * 1e3) if targets else now_us
            self._send(rank, number, sent_us, self._fabric.link.step_us, targets)
        for time_us in early:
            self._arrive(rank, max(now_us, time_us))

    def _send(self, rank: int, number: int, sent_us: float, latency_us: float, targets: list[int]) -> None:
        """Let a rank continue when it has sent, and its messages arrive."""
        self._add(sent_us, _ARRIVAL, number, rank)
        for target in targets:
            self._add(sent_us + latency_us + self._late_us(number, target), _ARRIVAL, number, target)

    def _late_us(self, number: int, target: int) -> float:
        if self._jitter is None:
            return 0.0
        if number not in self._late_in:
            self._late_in[number] = self._jitter(number, self._ranks)
        return float(self._late_in[number][target])

    def _reach(self, message: _Message, now_us: float) -> None:
        """Let a message reach its next queue, which serves it or holds it back."""
        if message.stage == len(message.queues):
            arrival_us = message.ended_us + message.latency_us + self._late_us(message.number, message.target)
            self._add(arrival_us, _ARRIVAL, message.number, message.target)
            return
        queue, message.ready_us = self._queues[message.queues[message.stage]], now_us
        if self._by_rounds and not queue.serves(message.number):
            heapq.heappush(queue.held, (message.number, now_us, message.target, message))
            return
        self._serve(message, queue)
        while self._by_rounds and queue.held and queue.serves(queue.held[0][0]):
            self._serve(heapq.heappop(queue.held)[-1], queue)

    def _serve(self, message: _Message, queue: _Queue) -> None:
        number, rank = message.number, message.source
        each = self._call.rounds[number]
        queue.pending[number] -= 1
        if queue.round != number:
            queue.round, queue.free_before_us = number, queue.free_us
        if each.reach is Reach.PEERS:
            sending_us = float(self._fabric.spread_us(each.nbytes, self._call.shape)[rank])
            sent_us = max(message.ready_us, queue.free_before_us) + sending_us
            queue.free_us = max(queue.free_us, sent_us)
            latency_us = self._fabric.spread_latency_us(self._call.shape.nodes)
            self._send(rank, number, sent_us, latency_us, self._sources(each, rank))
            return
        begun_us = max(message.ready_us, queue.free_us)
        queue.free_us = begun_us + message.nbytes / (self._gbps[message.stage] * 1e3)
        message.ended_us = max(queue.free_us, message.ended_us)
        if not message.stage:
            self._add(message.ended_us, _ARRIVAL, number, rank)
        message.stage += 1
        while message.stage < 4 and message.queues[message.stage] < 0:
            message.stage += 1
        self._add(begun_us, _QUEUE + message.stage, number, message.target, message)

    def _arrive(self, rank: int, time_us: float) -> None:
        self._ready_us[rank] = max(self._ready_us[rank], time_us)
        self._missing[rank] -= 1
        if not self._missing[rank]:
            self._round[rank] += 1
            self._begun[rank] = False
            self._add(self._ready_us[rank], _BEGIN, self._round[rank], rank)

    def _sources(self, each: Round, rank: int) -> list[int]:
        """Return the ranks that a rank waits for."""
        if each.reach is Reach.PAIR:
            return [each.sources[rank]] if each.sources[rank] != rank else []
        if each.reach is Reach.NODE:
            first = rank // self._local * self._local
            return [other for other in range(first, first + self._local) if other != rank]
        return [other for other in range(rank % self._local, self._ranks, self._local) if other != rank]

    def _targets_of(self, each: Round) -> dict[int, list[int]]:
        """Return by sender whom it sends to in a round of pairs."""
        found: dict[int, list[int]] = {}
        for target, source in enumerate(each.sources):
            if source != target:
                found.setdefault(source, []).append(target)
        return found


_ARRIVAL, _BEGIN, _QUEUE = 0, 1, 2
