"""The Communicator: the ranks of one group exchange tensors."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from shotcast import env
from shotcast.collectives import registry, rms_norm
from shotcast.collectives.algorithm import Topology
from shotcast.collectives.arguments import output, rank_in, rows_per_rank, sm_budget, valid, writable
from shotcast.collectives.choice.agreement import agree, find_tables, versions
from shotcast.collectives.choice.choice import Explanation
from shotcast.collectives.choice.resolver import Call, Resolver
from shotcast.collectives.executor_factory import build_executor
from shotcast.collectives.fast_path import FastPath
from shotcast.collectives.faults import error_of
from shotcast.collectives.first_check import wrong_result
from shotcast.collectives.first_use import FirstUse
from shotcast.collectives.forked import watch
from shotcast.collectives.growth import grow
from shotcast.collectives.nodes import find_nodes
from shotcast.collectives.norm_operands import Fp8Normed, aligned, copy_back, fp8_operands, is_aligned, norm_operands
from shotcast.collectives.peer_watch import PeerWatch
from shotcast.collectives.rank_device import device_of, gpus_are_shared
from shotcast.collectives.rendezvous import SETUP_TIMEOUT_S, process_group_of
from shotcast.collectives.stream_order import StreamChain
from shotcast.collectives.torch_ops import autograd, autograd_norm, operators
from shotcast.collectives.torch_ops.communicators import register
from shotcast.collectives.torch_ops.versions import increment_version
from shotcast.collectives.vendor.vendor import Vendor
from shotcast.errors import ClosedError, ConfigError, ShotcastError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.operands import NormTensors
from shotcast.wire import Fault, LaunchShape, Norm, Op

DEFAULT_MAX_BYTES = {"cuda": 64 << 20, "cpu": 16 << 20}
DEFAULT_TIMEOUT_S = 600.0
"""The default deadline of a call; a rank may write a checkpoint meanwhile. Dead ranks are not waited for."""
MAX_WORKSPACE_MESSAGE = 512 << 20
"""The largest value of ``max_bytes``."""
_KEPT_CALLS = 4096
_CLOSE_GRACE_S = 5.0
_TWO_THREADS = "two threads use one communicator at once, so its calls have no order; give each thread its own (split)"


def _seconds(timeout_s: float) -> float:
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < 1e9):
        raise ConfigError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
    return float(timeout_s)


class Communicator:
    """The ranks of a process group, which exchange ordinary tensors.

    Every rank makes the same calls in the same order (send and recv: the two ranks that take part). On CUDA a call is
    enqueued on the current stream, can be captured in a graph, and reports faults at :meth:`check` or at the next call;
    on the CPU it returns when it is done, or raises. Calls from several streams are ordered as they are made; calls
    from two threads at once are refused, and so is every use in a forked process. Results have the same bits on all
    ranks and on every run (``docs/reference/numerics.md``).

    Ranks may be on several nodes, which are hosts unless SHOTCAST_RANKS_PER_NODE divides them: the communicator finds
    them at its construction, where hosts that differ in version or options are refused. ``topology.layout`` has them,
    and errors name the nodes of ranks. On CPU hosts own kernels carry sums, messages and barriers; :meth:`explain` says
    what goes by the vendor library, and why.

    A replay of a captured graph is a call too: order it with the other uses of the communicator, or give it a
    communicator of its own (:meth:`split`). Kernels wait on the GPU for their peers. When several communicators are in
    use at once, at most one of them may be in a call whose grid fills the GPU (from about 4 MiB on; :meth:`explain`
    gives the programs). Two such calls, begun in another order on each of two GPUs, would wait for each other until the
    deadline.

    Args:
        group: a torch.distributed process group; None for all ranks, initialising torch.distributed from the
            environment (torchrun, :func:`shotcast.spawn`) if that has not been done.
        device: ``"cuda"``, ``"cuda:i"`` or ``"cpu"``; None takes a GPU where every rank of the host can have one.
        max_bytes: the largest message for own kernels on CUDA. The workspace begins with 82 MiB of each GPU and grows
            with the messages, to about 9 times ``max_bytes`` (more where captured graphs use several sizes of it).
            Longer all-reduces pass through it in pieces, and other long messages go to the vendor library. On the CPU
            it is the size of the workspace itself, through which messages of any size pass.
        timeout_s: how long a call waits for ranks that are late. A rank whose process has ended is not waited for: the
            others get a :class:`~shotcast.CollectiveTimeout` within a second.
        allow_fp8: whether ``auto`` may take ``two_shot_fp8`` where it is faster; it sends FP8 and loses precision
            (``docs/reference/numerics.md``). None takes SHOTCAST_ALLOW_FP8, which is 0 unless set.

    Raises:
        ConfigError: the environment or an argument is not usable, or differs between ranks; there is too little shared
            memory; or a registered algorithm gives wrong results.
        CollectiveTimeout: a rank did not come to the construction.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: str | torch.device | None = None,
        max_bytes: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        allow_fp8: bool | None = None,
    ):
        self._start(group, device, max_bytes, timeout_s, allow_fp8)

    def _start(self, *arguments: Any) -> None:
        """Build this communicator with the arguments of :meth:`_build`; on failure, release what would outlive it."""
        try:
            self._build(*arguments)
        except BaseException:
            if hasattr(self, "_peers"):
                self._peers.close()
            raise

    def _build(
        self,
        group: dist.ProcessGroup | None,
        device: str | torch.device | None,
        max_bytes: int | None,
        timeout_s: float,
        allow_fp8: bool | None,
        order: Sequence[int] | None = None,
        name: str | None = None,
    ) -> None:
        self._timeout_s = _seconds(timeout_s)
        if not isinstance(allow_fp8, bool | None):
            raise ConfigError(f"allow_fp8 is True, False or None, not {allow_fp8!r}")
        self._allow_fp8 = env.allow_fp8() if allow_fp8 is None else allow_fp8
        self.device = device_of(device)
        self._group = process_group_of(group, self.device)
        order = list(range(dist.get_world_size(self._group))) if order is None else list(order)
        self._host = StoreGroup(self._group, SETUP_TIMEOUT_S, order, name)
        self.rank, self.world_size, self.name = self._host.rank, self._host.world_size, self._host.name
        if max_bytes is None:
            max_bytes = DEFAULT_MAX_BYTES[self.device.type]
        if not isinstance(max_bytes, int) or not 0 < max_bytes <= MAX_WORKSPACE_MESSAGE:
            raise ConfigError(f"max_bytes is a whole number in 1..{MAX_WORKSPACE_MESSAGE}, not {max_bytes!r}")
        self.max_bytes = max_bytes
        self._closed = False
        self._peers = PeerWatch(self._host)
        self._lock = threading.Lock()
        self._calls: dict[tuple[Any, ...], Call] = {}
        self._chain = StreamChain(self.device) if self.device.type == "cuda" else None
        self._nvtx = self.device.type == "cuda" and env.nvtx()
        self._checks_vendor = env.check_vendor()
        registry.import_named()
        self._algorithms = registry.registered()
        environment = registry.from_environment()
        part = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        nodes = find_nodes(self._host, self.device)
        self._host.layout = nodes.layout
        found = find_tables(part, nodes.layout.shape, self.device.type, self._algorithms)
        settings = {
            "device": self.device.type,
            "SHOTCAST_CPU_KERNELS": env.cpu_kernels(),
            "GPU": part,
            "max_bytes": self.max_bytes,
            "SHOTCAST_ALGORITHM": environment,
            "allow_fp8 (SHOTCAST_ALLOW_FP8)": self._allow_fp8,
            "SHOTCAST_CHECK_VENDOR": self._checks_vendor,
            "SHOTCAST_SHARE_GPUS": env.share_gpus(),
            "SHOTCAST_NETWORK": env.network(),
            "SHOTCAST_RANKS_PER_NODE": nodes.ranks_per_node or "unset",
            "registered algorithms": registry.digest(self._algorithms),
            "tables (SHOTCAST_TABLE)": found.digest,
            **versions(nodes),
        }
        agree(self._host, settings, "; ".join(filter(None, (nodes.trouble, found.trouble))))
        built = build_executor(
            self._host, nodes, self.device, self.max_bytes, self._timeout_s, self._algorithms, self._peers.ended
        )
        self._executor = built.executor
        self._first_use: FirstUse | None = None
        if self._executor is not None:
            self._first_use = FirstUse(self._host, self._executor)
            self._peers.tell(self._executor.mark_gone)
        library = "gloo" if self.device.type == "cpu" or gpus_are_shared() else "nccl"
        compares = self._checks_vendor and self._executor is None
        executor = self._executor  # not the communicator: a cycle would keep what it holds for longer
        self._vendor = Vendor(
            self._host,
            self.device,
            self._algorithms,
            self._timeout_s,
            library,
            compares,
            lambda: executor is not None and executor.fault() is not None,
        )
        if self._executor is None and self.world_size > 1:
            self._vendor.connect(SETUP_TIMEOUT_S)
        topology = Topology(
            self._host.layout,
            self.device.type,
            part,
            built.kernels,
            built.obstacle,
            built.multicast,
            self.max_bytes,
            self._algorithms,
            self._allow_fp8,
            built.network,
            built.network_cost,
        )
        graphs = self._chain is not None
        others = self._executor if self.world_size > 1 else None
        self._resolver = Resolver(topology, environment, found.tables, found.passed, others, graphs)
        self._fast_path: FastPath | None = None
        if others is not None and self._chain is not None and not self._nvtx:
            self._fast_path = FastPath(self._calls, others, self._vendor, self._chain, self._lock, self.device)
        register(self)
        watch(self)
        self._check_registered()

    def _check_registered(self) -> None:
        """Check each algorithm that users registered. Collective; raises ConfigError on all ranks if one is wrong."""
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

    def all_reduce(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        algorithm: str = "auto",
        reduction: str = "sum",
        sms: int | None = None,
    ) -> torch.Tensor:
        """Compute ``out = x_0 + x_1 + ... + x_{N-1}``, on every rank.

        Args:
            x: contiguous, any shape, the same on all ranks.
            out: like ``x``; ``x`` itself for in place; None for a new tensor.
            algorithm: ``auto``, ``one_shot``, ``two_shot``, ``two_shot_fp8`` (loses precision:
                ``docs/reference/numerics.md``), ``ring``, ``multimem`` (by name only), ``vendor``, or the name of a
                registered algorithm; over several nodes ``nvrar``, ``nvrar_pairs``, ``nvrar_two_shot``,
                ``nvrar_halving`` and ``nvrar_16bit`` (by name only, loses precision), of which
                ``docs/reference/algorithms.md`` tells.
            reduction: ``sum``; or ``max``, ``min``, ``prod``, which the vendor library computes.
            sms: the most SMs that own kernels may occupy on a GPU, so that other work goes on beside the call; None for
                as many as are fastest. The same on all ranks. CPU ranks ignore it, and the vendor library, which
                serves where no own kernel can (:meth:`explain`), takes what it takes.

        Returns:
            ``out``. Differentiable; the gradient of ``max`` and ``min`` is divided equally among the ranks that reach
            it, as by ``torch.amax``. That of ``max``, ``min`` and ``prod`` gathers ``x`` of all ranks.
        """
        fast_path = None if out is None or sms is not None else self._fast_path
        if fast_path is not None and out is not None and fast_path.make(x, out, algorithm, reduction):
            return out
        valid(x, "x", self.device)
        if is_compiling():
            return operators.all_reduce(self, x, out, algorithm, reduction, sms)
        if out is None and x.requires_grad and torch.is_grad_enabled():
            return autograd.AllReduce.apply(x, self, algorithm, reduction, sms)
        out = output(x, out, x.shape)
        if (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
            return autograd.written(autograd.AllReduce, x, out, self, algorithm, reduction, sms)
        call = self._run(Op.ALL_REDUCE, x, out, algorithm=algorithm, reduction=reduction, sms=sms)
        if fast_path is not None:
            fast_path.keep(call, x, out)
        return out

    def reduce_scatter(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        algorithm: str = "auto",
        reduction: str = "sum",
        sms: int | None = None,
    ) -> torch.Tensor:
        """Compute ``out_i = x_0[i] + ... + x_{N-1}[i]``, where ``x[i]`` is the i-th of N equal parts.

        Args:
            x: contiguous [N * k, ...].
            out: [k, ...]; None for a new tensor.
            algorithm: ``auto``, ``one_shot``, ``ring`` or ``vendor``; with ``sms`` ``few_sms``.
            reduction, sms: as in :meth:`all_reduce`.

        Returns:
            ``out``. Differentiable as :meth:`all_reduce` is.
        """
        valid(x, "x", self.device)
        if is_compiling():
            return operators.reduce_scatter(self, x, out, algorithm, reduction, sms)
        rows = rows_per_rank(x, self.world_size, "reduce_scatter")
        if out is None and x.requires_grad and torch.is_grad_enabled():
            return autograd.ReduceScatter.apply(x, self, algorithm, reduction, sms)
        out = output(x, out, (rows, *x.shape[1:]))
        if (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
            return autograd.written(autograd.ReduceScatter, x, out, self, algorithm, reduction, sms)
        self._run(Op.REDUCE_SCATTER, x, out, algorithm=algorithm, reduction=reduction, sms=sms)
        return out

    def all_gather(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
        algorithm: str = "auto",
        sms: int | None = None,
    ) -> torch.Tensor:
        """Compute ``out = x_0, x_1, ..., x_{N-1}``, joined along the first dimension, on every rank.

        Args:
            x: contiguous [k, ...]; with ``sizes``, [sizes[rank], ...].
            out: [N * k, ...]; with ``sizes``, [sum(sizes), ...]; None for a new tensor.
            sizes: the first dimension of each rank's part, the same list on all ranks.
            algorithm: ``auto``, ``one_shot``, ``ring`` or ``vendor``; with ``sms`` ``few_sms`` or
                ``copy_engines``.
            sms: as in :meth:`all_reduce`.

        Returns:
            ``out``. Differentiable.
        """
        valid(x, "x", self.device)
        if x.dim() == 0:
            x = x.view(1)
        elements: tuple[int, ...] = ()
        if sizes is None:
            rows = x.shape[0] * self.world_size
        else:
            numbers = all(isinstance(size, int) for size in sizes)
            if len(sizes) != self.world_size or not numbers or min(sizes) < 0 or sizes[self.rank] != x.shape[0]:
                raise ConfigError(
                    f"all_gather: sizes must hold {self.world_size} numbers from 0 up, and {x.shape[0]} (the first "
                    f"dimension of x) at place {self.rank}; they are {list(sizes)}"
                )
            rows = sum(sizes)
            width = math.prod(x.shape[1:])
            elements = tuple(size * width for size in sizes)
        if is_compiling():
            return operators.all_gather(self, x, out, sizes, algorithm, sms)
        if out is None and x.requires_grad and torch.is_grad_enabled():
            return autograd.AllGather.apply(x, self, None if sizes is None else tuple(sizes), algorithm, sms)
        out = output(x, out, (rows, *x.shape[1:]))
        if (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
            parts = None if sizes is None else tuple(sizes)
            return autograd.written(autograd.AllGather, x, out, self, parts, algorithm, sms)
        self._run(Op.ALL_GATHER, x, out, algorithm=algorithm, sizes=elements, sms=sms)
        return out

    def all_to_all(
        self, x: torch.Tensor, out: torch.Tensor | None = None, algorithm: str = "auto", sms: int | None = None
    ) -> torch.Tensor:
        """Compute ``out_i = x_0[i], x_1[i], ..., x_{N-1}[i]``, where ``x[i]`` is the i-th of N equal parts.

        ``x`` and ``out`` are contiguous [N * k, ...] and do not overlap. Returns ``out``, like :meth:`all_gather`.
        """
        valid(x, "x", self.device)
        rows_per_rank(x, self.world_size, "all_to_all")
        if is_compiling():
            return operators.all_to_all(self, x, out, algorithm, sms)
        if out is None and x.requires_grad and torch.is_grad_enabled():
            return autograd.AllToAll.apply(x, self, algorithm, sms)
        out = output(x, out, x.shape)
        if out.data_ptr() == x.data_ptr() and x.numel():
            raise ConfigError("all_to_all cannot work in place; give another tensor as out, or none")
        if (x.requires_grad or out.requires_grad) and torch.is_grad_enabled():
            return autograd.written(autograd.AllToAll, x, out, self, algorithm, sms)
        self._run(Op.ALL_TO_ALL, x, out, algorithm=algorithm, sms=sms)
        return out

    def broadcast(self, x: torch.Tensor, root: int, algorithm: str = "auto") -> torch.Tensor:
        """Copy ``x`` of rank ``root`` to ``x`` of every rank, in place. Returns ``x``.

        Differentiable where ``x`` requires grad, on all ranks alike: its gradients are summed for the root.
        """
        valid(x, "x", self.device)
        rank_in(root, self.world_size, "root")
        if is_compiling():
            return operators.broadcast(self, x, root, algorithm)
        if x.requires_grad and torch.is_grad_enabled():
            writable(x, "x")
            return autograd.written(autograd.Broadcast, x, x, self, root, algorithm)
        increment_version((x,))
        self._run(Op.BROADCAST, x, x, algorithm=algorithm, root=root)
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``, which must receive as many elements of the same dtype.

        The send is complete (on CUDA: on the current stream) when the last of the message lies in a mailbox, which
        holds as many messages as :meth:`waiting_messages` says. So a sender may learn only with a later call that
        nobody received, or that the receiver expected something else. Gradients do not come back by themselves: the
        receiver sends them.
        """
        valid(x, "x", self.device)
        if rank_in(dst, self.world_size, "dst") == self.rank:
            raise ConfigError(f"rank {self.rank} cannot send to itself")
        if is_compiling():
            operators.send(self, x, dst)
            return
        self._run(Op.SEND, x, None, root=dst)

    def waiting_messages(self, x: torch.Tensor) -> int:
        """Return how many messages like ``x`` one rank may receive later while their sender goes on.

        It is 0 where the vendor library carries them, which promises nothing. This call communicates nothing.
        """
        if self._executor is None or self.explain(x, "send").by_library:
            return 0
        return self._executor.waiting(x.numel() * x.element_size())

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Receive into ``x`` what rank ``src`` sends, a constant for autograd. Returns ``x``."""
        valid(x, "x", self.device)
        if rank_in(src, self.world_size, "src") == self.rank:
            raise ConfigError(f"rank {self.rank} cannot receive from itself")
        if is_compiling():
            return operators.recv(self, x, src)
        if x.requires_grad and torch.is_grad_enabled():
            writable(x, "x")
            return x.copy_(self.recv(torch.empty_like(x, requires_grad=False), src))
        increment_version((x,))
        self._run(Op.RECV, None, x, root=src)
        return x

    def barrier(self) -> None:
        """Complete (on CUDA: on the current stream) when every rank has called."""
        if is_compiling():
            operators.barrier(self)
            return
        self._run(Op.BARRIER, None, None)

    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        algorithm: str = "auto",
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce ``x``, add the residual and apply RMSNorm in one kernel, as between the blocks of a transformer.

        ``new_residual = all_reduce(x) + residual``; ``normed = new_residual / rms(new_residual) * weight``, in float32
        with ``new_residual`` as rounded. Where no fused kernel serves (:meth:`explain` says why), the sum is a call of
        its own and the norm follows it, with the same bits.

        Args:
            x, residual: contiguous [..., hidden], float32, float16 or bfloat16.
            weight: [hidden], of the same dtype.
            eps: added to the mean square.
            algorithm: ``auto``, ``one_shot`` or ``two_shot``, or over several nodes those of :meth:`all_reduce`;
                ``vendor`` for the vendor library's sum, not fused.
            out: (normed, new_residual), like ``x``, so that nothing is allocated; new_residual may be ``residual``, and
                normed may be ``x``. None for new tensors.

        Returns:
            ``(normed, new_residual)``. Differentiable.
        """
        if is_compiling():
            return operators.all_reduce_rms_norm(self, x, residual, weight, eps, algorithm, out)
        name = Op.ALL_REDUCE_RMS_NORM.label
        norm, tensors = norm_operands(name, self.device, x, residual, weight, eps, 1, False, out)
        if torch.is_grad_enabled() and autograd_norm.requires_grad(x, residual, weight, out):
            return autograd_norm.differentiated(x, tensors, out, self, False, False, algorithm)
        self._run_norm(Op.ALL_REDUCE_RMS_NORM, x, norm, tensors, algorithm)
        assert tensors.normed is not None
        return tensors.normed, tensors.new_residual

    def all_reduce_rms_norm_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        scale: torch.Tensor | None = None,
        with_normed: bool = False,
        algorithm: str = "auto",
        out: Fp8Normed | None = None,
    ) -> Fp8Normed:
        """Do :meth:`all_reduce_rms_norm`, and give the norm in FP8 for the matrix product that follows.

        ``quantized = e4m3(clamp(normed * (1 / scale), -448, 448))`` of ``normed`` as rounded to the dtype; so
        ``normed`` is about ``quantized * scale``. NaN stays NaN.

        Args:
            x, residual, weight, eps, algorithm: as in :meth:`all_reduce_rms_norm`.
            scale: one float32 on the device; None for one scale a row: max |normed| / 448, at least 2^-126 (a row of
                zeros).
            with_normed: also give ``normed``.
            out: tensors for the results; its scale is written only if ``scale`` is None. None for new tensors.

        Returns:
            ``Fp8Normed(quantized, scale, new_residual, normed)``; not differentiable.
        """
        if is_compiling():
            return operators.all_reduce_rms_norm_fp8(self, x, residual, weight, eps, scale, with_normed, algorithm, out)
        op, device = Op.ALL_REDUCE_RMS_NORM, self.device
        norm, tensors = fp8_operands(
            f"{op.label}_fp8", device, x, residual, weight, eps, 1, False, scale, with_normed, out
        )
        self._run_norm(op, x, norm, tensors, algorithm)
        assert tensors.quantized is not None
        assert tensors.scale is not None
        return Fp8Normed(tensors.quantized, tensors.scale, tensors.new_residual, tensors.normed)

    def reduce_scatter_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        gather: bool = False,
        algorithm: str = "auto",
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce-scatter the rows of ``x``, then add the residual and norm this rank's rows, in one kernel.

        This is sequence parallelism. ``new_residual = reduce_scatter(x) + residual``, normed as in
        :meth:`all_reduce_rms_norm`.

        Args:
            x: contiguous [N * k, ..., hidden], float32, float16 or bfloat16.
            residual: [k, ..., hidden], this rank's rows.
            weight, eps: as in :meth:`all_reduce_rms_norm`.
            gather: give every rank the normed rows of all ranks, in the same kernel.
            algorithm: ``auto``; ``one_shot``, with ``gather`` ``two_shot``; or ``vendor``.
            out: (normed, new_residual); None for new tensors.

        Returns:
            ``(normed, new_residual)``, both [k, ..., hidden], with ``gather`` normed like ``x``. Differentiable.
        """
        if is_compiling():
            return operators.reduce_scatter_rms_norm(self, x, residual, weight, eps, gather, algorithm, out)
        op = Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER if gather else Op.REDUCE_SCATTER_RMS_NORM
        name, shards = "reduce_scatter_rms_norm", self.world_size
        norm, tensors = norm_operands(name, self.device, x, residual, weight, eps, shards, gather, out)
        if torch.is_grad_enabled() and autograd_norm.requires_grad(x, residual, weight, out):
            return autograd_norm.differentiated(x, tensors, out, self, True, gather, algorithm)
        self._run_norm(op, x, norm, tensors, algorithm)
        assert tensors.normed is not None
        return tensors.normed, tensors.new_residual

    def reduce_scatter_rms_norm_fp8(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        scale: torch.Tensor | None = None,
        with_normed: bool = False,
        gather: bool = False,
        algorithm: str = "auto",
        out: Fp8Normed | None = None,
    ) -> Fp8Normed:
        """Do :meth:`reduce_scatter_rms_norm`, and give the norm in FP8, as :meth:`all_reduce_rms_norm_fp8` does.

        With ``gather``, the second step sends FP8 and scales alone, unless ``with_normed``.
        """
        if is_compiling():
            operands = x, residual, weight, eps, scale
            return operators.reduce_scatter_rms_norm_fp8(self, *operands, with_normed, gather, algorithm, out)
        op = Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER if gather else Op.REDUCE_SCATTER_RMS_NORM
        name, shards = "reduce_scatter_rms_norm_fp8", self.world_size
        norm, tensors = fp8_operands(
            name, self.device, x, residual, weight, eps, shards, gather, scale, with_normed, out
        )
        self._run_norm(op, x, norm, tensors, algorithm)
        assert tensors.quantized is not None
        assert tensors.scale is not None
        return Fp8Normed(tensors.quantized, tensors.scale, tensors.new_residual, tensors.normed)

    def _run_norm(self, op: Op, x: torch.Tensor, norm: Norm, tensors: NormTensors, algorithm: str) -> None:
        """Run a fused call, or the sum and the norm as calls of their own."""
        by_kernel = self.device.type == "cuda" or self._resolver.topology.kernels == "interpreter"
        if self.world_size == 1 and not by_kernel and not self._closed:
            with torch.no_grad():
                rms_norm.add_rms_norm(x, tensors, norm, by_kernel)
            return
        if by_kernel and not is_aligned(x, tensors):
            moved, inside = aligned(x, tensors)
            self._run_norm(op, moved, norm, inside, algorithm)
            with torch.no_grad():
                copy_back(inside, tensors)
            return
        call = self._run(op, x, None, algorithm=algorithm, norm=norm, tensors=tensors)
        if self.world_size > 1 and not call.by_library:
            return
        plain = "vendor" if algorithm == "vendor" else "auto"
        gather = op is Op.REDUCE_SCATTER_RMS_NORM_ALL_GATHER
        own = rms_norm.share(tensors, norm, self.rank, self.world_size) if gather else tensors
        # the sum goes where the new residual will be; if the old one is there, into x where the norm will be
        room = own.new_residual if own.new_residual.data_ptr() != own.residual.data_ptr() else None
        if room is None and op is Op.ALL_REDUCE_RMS_NORM and own.normed is not None:
            room = x if own.normed.data_ptr() == x.data_ptr() else None
        with torch.no_grad():
            reduce = self.all_reduce if op is Op.ALL_REDUCE_RMS_NORM else self.reduce_scatter
            total = reduce(x, out=room, algorithm=plain)
            rms_norm.add_rms_norm(total, own, norm, by_kernel)
            if gather:
                for mine, whole in zip(rms_norm.gathered(own, norm), rms_norm.gathered(tensors, norm), strict=True):
                    self.all_gather(mine, out=whole, algorithm=plain)

    # -- one call -----------------------------------------------------------------------------------------------------

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
    ) -> Call:
        """Make a call. With ``launch`` it is launched as said, past the choice, for measuring."""
        if not self._lock.acquire(False):
            raise ShotcastError(_TWO_THREADS)
        try:
            if self._closed:
                raise ClosedError(f"{op.label}: this communicator was closed")
            capturing = self._chain.enter() if self._chain is not None and self.world_size > 1 else False
            whole = out if op is Op.ALL_GATHER or op is Op.RECV else x
            count, dtype = (0, None) if whole is None else (whole.numel(), whole.dtype)
            key: tuple[Any, ...] = (count, dtype, algorithm, reduction)  # what the fast path looks up
            if sms is not None:
                sm_budget(sms)  # True and 16.0 would find what 1 and 16 have left
            if op is not Op.ALL_REDUCE or capturing or launch is not None or sms is not None:
                key = (*key, op, root, sizes, norm, capturing, launch, sms)
            call = self._calls.get(key)
            if call is None:
                problem = self._resolver.problem(op, whole, reduction, root, sizes, norm, sms)
                call = self._resolver.resolve(problem, algorithm, capturing, launch)
                if len(self._calls) >= _KEPT_CALLS:
                    self._calls.clear()
                self._calls[key] = call
            if norm is None or not call.by_library:
                self._execute(call, x, out, capturing, tensors)
            elif not capturing:
                self._compile(call, capturing)  # the same call captured may take an own kernel
            return call
        finally:
            self._lock.release()

    def _compile(self, call: Call, capturing: bool) -> None:
        """Compile, and make room for, everything that a call needs. Raises ConfigError in a graph capture.

        If a rank has too little memory for a larger workspace, ConfigError is raised on all ranks.
        """
        if self._executor is not None:
            assert self._first_use is not None
            compiled = functools.partial(self._first_use, what=call.plan.op.label, timeout_s=self._timeout_s)
            grown = grow(self._executor, call, capturing, compiled)
            if isinstance(grown, Fault):
                raise self._error(grown)
            if grown:  # calls that are remembered have the addresses of the workspace before
                self._calls.clear()
        for form, bound in call.needs:
            assert self._first_use is not None
            if form not in self._first_use.known:
                if capturing:
                    raise ConfigError(f"{call.label} would be compiled inside a graph capture; call it once before")
                self._first_use(form, bound.load, call.plan.op.label, self._timeout_s)
        call.needs = ()

    def _execute(
        self,
        call: Call,
        x: torch.Tensor | None,
        out: torch.Tensor | None,
        capturing: bool,
        tensors: NormTensors | None,
    ) -> None:
        executor = self._executor
        if self.world_size == 1:
            if x is not None and out is not None and out.data_ptr() != x.data_ptr():
                out.view(-1).copy_(x.detach().view(-1))
            return
        if executor is not None:
            if fault := executor.fault():
                raise self._error(fault)
            if call.needs:
                self._compile(call, capturing)
            if capturing:
                executor.keep()
        if self._vendor.failed or (call.by_library and not self._vendor.connected(call.plan)):
            self._check_vendor_calls(call, capturing)
        if not self._nvtx:
            self._launch(call, x, out, tensors)
            return
        torch.cuda.nvtx.range_push(call.label)
        try:
            self._launch(call, x, out, tensors)
        finally:
            torch.cuda.nvtx.range_pop()

    def _launch(
        self, call: Call, x: torch.Tensor | None, out: torch.Tensor | None, tensors: NormTensors | None
    ) -> None:
        executor = self._executor
        if executor is not None and call.bound is not None and (self._checks_vendor or not call.by_library):
            call.bound.run(x, out, tensors)
            if self._chain is None and (fault := executor.fault()):
                raise self._error(fault)
        if call.by_library:
            if executor is not None and self._chain is not None and not self._vendor.connected(call.plan):
                torch.cuda.current_stream(self.device).synchronize()  # until the headers have been compared
                self.check()
            try:
                self._vendor.run(call.plan, x, out, call.reduction)
            except ShotcastError:
                self.check()  # a fault that own kernels report is the cause
                raise

    def _check_vendor_calls(self, call: Call, capturing: bool) -> None:
        """Raise if calls of the vendor library have failed, or if ranks would connect in a graph capture."""
        self._vendor.check()
        if capturing:
            raise ConfigError(f"{call.label} would connect ranks inside a graph capture; call it once before")

    # -- what is known ------------------------------------------------------------------------------------------------

    def explain(
        self,
        x: torch.Tensor,
        op: str = "all_reduce",
        algorithm: str = "auto",
        reduction: str = "sum",
        mode: str | None = None,
        sms: int | None = None,
    ) -> Explanation:
        """Return which algorithm and launch a call would take, who decided, and why. Communicates nothing.

        Args:
            x: the tensor that defines the size of the call: the input, or for an all_gather the output.
            op: the name of the operation.
            algorithm, reduction, sms: as in the call.
            mode: ``graph`` for a call captured in a CUDA graph, or ``eager``; tables may treat them differently. None
                for what a call made now would be.
        """
        if mode is None:
            mode = "graph" if self._chain is not None and self._chain.capturing() else "eager"
        return self._resolver.explain(x, op, algorithm, reduction, mode, sms)

    def candidates(self, x: torch.Tensor, op: str = "all_reduce", sms: int | None = None) -> list[str]:
        """Return the names of the algorithms that may serve such a call."""
        return list(self.explain(x, op, sms=sms).candidates)

    @property
    def topology(self) -> Topology:
        """The facts about ranks and machine that the choice of algorithms depends on."""
        return self._resolver.topology

    # -- trouble ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a failed collective stopped this communicator, as far as finished calls have seen.

        It never synchronises. On CUDA, results are sound if this returns after the stream that computed them was
        synchronised.

        Raises:
            CollectiveTimeout: ranks did not come to a call in time, or their processes have ended.
            CollectiveMismatch: ranks made different calls.
            ClosedError: after :meth:`close`.
        """
        if self._closed:
            raise ClosedError("check: this communicator was closed")
        if self._executor is not None and (fault := self._executor.fault()):
            raise self._error(fault)
        self._vendor.check()

    def _error(self, fault: Fault) -> ShotcastError:
        assert self._executor is not None
        return error_of(fault, self._executor, self._host, self._timeout_s, self._algorithms.names)

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls and of replays of captured ones. Each rank changes its own."""
        self._timeout_s = _seconds(timeout_s)
        self._vendor.set_timeout(self._timeout_s)
        if self._executor is not None:
            self._executor.set_timeout(self._timeout_s)

    def reset(self) -> None:
        """Make a stopped communicator usable again. Collective: every rank calls it, and all must be alive.

        It waits for this rank's work, then for all ranks, and clears the workspace. The epoch goes on.

        Raises:
            CollectiveTimeout: names the ranks that did not come within the timeout (at least 10 s).
        """
        if self._closed:
            raise ClosedError("reset: this communicator was closed")
        if not self._lock.acquire(blocking=False):
            raise ShotcastError(_TWO_THREADS)
        try:
            patience = max(self._timeout_s, 10.0)
            self._drain()
            executor, vendor = self._executor, self._vendor
            own = executor.epoch if executor is not None else 0, vendor.generation, vendor.needs_reset()
            epochs, generations, failed = zip(*self._host.all_gather(own, patience, what="reset"), strict=True)
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
        """Wait for this rank's calls, which end at their deadline at the latest."""
        if self._executor is not None:
            self._executor.drain()
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def split(self, color: int | None, key: int = 0, max_bytes: int | None = None) -> Communicator | None:
        """Make a communicator among the ranks of equal ``color``, ranked by (``key``, rank). Collective.

        A rank whose ``color`` is None gets None. One color for all ranks gives an independent workspace for the same
        ranks. ``max_bytes`` is that of a new communicator, the same on all ranks of a color; None takes the value of
        this one.
        """
        if self._closed:
            raise ClosedError("split: this communicator was closed")
        number = self._host.steps  # the same on all ranks that meet in this step
        colors = self._host.all_gather((color, key), what="split")
        if color is None:
            return None
        members = sorted((k, rank) for rank, (c, k) in enumerate(colors) if c == color)
        child = object.__new__(Communicator)
        order = [self._host.order[rank] for _, rank in members]
        room = self.max_bytes if max_bytes is None else max_bytes
        name = f"{self.name}/split {number}/{color}"
        child._start(self._group, self.device, room, self._timeout_s, self._allow_fp8, order, name)
        return child

    def close(self) -> None:
        """Wait for this rank's calls and give the workspace back. Needs no other rank; a second call does nothing."""
        # a call of another thread uses the workspace until it ends, which it does within its timeout
        if not self._lock.acquire(timeout=self._timeout_s + _CLOSE_GRACE_S):
            raise ShotcastError("close: a call of another thread has not ended within the timeout")
        try:
            if self._closed:
                return
            self._closed = True
            if self._fast_path is not None:
                self._fast_path.close()
            self._drain()  # while the ends of processes are still watched, as no call waits for dead ranks
            self._vendor.close()
            self._peers.close()
            if self._executor is not None:
                self._executor.close()
            self._calls.clear()
        finally:
            self._lock.release()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._resolver.topology.kernels or "vendor"
        return f"Communicator(rank={self.rank}, world_size={self.world_size}, device={self.device}, {state})"
