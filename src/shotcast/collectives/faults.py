"""Turn the fault that stopped a communicator into the error that describes it."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from shotcast import wire
from shotcast.collectives.interface import Executor
from shotcast.errors import CollectiveMismatch, ShotcastError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.members import Members
from shotcast.wire import Fault, Header, HeaderWords, Op

_FIELDS = ("op", "dtype", "algorithm", "root", "reduction", "nbytes")
_LAUNCH_FIELDS = ("launch", "piece")
"""Fields that follow from the others, so they are named only if no other differs."""
_REASONS = {
    wire.TIMEOUT: "late",
    wire.DEAD: "dead",
    wire.INTERRUPTED: "interrupted",
    wire.UNREACHABLE: "unreachable",
    wire.LEFT: "left",
}
_PATIENCE_S = 0.2


def error_of(
    fault: Fault, executor: Executor, host: StoreGroup, timeout_s: float, algorithms: Sequence[str]
) -> ShotcastError:
    """Return the error for a fault from this rank's view. Waits for no stream, since streams may wait for a lost rank.

    ``algorithms`` are names in the order of their header codes.
    """
    if fault.op in (Op.SEND.label, Op.RECV.label):
        epoch = fault.epoch32
    else:
        now = executor.epoch
        # the fault may be of a call that this rank has not begun: the nearest epoch with those 32 bits
        epoch = now - ((now - fault.epoch32 + (1 << 31) & 0xFFFFFFFF) - (1 << 31))
    if fault.kind == wire.PARTS_DIFFER:
        return host.members.mismatch(executor.parts(epoch), fault.ranks, ("sizes",), epoch)
    if fault.kind != wire.MISMATCH:
        return host.timeout(fault.ranks, fault.op, epoch, timeout_s, _REASONS[fault.kind])
    headers = _headers(executor, fault, epoch, min(_PATIENCE_S, timeout_s / 2))
    known = {r: words for r, words in enumerate(headers) if words is not None}
    return mismatch_of(host.members, known, epoch, algorithms, fault.ranks)


def mismatch_of(
    members: Members,
    headers: Mapping[int, HeaderWords],
    epoch: int,
    algorithms: Sequence[str],
    differing: Sequence[int] = (),
) -> CollectiveMismatch:
    """Return the error for calls that differ, from a rank's view.

    ``headers`` are the known headers by rank; ``algorithms`` are names in the order of their header codes;
    ``differing`` lists the ranks at fault, in case no header is known.
    """
    known = {r: Header.decode(words, algorithms) for r, words in sorted(headers.items())}
    fields = _differing(_FIELDS, known.values()) or _differing(_LAUNCH_FIELDS, known.values())
    if known:
        found = list(known.values())
        # the largest group of equal calls is taken to be right; of equally large ones, the one of the lowest rank
        usual = max(found, key=found.count)
        differing = tuple(r for r, header in known.items() if header != usual)
    calls = {r: header.differs(fields, members.ranks) for r, header in known.items()}
    return members.mismatch(calls, differing, fields, epoch)


def _differing(fields: Sequence[str], headers: Collection[Header]) -> list[str]:
    """Return the ``fields`` in which headers differ."""
    return [name for name in fields if len({getattr(header, name) for header in headers}) > 1]


def _headers(executor: Executor, fault: Fault, epoch: int, patience_s: float) -> list[HeaderWords | None]:
    """Collect every rank's header for the call; wait briefly for ranks that are about to send theirs."""
    headers = executor.headers(epoch)
    if fault.op in (Op.SEND.label, Op.RECV.label):
        # a message's two headers, where the executor keeps them; never those of a collective of that number
        return headers if any(word is not None and Header.decode(word).op == Op.SEND.label for word in headers) else []
    until = time.monotonic() + patience_s
    while None in headers and time.monotonic() < until:
        time.sleep(0.002)
        headers = executor.headers(epoch)
    return headers
