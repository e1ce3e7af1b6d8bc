"""The vendor's library: NCCL or Gloo. Ranks compare headers before each call to it."""

from __future__ import annotations

import dataclasses

from shotcast.collectives.algorithm import LIBRARY, Algorithm, Form
from shotcast.cost.collective import Work
from shotcast.wire import LaunchShape, Op

_headers_of_all = Form(
    work=lambda nbytes, shape, itemsize: Work(0, 0, 0),  # the cost model does not predict libraries
    launch=lambda problem: LaunchShape(programs=0, block_words=0, num_warps=0),
    triton="shotcast.transport.triton.barrier:bind",
    cpu="shotcast.transport.cpu.copies:BARRIER",
    hosts="shotcast.transport.network.copies:BARRIER",
)

ALGORITHM = Algorithm(
    name=LIBRARY,
    label="vendor",
    summary="NCCL or Gloo, after an exchange of headers",
    library=True,
    in_contract=lambda shape: False,
    color="#c49c94",
    forms=dict.fromkeys(Op, _headers_of_all)
    | {
        op: dataclasses.replace(
            _headers_of_all,
            triton="shotcast.transport.triton.send_recv:bind_header",
            cpu=f"shotcast.transport.cpu.send_recv:{op.name}_HEADER",
            hosts=f"shotcast.transport.network.messages:{op.name}_HEADER",
        )
        for op in (Op.SEND, Op.RECV)
    },
)
