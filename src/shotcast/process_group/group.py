"""The process group: every call of torch.distributed, run by a communicator or by the inner group."""

from __future__ import annotations

import collections
import functools
import re
import secrets
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shotcast.collectives.communicator import Communicator
from shotcast.collectives.rank_device import gpus_are_shared
from shotcast.collectives.reductions import Reduction, reduction_name
from shotcast.collectives.rendezvous import use_interface
from shotcast.collectives.torch_private import Unseen
from shotcast.errors import ClosedError, ConfigError, ShotcastError, UnsupportedError, call_text
from shotcast.memory.agreed_number import agreed_number
from shotcast.memory.host_group import Rendezvous, title_of
from shotcast.memory.members import Members
from shotcast.process_group import torch_private
from shotcast.process_group.calls import REDUCED, Begin, Calls
from shotcast.process_group.device_calls import DeviceCalls, Make
from shotcast.process_group.failure_watch import FailureWatch
from shotcast.process_group.messages import GroupMessage, HeldWork, MessageBatch, OfThread, begin_together
from shotcast.process_group.names import BACKEND
from shotcast.process_group.routing import INNER, LIBRARY, OWN, Route, route_of
from shotcast.process_group.torch_private import dispatch_modes, is_profiled
from shotcast.process_group.works import DoneWork, SeveralWorks, inner_work, seconds

_NO_TIMEOUT = timedelta(0)
"""The threshold below which a timeout means that a call has no deadline of its own."""
_ADVICE = "The process group is stopped: destroy it on every rank (dist.destroy_process_group) and make a new one"
_AllreduceOptions: Any = dist.AllreduceOptions


