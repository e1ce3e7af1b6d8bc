r"""Two-shot between nodes: a part of the slice to each peer, which adds up, then the sums to all. Two network steps.

.. math:: T = f + 2a + 2 \frac{L-1}{L} M / b + M / m + 2 a_w + \frac{H-1}{H} (S + M/L) / b_w

with the terms of :mod:`shotcast.collectives.algorithms.nvrar`, for any number H of nodes; :math:`a_w` and :math:`b_w`
are latency and bandwidth where a rank sends to all peers at once. The second step carries the sums in the dtype of the
call.
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm
from shotcast.collectives.between_nodes import forms_of, slice_of, to_all
from shotcast.cost.collective import Work
from shotcast.wire import NodeShape


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending a part of the slice to each peer, and the sum of the local part to all."""
    others = shape.nodes - 1
    sent = others / shape.nodes * sum(slice_of(nbytes, shape, itemsize))
    return to_all(nbytes, shape, 2 * min(others, 1), sent)


ALGORITHM = Algorithm(
    name="nvrar_two_shot",
    label="NVRAR two-shot",
    summary="a part of the sum of each node to each other node, which adds up, then the rounded parts to all",
    in_contract=lambda shape: True,
    color="#6a3d9a",
    forms=forms_of(
        work,
        hosts="shotcast.transport.network.nvrar_two_shot:ALL_REDUCE",
        normed_hosts="shotcast.transport.network.fused:TWO_SHOT",
    ),
)
