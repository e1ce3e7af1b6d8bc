"""Matrix products that are summed over the ranks, tile by tile while they are computed.

    matmul_reduce_scatter:  out_i = sum over r, in rank order, of round(a_r @ b_r)[rows of i]
    matmul_all_reduce:      out = the same of all rows

On GPUs one kernel does both (:mod:`shotcast.transport.triton.matmul_reduce`). On CPU ranks the product is made in
chunks of rows, each of which is summed under the product of the next. Every way gives the bits of the product, rounded,
and then the sum in the order of ranks, or on CPU ranks the collective. The sequential way gives others where its
collective is the vendor's or a lossy one (``allow_fp8``), and then ways are not compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shotcast import wire
from shotcast.collectives.arguments import operation, writable
from shotcast.collectives.communicator import Communicator
from shotcast.collectives.torch_private import increment_version, is_traced
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.overlap import schedule, torch_ops
from shotcast.overlap.adaptive import Adaptive, Cache, bucket
from shotcast.overlap.controller import Controller
from shotcast.overlap.lanes import lanes_of
from shotcast.overlap.policy import AUTO, FUSED, PLAIN, SEQUENTIAL, Decision, Way, check_way, measure, model_us
from shotcast.overlap.schedule import makespan_us
from shotcast.transport.kernel_call import KernelCall
from shotcast.units import align_up
from shotcast.wire import ProductOp

if TYPE_CHECKING:
    from shotcast.kernels.triton.gemm import GemmConfig

CHUNKS = 4
"""The most chunks of rows on CPU ranks."""
_LEAST_ROWS = 64
"""The fewest rows of a chunk: smaller products take more time for each row."""
_COLLECTIVES = {ProductOp.MATMUL_REDUCE_SCATTER: "reduce_scatter", ProductOp.MATMUL_ALL_REDUCE: "all_reduce"}


@torch_ops.run_eagerly
def matmul_reduce_scatter(
    comm: Communicator,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    way: str = AUTO,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Compute this rank's rows of ``a_0 @ b_0 + a_1 @ b_1 + ...``, each product rounded before the sum.

    Args:
        comm: the ranks. Nothing else uses it meanwhile.
        a: [m, k] with m divisible by the ranks; m is the same on all of them, k need not be.
        b: [k, n], such as ``weight.t()`` of a linear layer; n is the same on all ranks.
        out: [m / ranks, n], contiguous; None for a new tensor. Not a leaf that requires grad.
        way: ``auto``, which measures at the first call of about so many rows (up to a power of two) and then takes what
            was fastest; ``sequential``; ``fused``, one kernel on GPUs; or ``plain``, chunks on CPU ranks. Ranks whose k
            differ name one.
        config: the :class:`~shotcast.kernels.triton.gemm.GemmConfig` of products by own kernels, the same on all ranks;
            None for a fast one.

    Returns:
        ``out``. With gradients to be computed, the product is PyTorch's, followed by the collective.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit.
        UnsupportedError: the way that was named cannot serve the call (:func:`explain_product`).
    """
    return _run(comm, ProductOp.MATMUL_REDUCE_SCATTER, a, b, out, way, config)


