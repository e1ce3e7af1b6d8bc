"""A collective group of Ray actors, with one rank per actor. Importing it needs Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from shotcast import env
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.reductions import OF_TORCH
from shotcast.collectives.rendezvous import SETUP_TIMEOUT_S
from shotcast.errors import ClosedError, ConfigError, UnsupportedError
from shotcast.integrations.ray_meeting import ActorMeeting
from shotcast.memory.driver import uuid_of
from shotcast.memory.host_group import Rendezvous

_NAME_BYTES = 128


class ShotcastGroup(BaseGroup):
    """A group of ``ray.util.collective``: a CPU communicator, and a GPU communicator if each rank has its own GPU.

    Construction is collective. Calls take what Ray passes: lists of one tensor, which is a ``torch.Tensor`` or an array
    that shares memory through DLPack (numpy, CuPy). They write it in place. On the CPU a call returns when it is done;
    on a GPU it is enqueued on the current stream. :class:`~shotcast.CollectiveTimeout` names a rank that does not
    arrive, or whose actor has died; the group is then unusable, and :meth:`destroy_group` ends it.

    Raises CollectiveTimeout if a rank does not join the construction.
    """

    timeout_s: ClassVar[float] = 600.0
    """The deadline of calls in new groups; ``shotcast.integrations.ray.register`` sets it."""

    def __init__(self, world_size: int, rank: int, group_name: str):
        super().__init__(world_size, rank, group_name)
        self._communicators: dict[str, Communicator] = {}
        self._gpu_reason = ""
        self._meeting = ActorMeeting(group_name, rank, world_size, SETUP_TIMEOUT_S)
        try:
            cpu = self._add("cpu")
            self._gpu_reason = _gpu_unsupported_reason(cpu)
            if not self._gpu_reason:
                self._add(f"cuda:{torch.cuda.current_device()}")
        except BaseException:
            self.destroy_group()
            raise

    def _add(self, device: str) -> Communicator:
        kind = torch.device(device).type
        meeting = Rendezvous(self._meeting.store, self.rank, self.world_size, f"ray/{kind}")
        made = Communicator.from_store(meeting, device, timeout_s=self.timeout_s)
        self._communicators[kind] = made
        return made

    @classmethod
    def backend(cls) -> str:
        return "SHOTCAST"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return dist.is_available()

    def destroy_group(self) -> None:
        """Close the group on this rank. Not collective; a second call does nothing."""
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()
        self._meeting.close()

    def communicator(self, device: str = "cpu") -> Communicator:
        """Return the communicator for tensors on ``cpu`` or ``cuda``, for calls that Ray does not have."""
        if not self._communicators:
            raise ClosedError(f"group {self.group_name} was destroyed")
        if device not in self._communicators:
            raise UnsupportedError(f"group {self.group_name} has no communicator for {device}: {self._gpu_reason}")
        return self._communicators[device]

    # -- calls ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        with self._written(_one(tensor)) as x:
            self.communicator(x.device.type).all_reduce(x, out=x, reduction=_reduction(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all ranks, after waiting for this rank's pending GPU work."""
        _check_options(barrier_options)
        if "cuda" in self._communicators:
            device = self._communicators["cuda"].device
            torch.cuda.synchronize(device)
            self._communicators["cuda"].check()
        self.communicator().barrier()

    @torch.no_grad()
    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        x, root, reduction = _one(tensor), _root(reduce_options), _reduction(reduce_options)
        if root == self.rank:
            with self._written(x) as x:
                self.communicator(x.device.type).reduce(x, root, out=x, reduction=reduction)
        else:
            self.communicator(x.device.type).reduce(x.contiguous(), root, reduction=reduction)

    @torch.no_grad()
    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None) -> None:
        _check_options(allgather_options)
        x, parts = _one(tensor), _several(tensor_list, self.world_size)
        gathered = self.communicator(x.device.type).all_gather(x.reshape(1, -1))
        for part, values in zip(parts, gathered, strict=True):
            part.copy_(values.view(x.shape))

    @torch.no_grad()
    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        with self._written(_one(tensor)) as x:
            self.communicator(x.device.type).broadcast(x, _root(broadcast_options))

    @torch.no_grad()
    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None) -> None:
        out, parts = _one(tensor), _several(tensor_list, self.world_size)
        reduction = _reduction(reducescatter_options)
        if any(part.shape != out.shape for part in parts):
            raise ConfigError(f"reducescatter: tensors of a list have the shape of the result, {list(out.shape)}")
        with self._written(out) as out:
            x = torch.stack([part.reshape(-1) for part in parts])
            self.communicator(out.device.type).reduce_scatter(x, out=out.view(1, -1), reduction=reduction)

    @torch.no_grad()
    def send(self, tensor: list[Any], send_options: Any) -> None:
        _check_options(send_options)
        x = _one(tensor)
        self.communicator(x.device.type).send(x.contiguous(), send_options.dst_rank)

    @torch.no_grad()
    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        _check_options(recv_options)
        with self._written(_one(tensor)) as x:
            self.communicator(x.device.type).recv(x, recv_options.src_rank)

    @contextmanager
    def _written(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield ``x``, or a contiguous copy whose values are copied back to it."""
        dense = x.contiguous()
        yield dense
        if dense is not x:
            x.copy_(dense)


def _gpu_unsupported_reason(cpu: Communicator) -> str:
    """Return why these ranks have no GPU communicator; empty if each has its own GPU. Collective."""
    own = uuid_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else ""
    name = torch.tensor([list(own.encode().ljust(_NAME_BYTES, b"\0"))], dtype=torch.uint8, device="cpu")
    gpus = [bytes(row).rstrip(b"\0").decode() for row in cpu.all_gather(name).tolist()]
    without = [str(rank) for rank, gpu in enumerate(gpus) if not gpu]
    if without:
        return f"ranks {', '.join(without)} have no GPU (num_gpus of their actors)"
    if len(set(gpus)) < len(gpus) and not env.share_gpus():
        return f"ranks share GPUs: {', '.join(f'rank {rank} has {gpu}' for rank, gpu in enumerate(gpus))}"
    return ""


def _one(tensors: list[Any]) -> torch.Tensor:
    """Return the tensor of a call with one tensor per rank, whose memory can hold results."""
    if len(tensors) != 1:
        raise UnsupportedError(f"one rank of this backend has one tensor a call, not {len(tensors)}: one GPU an actor")
    (x,) = tensors
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


def _several(lists: list[list[Any]], count: int) -> list[torch.Tensor]:
    if len(lists) != 1:
        raise UnsupportedError(f"one rank of this backend has one list a call, not {len(lists)}: one GPU an actor")
    if len(lists[0]) != count:
        raise ConfigError(f"a list has a tensor for each of {count} ranks, not {len(lists[0])}")
    return [_one([x]) for x in lists[0]]


def _check_options(options: Any) -> None:
    """Reject a deadline for a single call, which Ray's functions do not pass."""
    timeout = getattr(options, "timeout_ms", None)
    if timeout is not None and timeout.total_seconds() >= 0:
        raise UnsupportedError("the deadline is that of the group: shotcast.integrations.ray.register(timeout_s)")


def _root(options: Any) -> int:
    _check_options(options)
    return 0 if options is None else options.root_rank


def _reduction(options: Any) -> str:
    _check_options(options)
    return "sum" if options is None else OF_TORCH[options.reduceOp.name]  # Ray's names are PyTorch's
