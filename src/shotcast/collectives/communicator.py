"""The Communicator: the ranks of one group exchange tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from shotcast import env
from shotcast.collectives import ops, registry
from shotcast.collectives.algorithm import Topology
from shotcast.collectives.arguments import sm_budget
from shotcast.collectives.call_watch import CallWaits
from shotcast.collectives.calls.coalesced import CoalescedCalls
from shotcast.collectives.calls.messages import MessageCalls
from shotcast.collectives.calls.norms import NormCalls
from shotcast.collectives.calls.rooted import RootedCalls
from shotcast.collectives.calls.started import StartedCalls
from shotcast.collectives.choice.agreement import agree, find_tables, outside_contract, versions
from shotcast.collectives.choice.choice import Explanation
from shotcast.collectives.choice.resolver import ResolvedCall, Resolver
from shotcast.collectives.dropped import CLOSER, Held
from shotcast.collectives.faults import error_of
from shotcast.collectives.first_check import wrong_result
from shotcast.collectives.first_use import CompileBarrier, CompiledVariant
from shotcast.collectives.forked import watch
from shotcast.collectives.growth import Growths
from shotcast.collectives.interface import GrowingExecutor, KernelExecutor, MappingExecutor
from shotcast.collectives.nodes import find_nodes
from shotcast.collectives.peer_watch import PeerWatch
from shotcast.collectives.prepared import Given, KeptCalls, PreparedCalls
from shotcast.collectives.rank_device import device_of, gpus_are_shared, may_have_own_gpu
from shotcast.collectives.reductions import Reduction, divide, is_divided
from shotcast.collectives.rendezvous import SETUP_TIMEOUT_S, rendezvous_of
from shotcast.collectives.stream_order import StreamChain
from shotcast.collectives.torch_ops import autograd
from shotcast.collectives.torch_ops.operators import register
from shotcast.collectives.torch_private import Unseen, increment_version, is_traced
from shotcast.collectives.vendor.vendor import Vendor
from shotcast.errors import ClosedError, ConfigError, ShotcastError, not_made
from shotcast.memory.host_group import Rendezvous, StoreGroup
from shotcast.memory.operands import NormTensors
from shotcast.transport.registry import build_executor, find
from shotcast.transport.transport import Ranks
from shotcast.wire import CallPlan, Fault, LaunchShape, Norm, Op

DEFAULT_MAX_BYTES = {"cuda": 64 << 20, "cpu": 16 << 20}
DEFAULT_TIMEOUT_S = 600.0
"""The default deadline of a call, long enough for a rank to write a checkpoint. Dead ranks are not waited for."""
MAX_WORKSPACE_MESSAGE = 512 << 20
"""The largest value of ``max_bytes``."""
_OF_ANY_SIZE = frozenset({Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BROADCAST, Op.REDUCE})
"""Operations whose first call on a GPU loads the kernels for all sizes, on a shared communicator.

CUDA cannot load a kernel while another runs, and a later call may begin during one that waits. There are three or four
kernels.
"""
_PATIENCE_S = 0.5
"""The time that the host of a GPU waits for the others in the first call of a kind.

