"""torch.distributed's calls in terms of a communicator's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shotcast.collectives.calls.caller import key_of
from shotcast.collectives.calls.coalesced import flat
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.reductions import OF_TORCH, reduction_name
from shotcast.collectives.torch_private import Unseen
from shotcast.errors import ConfigError
from shotcast.process_group import torch_private
from shotcast.process_group.modes import visible
from shotcast.process_group.operands import CallOperands, is_dense, joined, movable
from shotcast.process_group.routing import is_scaled, route_of
from shotcast.process_group.works import DoneWork, SeveralWorks

_CPU = torch.device("cpu")
MOVED = {op: key_of(getattr(Communicator, op), None) for op in ("all_gather", "all_to_all")}
REDUCED = {
    (op, getattr(dist.ReduceOp, kind).value): key_of(getattr(Communicator, op), None, reduction=name)
    for op in ("all_reduce", "reduce_scatter")
    for kind, name in OF_TORCH.items()
}
"""Keys under which a communicator's methods find prepared calls that have only tensor arguments."""
BARRIER = key_of(Communicator.barrier)
BROADCAST = functools.cache(functools.partial(key_of, Communicator.broadcast, None))
_SINGLE = {"reduce_scatter": "_reduce_scatter_base", "all_gather": "_allgather_base"}
"""Methods of an inner group on single tensors with the parts of all ranks."""
Begin = Callable[[Any], Any]
"""Starts a call of an inner group."""
OnOperands = Callable[[Communicator, CallOperands], None]
"""Runs a call on a communicator, with operands that stand in for the original ones."""


