"""The Communicator: tensors exchanged between the ranks of one group."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shotcast import env, wire
from shotcast.collectives import autograd, rms_norm
from shotcast.collectives.candidates import candidates
from shotcast.collectives.first_use import FirstUse, Form
from shotcast.collectives.problem import Choice, CollectiveProblem, Explanation, Topology
from shotcast.collectives.select import choose
from shotcast.collectives.streams import StreamChain
from shotcast.collectives.table import Table, load, packaged
from shotcast.collectives.vendor import REDUCTIONS, Vendor
from shotcast.errors import (
    ClosedError,
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    ShotcastError,
    UnsupportedError,
)
from shotcast.memory.host_group import StoreGroup
from shotcast.units import format_size
from shotcast.wire import CallPlan, Fault, Header, Op

logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = {"cuda": 64 << 20, "cpu": 16 << 20}
SETUP_TIMEOUT_S = 120.0
_MAX_WORKSPACE_MESSAGE = 512 << 20
_KEPT_CALLS = 4096
_CLOSE_GRACE_S = 5.0
_TWO_THREADS = "two threads use one communicator at once, so its calls have no order; give each thread its own (split)"
_DTYPE_NAMES = {getattr(torch, name): name for name in wire.DTYPES if hasattr(torch, name)}


class Executor(Protocol):
    """Runs call plans: ``kernels.executor.TritonExecutor`` or ``cpu.executor.CpuExecutor``."""

    def run(self, plan: CallPlan, x: torch.Tensor | None, out: torch.Tensor | None) -> None: ...
    def prepare(self, plan: CallPlan) -> bool: ...
    def fault(self) -> Fault | None: ...
    def headers(self, epoch: int) -> list[int | None]: ...
    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: int, /) -> None: ...
    def set_timeout(self, timeout_s: float, /) -> None: ...
    def drain(self) -> None: ...
    def clear(self, epoch: int) -> None: ...
    def close(self) -> None: ...


class _Call(NamedTuple):
    """A call resolved: kept, so that the same call again costs a look-up."""

    plan: CallPlan
    choice: Choice
    reduction: str
    form: Form
    label: str


class Communicator:
    """The ranks of a process group, exchanging ordinary tensors.

    Every rank makes the same calls in the same order (send and recv: the two ranks that take part). On CUDA a call is
    enqueued on the current stream, can be captured in a graph, and reports trouble at :meth:`check` or the next call;
    on the CPU it returns when it is done, or raises. Calls from several streams are ordered as they are made; calls
    from two threads at once are refused. Results have the same bits on all ranks and on every run
    (``docs/numerics.md``).

    A replay of a captured graph is a call too: order it with other uses of the communicator, or give it one of its own
    (:meth:`split`). Kernels wait on the GPU for their peers, so grids of communicators used at once must fit on it
    together.

    Args:
        group: a torch.distributed process group; None for all ranks, initialising torch.distributed from the
            environment (torchrun, :func:`shotcast.spawn`) if that has not been done.
        device: ``"cuda"``, ``"cuda:i"`` or ``"cpu"``; None takes a GPU where every rank of the host can have one.
        max_bytes: the largest message for own kernels on CUDA (beyond, the vendor library serves); the workspace takes
            about 8 times as much of each GPU. On the CPU, the workspace itself: messages of any size pass through it.
        timeout_s: how long a call waits for the other ranks.

    Raises:
        ConfigError: the environment or an argument is not usable, or differs between ranks; too little shared memory.
        CollectiveTimeout: a rank did not come to the construction.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: str | torch.device | None = None,
        max_bytes: int | None = None,
        timeout_s: float = 30.0,
    ):
        self._start(group, device, max_bytes, timeout_s, None)

    def _start(
        self,
        group: dist.ProcessGroup | None,
        device: str | torch.device | None,
        max_bytes: int | None,
        timeout_s: float,
        order: Sequence[int] | None,
    ) -> None:
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s < 1e9):
            raise ConfigError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
        self.device = _device(device)
        self._group = _process_group(group, self.device)
        self._timeout_s = float(timeout_s)
        order = list(range(dist.get_world_size(self._group))) if order is None else list(order)
        self._host = StoreGroup(self._group, SETUP_TIMEOUT_S, order)
        self.rank, self.world_size = self._host.rank, self._host.world_size
        if max_bytes is None:
            max_bytes = DEFAULT_MAX_BYTES[self.device.type]
        if not isinstance(max_bytes, int) or not 0 < max_bytes <= _MAX_WORKSPACE_MESSAGE:
            raise ConfigError(f"max_bytes is a whole number in 1..{_MAX_WORKSPACE_MESSAGE}, not {max_bytes!r}")
        self.max_bytes = max_bytes
        self._closed = False
        self._lock = threading.Lock()
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._chain = StreamChain() if self.device.type == "cuda" else None
        self._nvtx = self.device.type == "cuda" and env.nvtx()
        self._vendor = Vendor(self._group, order)
        self._first_use = FirstUse(self._host.store("first-use"), self.rank, self.world_size)
        self._executor: Executor | None = None
        self._environment = env.algorithm()
        part = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self._tables = self._agree(part)
        kernels, obstacle, multicast = self._build_executor()
        self._topology = Topology(self.world_size, self.device.type, part, kernels, obstacle, multicast, self.max_bytes)

    # -- construction -------------------------------------------------------------------------------------------------

    def _agree(self, part: str) -> tuple[tuple[str, Table], ...]:
        """The tables to ask, once it is certain that they and all else a choice depends on is the same on all ranks."""
        tables, trouble = [], ""
        try:
            if path := env.table_path():
                tables.append(("user table", load(path, part, self.world_size)))
            if table := packaged(part, self.world_size):
                tables.append(("packaged table", table))
        except ConfigError as error:
            trouble = str(error)
        texts = "\0".join(table.text for _, table in tables)
        mine = {
            "device": self.device.type,
            "SHOTCAST_CPU_KERNELS": env.cpu_kernels(),
            "GPU": part,
            "max_bytes": self.max_bytes,
            "SHOTCAST_ALGORITHM": self._environment,
            "tables (SHOTCAST_TABLE)": hashlib.sha256(texts.encode()).hexdigest()[:12],
        }
        everybody = self._host.all_gather((trouble, mine), what="construction")
        if told := "; ".join(f"rank {r}: {text}" for r, (text, _) in enumerate(everybody) if text):
            raise ConfigError(told)
        for name, value in mine.items():
            values = [theirs.get(name) for _, theirs in everybody]
            if any(theirs != value for theirs in values):
                said = ", ".join(f"rank {r}: {theirs}" for r, theirs in enumerate(values))
                raise ConfigError(f"the ranks do not agree on {name}: {said}")
        return tuple(tables)

    def _build_executor(self) -> tuple[str, str, bool]:
        """(who runs own kernels, why nobody does, whether by multicast)."""
        if self.world_size > wire.MAX_WORLD_SIZE:
            return "", f"own kernels serve up to {wire.MAX_WORLD_SIZE} ranks, not {self.world_size}", False
        host = (os.uname().nodename, _boot_id())
        places = self._host.all_gather((host, self.device.index), what="construction")
        if any(place[0] != host for place in places):
            return "", "the ranks are on several hosts, and own kernels share memory of one", False
        if self.device.type == "cpu":
            if env.cpu_kernels() == "compiled":
                from shotcast.cpu.executor import CpuExecutor

                self._executor = CpuExecutor(self._host, self.max_bytes, self._timeout_s)
                return "compiled", "", False
            from shotcast.kernels.executor import TritonExecutor
            from shotcast.kernels.layout import Layout
            from shotcast.memory.shm import ShmBuffer

            shared = ShmBuffer(self._host, Layout.of(self.max_bytes).nbytes)
            self._executor = TritonExecutor(shared, self._host, self.max_bytes, self._timeout_s, self.device)
            return "interpreter", "", False
        indices = [place[1] for place in places]
        obstacle = _peer_obstacle(self.device, indices)
        for rank, text in enumerate(self._host.all_gather(obstacle, what="construction")):
            if text:
                logger.warning("rank %d: %s; the vendor library serves all calls", rank, text)
                return "", f"rank {rank}: {text}", False
        from shotcast.kernels.executor import TritonExecutor
        from shotcast.kernels.layout import Layout
        from shotcast.memory.cuda import CudaBuffer

        buffer = CudaBuffer(self._group, Layout.of(self.max_bytes).nbytes, self.device, self._host.order)
        self._executor = TritonExecutor(buffer, self._host, self.max_bytes, self._timeout_s, self.device)
        return "triton", "", bool(buffer.multicast_address)

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: torch.Tensor, out: torch.Tensor | None = None, algorithm: str = "auto", reduction: str = "sum"
    ) -> torch.Tensor:
        """``out = x_0 + x_1 + ... + x_{N-1}``, on every rank.

        Args:
            x: contiguous, any shape, the same on all ranks.
            out: like ``x``; ``x`` itself for in place; None for a new tensor.
            algorithm: ``auto``, ``one_shot``, ``two_shot``, ``ring`` or ``vendor``.
            reduction: ``sum``; or ``max``, ``min``, ``prod``, which the vendor library does.

        Returns:
            ``out``. Differentiable when ``out`` is None and ``reduction`` is ``sum``.
        """
        self._valid(x, "x")
        if out is None and x.requires_grad and torch.is_grad_enabled() and reduction == "sum":
            return autograd.AllReduce.apply(x, self, algorithm)
        out = self._out(x, out, x.shape)
        self._run(Op.ALL_REDUCE, x, out, algorithm=algorithm, reduction=reduction)
        return out

    def reduce_scatter(
        self, x: torch.Tensor, out: torch.Tensor | None = None, algorithm: str = "auto", reduction: str = "sum"
    ) -> torch.Tensor:
        """``out_i = x_0[i] + ... + x_{N-1}[i]``, where ``x[i]`` is the i-th of N equal parts.

        Args:
            x: contiguous [N * k, ...].
            out: [k, ...]; None for a new tensor.
            algorithm: ``auto``, ``one_shot``, ``ring`` or ``vendor``.
            reduction: as in :meth:`all_reduce`.

        Returns:
            ``out``. Differentiable when ``out`` is None and ``reduction`` is ``sum``.
        """
        self._valid(x, "x")
        if out is None and x.requires_grad and torch.is_grad_enabled() and reduction == "sum":
            return autograd.ReduceScatter.apply(x, self, algorithm)
        rows = self._divided(x, "reduce_scatter")
        out = self._out(x, out, (rows, *x.shape[1:]))
        self._run(Op.REDUCE_SCATTER, x, out, algorithm=algorithm, reduction=reduction)
        return out

    def all_gather(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        sizes: Sequence[int] | None = None,
        algorithm: str = "auto",
    ) -> torch.Tensor:
        """``out = x_0, x_1, ..., x_{N-1}``, joined along the first dimension, on every rank.

        Args:
            x: contiguous [k, ...]; with ``sizes``, [sizes[rank], ...].
            out: [N * k, ...]; with ``sizes``, [sum(sizes), ...]; None for a new tensor.
            sizes: first dimension of each rank's part, the same list on all ranks.
            algorithm: ``auto``, ``one_shot``, ``ring`` or ``vendor``.

        Returns:
            ``out``. Differentiable when ``out`` is None.
        """
        self._valid(x, "x")
        if out is None and x.requires_grad and torch.is_grad_enabled():
            parts = None if sizes is None else tuple(sizes)
            return autograd.AllGather.apply(x, self, parts, algorithm)
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
        out = self._out(x, out, (rows, *x.shape[1:]))
        self._run(Op.ALL_GATHER, x, out, algorithm=algorithm, sizes=elements)
        return out

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor | None = None, algorithm: str = "auto") -> torch.Tensor:
        """``out_i = x_0[i], x_1[i], ..., x_{N-1}[i]``, where ``x[i]`` is the i-th of N equal parts.

        ``x`` and ``out`` are contiguous [N * k, ...] and do not overlap. Returns ``out``.
        """
        self._valid(x, "x")
        self._divided(x, "all_to_all")
        out = self._out(x, out, x.shape)
        if out.data_ptr() == x.data_ptr() and x.numel():
            raise ConfigError("all_to_all cannot work in place; give another tensor as out, or none")
        self._run(Op.ALL_TO_ALL, x, out, algorithm=algorithm)
        return out

    def broadcast(self, x: torch.Tensor, root: int, algorithm: str = "auto") -> torch.Tensor:
        """``x = x_root`` on every rank, in place. Returns ``x``."""
        self._valid(x, "x")
        self._run(Op.BROADCAST, x, x, algorithm=algorithm, root=self._peer(root, "root"))
        return x

    def send(self, x: torch.Tensor, dst: int) -> None:
        """Send ``x`` to rank ``dst``, which must receive as many elements of the same dtype."""
        self._valid(x, "x")
        if self._peer(dst, "dst") == self.rank:
            raise ConfigError(f"rank {self.rank} cannot send to itself")
        self._run(Op.SEND, x, None, root=dst)

    def recv(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Receive into ``x`` what rank ``src`` sends. Returns ``x``."""
        self._valid(x, "x")
        if self._peer(src, "src") == self.rank:
            raise ConfigError(f"rank {self.rank} cannot receive from itself")
        self._run(Op.RECV, None, x, root=src)
        return x

    def barrier(self) -> None:
        """Complete (on CUDA: on the current stream) when every rank has called."""
        self._run(Op.BARRIER, None, None)

    def all_reduce_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        algorithm: str = "auto",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce, residual add and RMSNorm, as between the blocks of a transformer.

        ``new_residual = all_reduce(x) + residual``; ``normed = new_residual / rms(new_residual) * weight``, in float32
        with ``new_residual`` as rounded.

        Args:
            x, residual: contiguous [..., hidden], float32, float16 or bfloat16.
            weight: [hidden].
            eps: added to the mean square.

        Returns:
            ``(normed, new_residual)``, new tensors like ``x``; not differentiable.
        """
        self._valid(x, "x")
        self._valid(residual, "residual")
        self._valid(weight, "weight")
        if _DTYPE_NAMES.get(x.dtype) not in wire.REDUCIBLE or residual.dtype != x.dtype:
            raise UnsupportedError(
                f"all_reduce_rms_norm takes x and residual of one dtype of {', '.join(wire.REDUCIBLE)}; "
                f"they are {x.dtype} and {residual.dtype}"
            )
        if x.dim() == 0 or residual.shape != x.shape or weight.shape != x.shape[-1:]:
            raise ConfigError(
                f"all_reduce_rms_norm takes x and residual [..., hidden] and weight [hidden]; shapes are "
                f"{list(x.shape)}, {list(residual.shape)}, {list(weight.shape)}"
            )
        total = self.all_reduce(x.detach(), algorithm=algorithm)
        by_kernel = self.device.type == "cuda" or self._topology.kernels == "interpreter"
        with torch.no_grad():
            return rms_norm.add_rms_norm(total, residual, weight, eps, by_kernel)

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
    ) -> None:
        if not self._lock.acquire(blocking=False):
            raise ShotcastError(_TWO_THREADS)
        try:
            if self._closed:
                raise ClosedError(f"{op.label}: this communicator was closed")
            whole = out if op is Op.ALL_GATHER or op is Op.RECV else x
            if x is not None:
                self._valid(x, "x")
            elif out is not None:
                self._valid(out, "x")
            count, dtype = (0, None) if whole is None else (whole.numel(), whole.dtype)
            key = (op, count, dtype, algorithm, reduction, root, sizes)
            call = self._calls.get(key)
            if call is None:
                call = self._resolve(op, whole, algorithm, reduction, root, sizes)
                if len(self._calls) >= _KEPT_CALLS:
                    self._calls.clear()
                self._calls[key] = call
            self._execute(call, x, out)
        finally:
            self._lock.release()

    def _execute(self, call: _Call, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        plan, executor = call.plan, self._executor
        if self.world_size == 1:
            if x is not None and out is not None and out.data_ptr() != x.data_ptr():
                out.view(-1).copy_(x.detach().view(-1))
            return
        capturing = self._chain.enter(self.device) if self._chain is not None else False
        if executor is not None:
            if fault := executor.fault():
                raise self._error(fault)
            if call.form not in self._first_use.known:
                if capturing:
                    raise ConfigError(
                        f"{plan.op.label} ({call.label}) would be compiled inside a graph capture; call it once before"
                    )
                self._first_use(call.form, lambda: executor.prepare(plan), min(0.5, self._timeout_s / 2))
        with self._range(call.label):
            if executor is not None:
                executor.run(plan, x, out)
                if self._chain is None and (fault := executor.fault()):
                    raise self._error(fault)
            if plan.algorithm == "vendor":
                self._vendor.run(plan, x, out, call.reduction)

    @contextlib.contextmanager
    def _range(self, label: str) -> Iterator[None]:
        if not self._nvtx:
            yield
            return
        torch.cuda.nvtx.range_push(label)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def _problem(
        self, op: Op, tensor: torch.Tensor | None, reduction: str, root: int, sizes: tuple[int, ...]
    ) -> CollectiveProblem:
        if reduction not in REDUCTIONS:
            raise ConfigError(f"unknown reduction {reduction!r}; there are {', '.join(REDUCTIONS)}")
        if tensor is None:
            return CollectiveProblem(op, 0, "uint8", self._topology)
        dtype = _DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedError(f"{op.label}: dtype {tensor.dtype} is not served; {', '.join(wire.DTYPES)} are")
        nbytes = tensor.numel() * tensor.element_size()
        return CollectiveProblem(op, nbytes, dtype, self._topology, root, sizes, reduction)

    def _resolve(
        self,
        op: Op,
        tensor: torch.Tensor | None,
        algorithm: str,
        reduction: str,
        root: int,
        sizes: tuple[int, ...],
    ) -> _Call:
        problem = self._problem(op, tensor, reduction, root, sizes)
        choice = choose(problem, algorithm, self._environment, self._tables)
        candidate = choice.candidate
        # a reduction other than sum has no field in the header; the root's is free
        code = list(REDUCTIONS).index(reduction) if op in (Op.ALL_REDUCE, Op.REDUCE_SCATTER) else root
        plan = CallPlan(op, candidate.algorithm, problem.dtype, problem.nbytes, code, sizes, candidate.launch)
        shape = candidate.launch
        rest = f"/{plan.algorithm}/{plan.dtype}/{shape.block_words}/{shape.num_warps}"
        form = Form(op.label + rest)
        if op in (Op.SEND, Op.RECV):
            form = Form(op.label + rest, root, (Op.RECV if op is Op.SEND else Op.SEND).label + rest)
        label = f"shotcast.{op.label} {plan.algorithm} {plan.dtype} {format_size(plan.nbytes)}"
        return _Call(plan, choice, reduction, form, label)

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _valid(self, x: torch.Tensor, name: str) -> None:
        if not isinstance(x, torch.Tensor):
            raise ConfigError(f"{name} is a torch.Tensor, not {type(x).__name__}")
        if x.device != self.device:
            raise ConfigError(f"{name} lies on {x.device}; this communicator serves {self.device}")
        if x.layout != torch.strided or not x.is_contiguous():
            how = f"shape {list(x.shape)}, strides {list(x.stride())}" if x.layout == torch.strided else str(x.layout)
            instead = "contiguous" if x.layout == torch.strided else "to_dense"
            raise ConfigError(f"{name} is not contiguous ({how}); pass {name}.{instead}()")
        if x.is_conj() or x.is_neg():
            # the memory holds other values than the tensor shows
            raise ConfigError(f"{name} is conjugated or negated lazily; pass {name}.resolve_conj().resolve_neg()")

    def _out(self, x: torch.Tensor, out: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
        if out is None:
            return x.new_empty(shape)
        self._valid(out, "out")
        if out.dtype != x.dtype or out.shape != torch.Size(shape):
            raise ConfigError(f"out must be {list(shape)} of {x.dtype}; it is {list(out.shape)} of {out.dtype}")
        if out.requires_grad and torch.is_grad_enabled():
            raise ConfigError("out requires grad, and what is written to it has no derivative; pass out.detach()")
        return out

    def _divided(self, x: torch.Tensor, name: str) -> int:
        if x.dim() == 0 or x.shape[0] % self.world_size:
            raise ConfigError(
                f"{name}: the first dimension of x is divided among {self.world_size} ranks; its shape is "
                f"{list(x.shape)}"
            )
        return x.shape[0] // self.world_size

    def _peer(self, rank: int, name: str) -> int:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ConfigError(f"{name} is a rank in 0..{self.world_size - 1}, not {rank!r}")
        return rank

    # -- what is known ------------------------------------------------------------------------------------------------

    def explain(self, x: torch.Tensor, op: str = "all_reduce", algorithm: str = "auto") -> Explanation:
        """Which algorithm and launch a call would take, who decided, and why. Communicates nothing.

        ``x`` is the tensor that defines the call's size: the input, or for an all_gather the output.
        """
        operation = _operation(op)
        if not isinstance(x, torch.Tensor):
            raise ConfigError(f"x is a torch.Tensor, not {type(x).__name__}")
        problem = self._problem(operation, None if operation is Op.BARRIER else x, "sum", 0, ())
        choice = choose(problem, algorithm, self._environment, self._tables)
        legal = tuple(candidate.algorithm for candidate in candidates(problem))
        return Explanation(
            operation.label,
            problem.nbytes,
            problem.dtype,
            choice.candidate.algorithm,
            choice.candidate.launch,
            choice.source,
            choice.reason,
            legal,
        )

    def candidates(self, x: torch.Tensor, op: str = "all_reduce") -> list[str]:
        """Names of the algorithms that may serve such a call."""
        return list(self.explain(x, op).candidates)

    @property
    def topology(self) -> Topology:
        """What the choice of algorithms knows of the ranks and the machine."""
        return self._topology

    # -- trouble ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what stopped this communicator, as far as finished calls have seen; synchronises nothing.

        On CUDA, results are sound if this returns after the stream they were computed on was synchronised.

        Raises:
            CollectiveTimeout: ranks did not come to a call in time.
            CollectiveMismatch: ranks made different calls.
            ClosedError: after :meth:`close`.
        """
        if self._closed:
            raise ClosedError("check: this communicator was closed")
        if self._executor is not None and (fault := self._executor.fault()):
            raise self._error(fault)

    def _error(self, fault: Fault) -> ShotcastError:
        assert self._executor is not None
        now = self._executor.epoch
        # the fault may be of a call that this rank has not begun: the nearest epoch with those 32 bits
        epoch = now - ((now - fault.epoch32 + (1 << 31) & 0xFFFFFFFF) - (1 << 31))
        point_to_point = fault.op in (Op.SEND.label, Op.RECV.label)
        if point_to_point:
            epoch = fault.epoch32
        if fault.kind == wire.TIMEOUT:
            return CollectiveTimeout(self.rank, fault.ranks, fault.op, epoch, self._timeout_s)
        headers = self._headers(epoch) if not point_to_point or self._topology.kernels == "compiled" else []
        known = {rank: Header.decode(word) for rank, word in enumerate(headers) if word is not None}
        fields = [
            name
            for name in ("op", "dtype", "algorithm", "root", "nbytes")
            if len({getattr(header, name) for header in known.values()}) > 1
        ]
        differing = fault.ranks
        if known:
            said = list(known.values())
            # the largest group of equal calls is taken to be right; of equally large ones, the one of the lowest rank
            usual = max(said, key=said.count)
            differing = tuple(rank for rank, header in known.items() if header != usual)
        calls = {rank: str(header) for rank, header in known.items()}
        return CollectiveMismatch(self.rank, calls, differing, fields, epoch)

    def _headers(self, epoch: int) -> list[int | None]:
        """Every rank's header of a call; those who are about to send theirs get a moment."""
        assert self._executor is not None
        until = time.monotonic() + min(0.2, self._timeout_s / 2)
        headers = self._executor.headers(epoch)
        while None in headers and time.monotonic() < until:
            time.sleep(0.002)
            headers = self._executor.headers(epoch)
        return headers

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of later calls, replays of captured ones included. Each rank for itself."""
        if not (isinstance(timeout_s, int | float) and 0 < timeout_s < 1e9):
            raise ConfigError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
        self._timeout_s = float(timeout_s)
        if self._executor is not None:
            self._executor.set_timeout(self._timeout_s)

    def reset(self) -> None:
        """Make a stopped communicator usable again. Collective: every rank calls it; all must be alive.

        Waits for this rank's work, then for all ranks, and clears the workspace. The epoch goes on.

        Raises:
            CollectiveTimeout: naming the ranks that did not come within the timeout (at least 10 s).
        """
        if self._closed:
            raise ClosedError("reset: this communicator was closed")
        if not self._lock.acquire(blocking=False):
            raise ShotcastError(_TWO_THREADS)
        try:
            patience = max(self._timeout_s, 10.0)
            if self._executor is None:
                self._host.barrier(patience, what="reset")
                return
            self._executor.drain()
            epoch = max(self._host.all_gather(self._executor.epoch, patience, what="reset"))
            self._executor.clear(epoch)
            self._host.barrier(patience, what="reset")
        finally:
            self._lock.release()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator among the ranks of equal ``color``, ranked by (``key``, rank). Collective.

        None for a rank whose ``color`` is None. With one color for all, an independent workspace for the same ranks.
        """
        if self._closed:
            raise ClosedError("split: this communicator was closed")
        said = self._host.all_gather((color, key, dist.get_rank()), what="split")
        if color is None:
            return None
        members = sorted((k, rank, job_rank) for rank, (c, k, job_rank) in enumerate(said) if c == color)
        job_ranks = [job_rank for _, _, job_rank in members]
        group = dist.new_group(
            sorted(job_ranks),
            timeout=timedelta(seconds=SETUP_TIMEOUT_S),
            backend=dist.get_backend_config(self._group),
            use_local_synchronization=True,
            group_desc=f"shotcast split {color}",
        )
        child = object.__new__(Communicator)
        order = [sorted(job_ranks).index(job_rank) for job_rank in job_ranks]
        child._start(group, self.device, self.max_bytes, self._timeout_s, order)
        return child

    def close(self) -> None:
        """Wait for this rank's calls and give the workspace back. Needs nobody else; does nothing twice."""
        # a call of another thread uses the workspace until it ends, which it does within its timeout
        if not self._lock.acquire(timeout=self._timeout_s + _CLOSE_GRACE_S):
            raise ShotcastError("close: a call of another thread has not ended within the timeout")
        try:
            if self._closed:
                return
            self._closed = True
            if self._executor is not None:
                self._executor.drain()
                self._executor.close()
        finally:
            self._lock.release()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._topology.kernels or "vendor"
        return f"Communicator(rank={self.rank}, world_size={self.world_size}, device={self.device}, {state})"


def _operation(op: str) -> Op:
    try:
        return Op[op.upper()]
    except KeyError:
        raise ConfigError(f"unknown operation {op!r}; there are {', '.join(o.label for o in Op)}") from None


def _boot_id() -> str:
    """Tells hosts of equal name apart, and containers of one host not."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _device(device: str | torch.device | None) -> torch.device:
    job = env.job()
    if device is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", job.world_size if job else 1))
        device = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= local else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device is cpu or cuda, not {device!r}") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is cpu or cuda, not {chosen}")
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {chosen} was asked for, and PyTorch {torch.__version__} sees no GPU")
    index: int | None = chosen.index
    if index is None:
        index = job.local_rank if job and "LOCAL_RANK" in os.environ else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device cuda:{index} was asked for; there are {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def _process_group(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup:
    if not dist.is_initialized():
        if group is not None:
            raise ConfigError("a process group was given, and torch.distributed is not initialised")
        if env.job() is None:
            raise ConfigError(
                "RANK and WORLD_SIZE are not set; start with torchrun, or with shotcast.spawn(fn, world_size)"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=SETUP_TIMEOUT_S))
    group = group or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        raise ConfigError("this rank is not a member of the process group")
    return group


def _peer_obstacle(device: torch.device, indices: Sequence[int]) -> str:
    """Why own kernels cannot run between these GPUs of this host; empty if they can."""
    if len(set(indices)) != len(indices):
        return f"several ranks use one GPU (indices {list(indices)})"
    for index in indices:
        if index != device.index and not torch.cuda.can_device_access_peer(device.index, index):
            return f"GPU {device.index} has no peer access to GPU {index}"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return ""
