"""Matrix products that leave room on the GPU for communication, ours and the vendor library's.

Each says what it leaves (:class:`~shotcast.overlap.occupancy.Room`):

- :class:`ShapedProduct`: our own, in blocks of a chosen shape, on as many SMs as are chosen.
- :class:`LibraryProduct`: the vendor library's. It can be told to leave SMs alone (``carve_out``), or run on SMs that
  the driver sets aside (``green_context``). A carve-out is a request: the library's kernel for a product may not heed
  it. So the room is that of the kernel which the library is seen to launch.

Our results have the same bits on any number of SMs, since no sum is divided between programs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import torch

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.hardware.multiprocessor import Multiprocessor, multiprocessor
from shotcast.overlap import torch_private
from shotcast.overlap.occupancy import Kernel, Room, resident_blocks

if TYPE_CHECKING:
    from shotcast.kernels.triton.gemm import Gemm, GemmConfig, GemmForm


class Product(Protocol):
    """A way to multiply matrices that says what it leaves of the GPU."""

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``a @ b``, in ``out`` if it is given."""

    def room(self, a: torch.Tensor, b: torch.Tensor) -> Room:
        """Return what is left of the GPU while ``a @ b`` is computed."""


@functools.cache
def sms_of(device: torch.device) -> int:
    """Return the number of SMs of a GPU; 1 for the CPU, where programs run one after the other."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def multiprocessor_of(device: torch.device) -> Multiprocessor:
    """Return the limits of an SM of a GPU."""
    return multiprocessor(torch.cuda.get_device_capability(device))


@functools.cache
def own_gemm() -> Any:
    """Return the module of our own product, which imports Triton."""
    from shotcast.kernels.triton import gemm

    return gemm


@functools.cache
def interprets_kernels() -> bool:
    """Return whether kernels of GPUs serve tensors of the CPU; without Triton none do."""
    try:
        from shotcast.device.triton.intrinsics import INTERPRETED
    except ImportError:
        return False
    return INTERPRETED


@functools.lru_cache(maxsize=256)
def _bind(form: GemmForm, config: GemmConfig, sms: int) -> Gemm:
    bound: Gemm = own_gemm().Gemm(form, config, sms)
    return bound


@dataclass(frozen=True, slots=True)
class ShapedProduct:
    """Products by our own kernel.

    Attributes:
        config: the shape of its blocks; None for one that is fast on all SMs that it has.
        sms: the number of SMs that it uses, one block each; None for all.
    """

    config: GemmConfig | None = None
    sms: int | None = None

    def __post_init__(self) -> None:
        if self.sms is not None and self.sms < 1:
            raise ConfigError(f"sms is {self.sms}; a product takes at least one SM")
        if self.sms is not None and self.config is not None and not self.config.persistent:
            raise ConfigError("sms is for persistent products; one with a program a tile takes all SMs")

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``a @ b``, in ``out`` if it is given, summed in float32 and rounded once.

        Args:
            a: [m, k] of bfloat16 or float16, with contiguous rows or columns.
            b: [k, n], likewise.
            out: [m, n] with contiguous rows.

        Raises:
            UnsupportedError: another dtype, device or layout.
            ConfigError: shapes that do not fit.
        """
        if out is None:
            out = a.new_empty(a.shape[0], b.shape[1])
        self._bound(own_gemm().form_of(a, b, out))(a, b, out)
        return out

    def room(self, a: torch.Tensor, b: torch.Tensor) -> Room:
        """Return what is left of the GPU while ``a @ b`` is computed; compiles the kernel.

        Raises:
            UnsupportedError: the kernel is interpreted.
        """
        bound = self.bound(a, b)
        found = bound.resources()
        if found is None:
            raise UnsupportedError("an interpreted kernel takes nothing of a GPU")
        return _room_of(Kernel(*found), bound.programs, sms_of(a.device), multiprocessor_of(a.device))

    def bound(self, a: torch.Tensor, b: torch.Tensor) -> Gemm:
        """Return the launch of ``a @ b``, not yet compiled if it was never called."""
        return self._bound(own_gemm().form_of(a, b, a.new_empty(a.shape[0], b.shape[1])))

    def _bound(self, form: GemmForm) -> Gemm:
        return _bind(form, self.config or own_gemm().choose_config(form, self.sms), self.sms or sms_of(form.device))