class Calls:
    """The calls of a process group, under all their names in PyTorch 2.11 to 2.14."""

    _rank: int
    _world_size: int

    # of the group: they run a call on a communicator, repeat an earlier one, and use an inner group
    _own: Callable[..., DoneWork]
    _again: Callable[..., DoneWork | None]
    _inner: Callable[..., DoneWork]
    _message: Callable[..., DoneWork]
    _ends_on_gpus: Callable[[], list[Callable[[], None]]]
    """Returns, for each GPU with calls, a function that makes the host wait for the calls so far."""
    _check_gpus: Callable[[], None]

    # -- reductions ---------------------------------------------------------------------------------------------------

    @visible("allreduce")
    def _all_reduce(self, tensors: Any, opts: Any, op: Any, timeout: timedelta | None) -> DoneWork:
        opts = _options(dist.AllreduceOptions, opts, op, timeout)
        given = _only(tensors, "allreduce")
        name, factor = _reduction(opts, given.dtype)
        x = torch_private.plain(given)

        def make(comm: Communicator, data: CallOperands) -> None:
            comm.all_reduce(data.scaled()[0], out=data.outputs[0], reduction=name)

        inner = "allreduce", [x], opts
        return self._call("all_reduce", make, [given], [x], [x], opts, inner, name, factor)

    @visible()
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> DoneWork:
        """Reduce tensors over all ranks, in place."""
        opts = opts if opts is not None else dist.AllreduceCoalescedOptions()
        xs, op = _plain(tensors), "all_reduce_coalesced"
        if not xs or torch_private.has_no_data(xs[0]):
            return DoneWork(list(tensors))
        name, factor = _reduction(opts, *[x.dtype for x in xs])
        _on_one_device(op, xs)

        def make(comm: Communicator, data: CallOperands) -> None:
            own = data.scaled()
            with Unseen():
                comm.all_reduce_coalesced(own, outs=data.outputs, reduction=name)

        inner = "allreduce_coalesced", xs, opts
        return self._call(op, make, list(tensors), xs, xs, opts, inner, name, factor)

    @visible()
    def reduce(self, tensors: Any, opts: Any = None, root: int = 0, op: Any = None) -> DoneWork:
        """Reduce a tensor over all ranks to one rank, in place."""
        opts = _rooted(dist.ReduceOptions, opts, root, op)
        given = _only(tensors, "reduce")
        self._check_root("reduce", opts.rootRank)
        name, factor = _reduction(opts, given.dtype)
        x = torch_private.plain(given)

        def make(comm: Communicator, data: CallOperands) -> None:
            out = data.outputs[0] if data.outputs else None
            comm.reduce(data.scaled()[0], opts.rootRank, out=out, reduction=name)

        outs = [x] if opts.rootRank == self._rank else []
        inner = "reduce", [x], opts
        return self._call("reduce", make, [given], [x], outs, opts, inner, name, factor)

    @visible()
    def reduce_scatter(self, outputs: Any, inputs: Any = None, opts: Any = None, op: Any = None) -> DoneWork:
        """Reduce the i-th tensor of every rank's list to rank i."""
        opts = _options(dist.ReduceScatterOptions, opts, op, None)
        given = _only(outputs, "reduce_scatter")
        name, factor = _reduction(opts, given.dtype)
        out, xs = torch_private.plain(given), _plain(_list(inputs))
        if torch_private.has_no_data(out):
            return DoneWork([given])
        _sized("reduce_scatter", len(xs), self._world_size, "tensors")
        _alike("reduce_scatter", [out, *xs])
        _sized("reduce_scatter", out.numel(), xs[self._rank].numel())
        equal = len({x.numel() for x in xs}) == 1

        def make(comm: Communicator, data: CallOperands) -> None:
            own = torch.cat([flat(x) for x in data.scaled()])
            if equal:
                comm.reduce_scatter(own, out=flat(data.outputs[0]), reduction=name)
            else:  # a rank whose list is wrong learns that from the communicator, as all make their call there
                comm.all_reduce(own, out=own, reduction=name)
                before = sum(x.numel() for x in data.inputs[: self._rank])
                with Unseen():
                    flat(data.outputs[0]).copy_(own[before : before + out.numel()])

        inner = "reduce_scatter", [out], [xs], opts
        return self._call("reduce_scatter", make, [given], xs, [out], opts, inner, name, factor)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> DoneWork:
        """Reduce the i-th part of every rank's tensor to rank i."""
        key = None if opts is None else REDUCED.get(("reduce_scatter", opts.reduceOp.op.value))
        return self._again("reduce_scatter", opts, key, x, output) or self._reduce_scatter_single(output, x, opts)

    @visible("reduce_scatter_single", "_reduce_scatter_base")
    def _reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> DoneWork:
        opts = opts if opts is not None else dist.ReduceScatterOptions()
        return self._single("reduce_scatter", output, x, opts, _reduction(opts, x.dtype))

    @visible("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Reduce the i-th parts of every rank's tensors to rank i."""
        return self._single_coalesced("reduce_scatter", outputs, inputs, opts or dist.ReduceScatterOptions())

    def _single(
        self, op: str, output: torch.Tensor, x: torch.Tensor, opts: Any, reduction: tuple[str, Any] | None = None
    ) -> DoneWork:
        """Run a reduce_scatter or an all_gather: the larger of two tensors has the parts of all ranks."""
        out, own = torch_private.plain(output), torch_private.plain(x)
        self._check_single(op, op, out, own)
        options = {} if reduction is None else {"reduction": reduction[0]}

        def make(comm: Communicator, data: CallOperands) -> None:
            source, target = data.scaled()[0], data.outputs[0]
            if op == "reduce_scatter":
                target, source = joined(target, source, self._world_size)
            else:
                source, target = joined(source, target, self._world_size)
            getattr(comm, op)(source, out=target, **options)

        inner = _SINGLE[op], out, own, opts
        return self._call(op, make, [output], [own], [out], opts, inner, *(reduction or ()))

    def _single_coalesced(self, op: str, outputs: Any, inputs: Any, opts: Any) -> DoneWork:
        outs, xs = _plain(outputs), _plain(inputs)
        call = f"{op}_coalesced"
        _sized(call, len(xs), len(outs), "inputs")
        if not outs or torch_private.has_no_data(outs[0]):
            return DoneWork(list(outputs))
        name, factor = _reduction(opts, *[x.dtype for x in xs]) if op == "reduce_scatter" else ("sum", None)
        for out, x in zip(outs, xs, strict=True):
            self._check_single(op, call, out, x)
        _on_one_device(call, xs)
        options = {"reduction": name} if op == "reduce_scatter" else {}

        def make(comm: Communicator, data: CallOperands) -> None:
            sources = [movable(x) for x in data.scaled()]
            with Unseen():
                getattr(comm, call)(sources, outs=[movable(out) for out in data.outputs], **options)

        if all(_is_own(op, [x], name) for x in xs):
            return self._call(call, make, list(outputs), xs, outs, opts, (), name, factor)
        return SeveralWorks(  # an inner group has no such call
            [
                self._inner(call, functools.partial(_begin, _SINGLE[op], out, x, opts), [out], out.device)
                for out, x in zip(outs, xs, strict=True)
            ]
        )

    def _check_single(self, op: str, call: str, out: torch.Tensor, x: torch.Tensor) -> None:
        part, whole = (out, x) if op == "reduce_scatter" else (x, out)
        _sized(call, whole.numel(), part.numel() * self._world_size)
        _alike(call, [part, whole])

    # -- copies -------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None) -> DoneWork:
        """Copy one rank's tensor to all ranks."""
        if type(opts) is not dist.BroadcastOptions:
            opts = _rooted(dist.BroadcastOptions, opts, root, None, timeout)
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        again = None
        if isinstance(tensors, list) and len(tensors) == 1:
            again = self._again("broadcast", opts, BROADCAST(opts.rootRank), tensors[0], tensors[0])
        return again or self._broadcast(tensors, opts)

    @visible("broadcast")
    def _broadcast(self, tensors: Any, opts: Any) -> DoneWork:
        given = _only(tensors, "broadcast")
        self._check_root("broadcast", opts.rootRank)
        x = torch_private.plain(given)

        def make(comm: Communicator, data: CallOperands) -> None:
            comm.broadcast(joined(data.outputs[0], data.outputs[0], 1)[0], opts.rootRank)

        inner = "broadcast", [x], opts
        return self._call("broadcast", make, [given], [], [x], opts, inner, keeps=True)

    @visible()
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> DoneWork:
        """Give every rank the tensors of all ranks, in a list."""
        opts = _options(torch_private.AllgatherOptions, opts, None, timeout)
        nested = isinstance(outputs[0], list | tuple)
        given = list(outputs[0]) if nested else list(outputs)
        outs, x = _plain(given), torch_private.plain(_only(inputs, "allgather"))
        result = [given] if nested else given
        if torch_private.has_no_data(x):
            return DoneWork(result)
        _sized("all_gather", len(outs), self._world_size, "tensors")
        _sized("all_gather", outs[self._rank].numel(), x.numel())
        _alike("all_gather", [x, *outs])
        sizes = [out.numel() for out in outs]
        equal = len(set(sizes)) == 1

        def make(comm: Communicator, data: CallOperands) -> None:
            own = movable(data.inputs[0])
            scale = x.element_size() // own.element_size()
            data.receive(comm.all_gather(own, sizes=None if equal else [size * scale for size in sizes]))

        inner = "allgather", [outs], [x], opts
        return self._call("all_gather", make, result, [x], outs, opts, inner)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> DoneWork:
        """Give every rank the tensors of all ranks, in one tensor."""
        work = self._again("all_gather", opts, MOVED["all_gather"], x, output)
        return work or self._all_gather_single(output, x, opts)

    @visible("all_gather_single", "_allgather_base")
    def _all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> DoneWork:
        return self._single("all_gather", output, x, opts or torch_private.AllgatherOptions())

    @visible("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Give every rank several tensors of all ranks, each gathered into one tensor."""
        return self._single_coalesced("all_gather", outputs, inputs, opts or torch_private.AllgatherOptions())

    @visible()
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Give every rank several tensors of all ranks; ``outputs[r][i]`` gets the i-th of rank r."""
        op, xs, outs = "all_gather_coalesced", _plain(inputs), [_plain(of_rank) for of_rank in outputs]
        if not xs:
            return DoneWork(list(outputs))
        _sized(op, len(outs), self._world_size, "lists")
        for of_rank in outs:
            _sized(op, len(of_rank), len(xs), "outputs of each rank")
            for out, x in zip(of_rank, xs, strict=True):
                _alike(op, [x, out], x.numel())
        _on_one_device(op, xs)

        def make(comm: Communicator, data: CallOperands) -> None:
            wholes = comm.all_gather_coalesced([movable(x) for x in data.inputs])
            parts = [whole.view(self._world_size, -1) for whole in wholes]
            data.receive([part[rank] for rank in range(self._world_size) for part in parts])

        flattened = [out for of_rank in outs for out in of_rank]
        inner = "allgather_coalesced", outs, xs, opts
        return self._call(op, make, list(outputs), xs, flattened, opts, inner)

    @visible()
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> DoneWork:
        """Give one rank the tensors of all ranks."""
        opts = _rooted(dist.GatherOptions, opts, root)
        x, given = torch_private.plain(_only(inputs, "gather")), _list(outputs)
        outs = _plain(given)
        at_root = opts.rootRank == self._rank
        self._check_root("gather", opts.rootRank)
        _sized("gather", len(outs), self._world_size if at_root else 0, "tensors")
        _alike("gather", [x, *outs], x.numel())

        def make(comm: Communicator, data: CallOperands) -> None:
            whole = comm.gather(movable(data.inputs[0]), opts.rootRank)
            if at_root:
                data.receive(whole)

        inner = "gather", [outs] if at_root else [], [x], opts
        return self._call("gather", make, given, [x], outs, opts, inner)

    @visible()
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> DoneWork:
        """Give every rank a tensor of one rank's list."""
        opts = _rooted(dist.ScatterOptions, opts, root)
        given = _only(outputs, "scatter")
        out, xs = torch_private.plain(given), _plain(_list(inputs))
        at_root = opts.rootRank == self._rank
        self._check_root("scatter", opts.rootRank)
        _sized("scatter", len(xs), self._world_size if at_root else 0, "tensors")
        _alike("scatter", [out, *xs], out.numel())

        def make(comm: Communicator, data: CallOperands) -> None:
            whole = torch.cat([movable(x) for x in data.inputs]) if at_root else None
            comm.scatter(whole, opts.rootRank, out=movable(data.outputs[0]))

        inner = "scatter", [out], [xs] if at_root else [], opts
        return self._call("scatter", make, [given], xs, [out], opts, inner)

    @visible()
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Send the i-th tensor of a list to rank i."""
        opts = opts if opts is not None else dist.AllToAllOptions()
        outs, xs = _plain(outputs), _plain(inputs)
        _sized("all_to_all", len(outs), self._world_size, "tensors")
        _sized("all_to_all", len(xs), self._world_size, "tensors")
        _alike("all_to_all", [*xs, *outs])

        def make(comm: Communicator, data: CallOperands) -> None:
            sources, targets = [[movable(one) for one in side] for side in (data.inputs, data.outputs)]
            with Unseen():
                comm.all_to_all_list(sources, targets)

        inner = "alltoall", outs, xs, opts
        return self._call("all_to_all", make, list(outputs), xs, outs, opts, inner)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> DoneWork:
        """Send the i-th part of a tensor to rank i; parts have equal or given numbers of rows."""
        key = None if output_split_sizes or input_split_sizes else MOVED["all_to_all"]
        work = self._again("all_to_all", opts, key, x, output)
        return work or self._all_to_all_single(output, x, output_split_sizes, input_split_sizes, opts)

    @visible("all_to_all_single", "alltoall_base")
    def _all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any,
    ) -> DoneWork:
        opts = opts if opts is not None else dist.AllToAllOptions()
        if torch_private.has_no_data(output):
            return DoneWork([output])
        out, own = torch_private.plain(output), torch_private.plain(x)
        _alike("all_to_all", [own, out])
        sent = self._elements(own, input_split_sizes, "input")
        received = self._elements(out, output_split_sizes, "output")
        given = bool(output_split_sizes) or bool(input_split_sizes)
        if not given:
            _sized("all_to_all", out.numel(), own.numel())
            dense = own.layout is torch.strided and is_dense(own) and is_dense(out)
            if dense and own.numel() and own.data_ptr() == out.data_ptr():
                raise ConfigError("all_to_all cannot work in place; give another tensor as the output")

        def make(comm: Communicator, data: CallOperands) -> None:
            source, target = data.inputs[0], data.outputs[0]
            if given or not source.dim() or source.shape[0] % self._world_size:
                source, target = movable(source), movable(target)
            else:
                source, target = joined(source, target, 1)
            sizes: dict[str, Any] = {}
            if given:
                scale = own.element_size() // source.element_size()
                sizes["input_sizes"] = [size * scale for size in sent]
                sizes["output_sizes"] = [size * scale for size in received]
            comm.all_to_all(source, out=target, **sizes)

        inner = "alltoall_base", out, own, list(output_split_sizes), list(input_split_sizes), opts
        return self._call("all_to_all", make, [output], [own], [out], opts, inner)

    def _call(
        self,
        op: str,
        make: OnOperands,
        result: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        inner: tuple[Any, ...],
        reduction: str = "sum",
        factor: Any = None,
        keeps: bool = False,
    ) -> DoneWork:
        """Run a checked call; calls without data complete at once.

        ``make`` runs it on the communicator, with :class:`CallOperands` from ``inputs``, ``outputs``, ``factor`` and
        ``keeps``. Calls that the communicator does not serve go to the inner group's method whose name and arguments
        are ``inner``.
        """
        if torch_private.has_no_data((outputs or inputs)[0]):
            return DoneWork(result)
        device = (outputs or inputs)[0].device
        if not _is_own(op, [*inputs, *outputs], reduction):
            return self._inner(op, functools.partial(_begin, *inner), result, device)
        data = CallOperands(inputs, outputs, factor, keeps)

        def call(comm: Communicator) -> None:
            make(comm, data)
            data.finish()

        return self._own(op, call, result, data.all(), opts, device)

    def _check_root(self, op: str, root: int) -> None:
        if not 0 <= root < self._world_size:
            raise ValueError(f"{op}: the root is one of the {self._world_size} ranks of the group, not {root}")

    def _elements(self, x: torch.Tensor, rows: Sequence[int], name: str) -> list[int]:
        """Return the number of elements of each rank's part."""
        if not rows:
            if x.dim() == 0 or x.shape[0] % self._world_size:
                raise ValueError(
                    f"all_to_all: the first dimension of the {name}, {list(x.shape)}, is not divisible by the "
                    f"{self._world_size} ranks"
                )
            return [x.numel() // self._world_size] * self._world_size
        if len(rows) != self._world_size or x.dim() == 0 or sum(rows) != x.shape[0]:
            raise ValueError(
                f"all_to_all: {name}_split_sizes are {self._world_size} numbers that add up to the first dimension of "
                f"{list(x.shape)}; they are {list(rows)}"
            )
        width = x.numel() // x.shape[0] if x.shape[0] else 0
        return [int(size) * width for size in rows]

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> DoneWork:
        """Wait until all ranks have arrived. On GPUs the host waits too."""
        on_cpu = type(opts) is dist.BarrierOptions and opts.device in (None, _CPU)
        work = self._again("barrier", opts, BARRIER, None, None) if on_cpu else None
        return work or self._barrier(opts, timeout)

    @visible("barrier")
    def _barrier(self, opts: Any, timeout: timedelta | None) -> DoneWork:
        opts = _options(dist.BarrierOptions, opts, None, timeout)
        device: torch.device = opts.device or _CPU
        if device.type == "cpu":
            ends = self._ends_on_gpus()

            def make(comm: Communicator) -> None:
                for end in ends:
                    end()
                comm.barrier()
                self._check_gpus()

            return self._own("barrier", make if ends else Communicator.barrier, [], (), opts, _CPU)
        return self._own("barrier", _host_barrier, [], (), opts, device)

    # -- messages -----------------------------------------------------------------------------------------------------

    @visible()
    def send(self, tensors: Any, dst: int, tag: int = 0) -> DoneWork:
        return self._message("send", torch_private.plain(_only(tensors, "send")), dst, tag)

    @visible()
    def recv(self, tensors: Any, src: int, tag: int = 0) -> DoneWork:
        return self._message("recv", torch_private.plain(_only(tensors, "recv")), src, tag)

    @visible()
    def recv_anysource(self, tensors: Any, tag: int = 0) -> DoneWork:
        return self._message("recv_anysource", torch_private.plain(_only(tensors, "recv")), -1, tag)

    # the names of PyTorch 2.11 and 2.12, some of which 2.13 calls too
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _host_barrier(comm: Communicator) -> None:
    comm.barrier()
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(comm.device).synchronize()
        comm.check()


def _only(tensors: Any, op: str) -> torch.Tensor:
    """Return the tensor of a call, bare or in a list of one."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{op} takes one tensor of each rank, not {len(tensors)}")
    found: torch.Tensor = tensors[0]
    return found


def _options(kind: Any, opts: Any, op: Any, timeout: timedelta | None) -> Any:
    """Return the options of a call, passed as an object or as separate arguments."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    op = opts if opts is not None and op is None else op
    if op is not None:
        made.reduceOp = op
    if timeout is not None:
        made.timeout = timeout
    return made


def _rooted(kind: Any, opts: Any, root: int, op: Any = None, timeout: timedelta | None = None) -> Any:
    """Return the options of a call with a root, passed as an object or as the root."""
    if isinstance(opts, int):
        root, opts = opts, None
    if opts is None:
        opts = _options(kind, None, op, timeout)
        opts.rootRank = root
    return opts


def _list(tensors: Any) -> list[torch.Tensor]:
    """Return the tensors in a list, bare or in a list of one."""
    return list(tensors[0]) if tensors and isinstance(tensors[0], list | tuple) else list(tensors)


def _plain(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [torch_private.plain(x) for x in tensors]


def _begin(method: str, *arguments: Any) -> Any:
    *given, inner = arguments
    return getattr(inner, method)(*given)


def _is_own(op: str, tensors: Sequence[torch.Tensor], reduction: str) -> bool:
    """Return whether the communicator serves a call on such tensors."""
    kinds = {(x.dtype, x.layout) for x in tensors}
    return all(route_of(op, dtype, reduction, layout).is_own for dtype, layout in kinds)


def _reduction(opts: Any, *dtypes: torch.dtype) -> tuple[str, Any]:
    """Return the name of a reduction, and the factor applied to tensors first; None for no factor."""
    op = opts.reduceOp
    if op == dist.ReduceOp.SUM:
        return "sum", None
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = torch_private.premul_factor(op)
        for dtype in dtypes:
            if not is_scaled(dtype):
                raise TypeError(f"PREMUL_SUM takes floating-point and complex tensors, not {dtype}")
        if isinstance(factor, torch.Tensor) and factor.numel() != 1:
            raise ValueError(f"the factor of PREMUL_SUM is one number, not {factor.numel()}")
        return "sum", factor
    if op == dist.ReduceOp.AVG and torch.bool in dtypes:
        raise TypeError("AVG takes numbers, not torch.bool")
    return reduction_name(op, "torch.distributed"), None


def _sized(op: str, found: int, wanted: int, what: str = "elements") -> None:
    if found != wanted:
        raise ValueError(f"{op}: {wanted} {what} are needed, and there are {found}")


def _alike(op: str, tensors: Sequence[torch.Tensor], elements: int | None = None) -> None:
    """Raise ValueError unless tensors share one dtype and one device, and all have this number of elements if given."""
    for x in tensors[1:]:
        if elements is not None:
            _sized(op, x.numel(), elements)
        if x.dtype != tensors[0].dtype:
            raise ValueError(f"{op}: a tensor has another dtype ({x.dtype}) than the others ({tensors[0].dtype})")
    _on_one_device(op, tensors)


def _on_one_device(op: str, tensors: Sequence[torch.Tensor]) -> None:
    for x in tensors[1:]:
        if x.device != tensors[0].device:
            raise ValueError(f"{op}: a tensor is on another device ({x.device}) than the others ({tensors[0].device})")
