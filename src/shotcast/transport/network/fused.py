"""All-reduces between nodes whose rows go through residual add, norm and quantization after the last phase.

The sum is gathered in private memory, and normed there in the same compiled call. So the sums, and all that follows
from them, have the bits of the sum and the norm as calls of their own.
"""

from __future__ import annotations

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import Arithmetic, Schedule
from shotcast.device.cpu.lazy_numba import njit
from shotcast.transport.cpu.host_call import sums_and_norms
from shotcast.transport.cpu.layout import ITEMSIZE, NBYTES, NETWORK, SOURCES, TOTAL
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, add_and_norm, begin_rows
from shotcast.transport.cpu.waiting import DONE
from shotcast.transport.network import nvrar, nvrar_halving, nvrar_pairs, nvrar_two_shot
from shotcast.transport.network.hosts_call import HostsCall, chunk_of_slices, partial_sums
from shotcast.transport.network.layout import ACCUMULATOR
from shotcast.wire import CallPlan

_nvrar = njit(error_model="numpy")(nvrar.all_reduce)
_pairs = njit(error_model="numpy")(nvrar_pairs.all_reduce)
_two_shot = njit(error_model="numpy")(nvrar_two_shot.all_reduce)
_halving = njit(error_model="numpy")(nvrar_halving.all_reduce)


@njit(error_model="numpy")
def _total(context: int, plan: int) -> int:
    """Return the address of the private memory for the sum."""
    return load(load(context + NETWORK) + ACCUMULATOR) + load(plan + TOTAL)


@njit(error_model="numpy")
def _norm(context: int, plan: int, status: int) -> int:
    """Norm the rows of the sum, if there is one."""
    if status == DONE:
        begin_rows(context)
        store(context + SOURCES, _total(context, plan))
        add_and_norm(context, plan, START_AT_MINUS_ZERO, 1, load(plan + NBYTES) // load(plan + ITEMSIZE))
    return status


def with_nvrar(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank. x: nbytes; the context's ROW says where the outputs are."""
    return _norm(context, plan, _nvrar(context, plan, x, _total(context, plan)))


def with_pairs(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank; see :func:`with_nvrar`."""
    return _norm(context, plan, _pairs(context, plan, x, _total(context, plan)))


def with_two_shot(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank; see :func:`with_nvrar`."""
    return _norm(context, plan, _two_shot(context, plan, x, _total(context, plan)))


def with_halving(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank; see :func:`with_nvrar`."""
    return _norm(context, plan, _halving(context, plan, x, _total(context, plan)))


def _arithmetic(plan: CallPlan) -> dict[int, Arithmetic]:
    return partial_sums(plan) | sums_and_norms(plan)


NVRAR = HostsCall(
    schedule=Schedule(with_nvrar),
    chunk=chunk_of_slices,
    arithmetic=_arithmetic,
    slots=nvrar.ALL_REDUCE.slots,
    norms=True,
)
PAIRS = HostsCall(
    schedule=Schedule(with_pairs),
    chunk=chunk_of_slices,
    arithmetic=_arithmetic,
    slots=nvrar_pairs.ALL_REDUCE.slots,
    norms=True,
)
TWO_SHOT = HostsCall(
    schedule=Schedule(with_two_shot),
    chunk=chunk_of_slices,
    arithmetic=_arithmetic,
    slots=nvrar_two_shot.ALL_REDUCE.slots,
    norms=True,
)
HALVING = HostsCall(
    schedule=Schedule(with_halving),
    chunk=chunk_of_slices,
    arithmetic=_arithmetic,
    slots=nvrar_halving.ALL_REDUCE.slots,
    norms=True,
)
