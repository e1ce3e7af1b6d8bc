r"""All-pairs between nodes: one network step, and H - 1 times the slice. The fastest for few nodes or small messages.

.. math:: T = f + 2a + 2 \frac{L-1}{L} M / b + M / m + a_w + (H - 1) S / b_w

with the terms of :mod:`shotcast.collectives.algorithms.nvrar`, for any number H of nodes; :math:`a_w` and :math:`b_w`
are latency and bandwidth where a rank sends to all peers at once. Every node sends its sum to all others, and each adds
up the whole tree.
"""

from __future__ import annotations

from shotcast.collectives.algorithm import Algorithm, Form, slice_in_node
from shotcast.collectives.between_nodes import forms_of, order_obstacle, slice_of, to_all
from shotcast.cost.collective import Work
from shotcast.wire import NodeShape, Op


def work(nbytes: int, shape: NodeShape, itemsize: int) -> Work:
    """Return the work of sending the slice to each peer."""
    others = shape.nodes - 1
    return to_all(nbytes, shape, min(others, 1), others * slice_of(nbytes, shape, itemsize).sums)


ALGORITHM = Algorithm(
    name="nvrar_pairs",
    label="NVRAR all-pairs",
    summary="the sum of each node to all others, each of which adds up all of them",
    in_contract=lambda shape: True,
    color="#1b9aaa",
    forms={
        **forms_of(
            work,
            hosts="shotcast.transport.network.nvrar_pairs:ALL_REDUCE",
            normed_hosts="shotcast.transport.network.fused:PAIRS",
            triton="shotcast.transport.triton.nvrar:bind_pairs",
            normed_triton="shotcast.transport.triton.fused_nvrar:bind_pairs",
            any_reduction=True,
            obstacle=order_obstacle,
        ),
        Op.REDUCE: Form(
            work=work,
            hosts="shotcast.transport.network.nvrar_pairs:REDUCE",
            reference="shotcast.collectives.reference:tree_all_reduce",
            share=slice_in_node,
            between_nodes=True,
            any_reduction=True,
            obstacle=order_obstacle,
        ),
    },
)