@torch_ops.run_eagerly
def matmul_all_reduce(
    comm: Communicator,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    way: str = AUTO,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Compute ``a_0 @ b_0 + a_1 @ b_1 + ...`` on all ranks, each product rounded before the sum.

    Arguments and errors are those of :func:`matmul_reduce_scatter`, but m is any number and ``out`` is [m, n].
    """
    return _run(comm, ProductOp.MATMUL_ALL_REDUCE, a, b, out, way, config)


def explain_product(
    comm: Communicator,
    a: torch.Tensor,
    b: torch.Tensor,
    op: str = "matmul_reduce_scatter",
    config: GemmConfig | None = None,
) -> Decision:
    """Return the way that ``auto`` takes for a product, and why, as far as is known now. Communicates nothing.

    Args:
        comm, a, b, config: as in the call.
        op: ``matmul_reduce_scatter`` or ``matmul_all_reduce``.
    """
    if op not in _OPS:
        raise ConfigError(f"op is {op!r}; it takes {' or '.join(_OPS)}")
    call = _Product(comm, _OPS[op], a, b, None, config)
    ways = call.ways()
    if len(ways) > 1:
        if known := call.cache.adaptive.decisions.get(call.shape):
            return known
        why = f"not measured yet; the first call measures {' and '.join(ways)}"
        return Decision(AUTO, why, {}, {}, {})
    return Decision(SEQUENTIAL, call.reason(), {}, {}, {})


_OPS = {op.label: op for op in _COLLECTIVES}


def _run(
    comm: Communicator,
    op: ProductOp,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    way: str,
    config: GemmConfig | None,
) -> torch.Tensor:
    if is_traced():
        _check(comm, op, a, b)
        check_way(way)
        return torch_ops.summed(comm, op is ProductOp.MATMUL_REDUCE_SCATTER, a, b, out, way, config)
    call = _Product(comm, op, a, b, out, config)
    check_way(way)
    if way == FUSED and (why := call.unsupported_reason):
        raise UnsupportedError(f"{op.label} of {call} has no fused form: {why}")
    if call.needs_gradients:
        if way == PLAIN:
            raise UnsupportedError(f"{op.label} of {call} in chunks has no gradient")
        return call.differentiable()
    if out is not None:
        increment_version((out,))  # kernels write it unseen by autograd, which may have kept it for a backward
    with torch.no_grad():
        ways = call.ways(forced=way)
        if way == AUTO:
            call.decide(call.cache.adaptive, call.shape, ways)
        elif way in ways:
            ways[way]()
        else:
            raise UnsupportedError(f"{op.label} of {call} has no way {way!r}: {call.reason_against_chunks()}")
    return call.out


def scattered_sums(
    adaptive: Adaptive, comm: Communicator, a: torch.Tensor, b: torch.Tensor, sms: int | None = None
) -> torch.Tensor:
    """Compute :func:`matmul_reduce_scatter`, without gradients, by the way that a layer's ``adaptive`` decides on.

    Where the way that it was given does not exist, the sequential one is taken. A collective after or beside a product
    occupies at most ``sms`` SMs; in the fused form the product's own programs send its tiles.
    """
    check_way(adaptive.way)
    call = _Product(comm, ProductOp.MATMUL_REDUCE_SCATTER, a, b, None, None, sms)
    with torch.no_grad():
        return call.decide(adaptive, ("forward", bucket(call.m), a.dtype), call.ways(adaptive.way))


class _Product:
    """One call: its operands, and the ways in which it can be done."""

    def __init__(
        self,
        comm: Communicator,
        op: ProductOp,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        config: GemmConfig | None,
        sms: int | None = None,
    ):
        self._sms = sms
        self.comm, self.op, self.a, self.b = comm, op, a, b
        _check(comm, op, a, b)
        self.m, self.k, self.n = a.shape[0], a.shape[1], b.shape[1]
        self.scatters = op is ProductOp.MATMUL_REDUCE_SCATTER
        self.rows = rows = self.m // comm.world_size if self.scatters else self.m
        operands = (a, b) if out is None else (a, b, out)
        self.needs_gradients = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        if out is not None and (
            out.shape != (rows, self.n) or out.dtype != a.dtype or out.device != a.device or not out.is_contiguous()
        ):
            raise ConfigError(
                f"out is contiguous, of {a.dtype}, [{rows}, {self.n}] on {a.device}; "
                f"not {out.dtype}, {list(out.shape)} with strides {list(out.stride())} on {out.device}"
            )
        if out is not None:
            writable(out, "out", op.label)
        self._given = out
        self._out: torch.Tensor | None = out
        self._config = config
        self.cache = Cache.of(comm, __name__)

    def __str__(self) -> str:
        return f"[{self.m}, {self.k}] @ [{self.k}, {self.n}] of {self.a.dtype}"

    @property
    def out(self) -> torch.Tensor:
        """The result, allocated when it is first needed."""
        if self._out is None:
            self._out = self.a.new_empty(self.rows, self.n)
        return self._out

    @property
    def shape(self) -> tuple[Any, ...]:
        """The key of a decision, which serves about so many rows."""
        return self.op.label, bucket(self.m), self.n, self.k, self.a.dtype, self._config

    # -- which ways ---------------------------------------------------------------------------------------------------

    def config(self) -> GemmConfig:
        """Return the shape of tiles: the same on all ranks, whatever the addresses of their operands."""
        from shotcast.kernels.triton import gemm

        if self._config is not None:
            return self._config
        return gemm.FAST if gemm.has_tma(self.a.device) else gemm.WITHOUT_TMA

    @functools.cached_property
    def unsupported_reason(self) -> str:
        """The reason why no kernel can multiply and sum at once; empty if one can."""
        topology = self.comm.topology
        if self.comm.world_size == 1:
            return "there is one rank"
        if not topology.transport.grids:
            return topology.obstacle or "these ranks have no kernels of GPUs"
        if topology.shape.nodes > 1 or self.comm.world_size > wire.MAX_WORLD_SIZE:
            return "it takes ranks of one node"
        if not topology.exclusive:
            return "it fills the GPU while it waits for other ranks, as only calls with exclusive=True may"
        if self.a.dtype not in (torch.bfloat16, torch.float16):
            return f"own products take bfloat16 and float16, not {self.a.dtype}"
        if not self.m or not self.n:
            return "there is nothing to compute"
        if self.needs_gradients:
            return "it has no gradient"
        from shotcast.kernels.triton import gemm
        from shotcast.transport.triton import matmul_reduce

        config = self.config()
        needed, most = gemm.shared_bytes(config), gemm.most_shared_bytes(self.a.device)
        if needed > most:
            return f"blocks of {config} take {needed} bytes of shared memory, and there are {most}"
        try:
            matmul_reduce.blocks_of(
                not self.scatters, self.m, self.n, self.comm.world_size, config, self.comm.max_bytes
            )
        except ConfigError as error:
            return str(error)
        return ""

    def reason_against_chunks(self) -> str:
        """Return why the product is not made in chunks, each summed under the next; empty if it can be."""
        if self.comm.world_size == 1:
            return "there is one rank"
        if self.a.device.type != "cpu":
            return "chunks of rows are for CPU ranks"
        if not self.unsupported_reason:
            return "chunks of rows are for ranks without a kernel that multiplies and sums"
        if self.needs_gradients:
            return "it has no gradient"
        if len(self._chunks()) < 2:
            return f"the rows that are summed at once, {self.rows}, are fewer than two chunks of {_LEAST_ROWS}"
        return ""

    def reason(self) -> str:
        """Return why ``auto`` has no other way than one after the other."""
        if self.a.device.type == "cpu" and not self.comm.topology.transport.grids:
            return self.reason_against_chunks()
        small = "its tiles are fewer than the SMs, so the vendor's library multiplies"
        return self.unsupported_reason or (small if self._is_small() else "")

    def _is_small(self) -> bool:
        """Return whether tiles would leave SMs idle, so that the library's choice of tiles is better."""
        from shotcast.device.triton.intrinsics import num_sms

        config = self.config()
        tiles = -(-self.m // config.tile_m) * -(-self.n // config.tile_n)
        return tiles < num_sms(self.a.device)

    def ways(self, forced: str = AUTO) -> dict[str, Callable[[], None]]:
        """Return the ways to make the call, the sequential one first."""
        if not self.unsupported_reason and (forced != AUTO or not self._is_small()):
            return {SEQUENTIAL: self._product_first, FUSED: self._fused}
        if not self.reason_against_chunks():
            return {SEQUENTIAL: self._product_first, PLAIN: self._in_chunks}
        return {SEQUENTIAL: self._library_product_first}

    def comparable(self, ways: Collection[str]) -> Collection[str]:
        """Return those of ``ways`` whose bits are equal if they are right: all sums are in the order of ranks."""
        name, topology = _COLLECTIVES[self.op], self.comm.topology
        sizes = [self.m]
        if PLAIN in ways:
            chunks = self._chunks()
            blocks = self.comm.world_size if self.scatters else 1
            sizes += [blocks * (end - first) for first, end in (chunks[0], chunks[-1])]
        for rows in sizes:
            taken = self.comm.explain(self.a.new_empty(1).expand(rows, self.n), name, sms=self._sms).algorithm
            if not topology.algorithms[taken].keeps_bits(operation(name), topology.shape):
                return ()
        return ways

    def decide(self, adaptive: Adaptive, shape: Hashable, ways: Mapping[str, Callable[[], None]]) -> torch.Tensor:
        """Make the call by the way that ``adaptive`` decides on for a shape, and return the result."""

        def giving(way: Callable[[], None]) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                way()
                return self.out

            return run

        checked = self.comparable(ways) if shape not in adaptive.decisions else ()
        return adaptive.run(shape, {name: giving(run) for name, run in ways.items()}, self.predict, checked)

    def predict(self) -> dict[str, float]:
        """Predict each way from the times of the product alone and of the collective alone."""
        size = self.a.new_empty(self.m, self.n)
        ways = self.ways()
        alone = (Way("product", lambda: self._product(size)), Way("collective", lambda: self._collective(size)))
        product_us, whole_us = measure(self.comm, alone, 3).values()
        modelled_us = model_us(self.comm, size, _COLLECTIVES[self.op])
        found = {SEQUENTIAL: product_us + whole_us}
        if FUSED in ways:  # all but the last tiles are sent, and those of the peers taken, under the product
            found[FUSED] = max(product_us, modelled_us or whole_us)
        elif PLAIN in ways:
            count = len(self._chunks())
            times = {f"compute {i}": product_us / count for i in range(count)}
            times |= {f"communicate {i}": whole_us / count for i in range(count)}
            found[PLAIN] = makespan_us(schedule.chain(count), times)
        return found

    # -- GPUs ---------------------------------------------------------------------------------------------------------

    def _fused(self) -> None:
        from shotcast.kernels.triton import gemm
        from shotcast.transport.triton import matmul_reduce

        a, b = self._operands()
        out = self.out if not self.out.data_ptr() % 16 else torch.empty_like(self.out)
        form, config = gemm.form_of(a, b, a.new_empty(1, self.n).expand(self.m, self.n)), self.config()

        def new_call() -> KernelCall:
            dtype, comm = str(a.dtype).removeprefix("torch."), self.comm
            return matmul_reduce.call_of(self.op, form, config, comm.world_size, comm.max_bytes, dtype)

        call = self.cache.once((self.op, form, config), new_call)
        self.comm._run_kernel(call, a, b, out)
        if out is not self.out:
            self.out.copy_(out)

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the operands as own kernels take them."""
        from shotcast.kernels.triton import gemm

        if not self.k:  # a product of nothing is that of zeros
            return self.a.new_zeros(self.m, gemm.UNIT), self.b.new_zeros(gemm.UNIT, self.n)
        # the copy engine takes columns from multiples of 16 bytes on, and blocks of rows are columns of a transpose
        by_rows = self.scatters and self.m // self.comm.world_size % gemm.UNIT > 0
        return _in_units(self.a, by_rows), _in_units(self.b)

    def _product_first(self) -> None:
        product = self.a.new_empty(self.m, self.n)
        self._product(product)
        self._collective(product)

    def _product(self, out: torch.Tensor) -> None:
        """Multiply as all ways do, rounded to the dtype."""
        ways = self.ways()
        if FUSED in ways or not self.unsupported_reason:
            from shotcast.overlap.products import ShapedProduct

            stored = self._for_copy_engine(out)
            ShapedProduct(self.config())(*self._operands(), stored)
            if stored is not out:
                out.copy_(stored)
        elif PLAIN in ways:
            for first, end in self._chunks():
                for source, target in zip(self._blocks(self.a), self._blocks(out), strict=True):
                    torch.mm(source[first:end], self.b, out=target[first:end])
        else:
            torch.matmul(self.a, self.b, out=out)

    def _for_copy_engine(self, out: torch.Tensor) -> torch.Tensor:
        """Return a matrix like ``out`` that the copy engine of SMs can store: itself, or one in longer rows.

        Without it, tiles of the size that was chosen for it would take more registers than a thread has.
        """
        from shotcast.kernels.triton import gemm

        if not self.n % gemm.UNIT or not gemm.has_tma(out.device):
            return out
        return out.new_empty(self.m, align_up(self.n, gemm.UNIT))[:, : self.n]

    def _collective(self, product: torch.Tensor) -> None:
        getattr(self.comm, _COLLECTIVES[self.op])(product, out=self.out, sms=self._sms)

    def _library_product_first(self) -> None:
        self._collective(torch.matmul(self.a, self.b))

    def differentiable(self) -> torch.Tensor:
        """Make the call by functions that have gradients."""
        product = torch.matmul(self.a, self.b)
        result: torch.Tensor = getattr(self.comm, _COLLECTIVES[self.op])(product)
        return result if self._given is None else self._given.copy_(result)

    # -- CPU ranks ----------------------------------------------------------------------------------------------------

    def _chunks(self) -> list[tuple[int, int]]:
        """Return the first row of each chunk, and the row behind it, in each block of rows that is divided."""
        each = max(1, -(-self.rows // max(1, min(CHUNKS, self.rows // _LEAST_ROWS))))
        return [(first, min(first + each, self.rows)) for first in range(0, self.rows, each)]

    def _blocks(self, product: torch.Tensor) -> torch.Tensor:
        """Return a matrix of m rows by blocks of rows, in each of which chunks lie."""
        blocks = self.comm.world_size if self.scatters else 1
        return product.reshape(blocks, self.m // blocks, product.shape[1])

    def _in_chunks(self) -> None:
        chunks, out = self._chunks(), self.out
        parts: list[torch.Tensor] = []
        blocks = self._blocks(self.a)

        def compute(first: int, end: int) -> None:
            part = self.a.new_empty(len(blocks), end - first, self.n)
            for source, target in zip(blocks, part, strict=True):
                torch.mm(source[first:end], self.b, out=target)
            parts.append(part)

        def communicate(comm: Communicator, number: int) -> None:
            first, end = chunks[number]
            part = parts[number].view(-1, self.n)
            if self.scatters:
                comm.reduce_scatter(part, out=out[first:end], sms=self._sms)
            else:
                comm.all_reduce(part, out=out[first:end], sms=self._sms)

        if self.cache.controller is None:
            self.cache.controller = Controller(lanes_of(self.comm))
        self.cache.controller.run(
            schedule.chain(len(chunks)),
            {f"compute {i}": lambda one=one: compute(*one) for i, one in enumerate(chunks)},  # type: ignore[misc]
            {f"communicate {i}": lambda comm, i=i: communicate(comm, i) for i in range(len(chunks))},  # type: ignore[misc]
        )


def _check(comm: Communicator, op: ProductOp, a: torch.Tensor, b: torch.Tensor) -> None:
    for name, one in (("a", a), ("b", b)):
        if not isinstance(one, torch.Tensor) or one.dim() != 2:
            what = list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
            raise ConfigError(f"{op.label}: {name} is a matrix, not {what}")
    if a.shape[1] != b.shape[0]:
        raise ConfigError(f"{op.label}: {list(a.shape)} @ {list(b.shape)} does not fit")
    if a.dtype != b.dtype or not a.is_floating_point():
        raise ConfigError(f"{op.label}: a and b have one floating-point dtype, not {a.dtype} and {b.dtype}")
    if a.device != comm.device or b.device != comm.device:
        raise ConfigError(f"{op.label}: a and b are on {comm.device}, not {a.device} and {b.device}")
    if op is ProductOp.MATMUL_REDUCE_SCATTER and a.shape[0] % comm.world_size:
        raise ConfigError(f"{op.label}: {a.shape[0]} rows are not divisible among {comm.world_size} ranks")


def _in_units(matrix: torch.Tensor, by_rows: bool = False) -> torch.Tensor:
    """Return a matrix whose rows, or columns, are contiguous and begin at multiples of 16 bytes: itself or a copy.

    With ``by_rows``, rows are.
    """
    unit = 16 // matrix.itemsize
    by_columns = matrix.stride(0) == 1 and matrix.shape[1] > 1 and matrix.stride(1) != 1
    stored = matrix.t() if by_columns else matrix
    if by_columns and by_rows:
        by_columns, stored = False, matrix
    is_contiguous = stored.stride(1) == 1 or stored.shape[1] <= 1
    if is_contiguous and not math.gcd(stored.data_ptr() // matrix.itemsize, stored.stride(0)) % unit:
        return matrix
    copied = stored.new_empty(stored.shape[0], align_up(stored.shape[1], unit))[:, : stored.shape[1]]
    copied.copy_(stored)
    return copied.t() if by_columns else copied
