"""Symmetric memory of the GPUs of one node, from PyTorch. The only file that uses PyTorch's private interface to it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from shotcast import env
from shotcast.errors import ClosedError
from shotcast.memory.host_group import StoreGroup
from shotcast.memory.symmetric import nbytes_of_view, raise_failures, shortage
from shotcast.units import about_size

_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class CudaBuffer:
    """``nbytes`` of zeros on each rank's GPU, mapped by all; a :class:`~shotcast.memory.symmetric.SymmetricBuffer`.

    Construction is collective and needs no process group. Ranks confirm that their GPUs have the memory before mapping
    each other's. All GPUs must have peer access to each other. They are ``repeated`` if several ranks share one, or use
    the same number for different ones, for example because each sees only its own. PyTorch must then be told, and there
    is no multicast. Raises ConfigError on every rank, naming the ranks whose GPU has too little memory (with the
    requested and free sizes), or whose memory PyTorch cannot map.
    """

    def __init__(self, group: StoreGroup, nbytes: int, device: torch.device, repeated: bool):
        settings = [name for name, wanted in ((_OVERLAPPING, repeated), (_NO_MULTICAST, not env.multicast())) if wanted]
        self.nbytes = nbytes
        failure, tensor = "", None
        with torch.cuda.device(device):
            try:
                tensor = _allocated(nbytes, device)
            except RuntimeError as error:
                failure = shortage(device, f"{about_size(nbytes)} more for communication", error)
            raise_failures(group, failure)
            assert tensor is not None
            name = min(group.all_gather(f"shotcast/{secrets.token_hex(8)}"))
            try:
                with _pytorch_told(settings):
                    self._handle = _shared(tensor, group, name)
                tensor.zero_()
            except RuntimeError as error:
                failure = f"PyTorch could not share {about_size(nbytes)} of {device} with the other GPUs: {error}"
            raise_failures(group, failure)
        self._tensor: torch.Tensor | None = tensor
        self.addresses = tuple(int(address) for address in self._handle.buffer_ptrs)
        self.multicast_address = int(self._handle.multicast_ptr or 0) if env.multicast() else 0

    def view(self, rank: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if self._tensor is None:
            raise ClosedError("this symmetric buffer is closed")
        nbytes_of_view("buffer", self.nbytes, offset, shape, dtype)
        return self._handle.get_buffer(rank, tuple(shape), dtype, offset // dtype.itemsize)

    def close(self) -> None:
        """Release the memory. A second call does nothing."""
        if self._tensor is None:
            return
        self._tensor = None
        del self._handle


@contextlib.contextmanager
def _pytorch_told(settings: Sequence[str]) -> Iterator[None]:
    """Set, within this context, the variables to 1 that PyTorch reads when it shares memory.

    Later memory may belong to other ranks, and other memory that the program shares through PyTorch may have multicast.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(dict.fromkeys(settings, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _allocated(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory that can be shared. If it is short, PyTorch first releases its tensor cache."""
    try:
        return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:
        torch.cuda.empty_cache()
        return symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


def _shared(tensor: torch.Tensor, group: StoreGroup, name: Any) -> Any:
    """Map the ``tensor`` of every rank; ``name`` is a new string, the same on all ranks.

    PyTorch asks the process group of that name for the ranks and their store, through which they exchange handles. A
    group without a backend suffices; a backend would take additional memory and connections.
    """
    store = AlikeKeys(group.store(f"symmetric memory/{name}"))
    ranks = dist.ProcessGroup(store, group.rank, group.world_size)
    _register_process_group(name, ranks)
    try:
        return symmetric_memory.rendezvous(tensor, group=name)
    finally:
        _unregister_process_group(name)


class AlikeKeys(dist.Store):
    """A store for one exchange of PyTorch, with the same keys on all ranks.

    PyTorch numbers the exchanges of a process, ``CUDASymmetricMemory/<number>/<rank>``, and expects that all ranks of a
    group have made equally many, in any groups. This store counts from the first number that it is asked for.
    """

    def __init__(self, store: dist.Store):
        super().__init__()
        self._store, self._first = store, -1

    def _alike(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        if self._first < 0:
            self._first = int(number)
        return f"{name}/{int(number) - self._first}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._alike(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._alike(key))

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        alike = [self._alike(key) for key in keys]
        self._store.wait(alike) if timeout is None else self._store.wait(alike, timeout)