Once all ranks have compiled the kernels, no call waits on the host.
"""
_CLOSE_GRACE_S = 5.0
_TWO_THREADS = "two threads use one communicator at once, so its calls have no order; give each thread its own (split)"


def _seconds(timeout_s: float, call: str) -> float:
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < 1e9):
        raise ConfigError(f"{call}: timeout_s is a number of seconds above 0, not {timeout_s!r}")
    return float(timeout_s)


class Communicator(RootedCalls, MessageCalls, CoalescedCalls, StartedCalls, NormCalls):
    """The ranks of a process group, which exchange ordinary tensors.

    Every rank makes the same calls in the same order (send and recv: the two ranks that take part). On CUDA a call is
    enqueued on the current stream, can be captured in a graph, and reports faults at :meth:`check` or at the next call;
    on the CPU it returns when it is done, or raises. Calls from several streams run in the order in which they are
    made; concurrent calls from two threads are refused, and so is any use in a forked process. Results have the same
    bits on all ranks and on every run (``docs/reference/numerics.md``).

    Ranks may be on several nodes (``docs/guides/several_hosts.md``), which the communicator discovers during
    construction: hosts, unless SHOTCAST_RANKS_PER_NODE divides them. ``topology.layout`` lists them. :meth:`explain`
    says what the vendor library serves, and why.

    A replay of a captured graph is a call too, ordered by when it is launched, unless the communicator is
    ``exclusive``.

    Args:
        group: a torch.distributed process group; None for all ranks, initializing torch.distributed from the
            environment (torchrun, :func:`shotcast.spawn`) if that has not been done. Outside a job, where neither RANK
            nor WORLD_SIZE is set, this process is the only rank.
        device: ``"cuda"``, ``"cuda:i"`` or ``"cpu"``; None takes a GPU if every rank of the host can have one, even if
            each sees only its own (CUDA_VISIBLE_DEVICES).
        max_bytes: the largest message for native kernels on CUDA. The workspace takes 82 MiB of each GPU at first and
            grows with the messages, to about 9 times ``max_bytes``, plus 256 MiB if the communicator is not exclusive
            (and more if captured graphs use several sizes of it). Longer all-reduces are split into pieces, and other
            long messages go to the vendor library. On the CPU it is the size of the workspace, which serves messages of
            any size.
        timeout_s: how long a call waits for ranks that are late. A rank whose process has ended is not waited for: the
            others get a :class:`~shotcast.CollectiveTimeout` within a second.
        allow_fp8: whether ``auto`` may select ``two_shot_fp8`` if it is faster; it sends FP8 and loses precision
            (``docs/reference/numerics.md``). None reads SHOTCAST_ALLOW_FP8, which defaults to 0.
        batch_invariant: whether reductions use only algorithms of the numerics contract, at every size and regardless
            of tables, so that the bits of an element do not depend on the message around it. A reduction that none of
            them serves raises :class:`~shotcast.UnsupportedError` instead of going to the vendor library. None reads
            SHOTCAST_BATCH_INVARIANT, which defaults to 0.
        exclusive: whether calls may fill the GPU while they wait for other ranks. If not, one warp of one SM waits
            before each call, and other streams, communicators and libraries keep running. Calls of an exclusive
            communicator take 2 us less, and their replays are not ordered with other calls. Use it if all calls and
            replays, and all GPU work that other ranks may wait for, are on one stream, as in an inference engine. CPU
            ranks ignore it.

    Raises:
        ConfigError: the environment or an argument is not usable, or differs between ranks; there is too little shared
            memory; or a registered algorithm gives wrong results.
        CollectiveTimeout: a rank did not join the construction.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: str | torch.device | None = None,
        max_bytes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow_fp8: bool | None = None,
        batch_invariant: bool | None = None,
        exclusive: bool = False,
    ):
        place = device_of(device)
        modes = allow_fp8, batch_invariant, exclusive
        undecided = may_have_own_gpu(device)
        self._start(rendezvous_of(group, place), place, max_bytes, timeout_s, *modes, undecided=undecided)

    @classmethod
    def from_store(
        cls,
        meeting: Rendezvous,
        device: str | torch.device,
        max_bytes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow_fp8: bool | None = None,
        batch_invariant: bool | None = None,
        setup_timeout_s: float | None = None,
        exclusive: bool = False,
    ) -> Communicator:
        """Create a communicator for ranks that share only a key-value store, without torch.distributed. Collective.

        Args:
            meeting: the ranks, which may create any number of communicators.
            device, max_bytes, timeout_s, allow_fp8, batch_invariant, exclusive: as for any communicator.
            setup_timeout_s: how long to wait for ranks that are late to the construction; None for two minutes.

        Raises:
            ConfigError, CollectiveTimeout: as for any communicator.
        """
        made = object.__new__(cls)
        modes = allow_fp8, batch_invariant, exclusive
        made._start(meeting, device_of(device), max_bytes, timeout_s, *modes, setup_timeout_s=setup_timeout_s)
        return made

    @property
    def calls_by_library(self) -> int:
        """The number of calls served by the vendor library, not counting replays of captured graphs."""
        return self._vendor.served

    def _start(self, *arguments: Any, **others: Any) -> None:
        """Build this communicator with the arguments of :meth:`_build`; on failure, release what would outlive it."""
        try:
            self._build(*arguments, **others)
        except BaseException:
            if hasattr(self, "_peers"):
                self._peers.close()
            raise

    def _build(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        max_bytes: int | None,
        timeout_s: float,
        allow_fp8: bool | None,
        batch_invariant: bool | None,
        exclusive: bool,
        order: Sequence[int] | None = None,
        name: str | None = None,
        setup_timeout_s: float | None = None,
        undecided: bool = False,
        title: str | None = None,
    ) -> None:
        self._timeout_s = _seconds(timeout_s, "Communicator")
        if not isinstance(allow_fp8, bool | None):
            raise ConfigError(f"allow_fp8 is True, False or None, not {allow_fp8!r}")
        self._allow_fp8 = env.allow_fp8() if allow_fp8 is None else allow_fp8
        if not isinstance(batch_invariant, bool | None):
            raise ConfigError(f"batch_invariant is True, False or None, not {batch_invariant!r}")
        self._batch_invariant = env.batch_invariant() if batch_invariant is None else batch_invariant
        if not isinstance(exclusive, bool):
            raise ConfigError(f"exclusive is True or False, not {exclusive!r}")
        self._exclusive = exclusive
        if max_bytes is not None and (not isinstance(max_bytes, int) or not 0 < max_bytes <= MAX_WORKSPACE_MESSAGE):
            raise ConfigError(f"max_bytes is a whole number in 1..{MAX_WORKSPACE_MESSAGE}, not {max_bytes!r}")
        self._rendezvous = rendezvous
        patience = SETUP_TIMEOUT_S if setup_timeout_s is None else setup_timeout_s
        self._host = StoreGroup(rendezvous, patience, order, name, title)
        self.rank, self.world_size, self.name = self._host.rank, self._host.world_size, self._host.name
        self._closed = False
        self._first: ShotcastError | None = None
        """The error of the call that stopped this communicator, once it has been reported."""
        self._peers = PeerWatch(self._host)
        nodes = find_nodes(self._host, device, undecided)
        self._host.layout = nodes.layout
        self.device = torch.device("cuda", 0) if nodes.own_gpus else device
        self.max_bytes = DEFAULT_MAX_BYTES[self.device.type] if max_bytes is None else max_bytes
        self._lock = threading.Lock()
        self._calls: KeptCalls[ResolvedCall] = KeptCalls()
        self._chain = StreamChain(self.device, replays=not exclusive) if self.device.type == "cuda" else None
        self._nvtx = self.device.type == "cuda" and env.nvtx()
        self._checks_vendor = env.check_vendor()
        registry.import_named()
        self._algorithms = registry.registered()
        environment = registry.from_environment()
        part = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        found = find_tables(part, nodes.layout.shape, self.device.type, self._algorithms)
        transport = find(self.device.type, nodes.layout.nodes)
        settings = {
            "device": self.device.type,
            "SHOTCAST_CPU_KERNELS": env.cpu_kernels(),
            "transport": transport.name,
            "GPU": part,
            "max_bytes": self.max_bytes,
            "SHOTCAST_ALGORITHM": environment,
            "allow_fp8 (SHOTCAST_ALLOW_FP8)": self._allow_fp8,
            "batch_invariant (SHOTCAST_BATCH_INVARIANT)": self._batch_invariant,
            "exclusive": exclusive,
            "SHOTCAST_CHECK_VENDOR": self._checks_vendor,
            "SHOTCAST_SHARE_GPUS": env.share_gpus(),
            "SHOTCAST_NETWORK": env.network(),
            "SHOTCAST_RANKS_PER_NODE": nodes.ranks_per_node or "unset",
            "registered algorithms": registry.digest(self._algorithms),
            "tables (SHOTCAST_TABLE)": found.digest,
            **versions(nodes),
        }
        other_bits = ""
        if self._batch_invariant:
            other_bits = outside_contract(self._algorithms, environment, self._allow_fp8, nodes.layout.shape)
        agree(self._host, settings, "; ".join(filter(None, (nodes.trouble, found.trouble, other_bits))))
        told = self._peers.ended, self._peers.departed
        limits = self.max_bytes, self._timeout_s
        ranks = Ranks(self._host, *nodes[:2], self.device, *limits, self._algorithms, *told, exclusive, self._peers)
        transport, built = build_executor(transport, ranks)
        self._executor = built.executor
        self._compile_barrier: CompileBarrier | None = None
        self._growths: Growths | None = None
        self._waits: CallWaits | None = None
        if self._executor is not None:
            on_gpu = self.device.type == "cuda"
            self._compile_barrier = CompileBarrier(
                self._host, self._executor, None if exclusive or not on_gpu else _PATIENCE_S
            )
            if on_gpu and not exclusive:
                self._growths = Growths(self._host.store("growths"), self.world_size, _PATIENCE_S)
            self._peers.tell(self._executor.mark_gone)
            self._waits = CallWaits(self._executor, self._host)
        library = "gloo" if self.device.type == "cpu" or gpus_are_shared() else "nccl"
        compares = self._checks_vendor and self._executor is None
        executor = self._executor  # not the communicator: a cycle would keep what it holds for longer
        ended = self._ended = threading.Event()

        def stopped() -> bool:
            return ended.is_set() or (executor is not None and executor.fault() is not None)

        calls = self._host, self.device, self._algorithms, self._timeout_s, library, compares, stopped, self._peers
        self._vendor = Vendor(*calls, executor.stop if isinstance(executor, KernelExecutor) else None)
        if self._executor is None and self.world_size > 1:
            self._vendor.connect(SETUP_TIMEOUT_S)
        facts = self._host.layout, self.device.type, part, transport, built.unsupported_reason, built.multicast
        options = self.max_bytes, self._algorithms, self._allow_fp8, built.network, self._batch_invariant, exclusive
        topology = self.topology = Topology(*facts, *options)
        graphs = self._chain is not None
        others = self._executor if self.world_size > 1 else None
        self._resolver = Resolver(topology, environment, found.tables, found.passed, others, graphs)
        prepares = None if self._nvtx else others
        check = weakref.WeakMethod(self.check)
        self._prepared = PreparedCalls(prepares, self._vendor, self._chain, self._lock, check, topology.runs_grids)
        self._starter = None
        register(self)
        watch(self)
        held = Held(self._executor, self._vendor, self._peers, self._chain, self.device)
        self._dropped = CLOSER.watch(self, held)
        self._check_registered()

    def _check_registered(self) -> None:
        """Check each user-registered algorithm. Collective; raises ConfigError on all ranks if one is wrong."""
        added = registry.added(self._algorithms)
        if not added or self.world_size == 1:
            return
        try:
            with torch.no_grad():
                for algorithm in added:
                    wrong = wrong_result(algorithm, self.topology, self.rank, self.device, self._run_to_end)
                    agree(self._host, {}, wrong)
        except ShotcastError:
            self.close()
            raise

    def _run_to_end(self, op: Op, x: torch.Tensor, out: torch.Tensor, algorithm: str) -> None:
        if op is Op.BROADCAST:
            out.copy_(x)
            x = out
        self._run(op, x, out, algorithm=algorithm)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.check()

    # -- collectives --------------------------------------------------------------------------------------------------

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate an uninitialized tensor in memory that all ranks of this communicator map.

        Not collective. Calls of this communicator read and write such tensors in place instead of staging them:
        ``two_shot`` all-reduces (``x`` and ``out``), reduce-scatters and all-gathers (``x``), and broadcasts (the
        root's tensor). On GPUs, only ``few_sms`` calls do. If any rank passes another tensor, all ranks stage theirs as
        usual. The results are the same.

        It behaves like any other tensor, except that its storage cannot be resized and ``record_stream`` does nothing.
        Its memory is freed with its last view, which may outlive the communicator. After a call that failed, a late
        rank may still write to such tensors of the call until :meth:`reset` has returned.

        Args:
            shape: the shape of the tensor, as for ``torch.empty``; it may differ between ranks.
            dtype: None for PyTorch's default.

        Returns:
            The tensor, on the current stream of a GPU. It is an ordinary one during captures, over several nodes, if
                the vendor library serves all calls, or if there is no memory for it.

        Raises:
            ClosedError: after :meth:`close`.
            ConfigError: the shape is invalid.
        """
        if self._closed:
            raise ClosedError("empty: this communicator was closed")
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        extents = tuple(extent for extent in given if type(extent) is int and extent >= 0)
        if len(extents) != len(given):
            raise ConfigError(f"empty: a shape consists of whole numbers from 0 up, not {given}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        executor = self._executor
        mapped = executor.empty(extents, dtype) if isinstance(executor, MappingExecutor) else None
        return torch.empty(extents, dtype=dtype, device=self.device) if mapped is None else mapped

    def barrier(self) -> None:
        """Complete (on CUDA: on the current stream) when every rank has called."""
        given = ("barrier",), (None, None)
        if (prepared := self._prepared.find(*given)) and prepared.run(given[1]):
            return
        if is_traced():
            autograd.in_graph(ops.BARRIER, self.name, {})
            return
        self._run(Op.BARRIER, None, None, given=given)

    # -- one call -----------------------------------------------------------------------------------------------------

    def _take_turn(self, call: str) -> None:
        """Wait for asynchronous calls, and take the lock, which is free unless another thread is in a call."""
        if self._starter is not None:
            self._starter.settle()
        if not self._lock.acquire(False):
            raise ShotcastError(_TWO_THREADS)
        if self._closed:
            self._lock.release()
            raise ClosedError(f"{call}: this communicator was closed")

    def _run(
        self,
        op: Op,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        algorithm: str = "auto",
        reduction: str = "sum",
        root: int = 0,
        sizes: tuple[int, ...] = (),
        norm: Norm | None = None,
        tensors: NormTensors | None = None,
        launch: LaunchShape | None = None,
        sms: int | None = None,
        count: int | None = None,
        given: Given | None = None,
    ) -> ResolvedCall:
        """Run a call. ``launch`` overrides the chosen launch, for measurements.

        ``count`` is the number of elements that define the call, if it differs from the tensor's. ``given`` holds the
        method's arguments, for which the call is prepared if possible.
        """
        self._take_turn(op.label)
        try:
            capturing = self._chain.enter() if self._chain is not None and self.world_size > 1 else False
            whole = out if op is Op.ALL_GATHER or x is None else x
            dtype = None if whole is None else whole.dtype
            divides = reduction == "avg" and is_divided(str(dtype).removeprefix("torch."), reduction)
            if divides:
                reduction = "sum"
            if count is None:
                count = 0 if whole is None else whole.numel()
            of_two: tuple[int, ...] = ()
            if op is Op.ALL_TO_ALL_UNEVEN:  # two ranks each know a size, so nothing that ranks agree on goes by it
                sizes, of_two = of_two, sizes
            if sms is not None:
                sm_budget(sms, op.label)  # True and 16.0 would find what 1 and 16 have left
            key = op, count, dtype, algorithm, reduction, root, sizes, norm, capturing, launch, sms
            call = self._calls.get(key) or self._calls.recall(key)
            if call is None:
                problem = self._resolver.problem(op, dtype, count, reduction, root, sizes, norm, sms)
                named = self._resolver.named(problem, algorithm, sms)
                call = self._calls.keep(key, self._resolver.resolve(problem, named, capturing, launch))
            if self._growths is not None and call.needs and algorithm == "auto":
                call = self._within_workspace(call, capturing, op, dtype, count, reduction, root, sizes, norm, sms)
            if out is not None and norm is None and self._prepared.counts_versions:
                increment_version((out,))
            if norm is None or not call.by_library:
                self._execute(call, x, out, capturing, tensors, of_two)
                if divides and out is not None:
                    with Unseen():
                        divide(out, self.world_size)
            elif not capturing:
                self._compile(call, capturing)  # the same call captured may take a native kernel
            if self._chain is not None and self.world_size > 1:
                self._chain.leave(capturing)
            if given is not None and not capturing:
                self._prepared.keep(given, call, x, out, tensors, of_two, self.world_size if divides else 0)
            return call
        finally:
            self._lock.release()

    def _within_workspace(self, call: ResolvedCall, capturing: bool, *problem: Any) -> ResolvedCall:
        """Return a call that fits the current workspace, to use if ranks are absent that should enlarge it."""
        executor = self._executor
        assert executor is not None
        assert self._growths is not None
        if call.capacity <= executor.capacity or self._batch_invariant:  # where what fits may have no algorithm
            return call
        if not capturing and self._growths.all_there():
            return call
        within = self._resolver.within(executor.capacity)
        makeshift = within.resolve(*within.makeshift(within.problem(*problem)), capturing)
        makeshift.is_makeshift = True
        return makeshift

    def _grow(self, call: ResolvedCall, capturing: bool) -> None:
        """Enlarge the workspace for a call. Collective: every rank makes the call.

        Ranks allocate together, so they first exchange the header of the call: an absent rank is then named by the
        deadline, and so is one that makes another call, instead of letting the others wait in an allocation.

        Raises ConfigError in a graph capture, and on all ranks if one has too little memory.
        """
        if capturing:
            raise ConfigError(
                f"{call.label} needs a larger workspace, which cannot be made inside a graph capture; "
                "call it once before"
            )
        executor, barrier = self._executor, self._compile_barrier
        assert isinstance(executor, GrowingExecutor)
        assert barrier is not None
        exchange = executor.header_exchange(call.plan)
        barrier(CompiledVariant("header exchange"), exchange.load, call.plan.op.label, self._timeout_s)
        exchange.run()
        if fault := executor.fault():
            self.check()
            raise self._error(fault)
        executor.grow(call.capacity)
        self._calls.clear()  # calls that are remembered have the addresses of the workspace before
        self._prepared.clear()

    def _compile(self, call: ResolvedCall, capturing: bool) -> None:
        """Compile everything that a call needs and make room for it. Raises the errors of :meth:`_grow`."""
        if self._executor is not None and call.capacity > self._executor.capacity:
            self._grow(call, capturing)
        for variant, bound in call.needs.items():
            assert self._compile_barrier is not None
            if variant not in self._compile_barrier.known:
                if capturing:
                    raise ConfigError(f"{call.label} would be compiled inside a graph capture; call it once before")
                others, load, plan = dict[CompiledVariant, CallPlan](), bound.load, call.plan
                if self._growths is not None and not call.by_library and plan.op in _OF_ANY_SIZE and not plan.sizes:
                    others = self._resolver.plans_of_sizes(plan)  # calls of other sizes use them
                if others:
                    assert isinstance(self._executor, GrowingExecutor)
                    load = functools.partial(self._executor.load, bound, tuple(others.values()))
                self._compile_barrier(variant, load, call.plan.op.label, self._timeout_s)
                self._compile_barrier.known.update(others)
        call.needs = {}

    def _execute(
        self,
        call: ResolvedCall,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        capturing: bool,
        tensors: NormTensors | None,
        sizes: tuple[int, ...],
    ) -> None:
        """Run a resolved call, after compiling and making room for it. Raises the error of an earlier call."""
        if self.world_size == 1:
            if x is not None and out is not None and out.data_ptr() != x.data_ptr():
                with Unseen():
                    out.view(-1).copy_(x.view(-1))
            return
        executor = self._executor
        if (executor is not None and executor.fault()) or self._vendor.failed:
            self._refuse_if_stopped(call.plan.op.label)
        if executor is not None:
            if call.needs:
                self._compile(call, capturing)
            if capturing:
                executor.keep()
        if call.by_library and not self._vendor.connected(call.plan):
            self._refuse_if_stopped(call.plan.op.label)
            if capturing:
                raise ConfigError(f"{call.label} would connect ranks inside a graph capture; call it once before")
        if not self._nvtx:
            self._launch(call, x, out, tensors, sizes)
            return
        torch.cuda.nvtx.range_push(call.label)
        try:
            self._launch(call, x, out, tensors, sizes)
        finally:
            torch.cuda.nvtx.range_pop()

    def _launch(
        self,
        call: ResolvedCall,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        tensors: NormTensors | None,
        sizes: tuple[int, ...],
    ) -> None:
        executor = self._executor
        if executor is not None and call.bound is not None and (self._checks_vendor or not call.by_library):
            call.bound.run(x, out, tensors, sizes)
            if self._chain is None and (fault := executor.fault()):
                raise self._error(fault)
        if call.by_library:
            if executor is not None and self._chain is not None and not self._vendor.connected(call.plan):
                torch.cuda.current_stream(self.device).synchronize()  # until the headers have been compared
                self.check()
            try:
                with Unseen():
                    self._vendor.run(dataclasses.replace(call.plan, sizes=sizes) if sizes else call.plan, x, out)
            except ShotcastError:
                self.check()  # a fault that native kernels report is the cause
                raise

    def _refuse_if_stopped(self, op: str) -> None:
        """Raise if an earlier call stopped this communicator: with its error or, once reported, one without a call."""
        first = self._first
        try:
            self.check()
        except ShotcastError:
            if first is not None:
                raise not_made(op, first) from first
            raise

    def _stream_of_last_call(self) -> torch.cuda.Stream | None:
        """Return the stream of the last eager call on a GPU, ordered after all calls; None if nothing is pending."""
        return None if self._chain is None else cast("torch.cuda.Stream | None", self._chain.last())

    # -- what is known ------------------------------------------------------------------------------------------------

    def explain(
        self,
        x: torch.Tensor,
        op: str = "all_reduce",
        algorithm: str = "auto",
        reduction: Reduction = "sum",
        mode: str | None = None,
        sms: int | None = None,
    ) -> Explanation:
        """Return which algorithm and launch a call would use, who decided, and why. Does not communicate.

        Args:
            x: the tensor that defines the size of the call: the input or, for an all_gather, the output.
            op: the name of the operation.
            algorithm, reduction, sms: as in the call.
            mode: ``graph`` for a call captured in a CUDA graph, or ``eager``; tables may treat them differently. None
                for the mode of a call made now.
        """
        if mode is None:
            mode = "graph" if self._chain is not None and self._chain.capturing() else "eager"
        return self._resolver.explain(x, op, algorithm, reduction, mode, sms)

    def candidates(self, x: torch.Tensor, op: str = "all_reduce", sms: int | None = None) -> list[str]:
        """Return the names of the algorithms that could serve such a call."""
        return list(self.explain(x, op, sms=sms).candidates)

    # -- trouble ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a failed collective stopped this communicator, as far as finished calls have noticed.

        It never synchronizes. On CUDA, results are sound if this returns after the stream that computed them was
        synchronized.

        Raises:
            CollectiveTimeout: ranks did not join a call in time, or their processes have ended.
            CollectiveMismatch: ranks made different calls.
            ClosedError: after :meth:`close`.
        """
        if self._closed:
            raise ClosedError("check: this communicator was closed")
        self._check_kernels()
        try:
            self._vendor.check()
        except ShotcastError as error:
            self._check_kernels()  # whose fault may have come meanwhile, and be the cause
            self._first = self._first or error
            raise

    def _check_kernels(self) -> None:
        """Raise the error of native kernels, unless they stopped because a library call had failed."""
        if self._executor is not None and not self._vendor.failed_first and (fault := self._executor.fault()):
            raise self._error(fault)

    def _error(self, fault: Fault) -> ShotcastError:
        """Return the error of the call that stopped this communicator."""
        assert self._executor is not None
        if self._first is None:
            self._first = error_of(fault, self._executor, self._host, self._timeout_s, tuple(self._algorithms))
            return self._first
        return copy.copy(self._first)

    def _interrupt(self) -> None:
        """Abort this rank's calls from another thread.

        Ranks of this machine that are also in a native call learn which rank aborted it.
        """
        self._ended.set()
        if self._executor is not None and not self._closed:
            self._executor.interrupt()

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls and of replays of captured ones, on this rank only."""
        self._timeout_s = _seconds(timeout_s, "set_timeout")
        self._vendor.set_timeout(self._timeout_s)
        if self._executor is not None:
            self._executor.set_timeout(self._timeout_s)

    def reset(self) -> None:
        """Make a stopped communicator usable again. Collective: every rank calls it, and all must be alive.

        It waits for this rank's work, then for all ranks, and clears the workspace. The epoch continues.

        Raises:
            CollectiveTimeout: names the ranks that did not join within the timeout (at least 10 s).
        """
        self._take_turn("reset")
        try:
            patience = max(self._timeout_s, 10.0)
            self._drain()
            executor, vendor = self._executor, self._vendor
            asked = self._growths.asked if self._growths is not None else 0
            own = executor.epoch if executor is not None else 0, asked, vendor.generation, vendor.needs_reset()
            epochs, growths, generations, failed = zip(*self._host.all_gather(own, patience, what="reset"), strict=True)
            if self._growths is not None:
                self._growths.asked = max(growths)
            self._first = None
            if executor is not None:
                executor.clear(max(epochs))
            if any(failed):
                vendor.reset(max(generations) + 1)
            self._host.barrier(patience, what="reset")
            if executor is None and any(failed):
                vendor.connect(patience)
        finally:
            self._lock.release()

    def _drain(self) -> None:
        """Wait for this rank's calls, which end by their deadline."""
        if self._executor is not None:
            self._executor.drain()
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def split(
        self, color: int | None, key: int = 0, max_bytes: int | None = None, exclusive: bool | None = None
    ) -> Communicator | None:
        """Create a communicator among the ranks of equal ``color``, ranked by (``key``, rank). Collective.

        A rank whose ``color`` is None gets None. One color for all ranks gives an independent workspace for the same
        ranks. ``max_bytes`` and ``exclusive`` apply to the new communicator and must match on all ranks of a color;
        None inherits the value of this one.
        """
        if self._closed:
            raise ClosedError("split: this communicator was closed")
        if self._starter is not None:
            self._starter.settle()
        number = self._host.steps  # the same on all ranks that meet in this step
        colors = self._host.all_gather((color, key), what="split")
        if color is None:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(colors) if c == color)
        child = object.__new__(Communicator)
        order = [self._host.order[rank] for _, rank in members]
        capacity = self.max_bytes if max_bytes is None else max_bytes
        name = f"{self.name}/split {number}/{color}"
        modes = self._allow_fp8, self._batch_invariant, self._exclusive if exclusive is None else exclusive
        parent = f"{self._host.members.group}." if self._host.members.group else ""
        title = f"{parent}split(color={color})"
        child._start(
            self._rendezvous, self.device, capacity, self._timeout_s, *modes, order=order, name=name, title=title
        )
        return child

    def close(self) -> None:
        """Wait for this rank's calls and release the workspace. Not collective; a second call does nothing."""
        if self._starter is not None:
            self._starter.settle()
        # a call of another thread uses the workspace until it ends, which it does within its timeout
        if not self._lock.acquire(timeout=self._timeout_s + _CLOSE_GRACE_S):
            raise ShotcastError("close: a call of another thread has not ended within the timeout")
        try:
            if self._closed:
                return
            self._closed = True
            CLOSER.leave(self._dropped)
            self._prepared.close()
            self._drain()  # while the ends of processes are still watched, as no call waits for dead ranks
            self._peers.leave()
            if self._waits is not None:
                self._waits.close()
            if self._starter is not None:
                self._starter.close()
            self._vendor.close()
            self._peers.close()
            if self._executor is not None:
                self._executor.close()
            self._calls.clear()
        finally:
            self._lock.release()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"stopped by {type(self._first).__name__}" if self._first else self.topology.transport.name
        ranks = f"name={self.name!r}, rank={self.rank}, world_size={self.world_size}"
        return f"Communicator({ranks}, device={self.device}, {'closed' if self._closed else state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Communicator cannot be pickled or copied, as it holds memory and connections of this process; construct "
            "one in each process, within the function that it runs"
        )