def _room_of(kernel: Kernel, blocks: int, sms: int, sm: Multiprocessor) -> Room:
    """Return what ``blocks`` leave of a GPU of ``sms`` SMs, which gives each SM a block before any gets another."""
    busy = min(sms, blocks)
    return Room(sm, sms - busy, busy, ((kernel, min(resident_blocks(kernel, sm), -(-blocks // sms))),))


Mode = Literal["carve_out", "green_context"]
_GREEN_UNIT = 8
"""SMs of a green context come in multiples of this many from compute capability 9 on (CUDA Driver API)."""


@dataclass(frozen=True, slots=True)
class LibraryProduct:
    """Products of the vendor's library (``torch.matmul``) that leave SMs alone.

    Attributes:
        left_sms: the number of SMs that it is to leave; 0 for none.
        mode: ``carve_out`` asks the library to launch fewer blocks, ``green_context`` has the driver keep its blocks on
            other SMs. SMs of green contexts come in groups, so up to seven more are left, and a product in a green
            context cannot be captured in a graph.
    """

    left_sms: int = 0
    mode: Mode = "carve_out"

    def __post_init__(self) -> None:
        if self.left_sms < 0:
            raise ConfigError(f"left_sms is {self.left_sms}; it takes a number from 0 up")
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode is {self.mode!r}; it takes {' or '.join(get_args(Mode))}")

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``torch.matmul(a, b)``, in ``out`` if it is given."""
        with self.scope(a.device):
            return torch.matmul(a, b, out=out) if out is not None else torch.matmul(a, b)

    @contextlib.contextmanager
    def scope(self, device: torch.device) -> Iterator[None]:
        """Let every product of the library leave the SMs alone, until the scope ends.

        Raises:
            UnsupportedError: PyTorch or the GPU has no green contexts, or the stream is captured in a graph.
            ConfigError: the GPU does not have so many SMs.
        """
        if not self.left_sms or device.type != "cuda":
            yield
        elif self.mode == "carve_out":
            self._used_sms(device)
            with torch_private.sm_carveout(self.left_sms):
                yield
        else:
            with torch_private.green_context(_green_context(self._used_sms(device), device), device):
                yield

    def room(self, a: torch.Tensor, b: torch.Tensor) -> Room:
        """Return what is left of the GPU while ``a @ b`` is computed; runs it, under PyTorch's profiler.

        Where the product takes several kernels, it is the room beside the one that leaves least. Where the profiler
        sees none, and on SMs of a green context, which its other users may fill, nothing counts as left.
        """
        sms, used, sm = sms_of(a.device), self._used_sms(a.device), multiprocessor_of(a.device)
        if self.mode == "green_context" and self.left_sms:
            return Room(sm, sms - used, used, None)
        self(a, b)  # the library sets itself up
        rooms = [
            _room_of(Kernel(seen.registers, seen.threads, seen.shared_bytes), seen.blocks, sms, sm)
            for seen in seen_kernels(lambda: self(a, b))
        ]
        return min(rooms, key=_SIZE_OF_ROOM, default=Room(sm, 0, sms, None))

    def _used_sms(self, device: torch.device) -> int:
        """Return the number of SMs that are not left."""
        used = sms_of(device) - self.left_sms
        if self.mode == "green_context" and self.left_sms:
            used = used // _GREEN_UNIT * _GREEN_UNIT
        if used < 1:
            raise ConfigError(f"left_sms is {self.left_sms}; {device} has {sms_of(device)} SMs, and some must remain")
        return used


_SIZE_OF_ROOM = operator.attrgetter("free_sms", "beside.registers", "beside.shared_bytes")


class SeenKernel(NamedTuple):
    """A launch that the profiler saw: its blocks, and what each takes of an SM."""

    name: str
    blocks: int
    threads: int
    registers: int
    shared_bytes: int


def seen_kernels(call: Callable[[], Any]) -> list[SeenKernel]:
    """Return the kernels that ``call`` launches on GPUs, in their order, as PyTorch's profiler sees them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [
        SeenKernel(
            event["name"],
            math.prod(event["args"]["grid"]),
            math.prod(event["args"]["block"]),
            event["args"]["registers per thread"],
            event["args"]["shared memory"],
        )
        for event in sorted(events, key=lambda event: event.get("ts", 0))
        if event.get("cat") == "kernel"
    ]


@functools.lru_cache(maxsize=32)
def _green_context(sms: int, device: torch.device) -> Any:
    """Return the green context of so many SMs; it lasts as long as the process, as its stream may have work."""
    return torch_private.new_green_context(sms, device)
