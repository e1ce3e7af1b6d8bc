"""The calls of torch.distributed in terms of those of a communicator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shotcast.collectives.communicator import Communicator
from shotcast.collectives.reductions import OF_TORCH, reduction_name
from shotcast.collectives.torch_ops.versions import Unseen
from shotcast.errors import ConfigError
from shotcast.process_group import torch_private
from shotcast.process_group.device_calls import Make
from shotcast.process_group.modes import visible
from shotcast.process_group.operands import Operands, flat, joined, movable
from shotcast.process_group.served import is_scaled, way_of
from shotcast.process_group.works import DoneWork, SeveralWorks

_CPU = torch.device("cpu")
MOVED = {op: (op, "auto", None, type(None)) for op in ("all_gather", "all_to_all")}
REDUCED = {
    (op, kind.value): (op, "auto", name, None, type(None))
    for op in ("all_reduce", "reduce_scatter")
    for kind, name in OF_TORCH.items()
}
"""Keys by which methods of a communicator find calls that they prepared, without arguments beside the tensors."""
Begin = Callable[[Any], Any]
"""Begins a call of an inner group."""


class Calls:
    """The calls of a process group, under all names that PyTorch 2.11 to 2.13 has for them."""

    _rank: int
    _world_size: int

    @abstractmethod
    def _own(
        self, op: str, make: Make, result: Any, operands: Sequence[torch.Tensor], opts: Any, device: torch.device
    ) -> DoneWork:
        """Make a call on the communicator of a device."""

    @abstractmethod
    def _again(
        self, op: str, opts: Any, key: tuple[Any, ...] | None, x: torch.Tensor | None, out: torch.Tensor | None
    ) -> DoneWork | None:
        """Make a call like one before; None, with nothing done, if there was none.

        ``key`` is what the communicator's method finds it by, beside the tensors.
        """

    @abstractmethod
    def _inner(self, op: str, begin: Begin, result: Any, device: torch.device) -> DoneWork:
        """Make a call on the inner group of a device."""

    @abstractmethod
    def _message(self, op: str, x: torch.Tensor, peer: int, tag: int) -> DoneWork:
        """Make a message to or from ``peer`` on an inner group."""

    @abstractmethod
    def _ends_on_gpus(self) -> list[Callable[[], None]]:
        """Return, for each GPU with calls, what makes the host wait for those so far."""

    @abstractmethod
    def _check_gpus(self) -> None:
        """Raise the fault of a call on a GPU, if one is known."""

    # -- reductions ---------------------------------------------------------------------------------------------------

    @visible("allreduce")
    def _all_reduce(self, tensors: Any, opts: Any, op: Any, timeout: timedelta | None) -> DoneWork:
        opts = _options(torch_private.AllreduceOptions, opts, op, timeout)
        given = _only(tensors, "allreduce")
        name, factor = _reduction(opts, given.dtype)
        if torch_private.has_no_data(given):
            return DoneWork([given])
        x = torch_private.plain(given)
        if not way_of("all_reduce", x.dtype, name, x.layout).is_own:
            return self._inner("all_reduce", lambda inner: inner.allreduce([x], opts), [given], x.device)
        data = Operands([x], [x])

        def make(comm: Communicator) -> None:
            own = data.inputs[0]
            comm.all_reduce(_scaled(own, factor), out=data.outputs[0], reduction=name)
            data.finish()

        return self._own("all_reduce", make, [given], data.all(factor), opts, x.device)

    @visible()
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> DoneWork:
        """Reduce tensors of all ranks, in place."""
        opts = opts if opts is not None else torch_private.AllreduceCoalescedOptions()
        xs = [torch_private.plain(x) for x in tensors]
        if not xs or torch_private.has_no_data(xs[0]):
            return DoneWork(list(tensors))
        name, factor = _reduction(opts, *[x.dtype for x in xs])
        _on_one_device("all_reduce_coalesced", xs)
        if not all(way_of("all_reduce", x.dtype, name, x.layout).is_own for x in xs):
            return self._inner(
                "all_reduce_coalesced", lambda inner: inner.allreduce_coalesced(xs, opts), list(tensors), xs[0].device
            )
        data = Operands(xs, xs)

        def make(comm: Communicator) -> None:
            own = [_scaled(x, factor) for x in data.inputs]
            with Unseen():
                comm.all_reduce_coalesced(own, outs=data.outputs, reduction=name)
            data.finish()

        return self._own("all_reduce_coalesced", make, list(tensors), data.all(factor), opts, xs[0].device)

    @visible()
    def reduce(self, tensors: Any, opts: Any = None, root: int = 0, op: Any = None) -> DoneWork:
        """Reduce a tensor of all ranks to one of them, in place there."""
        if isinstance(opts, int):  # (tensor, root, op)
            root, opts = opts, None
        if opts is None:
            opts = _options(torch_private.ReduceOptions, None, op, None)
            opts.rootRank = root
        given = _only(tensors, "reduce")
        self._check_root("reduce", opts.rootRank)
        name, factor = _reduction(opts, given.dtype)
        if torch_private.has_no_data(given):
            return DoneWork([given])
        x = torch_private.plain(given)
        if not way_of("reduce", x.dtype, name, x.layout).is_own:
            return self._inner("reduce", lambda inner: inner.reduce([x], opts), [given], x.device)
        data = Operands([x], [x] if opts.rootRank == self._rank else [])

        def make(comm: Communicator) -> None:
            own = data.inputs[0]
            out = data.outputs[0] if data.outputs else None
            comm.reduce(_scaled(own, factor), opts.rootRank, out=out, reduction=name)
            data.finish()

        return self._own("reduce", make, [given], data.all(factor), opts, x.device)

    @visible()
    def reduce_scatter(self, outputs: Any, inputs: Any = None, opts: Any = None, op: Any = None) -> DoneWork:
        """Reduce the i-th tensor of a list of all ranks to rank i."""
        opts = _options(torch_private.ReduceScatterOptions, opts, op, None)
        given = _only(outputs, "reduce_scatter")
        parts = list(inputs[0]) if isinstance(inputs[0], list | tuple) else list(inputs)
        name, factor = _reduction(opts, given.dtype)
        out, xs = torch_private.plain(given), [torch_private.plain(part) for part in parts]
        if torch_private.has_no_data(out):
            return DoneWork([given])
        _sized("reduce_scatter", len(xs), self._world_size, "tensors")
        _alike("reduce_scatter", [out, *xs])
        _sized("reduce_scatter", out.numel(), xs[self._rank].numel())
        equal = len({x.numel() for x in xs}) == 1
        if not way_of("reduce_scatter", out.dtype, name, out.layout).is_own:
            return self._inner(
                "reduce_scatter", lambda inner: inner.reduce_scatter([out], [xs], opts), [given], out.device
            )
        data = Operands(xs, [out])

        def make(comm: Communicator) -> None:
            own = _scaled(torch.cat([flat(x) for x in data.inputs]), factor)
            if equal:
                comm.reduce_scatter(own, out=flat(data.outputs[0]), reduction=name)
            else:  # a rank whose list is wrong learns that from the communicator, as all make their call there
                comm.all_reduce(own, out=own, reduction=name)
                before = sum(x.numel() for x in data.inputs[: self._rank])
                with Unseen():
                    flat(data.outputs[0]).copy_(own[before : before + out.numel()])
            data.finish()

        return self._own("reduce_scatter", make, [given], data.all(factor), opts, out.device)

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> DoneWork:
        """Reduce the i-th part of a tensor of all ranks to rank i."""
        key = None if opts is None else REDUCED.get(("reduce_scatter", opts.reduceOp.op.value))
        return self._again("reduce_scatter", opts, key, x, output) or self._reduce_scatter_single(output, x, opts)

    @visible("reduce_scatter_single", "_reduce_scatter_base")
    def _reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> DoneWork:
        opts = opts if opts is not None else torch_private.ReduceScatterOptions()
        name, factor = _reduction(opts, x.dtype)
        if torch_private.has_no_data(output):
            return DoneWork([output])
        out, own = torch_private.plain(output), torch_private.plain(x)
        _sized("reduce_scatter", out.numel() * self._world_size, own.numel())
        _alike("reduce_scatter", [out, own])
        if not way_of("reduce_scatter", out.dtype, name, out.layout).is_own:
            return self._inner(
                "reduce_scatter", lambda inner: inner._reduce_scatter_base(out, own, opts), [output], out.device
            )
        data = Operands([own], [out])

        def make(comm: Communicator) -> None:
            target, source = joined(data.outputs[0], data.inputs[0], self._world_size)
            comm.reduce_scatter(_scaled(source, factor), out=target, reduction=name)
            data.finish()

        return self._own("reduce_scatter", make, [output], data.all(factor), opts, out.device)

    @visible("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Reduce the i-th parts of tensors of all ranks to rank i."""
        opts = opts if opts is not None else torch_private.ReduceScatterOptions()
        outs, xs = [torch_private.plain(out) for out in outputs], [torch_private.plain(x) for x in inputs]
        _sized("reduce_scatter_coalesced", len(xs), len(outs), "inputs")
        if not outs or torch_private.has_no_data(outs[0]):
            return DoneWork(list(outputs))
        name, factor = _reduction(opts, *[x.dtype for x in xs])
        for out, x in zip(outs, xs, strict=True):
            _sized("reduce_scatter_coalesced", out.numel() * self._world_size, x.numel())
            _alike("reduce_scatter_coalesced", [out, x])
        _on_one_device("reduce_scatter_coalesced", xs)
        if not all(way_of("reduce_scatter", x.dtype, name, x.layout).is_own for x in xs):
            begins = [
                lambda inner, out=out, x=x: inner._reduce_scatter_base(out, x, opts)
                for out, x in zip(outs, xs, strict=True)
            ]
            return self._each_inner("reduce_scatter_coalesced", begins, outs)
        data = Operands(xs, outs)

        def make(comm: Communicator) -> None:
            sources = [_scaled(flat(x), factor) for x in data.inputs]
            with Unseen():
                comm.reduce_scatter_coalesced(sources, outs=[flat(out) for out in data.outputs], reduction=name)
            data.finish()

        return self._own("reduce_scatter_coalesced", make, list(outputs), data.all(factor), opts, outs[0].device)

    # -- copies -------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: int = 0, timeout: timedelta | None = None) -> DoneWork:
        """Copy a tensor of one rank to all."""
        if isinstance(opts, int):  # (tensor, root)
            root, opts = opts, None
        if opts is None:
            opts = _options(torch_private.BroadcastOptions, None, None, timeout)
            opts.rootRank = root
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if isinstance(tensors, list) and len(tensors) == 1:
            key, x = ("broadcast", opts.rootRank, int, "auto"), tensors[0]
            if work := self._again("broadcast", opts, key, x, x):
                return work
        return self._broadcast(tensors, opts)

    @visible("broadcast")
    def _broadcast(self, tensors: Any, opts: Any) -> DoneWork:
        given = _only(tensors, "broadcast")
        self._check_root("broadcast", opts.rootRank)
        if torch_private.has_no_data(given):
            return DoneWork([given])
        x = torch_private.plain(given)
        if not way_of("broadcast", x.dtype, layout=x.layout).is_own:
            return self._inner("broadcast", lambda inner: inner.broadcast([x], opts), [given], x.device)
        data = Operands([], [x], keeps=True)

        def make(comm: Communicator) -> None:
            comm.broadcast(joined(data.outputs[0], data.outputs[0], 1)[0], opts.rootRank)
            data.finish()

        return self._own("broadcast", make, [given], data.all(), opts, x.device)

    @visible()
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> DoneWork:
        """Give every rank the tensors of all, in a list."""
        opts = _options(torch_private.AllgatherOptions, opts, None, timeout)
        nested = isinstance(outputs[0], list | tuple)
        given = list(outputs[0]) if nested else list(outputs)
        outs, x = [torch_private.plain(out) for out in given], torch_private.plain(_only(inputs, "allgather"))
        result = [given] if nested else given
        if torch_private.has_no_data(x):
            return DoneWork(result)
        if not way_of("all_gather", x.dtype, layout=x.layout).is_own:
            return self._inner("all_gather", lambda inner: inner.allgather([outs], [x], opts), result, x.device)
        _sized("all_gather", len(outs), self._world_size, "tensors")
        _sized("all_gather", outs[self._rank].numel(), x.numel())
        _alike("all_gather", [x, *outs])
        data = Operands([x], outs)
        sizes = [out.numel() for out in outs]
        equal = len(set(sizes)) == 1

        def make(comm: Communicator) -> None:
            own = movable(data.inputs[0])
            scale = x.element_size() // own.element_size()
            whole = comm.all_gather(own, sizes=None if equal else [size * scale for size in sizes])
            data.receive(whole)

        return self._own("all_gather", make, result, data.all(), opts, x.device)

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> DoneWork:
        """Give every rank the tensors of all, in one."""
        work = self._again("all_gather", opts, MOVED["all_gather"], x, output)
        return work or self._all_gather_single(output, x, opts)

    @visible("all_gather_single", "_allgather_base")
    def _all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> DoneWork:
        opts = opts if opts is not None else torch_private.AllgatherOptions()
        if torch_private.has_no_data(output):
            return DoneWork([output])
        out, own = torch_private.plain(output), torch_private.plain(x)
        _sized("all_gather", out.numel(), own.numel() * self._world_size)
        _alike("all_gather", [own, out])
        if not way_of("all_gather", out.dtype, layout=own.layout).is_own:
            return self._inner("all_gather", lambda inner: inner._allgather_base(out, own, opts), [output], out.device)
        data = Operands([own], [out])

        def make(comm: Communicator) -> None:
            source, target = joined(data.inputs[0], data.outputs[0], self._world_size)
            comm.all_gather(source, out=target)
            data.finish()

        return self._own("all_gather", make, [output], data.all(), opts, out.device)

    @visible("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Give every rank tensors of all, each in one."""
        opts = opts if opts is not None else torch_private.AllgatherOptions()
        outs, xs = [torch_private.plain(out) for out in outputs], [torch_private.plain(x) for x in inputs]
        _sized("all_gather_coalesced", len(xs), len(outs), "inputs")
        if not outs or torch_private.has_no_data(outs[0]):
            return DoneWork(list(outputs))
        for out, x in zip(outs, xs, strict=True):
            _sized("all_gather_coalesced", out.numel(), x.numel() * self._world_size)
            _alike("all_gather_coalesced", [x, out])
        _on_one_device("all_gather_coalesced", xs)
        if not all(way_of("all_gather", x.dtype, layout=x.layout).is_own for x in xs):
            begins = [
                lambda inner, out=out, x=x: inner._allgather_base(out, x, opts) for out, x in zip(outs, xs, strict=True)
            ]
            return self._each_inner("all_gather_coalesced", begins, outs)
        data = Operands(xs, outs)

        def make(comm: Communicator) -> None:
            sources = [movable(x) for x in data.inputs]
            with Unseen():
                comm.all_gather_coalesced(sources, outs=[movable(out) for out in data.outputs])
            data.finish()

        return self._own("all_gather_coalesced", make, list(outputs), data.all(), opts, outs[0].device)

    @visible()
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Give every rank tensors of all; ``outputs[r][i]`` gets the i-th of rank r."""
        opts = opts if opts is not None else torch_private.AllgatherOptions()
        xs = [torch_private.plain(x) for x in inputs]
        outs = [[torch_private.plain(out) for out in of_rank] for of_rank in outputs]
        if not xs or torch_private.has_no_data(xs[0]):
            return DoneWork(list(outputs))
        _sized("all_gather_coalesced", len(outs), self._world_size, "lists")
        for of_rank in outs:
            _sized("all_gather_coalesced", len(of_rank), len(xs), "outputs of each rank")
            for out, x in zip(of_rank, xs, strict=True):
                _sized("all_gather_coalesced", out.numel(), x.numel())
                _alike("all_gather_coalesced", [x, out])
        _on_one_device("all_gather_coalesced", xs)
        if not all(way_of("all_gather", x.dtype, layout=x.layout).is_own for x in xs):
            return self._inner(
                "all_gather_coalesced",
                lambda inner: inner.allgather_coalesced(outs, xs, opts),
                list(outputs),
                xs[0].device,
            )
        data = Operands(xs, [out for of_rank in outs for out in of_rank])

        def make(comm: Communicator) -> None:
            wholes = comm.all_gather_coalesced([movable(x) for x in data.inputs])
            parts = [whole.view(self._world_size, -1) for whole in wholes]
            data.receive([part[rank] for rank in range(self._world_size) for part in parts])

        return self._own("all_gather_coalesced", make, list(outputs), data.all(), opts, xs[0].device)

    @visible()
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> DoneWork:
        """Give one rank the tensors of all."""
        if isinstance(opts, int):
            root, opts = opts, None
        if opts is None:
            opts = torch_private.GatherOptions()
            opts.rootRank = root
        x = torch_private.plain(_only(inputs, "gather"))
        given = list(outputs[0]) if outputs and isinstance(outputs[0], list | tuple) else list(outputs)
        outs = [torch_private.plain(out) for out in given]
        at_root = opts.rootRank == self._rank
        self._check_root("gather", opts.rootRank)
        _sized("gather", len(outs), self._world_size if at_root else 0, "tensors")
        if torch_private.has_no_data(x):
            return DoneWork(given)
        if not way_of("gather", x.dtype, layout=x.layout).is_own:
            return self._inner(
                "gather", lambda inner: inner.gather([outs] if at_root else [], [x], opts), given, x.device
            )
        if any(out.numel() != x.numel() for out in outs):
            raise ValueError(f"gather: every tensor has the {x.numel()} elements of the one that is sent")
        _alike("gather", [x, *outs])
        data = Operands([x], outs)

        def make(comm: Communicator) -> None:
            whole = comm.gather(movable(data.inputs[0]), opts.rootRank)
            if at_root:
                data.receive(whole)

        return self._own("gather", make, given, data.all(), opts, x.device)

    @visible()
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> DoneWork:
        """Give every rank a tensor of one rank's list."""
        if isinstance(opts, int):
            root, opts = opts, None
        if opts is None:
            opts = torch_private.ScatterOptions()
            opts.rootRank = root
        given = _only(outputs, "scatter")
        out = torch_private.plain(given)
        parts = list(inputs[0]) if inputs and isinstance(inputs[0], list | tuple) else list(inputs)
        xs = [torch_private.plain(part) for part in parts]
        at_root = opts.rootRank == self._rank
        self._check_root("scatter", opts.rootRank)
        _sized("scatter", len(xs), self._world_size if at_root else 0, "tensors")
        if torch_private.has_no_data(out):
            return DoneWork([given])
        if not way_of("scatter", out.dtype, layout=out.layout).is_own:
            return self._inner(
                "scatter", lambda inner: inner.scatter([out], [xs] if at_root else [], opts), [given], out.device
            )
        if any(x.numel() != out.numel() for x in xs):
            raise ValueError(f"scatter: every tensor has the {out.numel()} elements of the one that is received")
        _alike("scatter", [out, *xs])
        data = Operands(xs, [out])

        def make(comm: Communicator) -> None:
            whole = torch.cat([movable(x) for x in data.inputs]) if at_root else None
            comm.scatter(whole, opts.rootRank, out=movable(data.outputs[0]))
            data.finish()

        return self._own("scatter", make, [given], data.all(), opts, out.device)

    @visible()
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> DoneWork:
        """Send the i-th tensor of a list to rank i."""
        opts = opts if opts is not None else torch_private.AllToAllOptions()
        outs, xs = [torch_private.plain(out) for out in outputs], [torch_private.plain(x) for x in inputs]
        _sized("all_to_all", len(outs), self._world_size, "tensors")
        _sized("all_to_all", len(xs), self._world_size, "tensors")
        if torch_private.has_no_data(xs[0]):
            return DoneWork(list(outputs))
        _alike("all_to_all", [*xs, *outs])
        if not all(way_of("all_to_all", x.dtype, layout=x.layout).is_own for x in (*xs, *outs)):
            return self._inner("all_to_all", lambda inner: inner.alltoall(outs, xs, opts), list(outputs), xs[0].device)
        data = Operands(xs, outs)

        def make(comm: Communicator) -> None:
            sources, targets = [[movable(one) for one in side] for side in (data.inputs, data.outputs)]
            with Unseen():
                comm.all_to_all_list(sources, targets)
            data.finish()

        return self._own("all_to_all", make, list(outputs), data.all(), opts, outs[0].device)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> DoneWork:
        """Send the i-th part of a tensor to rank i; parts have equal or the given numbers of rows."""
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
        opts = opts if opts is not None else torch_private.AllToAllOptions()
        if torch_private.has_no_data(output):
            return DoneWork([output])
        out, own = torch_private.plain(output), torch_private.plain(x)
        _alike("all_to_all", [own, out])
        if not way_of("all_to_all", own.dtype, layout=own.layout).is_own:
            sizes = list(output_split_sizes), list(input_split_sizes)
            return self._inner(
                "all_to_all", lambda inner: inner.alltoall_base(out, own, *sizes, opts), [output], out.device
            )
        data = Operands([own], [out])
        sent = self._elements(own, input_split_sizes, "input")
        received = self._elements(out, output_split_sizes, "output")
        given = bool(output_split_sizes) or bool(input_split_sizes)
        if not given:
            _sized("all_to_all", out.numel(), own.numel())
            if own.numel() and data.inputs[0].data_ptr() == data.outputs[0].data_ptr():
                raise ConfigError("all_to_all cannot work in place; give another tensor as the output")

        def make(comm: Communicator) -> None:
            source, target = data.inputs[0], data.outputs[0]
            if given or not source.dim() or source.shape[0] % self._world_size:
                source, target = movable(source), movable(target)
            else:
                source, target = joined(source, target, 1)
            if given:
                scale = own.element_size() // source.element_size()
                comm.all_to_all(
                    source,
                    out=target,
                    input_sizes=[size * scale for size in sent],
                    output_sizes=[size * scale for size in received],
                )
            else:
                comm.all_to_all(source, out=target)
            data.finish()

        return self._own("all_to_all", make, [output], data.all(), opts, out.device)

    def _check_root(self, op: str, root: int) -> None:
        if not 0 <= root < self._world_size:
            raise ValueError(f"{op}: the root is one of the {self._world_size} ranks of the group, not {root}")

    def _each_inner(self, op: str, begins: Sequence[Begin], outs: Sequence[torch.Tensor]) -> DoneWork:
        """Make calls on an inner group, which has no such call for several tensors; each writes one of ``outs``."""
        return SeveralWorks(
            [self._inner(op, begin, [out], out.device) for begin, out in zip(begins, outs, strict=True)]
        )

    def _elements(self, x: torch.Tensor, rows: Sequence[int], name: str) -> list[int]:
        """Return the elements of the part of each rank."""
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
        """Wait until all ranks have come here. On GPUs the host waits too."""
        on_cpu = type(opts) is torch_private.BarrierOptions and opts.device in (None, _CPU)
        work = self._again("barrier", opts, ("barrier",), None, None) if on_cpu else None
        return work or self._barrier(opts, timeout)

    @visible("barrier")
    def _barrier(self, opts: Any, timeout: timedelta | None) -> DoneWork:
        opts = _options(torch_private.BarrierOptions, opts, None, timeout)
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
        """Send a tensor to a rank."""
        return self._message("send", torch_private.plain(_only(tensors, "send")), dst, tag)

    @visible()
    def recv(self, tensors: Any, src: int, tag: int = 0) -> DoneWork:
        """Receive a tensor from a rank."""
        return self._message("recv", torch_private.plain(_only(tensors, "recv")), src, tag)

    @visible()
    def recv_anysource(self, tensors: Any, tag: int = 0) -> DoneWork:
        """Receive a tensor from any rank."""
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
    """Return the tensor of a call, alone or in a list of one."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{op} takes one tensor of each rank, not {len(tensors)}")
    found: torch.Tensor = tensors[0]
    return found


def _options(kind: Any, opts: Any, op: Any, timeout: timedelta | None) -> Any:
    """Return the options of a call that may be given as they are, or as the arguments that stand for them."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    op = opts if opts is not None and op is None else op
    if op is not None:
        made.reduceOp = op
    if timeout is not None:
        made.timeout = timeout
    return made


def _reduction(opts: Any, *dtypes: torch.dtype) -> tuple[str, Any]:
    """Return the name of a reduction, and the factor of tensors before it; None for no factor."""
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
    return reduction_name(op), None


def _scaled(x: torch.Tensor, factor: Any) -> torch.Tensor:
    """Return a tensor times a factor, in the tensor's own dtype."""
    if factor is None:
        return x
    return x * (factor.to(x.device, x.dtype).reshape(()) if isinstance(factor, torch.Tensor) else factor)


def _sized(op: str, found: int, wanted: int, what: str = "elements") -> None:
    if found != wanted:
        raise ValueError(f"{op}: {wanted} {what} are needed, and there are {found}")


def _alike(op: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError unless tensors have one dtype and lie on one device."""
    for x in tensors[1:]:
        if x.dtype != tensors[0].dtype:
            raise ValueError(f"{op}: a tensor has another dtype ({x.dtype}) than the others ({tensors[0].dtype})")
    _on_one_device(op, tensors)


def _on_one_device(op: str, tensors: Sequence[torch.Tensor]) -> None:
    for x in tensors[1:]:
        if x.device != tensors[0].device:
            raise ValueError(f"{op}: a tensor is on another device ({x.device}) than the others ({tensors[0].device})")
