"""Forms of training steps: DDP, FSDP2 and tensor parallelism by ours and by the vendor library, each checked."""

# no postponed annotations: DDP reads those of hooks

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from training_model import Begin, Divided, Model, Shape

import shotcast
from shotcast import overlap
from shotcast.collectives.reference import ordered_sum

NONE = "no communication"
OWN, LIBRARY = "own", "library"
_LARGE_BUCKET_MB = 100
_GROUP_TIMEOUT = datetime.timedelta(seconds=120)


@dataclass(frozen=True)
class Form:
    """A way to make a step.

    Attributes:
        build: returns the step, and what returns how far its gradients are off. Collective.
    """

    name: str
    by: str
    build: Callable[[], tuple[Callable[[], Any], Callable[[], float]]]


# -- gradients --------------------------------------------------------------------------------------------------------


def of_all(comm: shotcast.Communicator, x: torch.Tensor) -> list[torch.Tensor]:
    """Return ``x`` of each rank."""
    return list(comm.all_gather(x.contiguous().view(-1)).chunk(comm.world_size))


def named_average(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean by the named order: the sum in the order of ranks in float32, divided and then rounded."""
    return (ordered_sum([x.float() for x in xs]) / len(xs)).to(xs[0].dtype)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of all parameters; collective where FSDP2 has divided them."""
    found: list[Any] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [one.full_tensor() if hasattr(one, "full_tensor") else one.clone() for one in found]


def distance(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the norm of all differences over the norm of all exact values; 0 where the bits are equal."""
    if len(found) != len(exact):
        raise ValueError(f"{len(found)} gradients, where there are {len(exact)}")
    off = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, exact, strict=True))
    size = sum(float(b.double().square().sum()) for b in exact)
    return (off / size) ** 0.5 if off else 0.0


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Return a step: forward and backward, from no gradients."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).float().square().mean().backward()

    return step


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Compute attention by products alone: other kernels add in any order."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def compared(
    model: nn.Module, x: torch.Tensor, wanted: Callable[[], Sequence[torch.Tensor]]
) -> tuple[Callable[[], None], Callable[[], float]]:
    """Return a step, and what returns how far its gradients are off ``wanted``. Collective."""
    step = step_of(model, x)

    def off() -> float:
        with repeatable():
            step()
        return distance(gradients(model), wanted())

    return step, off


# -- data parallel ----------------------------------------------------------------------------------------------------


def keep(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave a bucket as it is: what is left is what DDP itself takes."""
    x = bucket.buffer()
    done: torch.futures.Future[Any] = torch.futures.Future(devices=[x.device] if x.device.type == "cuda" else None)
    done.set_result(x)
    return done


class Batch:
    """A rank's own tokens, and what its gradients are to be."""

    def __init__(self, comm: shotcast.Communicator, shape: Shape, dtype: torch.dtype):
        self.comm, self.shape, self.dtype = comm, shape, dtype
        seed = torch.Generator(comm.device).manual_seed(comm.rank)
        self.x = torch.randn(shape.tokens, shape.hidden, generator=seed, device=comm.device).to(dtype)

    def model(self) -> nn.Module:
        return Model(self.shape, self.dtype, self.comm.device)

    @functools.cached_property
    def averaged(self) -> list[torch.Tensor]:
        """The averages over the ranks, by the named order. Collective."""
        model = self.model()
        with repeatable():
            step_of(model, self.x)()
        return [named_average(of_all(self.comm, one)).view(one.shape) for one in gradients(model)]

    def alone(self) -> Any:
        """Build a step without communication."""
        return step_of(self.model(), self.x), lambda: 0.0


def data_forms(comm: shotcast.Communicator, shape: Shape, dtype: torch.dtype) -> Iterator[Form]:
    """Yield the forms of data parallelism by DDP."""
    batch = Batch(comm, shape, dtype)
    ids = [comm.device.index] if comm.device.type == "cuda" else None

    def ddp(group: dist.ProcessGroup, **settings: Any) -> Any:
        model = DistributedDataParallel(batch.model(), device_ids=ids, process_group=group, **settings)
        return compared(model, batch.x, lambda: batch.averaged)

    def nothing_sent() -> Any:
        model = DistributedDataParallel(batch.model(), device_ids=ids, process_group=any_group(comm))
        model.register_comm_hook(None, keep)
        return step_of(model, batch.x), lambda: 0.0

    yield Form(NONE, "", batch.alone)
    yield Form("DDP, nothing sent", "", nothing_sent)
    yield Form("DDP", LIBRARY, lambda: ddp(group_of(comm)))
    large = {"bucket_cap_mb": _LARGE_BUCKET_MB}
    yield Form(f"DDP, {_LARGE_BUCKET_MB} MB", LIBRARY, lambda: ddp(group_of(comm), **large))
    if comm.device.type == "cuda":
        yield Form("DDP, priority", LIBRARY, lambda: ddp(group_of(comm, priority=True)))
        yield Form("DDP, priority, large", LIBRARY, lambda: ddp(group_of(comm, priority=True), **large))
        for ctas in (8, 16):
            yield Form(
                f"DDP, priority, at most {ctas} CTAs",
                LIBRARY,
                lambda ctas=ctas: ddp(group_of(comm, priority=True, max_ctas=ctas)),
            )
    yield Form("DDP by shotcast", OWN, lambda: ddp(own_group(comm)))
    yield Form(f"DDP by shotcast, {_LARGE_BUCKET_MB} MB", OWN, lambda: ddp(own_group(comm), **large))


def sharded_forms(comm: shotcast.Communicator, shape: Shape, dtype: torch.dtype) -> Iterator[Form]:
    """Yield the forms of data parallelism by FSDP2, whose ranks keep a part of every layer."""
    batch = Batch(comm, shape, dtype)

    def fsdp(group: dist.ProcessGroup, mapped: bool = False) -> Any:
        mesh = DeviceMesh.from_group(group, comm.device.type)
        model: Any = batch.model()
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
            if mapped:
                module.set_allocate_memory_from_process_group_for_comm(True)
        return compared(model, batch.x, lambda: batch.averaged)

    yield Form(NONE, "", batch.alone)
    yield Form("FSDP2", LIBRARY, lambda: fsdp(group_of(comm)))
    if comm.device.type == "cuda":
        yield Form("FSDP2, priority", LIBRARY, lambda: fsdp(group_of(comm, priority=True)))
        for ctas in (8, 16):
            yield Form(
                f"FSDP2, priority, at most {ctas} CTAs",
                LIBRARY,
                lambda ctas=ctas: fsdp(group_of(comm, priority=True, max_ctas=ctas)),
            )
    yield Form("FSDP2 by shotcast", OWN, lambda: fsdp(own_group(comm)))
    yield Form("FSDP2 by shotcast, in mapped memory", OWN, lambda: fsdp(own_group(comm), mapped=True))


@functools.cache
def group_of(comm: shotcast.Communicator, priority: bool = False, max_ctas: int = 0) -> dist.ProcessGroup:
    """Return a group of NCCL with these options; of Gloo on CPU ranks."""
    if comm.device.type == "cpu":
        return dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
    settings = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
    if max_ctas:
        settings.config.max_ctas = max_ctas
    return dist.new_group(backend="nccl", timeout=_GROUP_TIMEOUT, pg_options=settings)


@functools.cache
def own_group(comm: shotcast.Communicator) -> dist.ProcessGroup:
    """Return a group of the backend "shotcast", as a script has one that names it."""
    return dist.new_group(backend="shotcast", timeout=_GROUP_TIMEOUT)


@functools.cache
def any_group(comm: shotcast.Communicator) -> dist.ProcessGroup:
    """Return a group for what DDP does besides averaging: of Gloo, which serves ranks that share a GPU too."""
    return dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)


# -- tensor parallel --------------------------------------------------------------------------------------------------


def tensor_forms(comm: shotcast.Communicator, shape: Shape, dtype: torch.dtype) -> Iterator[Form]:
    """Yield the forms of tensor parallelism."""
    seed = torch.Generator(comm.device).manual_seed(0)  # all ranks have the same tokens
    x = torch.randn(shape.tokens, shape.hidden, generator=seed, device=comm.device).to(dtype)

    def divided(begin: Begin) -> nn.Module:
        def part(by_columns: bool) -> Callable[[nn.Linear], nn.Module]:
            return lambda linear: Divided(linear, comm.rank, comm.world_size, by_columns, begin)

        return Model(shape, dtype, comm.device, part(True), part(False))

    def in_order(x: torch.Tensor) -> Callable[[], None]:
        x.copy_(ordered_sum(of_all(comm, x)).view(x.shape))
        return lambda: None

    def by_library(x: torch.Tensor) -> Any:
        return dist.all_reduce(x, group=group_of(comm), async_op=True).wait

    def at_once(x: torch.Tensor) -> Any:
        by_library(x)()
        return lambda: None

    @functools.cache
    def summed() -> list[torch.Tensor]:
        model = divided(in_order)
        with repeatable():
            step_of(model, x)()
        return gradients(model)

    def by_lanes(model: nn.Module, exact: bool) -> Any:
        step, distance_off = compared(model, x, summed)

        def off() -> float:
            found = distance_off()
            if exact and found:
                raise ArithmeticError(f"gradients are off by {found:.2g} of their size, and should have the same bits")
            return found

        return step, off

    def ours(way: str) -> Any:
        lanes = overlap.lanes_of(comm)

        def column(linear: nn.Linear) -> nn.Module:
            return overlap.ColumnParallelLinear(lanes, linear, way)

        def row(linear: nn.Linear) -> nn.Module:
            return overlap.RowParallelLinear(lanes, linear, way)

        return by_lanes(Model(shape, dtype, comm.device, column, row), exact=way == "sequential")

    def alone() -> Any:
        return step_of(divided(lambda x: lambda: None), x), lambda: 0.0

    def library(begin: Begin) -> Any:
        by_library(torch.ones(1, device=comm.device))()
        return compared(divided(begin), x, summed)

    yield Form(NONE, "", alone)
    yield Form("library, sequential", LIBRARY, lambda: library(at_once))
    yield Form("library, overlapped", LIBRARY, lambda: library(by_library))
    yield Form("ours, sequential", OWN, lambda: ours("sequential"))
    yield Form("ours", OWN, lambda: ours("auto"))
