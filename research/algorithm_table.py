"""The table of registered algorithms, from their descriptions; ``fill.py`` puts it on the reference page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shotcast.bench import implementations
from shotcast.collectives.algorithm import Algorithm
from shotcast.wire import NodeShape, Op

_NUMBERS = (2, 4, 8)
_MESSAGE = 1 << 20


def algorithm_table() -> str:
    """Return two Markdown tables with a row for each own all-reduce: those of one node, and those between nodes.

    Steps and bytes that a rank sends, as a multiple of the message (bfloat16), are those of 2, 4 and 8 ranks; of
    algorithms between nodes, what goes over the network between 2, 4 and 8 nodes of one rank.
    """
    numbers = ", ".join(map(str, _NUMBERS))
    own = [one for one in implementations.algorithms().serving(Op.ALL_REDUCE) if not one.library]
    lines = [
        f"| | what moves | steps at {numbers} ranks | sent, of M | sums of the contract | other operations |",
        "|---|---|---|---|---|---|",
        *(_row(_cells(algorithm)) for algorithm in own if not algorithm.between_nodes),
        "",
        f"| between nodes | what moves | network steps at {numbers} nodes | sent over it, of M |",
        "|---|---|---|---|",
        *(_row(_cells_between_nodes(algorithm)) for algorithm in own if algorithm.between_nodes),
    ]
    return "\n".join(lines)


def _row(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(algorithm: Algorithm) -> Iterator[str]:
    shapes = [NodeShape(1, ranks) for ranks in _NUMBERS]
    work = [algorithm.forms[Op.ALL_REDUCE].work(_MESSAGE, shape, 2) for shape in shapes]
    yield f"`{algorithm.name}`"
    yield algorithm.summary
    yield _numbers(one.steps for one in work)
    yield ", ".join(f"{one.sent / _MESSAGE:.3g}" for one in work)
    kept = [shape.world_size for shape in shapes if algorithm.keeps_bits(Op.ALL_REDUCE, shape)]
    yield "yes" if len(kept) == len(work) else f"with {', '.join(map(str, kept))} ranks" if kept else "no"
    yield ", ".join(op.label for op in algorithm.forms if op is not Op.ALL_REDUCE) or "-"


def _cells_between_nodes(algorithm: Algorithm) -> Iterator[str]:
    work = [algorithm.forms[Op.ALL_REDUCE].work(_MESSAGE, NodeShape(nodes, 1), 2) for nodes in _NUMBERS]
    yield f"`{algorithm.name}`"
    yield algorithm.summary
    yield _numbers(one.network_steps + one.spread_steps for one in work)
    yield ", ".join(f"{(one.network_sent + one.spread_sent) / _MESSAGE:.3g}" for one in work)


def _numbers(numbers: Iterable[int]) -> str:
    """Return the numbers, or the one that they all are."""
    found = list(map(str, numbers))
    return found[0] if len(set(found)) == 1 else ", ".join(found)
