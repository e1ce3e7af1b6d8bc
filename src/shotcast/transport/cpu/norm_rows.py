"""The tensors of a fused call as compiled code reads them, and norms of rows within one process."""

from __future__ import annotations

import functools
import struct
from array import array

import torch

from shotcast import wire
from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import CompiledSchedule
from shotcast.memory.operands import NormTensors
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.layout import ITEMSIZE, NBYTES, SOURCES
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, add_and_norm, arithmetic_of, begin_rows
from shotcast.transport.cpu.waiting import DONE
from shotcast.wire import Norm

_RESIDUAL, _NEW_RESIDUAL, _WEIGHT, _BIAS, _NORMED, _QUANTIZED, _SCALE, _DYNAMIC, _EPS = (
    (layout.ROW + offset) // 8
    for offset in (
        *(layout.RESIDUAL, layout.NEW_RESIDUAL, layout.WEIGHT, layout.BIAS, layout.NORMED, layout.QUANTIZED),
        *(layout.SCALE, layout.DYNAMIC, layout.EPS),
    )
)
"""Words of the context."""
_NO_CONTEXT = array("q", [0] * layout.CONTEXT_WORDS)
_FLOAT32, _INT32 = struct.Struct("=f"), struct.Struct("=i")


def put_tensors(context: array[int], tensors: NormTensors, norm: Norm) -> None:
    """Write the addresses of ``tensors`` into the context's ROW."""

    context[_RESIDUAL] = tensors.residual.data_ptr()
    context[_NEW_RESIDUAL] = tensors.new_residual.data_ptr()
    context[_WEIGHT] = tensors.weight.data_ptr()
    context[_BIAS] = 0 if tensors.bias is None else tensors.bias.data_ptr()
    context[_NORMED] = 0 if tensors.normed is None else tensors.normed.data_ptr()
    context[_QUANTIZED] = 0 if tensors.quantized is None else tensors.quantized.data_ptr()
    context[_SCALE] = 0 if tensors.scale is None else tensors.scale.data_ptr()
    context[_DYNAMIC] = norm.quantize == "dynamic"
    context[_EPS] = _INT32.unpack(_FLOAT32.pack(tensors.eps))[0]


def rows(context: int, plan: int, x: int, _out: int) -> int:
    """Normalize rows that are already summed. x: nbytes."""
    begin_rows(context)
    store(context + SOURCES, x)
    add_and_norm(context, plan, START_AT_MINUS_ZERO, 1, load(plan + NBYTES) // load(plan + ITEMSIZE))
    return DONE


ROWS = CompiledSchedule(rows)


def norm_sum(total: torch.Tensor, tensors: NormTensors, norm: Norm) -> None:
    """Apply the residual add, norm and quantization of the fused operations to a sum, with the same bits.

    ``total`` is [rows, hidden], contiguous, float32, float16 or bfloat16; the tensors have as many rows.
    """
    context = array("q", _NO_CONTEXT)
    put_tensors(context, tensors, norm)
    record = _record(total.dtype, total.numel(), norm)
    ROWS.get()(context.buffer_info()[0], record.buffer_info()[0], total.data_ptr(), 0)


@functools.lru_cache(maxsize=1024)
def _record(dtype: torch.dtype, count: int, norm: Norm) -> array[int]:
    """Build the plan record of :func:`rows`, which the schedule only reads."""
    name, record = str(dtype).removeprefix("torch."), array("q", [0] * layout.PLAN_WORDS)
    record[NBYTES // 8] = count * dtype.itemsize
    record[ITEMSIZE // 8] = wire.DTYPES[name]
    record[layout.HIDDEN // 8] = norm.hidden
    add, norm_row = arithmetic_of(name, norm)
    record[layout.ADD // 8] = add.address()
    record[layout.NORM // 8] = norm_row.address()
    return record
