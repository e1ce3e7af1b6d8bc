"""Launches of kernels whose tensors the SMs' copy engine (TMA) loads and stores."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from shotcast.device.triton.launch import Launch, _cells
from shotcast.memory import driver

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
"""Size and alignment of the driver's CUtensorMap."""
_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_NO_INTERLEAVE, _PROMOTE_TO_128_BYTES, _FILL_WITH_ZEROS = 0, 2, 0


@dataclasses.dataclass(frozen=True, slots=True)
class _NoTensor:
    """A stand-in for the tensor of a descriptor whose address each call supplies."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def descriptor(
    dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int]
) -> TensorDescriptor:
    """Describe tensors to the SMs' copy engine (TMA), which copies one ``block_shape`` at a time.

    The descriptor is an argument of :class:`TmaLaunch`, whose calls supply the tensors. A tensor must begin at a
    multiple of 16 bytes. Its last stride must be 1, and the other strides multiples of 16 bytes.
    """
    return TensorDescriptor(_NoTensor(dtype), list(shape), list(strides), list(block_shape))


class _TensorMap:
    """A descriptor in the driver's form; ``value`` sets the tensor that it describes."""

    def __init__(self, descriptor: TensorDescriptor, swizzle: int, box: Sequence[int]):
        self._memory = (ctypes.c_ubyte * (_MAP_BYTES + _MAP_ALIGNMENT))()
        offset = -ctypes.addressof(self._memory) % _MAP_ALIGNMENT
        self._map = (ctypes.c_ubyte * _MAP_BYTES).from_buffer(self._memory, offset)
        self._descriptor, self._swizzle, self._box = descriptor, swizzle, list(box)
        self._is_encoded = False

    @property
    def memory(self) -> Any:
        """The description, which the kernel takes."""
        return self._map

    def _encode(self, address: int) -> None:
        shape, strides = self._descriptor.shape, self._descriptor.strides
        rank, itemsize = len(shape), self._descriptor.base.dtype.itemsize
        # the driver counts dimensions from the innermost one, whose stride is implied
        error = driver.library().cuTensorMapEncodeTiled(
            ctypes.byref(self._map),
            _MAP_TYPES[self._descriptor.base.dtype],
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * rank)(*(stride * itemsize for stride in reversed(strides[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(self._box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            _NO_INTERLEAVE,
            self._swizzle,
            _PROMOTE_TO_128_BYTES,
            _FILL_WITH_ZEROS,
        )
        driver.check(error, f"describing a tensor of shape {tuple(shape)} and strides {tuple(strides)}")
        self._is_encoded = True

    @property
    def value(self) -> None:
        """The tensor; it can only be set."""
        return None

    @value.setter
    def value(self, tensor: torch.Tensor) -> None:
        if not self._is_encoded:
            self._encode(tensor.data_ptr())
        elif error := driver.library().cuTensorMapReplaceAddress(
            ctypes.byref(self._map), ctypes.c_void_p(tensor.data_ptr())
        ):
            driver.check(error, "moving the description of a tensor")


class TmaLaunch(Launch):
    """One kernel on one grid, some of whose arguments are results of :func:`descriptor`; each call supplies them."""

    def _argument_cells(self, compiled: Any) -> tuple[dict[str, list[Any]], list[Any]]:
        maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        opened: dict[str, list[Any]] = {}
        cells: list[Any] = []
        for name, kind in compiled.src.signature.items():
            given = self.arguments[name]
            if isinstance(given, TensorDescriptor):
                form = next(maps)
                tensor_map = _TensorMap(given, form["swizzle"], form["block_size"])
                opened[name] = [tensor_map]
                cells += [tensor_map.memory, *map(ctypes.c_int32, given.shape), *map(ctypes.c_int64, given.strides)]
            else:
                opened[name] = list(_cells(kind, given))
                cells += opened[name]
        return opened, cells

    def _filled(self, call_values: Sequence[Any]) -> dict[str, Any]:
        described = {name: given for name, given in self.arguments.items() if isinstance(given, TensorDescriptor)}
        filled = super()._filled(call_values)
        return filled | {name: dataclasses.replace(given, base=filled[name]) for name, given in described.items()}