class ShotcastProcessGroup(Calls, torch_private.ProcessGroup):
    """The ranks of a torch.distributed group.

    Calls go to a communicator per device, built by the first call, or to an inner Gloo or NCCL group (:meth:`explain`).
    Several threads may issue calls, which run in the order of issue.

    ``name`` is unique in the job, and ``ranks`` are the ranks in the job; empty for all of them.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        name: str,
        nccl_options: Any = None,
        ranks: Sequence[int] = (),
    ):
        super().__init__(rank, world_size)
        self._ranks = tuple(ranks)
        self._rank, self._world_size, self._timeout, self._name = rank, world_size, timeout, name
        self._nccl_options = nccl_options
        # a process may make the group of all ranks again on the same store, where the addresses of before still are
        meetings = dist.PrefixStore("shotcast groups", store)
        limit_s, what = timeout.total_seconds(), "construction of the process group"
        members = Members(rank, self._ranks, name if ranks else "", _ADVICE)
        number = agreed_number(meetings, members, world_size, limit_s, what)
        self._store = dist.PrefixStore(f"shotcast {number}", store)
        token = self._store.compare_set("connection", "", secrets.token_hex(8)).decode()
        self._connection = torch_private.own_connection(store)
        self._shared_store = dist.PrefixStore(f"shotcast group {token}", self._connection.store)
        self._failures = FailureWatch(dist.PrefixStore("processes", self._shared_store), rank, world_size)
        use_interface()
        kinds = dist.ProcessGroup.BackendType
        gloo = torch_private.inner_gloo(self._part("gloo"), rank, world_size, timeout, weakref.ref(self))
        self._inners: dict[str, Any] = {"cpu": gloo}
        self._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if dist.is_nccl_available() and torch.cuda.is_available() and not gpus_are_shared():
            self._inners["cuda"] = self._nccl("nccl", rank, world_size)
            self._register_backend(torch.device("cuda"), kinds.NCCL, self._inners["cuda"])
        elif torch.cuda.is_available():
            self._inners["cuda"] = gloo
            self._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
        self._set_default_backend(kinds.GLOO)
        self._calls: dict[torch.device, DeviceCalls] = {}
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._thread = OfThread()
        self._splits = 0
        self._aborted = False
        self._on_cpu = self._calls_on(torch.device("cpu"))

    def _part(self, name: str) -> dist.Store:
        return dist.PrefixStore(f"shotcast {name}", self._store)

    def _members(self) -> Members:
        """Return the ranks as named in errors. PyTorch describes a group only after creating it."""
        return Members(self._rank, self._ranks, title_of(self) if self._ranks else "", _ADVICE)

    def _nccl(self, name: str, rank: int, world_size: int) -> Any:
        ranks = self._part(name), rank, world_size
        return torch_private.inner_nccl(*ranks, self._timeout, weakref.ref(self), self._nccl_options)

    # -- what it is ---------------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size

    def name(self) -> str:
        return BACKEND

    def get_group_store(self) -> dist.Store:
        return self._store

    getRank, getSize, getBackendName = rank, size, name  # noqa: N815 - as C++ calls them

    def _get_backend(self, device: torch.device) -> Any:
        """Return a device's inner group.

        ``init_process_group(device_id=...)`` requests its device's group before there is a group of all ranks, and this
        is the only way a Python group learns the device.
        """
        if device.index is not None and not dist.is_initialized():
            self.bound_device_id = device
        return super()._get_backend(device)

    def __repr__(self) -> str:
        return f"ShotcastProcessGroup(rank={self._rank}, world_size={self._world_size}, {self._name!r})"

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many calls each route has served, by operation; see :func:`shotcast.process_group.counts`."""
        counts: dict[str, dict[str, int]] = {}
        for (op, route), number in sorted(self._counts.items()):
            counts.setdefault(op, {})[route] = number
        return counts

    def explain(self, x: torch.Tensor, op: str = "all_reduce", reduction: Reduction = "sum") -> Route:
        """Return which route a call would take, and why. Does not communicate.

        Args:
            x: the tensor that defines the size of the call: the input or, for an all_gather, the output.
            op: the name of the operation, such as ``"all_reduce"``, ``"all_to_all"`` or ``"send"``.
            reduction: as in the call.
        """
        route = route_of(op, x.dtype, reduction_name(reduction, "explain"), x.layout)
        calls = self._calls.get(x.device)
        if not route.is_own or calls is None or calls.comm is None:
            return route
        found = calls.comm.explain(x, op.removesuffix("_coalesced"), reduction=reduction)
        return Route(LIBRARY if found.by_library else OWN, found.reason, found.algorithm)

    # -- calls --------------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> DoneWork:
        """Reduce a tensor over all ranks, in place."""
        if type(opts) is _AllreduceOptions and len(tensors) == 1:
            key, x = REDUCED.get(("all_reduce", opts.reduceOp.op.value)), tensors[0]
            if work := self._again("all_reduce", opts, key, x, x):
                return work
        return self._all_reduce(tensors, opts, op, timeout)

    def _again(
        self, op: str, opts: Any, key: tuple[Any, ...] | None, x: torch.Tensor | None, out: torch.Tensor | None
    ) -> DoneWork | None:
        """Repeat an earlier call, which the communicator finds by ``key`` and tensors; None if there was none."""
        if opts is None or key is None or is_profiled() or dispatch_modes():
            return None
        if self._thread.works is not None or opts.timeout > _NO_TIMEOUT:
            return None
        if x is None and len(self._calls) > 1:  # a barrier waits for calls on GPUs, too
            return None
        calls = self._on_cpu if x is None or x.is_cpu else self._calls.get(x.device)
        work = None if calls is None else calls.again(op, key, (x, out), opts.asyncOp)
        if work is not None:
            self._counts[op, OWN] += 1
        return work

    def _calls_on(self, device: torch.device) -> DeviceCalls:
        if device == torch.device("cuda"):
            device = torch.device(device.type, torch.cuda.current_device())
        calls = self._calls.get(device)
        if calls is None:
            rendezvous = functools.partial(self._rendezvous, device)
            limit_s = self._timeout.total_seconds()
            calls = self._calls[device] = DeviceCalls(rendezvous, self._failures.known, device, limit_s)
        return calls

    def _rendezvous(self, device: torch.device) -> Rendezvous:
        """Return the rendezvous of the ranks that make calls on a device."""
        name, known = f"group {self._name} on {device.type}", self._members()
        size, ends = self._world_size, (self._gone, self._failures.left)
        return Rendezvous(self._shared_store, self._rank, size, name, *ends, known.ranks, known.group, known.advice)

    def _gone(self) -> list[int]:
        """Return the departed ranks, while a communicator is being built. Raises ClosedError on abort."""
        if self._aborted:
            raise ClosedError("the process group was aborted")
        return self._failures.gone()

    def _ends_on_gpus(self) -> list[Callable[[], None]]:
        ends = []
        for device, calls in list(self._calls.items()):
            if device.type == "cuda" and calls.comm is not None and not torch.cuda.is_current_stream_capturing():
                # every call waits for the one before it, so the last one is the end of all
                for stream in filter(None, (torch.cuda.current_stream(device), calls.comm._stream_of_last_call())):
                    ends.append(stream.record_event().synchronize)
        return ends

    def _check_gpus(self) -> None:
        for device, calls in list(self._calls.items()):
            if device.type == "cuda" and calls.comm is not None:
                calls.comm.check()

    def _own(
        self, op: str, make: Make, result: Any, operands: Sequence[torch.Tensor], opts: Any, device: torch.device
    ) -> DoneWork:
        def counted(comm: Communicator) -> None:
            before = comm.calls_by_library
            make(comm)
            self._counts[op, OWN if comm.calls_by_library == before else LIBRARY] += 1

        calls = self._calls_on(device)
        call = _profiled(f"{BACKEND}:{op}", counted, operands) if is_profiled() else counted
        return self._issued(calls.make(op, call, result, operands, opts.asyncOp, seconds(opts.timeout)))

    def _inner(
        self, op: str, begin: Begin, result: Any, device: torch.device, finish: Callable[[], Any] | None = None
    ) -> DoneWork:
        inner = self._inners.get(device.type)
        if inner is None:
            raise ConfigError(f"{op}: this process group has no tensors on {device}")
        return self._begun(op, begin, inner, result, finish)

    def _begun(
        self, op: str, begin: Begin, inner: Any, result: Any, finish: Callable[[], Any] | None = None
    ) -> DoneWork:
        self._counts[op, INNER] += 1
        try:
            work = begin(inner)
        except RuntimeError as error:
            raise self._meaning(op, error, None) from error
        return self._issued(inner_work(work, result, functools.partial(self._meaning, op), finish))

    def _message(self, op: str, x: torch.Tensor, peer: int, tag: int) -> DoneWork:
        inner = self._inners.get(x.device.type)
        if x.is_cpu or inner is None:
            return self._inner(op, GroupMessage(op, x, peer, tag).begin, [x], x.device)
        if inner is self._inners["cpu"]:  # ranks that share a GPU
            host = x.cpu() if op == "send" else torch.empty_like(x, device="cpu")
            finish = None if op == "send" else functools.partial(_copy, host, x)
            return self._inner(op, GroupMessage(op, host, peer, tag).begin, [x], x.device, finish)
        if op == "recv_anysource":
            raise UnsupportedError("recv: NCCL has to know the rank that sends: give src, or use tensors on the CPU")
        if self._thread.works is not None:
            return self._issued(HeldWork(GroupMessage(op, x, peer, tag)))
        if (found := torch_private.batch_of_caller()) is None:
            return self._begun(op, GroupMessage(op, x, peer, tag).begin, inner, [x])
        return self._of_batch(*found)

    def _of_batch(self, caller: Any, messages: Sequence[tuple[str, torch.Tensor, int, int]]) -> DoneWork:
        """Return the work of all messages of a batch. Each message requests it, and the first request starts them all.

        So no PyTorch code runs in between, which might leave NCCL waiting for the rest.
        """
        batch = self._thread.batch
        if batch is None or batch.caller is not caller:
            ours = [GroupMessage(*message) for message in messages if not message[1].is_cpu]
            batch = MessageBatch(caller, self._together(ours), len(ours))
        batch = batch._replace(left=batch.left - 1)
        self._thread.batch = batch if batch.left else None
        return batch.work

    def _together(self, messages: Sequence[GroupMessage]) -> DoneWork:
        """Start messages, none of which waits for another; return the work of all.

        NCCL runs a batch on a communicator of all ranks of its group, which the first batch connects. Ranks without a
        message do not take part, so each pair of ranks has a separate NCCL group.
        """
        self._counts.update((message.op, INNER) for message in messages)
        meaning = functools.partial(self._meaning, "batch_isend_irecv")
        by_pair: dict[tuple[int, ...], list[GroupMessage]] = {}
        for message in messages:
            by_pair.setdefault(tuple(sorted({self._rank, message.peer})), []).append(message)
        works = []
        for pair in sorted(by_pair):  # pairs connect in one order on all ranks
            own = [message._replace(peer=pair.index(message.peer)) for message in by_pair[pair]]
            try:
                work = begin_together(self._nccl_of(pair), own)
            except RuntimeError as error:
                raise meaning(error, None) from error
            works.append(inner_work(work, [message.x for message in own], meaning))
        return works[0] if len(works) == 1 else SeveralWorks(works)

    def _nccl_of(self, ranks: tuple[int, ...]) -> Any:
        """Return an NCCL group of this rank and another, or of this rank only."""
        if len(ranks) == self._world_size:
            return self._inners["cuda"]
        name = "nccl " + "-".join(map(str, ranks))
        if name not in self._inners:  # nothing connects two that threads make at once, and one is kept
            self._inners.setdefault(name, self._nccl(name, ranks.index(self._rank), len(ranks)))
        return self._inners[name]

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks on the host, and name the ones that do not arrive; Gloo does the work."""
        try:
            self._inners["cpu"].monitored_barrier(self._timeout if timeout is None else timeout, wait_all_ranks)
        except RuntimeError as error:
            members = self._members()
            known = re.sub(r"\b[Rr]anks? \d+(?:, \d+)*", functools.partial(_as_known, members), str(error))
            raise ShotcastError(
                f"rank {members.own}: {call_text('monitored_barrier', 0, members.group)}: {known}"
            ) from error

    monitoredBarrier = monitored_barrier  # noqa: N815 - as C++ calls it

    def _meaning(self, op: str, error: Exception, limit_s: float | None) -> Exception:
        """Translate an error of the inner library to the error to raise."""
        limit_s = self._timeout.total_seconds() if limit_s is None else limit_s
        return self._failures.meaning(op, error, limit_s, self._members())

    def _issued(self, work: DoneWork) -> DoneWork:
        if self._thread.works is not None:
            self._thread.works.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._thread.works = []

    def _end_coalescing(self, device: torch.device | None = None) -> DoneWork:
        works, self._thread.works = self._thread.works or [], None
        held = [work for work in works if isinstance(work, HeldWork)]
        if held:
            begun = self._together([work.message for work in held])
            for work in held:
                work.begun = begun
        return SeveralWorks(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing  # as C++ calls them from PyTorch 2.14 on

    # -- state --------------------------------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ShotcastProcessGroup | None:
        """Create a group of some of these ranks, in this order; returns None on the others. Collective among all."""
        self._splits += 1
        members = list(ranks)
        if self._rank not in members:
            return None
        name = group_name or f"{self._name}:split {self._splits}:{members[0]}"
        store = self._part(f"split {self._splits}/{members[0]}")
        known = [self._members().known(rank) for rank in members]
        place = members.index(self._rank), len(members)
        child = ShotcastProcessGroup(store, *place, timeout or self._timeout, name, self._nccl_options, known)
        if self.bound_device_id is not None:
            child.bound_device_id = self.bound_device_id
        child._set_group_name(name)
        child._set_group_desc(group_desc or f"split of {self._name}")
        return child

    def set_timeout(self, timeout: timedelta) -> None:
        for inner in list(self._inners.values()):
            inner._set_default_timeout(timeout)

    def _take_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for calls in list(self._calls.values()):
            calls.set_timeout(timeout.total_seconds())

    def _allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate a tensor in memory that the ranks map, after the first call on the device.

        Not collective.
        """
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        calls = self._calls.get(device)
        if calls is None or calls.comm is None:
            return torch.empty(size, dtype=dtype, device=device)
        return calls.comm.empty(size, dtype=dtype)

    def shutdown(self) -> None:
        """Wait for this rank's calls, which end by their deadline, and release their resources.

        Not collective.
        """
        for calls in list(self._calls.values()):
            calls.close()
        self._failures.leave()
        for inner in list(self._inners.values()):
            inner.shutdown()

    def abort(self) -> None:
        """Shut down like :meth:`shutdown`, but abort calls at once.

        Waiting calls, including those of other ranks on this machine, raise a CollectiveTimeout that names this rank.
        """
        self._aborted = True
        for calls in list(self._calls.values()):
            if calls.comm is not None:
                calls.comm._interrupt()
        for inner in list(self._inners.values()):
            inner.abort()
        self.shutdown()


def _copy(host: torch.Tensor, x: torch.Tensor) -> None:
    with Unseen():
        x.copy_(host)


def _as_known(members: Members, found: re.Match[str]) -> str:
    """Replace group ranks in a Gloo error text with the ranks shown to users."""
    return re.sub(r"\d+", lambda number: str(members.known(int(number[0]))), found[0])


def _profiled(name: str, make: Make, operands: Sequence[torch.Tensor]) -> Make:
    """Begin a profiler range that ends with the call, on whichever thread runs it."""
    profiled = torch_private.profiled_range(name, {id(x): x for x in operands}.values())
    profiled.__enter__()

    def make_in_range(comm: Communicator) -> None:
        try:
            make(comm)
        finally:
            profiled.__exit__(None, None, None)

    return make_in_range


def own_group(group: dist.ProcessGroup | None) -> ShotcastProcessGroup:
    """Return a process group of this backend; None for the group of all ranks. Raises ConfigError for others."""
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ShotcastProcessGroup):
        raise ConfigError(f"the process group is not one of the backend {BACKEND}: {found!r}")
    return found
