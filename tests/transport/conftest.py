"""Tests of the CPU transport start their own ranks, forked from a test process that has compiled the host code."""

from __future__ import annotations

import pytest

from shotcast import wire
from shotcast.device.cpu import reductions
from shotcast.device.cpu.compilation import Arithmetic, CompiledSchedule
from shotcast.transport.cpu import copies, fused, norm, norm_rows, one_shot, ring, send_recv, two_shot
from shotcast.transport.cpu.host_call import HostCall
from shotcast.transport.network import copies as copies_between_nodes
from shotcast.transport.network import messages, sums


@pytest.fixture(scope="session")
def compiled_before_forking():
    network = (copies_between_nodes, messages, sums)
    for module in (copies, fused, norm_rows, one_shot, ring, send_recv, two_shot, *network):
        for value in vars(module).values():
            if isinstance(value, HostCall):
                value.schedule.get()
            if isinstance(value, CompiledSchedule):
                value.get()
    by_dtype = (reductions.REDUCTIONS, reductions.PARTIAL_SUMS, reductions.ROUNDED_SUMS)
    half_bits = reductions.arithmetic("float16 by bits", "sum")
    norms = [part for dtype in wire.REDUCIBLE for part in norm.arithmetic_of(dtype, wire.Norm(1))]
    for arithmetic in (*(kind for kinds in by_dtype for kind in kinds.values()), half_bits, *norms):
        assert isinstance(arithmetic, Arithmetic)
        arithmetic.address()
