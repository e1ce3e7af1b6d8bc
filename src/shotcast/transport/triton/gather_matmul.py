"""All-gather and product in one call: few programs bring rows to a product that begins before all of them have come.

    out = (x_0, x_1, ..., x_{N-1}) @ b

The call launches two kernels. The first is the all-gather of :mod:`.few_sms`, with the header, the deadline and the
epoch of every call; it announces the chunks that are there. The second is the product of
:mod:`shotcast.kernels.triton.arriving_gemm`, whose tiles wait for announcements. It is let in by the first
(programmatic dependent launch) when every program has seen its namesakes on all ranks.

So nothing can hang. When the product takes SMs, all programs that bring rows, of all ranks, have theirs, also where
ranks share a GPU: they wait for each other alone, and end by the deadline at the latest. The product waits only for
the first kernel of its own rank, which announces every chunk, also when it was stopped: rows are NaN then. On GPUs
without dependent launches, and in the interpreter, the product begins when the first kernel has ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from shotcast import wire
from shotcast.device.triton.intrinsics import INTERPRETED, num_sms
from shotcast.device.triton.launch import Launch
from shotcast.kernels.triton import gemm
from shotcast.kernels.triton.arriving_gemm import WORDS_NBYTES, Arrival, ArrivingGemm
from shotcast.kernels.triton.gemm import GemmConfig, GemmForm
from shotcast.memory import driver
from shotcast.transport.kernel_call import KernelCall
from shotcast.transport.triton import few_sms, layout
from shotcast.transport.triton.binding import TENSORS, KernelContext
from shotcast.wire import CallPlan, LaunchShape, Op, ProductOp


class GatherThenMultiply:
    """The two kernels of a call on this rank.

    ``arrivals`` is the address of the words by which the first tells the second what is there.
    """

    def __init__(self, gather: Launch, product: ArrivingGemm, arrivals: int):
        self._gather, self._product, self._arrivals = gather, product, arrivals

    def load(self) -> None:
        self._gather.load()
        self._product.load()

    def __call__(self, stream: int, operands: Sequence[Any]) -> None:
        """Enqueue the call for tensors ``x``, ``gathered``, ``b`` and ``out``."""
        x, gathered, b, out = operands
        try:
            self._gather(stream, (x.data_ptr(), gathered.data_ptr()))
            self._product.multiply(stream, gathered, b, out, self._arrivals)
        except BaseException:
            self._forget(stream)  # or the next product would take the announcements of this call for its own
            raise

    def _forget(self, stream: int) -> None:
        if INTERPRETED:
            ctypes.memset(self._arrivals, 0, WORDS_NBYTES)
            return
        target, nbytes = ctypes.c_uint64(self._arrivals), ctypes.c_size_t(WORDS_NBYTES)
        error = driver.library().cuMemsetD8Async(target, ctypes.c_ubyte(0), nbytes, ctypes.c_void_p(stream))
        driver.check(error, "clearing announcements")


def call_of(form: GemmForm, config: GemmConfig, world_size: int, shape: LaunchShape) -> KernelCall:
    """Return the call for products of one form.

    ``form`` is that of the product of all rows, which lie one after the other, in memory at a multiple of 16 bytes;
    each rank has equally many. ``shape`` is the launch of the all-gather.
    """
    dtype, nbytes = str(form.dtype).removeprefix("torch."), form.m * form.k * form.dtype.itemsize
    plan = wire.product_plan(ProductOp.ALL_GATHER_MATMUL, dtype, nbytes, shape, 0)

    def launches(context: KernelContext) -> list[GatherThenMultiply]:
        gather = few_sms.bind(CallPlan(Op.ALL_GATHER, "few_sms", dtype, nbytes, launch=shape), context, announces=True)
        header = context.header_of(plan)
        entry = gather.arguments["entry"]._replace(header_size=header.size, header_call=header.call)
        arguments = gather.arguments | {"entry": entry}
        # an SM divides its memory when it is idle: it has to leave shared memory to the product that joins it
        launch = Launch(gather.kernel, gather.programs, arguments, TENSORS[gather.tensors], gather.options, 0)
        arrival = Arrival(context.rank, world_size, shape.programs, shape.chunk_bytes)
        product = ArrivingGemm(form, config, num_sms(form.device), arrival)
        return [GatherThenMultiply(launch, product, context.arrivals_address)]

    parts_are_quads = nbytes // world_size % layout.QUAD == 0
    gather = shape.block_words, shape.num_warps, parts_are_quads
    return KernelCall(
        plan,
        f"{plan.op.label}/{gemm.constants_of(form, config)}/{config.warps}/{gather}",
        launches,
        lambda *operands: operands,
    )
