"""The table of registered algorithms: what the description of each says, for the reference pages and for readers."""

from __future__ import annotations

from collections.abc import Iterator

from shotcast.bench import implementations
from shotcast.collectives.algorithm import Algorithm
from shotcast.wire import NodeShape, Op

_WORLD_SIZES = (2, 4, 8)
_MESSAGE = 1 << 20


def algorithm_table() -> str:
    """Return a Markdown table with a row for each own all-reduce.

    Steps and bytes that a rank sends, as a multiple of the message (bfloat16), are those of 2, 4 and 8 ranks.
    """
    ranks = ", ".join(map(str, _WORLD_SIZES))
    lines = [
        f"| | what moves | steps at {ranks} ranks | sent, of M | sums of the contract | other operations |",
        "|---|---|---|---|---|---|",
    ]
    own = [one for one in implementations.algorithms().serving(Op.ALL_REDUCE) if not one.library]
    return "\n".join([*lines, *(" | ".join(_cells(algorithm)).join(("| ", " |")) for algorithm in own)])


def _cells(algorithm: Algorithm) -> Iterator[str]:
    work = [algorithm.forms[Op.ALL_REDUCE].work(_MESSAGE, NodeShape(1, world_size), 2) for world_size in _WORLD_SIZES]
    steps = [str(one.steps) for one in work]
    yield f"`{algorithm.name}`"
    yield algorithm.summary
    yield steps[0] if len(set(steps)) == 1 else ", ".join(steps)
    yield ", ".join(f"{one.sent / _MESSAGE:.3g}" for one in work)
    kept = [world_size for world_size in _WORLD_SIZES if algorithm.keeps_bits(Op.ALL_REDUCE, NodeShape(1, world_size))]
    yield "yes" if len(kept) == len(work) else f"with {', '.join(map(str, kept))} ranks" if kept else "no"
    yield ", ".join(op.label for op in algorithm.forms if op is not Op.ALL_REDUCE) or "-"
