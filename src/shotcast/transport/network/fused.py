"""All-reduces between nodes whose rows go through residual add, norm and quantization after the last phase.

The sum is gathered in private memory, and normed there in the same compiled call. So the sums, and all that follows
from them, have the bits of the sum and the norm as calls of their own.
"""

from __future__ import annotations

from dataclasses import replace

from shotcast.device.cpu.atomics import load, store
from shotcast.device.cpu.compilation import Arithmetic, Schedule
from shotcast.device.cpu.lazy_numba import HostFunction, njit
from shotcast.transport.cpu.host_call import sums_and_norms
from shotcast.transport.cpu.layout import ITEMSIZE, NBYTES, NETWORK, SOURCES, TOTAL
from shotcast.transport.cpu.norm import START_AT_MINUS_ZERO, add_and_norm, begin_rows
from shotcast.transport.cpu.waiting import DONE
from shotcast.transport.network import nvrar, nvrar_halving, nvrar_pairs, nvrar_two_shot
from shotcast.transport.network.hosts_call import partial_sums
from shotcast.transport.network.layout import ACCUMULATOR
from shotcast.transport.network.nvrar import exchange as nvrar_exchange
from shotcast.transport.network.nvrar_halving import exchange as halving_exchange
from shotcast.transport.network.nvrar_pairs import exchange as pairs_exchange
from shotcast.transport.network.nvrar_two_shot import exchange as two_shot_exchange
from shotcast.transport.network.phases import all_reduce_by
from shotcast.wire import CallPlan


@njit(error_model="numpy")
def _norm_sums_of(exchange: HostFunction, context: int, plan: int, x: int) -> int:
    """Sum and norm all rows on every rank. x: nbytes; the context's ROW says where the outputs are."""
    total = load(load(context + NETWORK) + ACCUMULATOR) + load(plan + TOTAL)
    status = all_reduce_by(exchange, context, plan, x, total)
    if status == DONE:
        begin_rows(context)
        store(context + SOURCES, total)
        add_and_norm(context, plan, START_AT_MINUS_ZERO, 1, load(plan + NBYTES) // load(plan + ITEMSIZE))
    return status


def with_nvrar(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank."""
    return _norm_sums_of(nvrar_exchange, context, plan, x)


def with_pairs(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank."""
    return _norm_sums_of(pairs_exchange, context, plan, x)


def with_two_shot(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank."""
    return _norm_sums_of(two_shot_exchange, context, plan, x)


def with_halving(context: int, plan: int, x: int, _out: int) -> int:
    """Sum and norm all rows on every rank."""
    return _norm_sums_of(halving_exchange, context, plan, x)


def _arithmetic(plan: CallPlan) -> dict[int, Arithmetic]:
    return partial_sums(plan) | sums_and_norms(plan)


NVRAR = replace(nvrar.ALL_REDUCE, schedule=Schedule(with_nvrar), arithmetic=_arithmetic, norms=True)
PAIRS = replace(nvrar_pairs.ALL_REDUCE, schedule=Schedule(with_pairs), arithmetic=_arithmetic, norms=True)
TWO_SHOT = replace(nvrar_two_shot.ALL_REDUCE, schedule=Schedule(with_two_shot), arithmetic=_arithmetic, norms=True)
HALVING = replace(nvrar_halving.ALL_REDUCE, schedule=Schedule(with_halving), arithmetic=_arithmetic, norms=True)
