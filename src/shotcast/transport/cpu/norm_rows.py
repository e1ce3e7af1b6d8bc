"""The tensors of a fused call as compiled code finds them, and rows that one process norms alone."""

from __future__ import annotations

import struct
from array import array

import torch

from shotcast import wire
from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import Schedule
from shotcast.memory.operands import NormTensors
from shotcast.transport.cpu import layout
from shotcast.transport.cpu.layout import ITEMSIZE, NBYTES, SOURCES
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, add_and_norm, arithmetic_of, begin_rows
from shotcast.transport.cpu.waiting import DONE
from shotcast.wire import Norm


def put_tensors(context: array[int], tensors: NormTensors, norm: Norm) -> None:
    """Write the addresses of ``tensors`` into the context's ROW."""

    def put(offset: int, value: int) -> None:
        context[(layout.ROW + offset) // 8] = value

    put(layout.RESIDUAL, tensors.residual.data_ptr())
    put(layout.NEW_RESIDUAL, tensors.new_residual.data_ptr())
    put(layout.WEIGHT, tensors.weight.data_ptr())
    put(layout.BIAS, 0 if tensors.bias is None else tensors.bias.data_ptr())
    put(layout.NORMED, 0 if tensors.normed is None else tensors.normed.data_ptr())
    put(layout.QUANTIZED, 0 if tensors.quantized is None else tensors.quantized.data_ptr())
    put(layout.SCALE, 0 if tensors.scale is None else tensors.scale.data_ptr())
    put(layout.DYNAMIC, int(norm.quantize == "dynamic"))
    put(layout.EPS, struct.unpack("=i", struct.pack("=f", tensors.eps))[0])


def rows(context: int, plan: int, x: int, _out: int) -> int:
    """Norm rows that are summed already. x: nbytes."""
    begin_rows(context)
    store(context + SOURCES, x)
    add_and_norm(context, plan, START_AT_MINUS_ZERO, 1, load(plan + NBYTES) // load(plan + ITEMSIZE))
    return DONE


ROWS = Schedule(rows)


def norm_sum(total: torch.Tensor, tensors: NormTensors, norm: Norm) -> None:
    """Do to a sum what the fused operations do, with the same bits.

    ``total`` is [rows, hidden], contiguous, float32, float16 or bfloat16; the tensors have as many rows.
    """
    dtype = str(total.dtype).removeprefix("torch.")
    context, record = array("q", [0] * layout.CONTEXT_WORDS), array("q", [0] * layout.PLAN_WORDS)
    put_tensors(context, tensors, norm)
    record[NBYTES // 8] = total.numel() * total.element_size()
    record[ITEMSIZE // 8] = wire.DTYPES[dtype]
    record[layout.HIDDEN // 8] = norm.hidden
    add, norm_row = arithmetic_of(dtype, norm)
    record[layout.ADD // 8] = add.address()
    record[layout.NORM // 8] = norm_row.address()
    ROWS.get()(context.buffer_info()[0], record.buffer_info()[0], total.data_ptr(), 0)
